"""Messages as data: a sentence and its ranks, names and numbers. Each surface renders the text.

`messages` has the sentences of several packages; a rule has its own. Records contain messages, and code compares
`message.code`, never the text. `str(message)` is the plain text; `message.render(write)` calls `write` for each part of
the sentence, so that a surface can write names and code in its own way. Nothing reads a rendered text. An option has
the name of its field in `syncheck.options`, or is spelled as the user types it (`text.options_as_typed`).
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from functools import cache
from itertools import cycle
from string import Formatter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.frozen import record
from syncheck.text import (
    by_rank_text,
    names_text,
    number_text,
    option_text,
    option_usage,
    owner_text,
    ranks_as_ranges,
    ranks_text,
    sets_text,
    values_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Writer = Callable[[str, "Part"], str]


class Part(Enum):
    """The parts of a sentence that a surface may write in its own way."""

    WORDS = "words"
    """Words of the sentence itself."""
    CODE = "code"
    """Code or options that the user can type."""
    NAME = "name"
    """A name or a value, most often from a file: untrusted."""
    TEXT = "text"
    """Other text that may contain names from a file: untrusted."""


def write_plain(text: str, _part: Part) -> str:
    """Return the text unchanged."""
    return text


class Sentence(Enum):
    """Base class of the sentences about one topic. Values are templates in the syntax of `str.format`.

    Code stands between backticks, which plain text omits. Additional format specifications:

    - `{tensor:name}`, `{prefix:quoted}`: a name; the same between backticks in plain text
    - `{verdict:words}`: words from a fixed list
    - `{ranks:ranks}`: "rank 1", "ranks 0, 2"
    - `{ranks:Ranks}`: the same at the start of a sentence
    - `{ranks:owner}`: "on ranks 0, 2", or "in B" for a side of two models
    - `{ranks:ranges}`: "ranks 0-2,5"
    - `{groups:sets}` or `{groups:sets 3}`: "ranks 0, 2 and ranks 1, 3", 4 or 3 sets of ranks at most
    - `{names:names}` or `{names:names 5}`: the first 3 or 5 names or messages, and how many more there are
    - `{parts:list}`: messages, names or numbers, separated by commas
    - `{codes:either}`: the same with "or" before the last
    - `{facts:statements}`: messages, separated by semicolons
    - `{values:by_rank}`: "0.25 on ranks 0, 1 and 1e-20 on rank 2", from a mapping of ranks to values
    - `{values:on_ranks}`: the same from ((value, ranks), ...): "float32 on rank 0 and float64 on rank 1"
    - `{tensors:count tensor}` or `{batches:count batch|batches}`: "1 tensor", "2 tensors"
    - `{tensors:verb differs|differ}`: the verb of so many tensors, or of a tuple of ranks
    - `{step:number}` or `{gap:number 3}`: whole numbers with all digits, other numbers with 6 or 3 digits
    - `{path:typed map}`: the option `map` of `Options` with the value of the parameter: `--map FILE`
    - `{quick:option}`, `{buffers:option GLOB}`, `{allow:option=SYN201}`: the option with this name in `Options`,
      without a parameter
    """

    _topic: ClassVar[str]

    def __init_subclass__(cls, *, topic: str = "") -> None:
        """Name the topic in documents: the code of a rule; the name of the class by default."""
        cls._topic = topic or cls.__name__

    def __call__(self, **parameters: object) -> Message:
        """Return the sentence with the parameters."""
        return Message(self, parameters)

    @property
    def key(self) -> str:
        """The name of the sentence in a document: `Note.QUICK`, or `SYN201.CAUSE` for the sentences of a rule."""
        return f"{self._topic}.{self.name}"


@record
class Message:
    """A sentence with parameters: tuples of ranks or names, numbers, texts, and other messages."""

    code: Sentence
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Render the sentence as plain text."""
        return self.render()

    def __hash__(self) -> int:
        # Values of parameters may be mappings, which have no hash.
        return hash((self.code, *self.parameters))

    def render(self, write: Writer = write_plain) -> str:
        """Render the sentence. Raises KeyError if a parameter is missing.

        write: called with each part; returns its text.
        """
        texts = []
        for piece in _parse(self.code.value):
            if isinstance(piece, _Literal):
                texts.append(write(piece.text, piece.part))
            elif piece.kind == "option":
                texts.append(write(_write_option(piece), Part.CODE))
            else:
                value = _Value(self.parameters[piece.name], piece, write)
                texts.append(_FORMATS.get(piece.kind, _Value.any)(value))
        return "".join(texts)


class _Literal(NamedTuple):
    """Text of a template."""

    text: str
    part: Part


class _Field(NamedTuple):
    """A field of a template. spec: all of the format specification, which is a kind and its argument."""

    name: str
    spec: str
    kind: str
    argument: str


# Large comparisons render a template for each of thousands of tensors.
@cache
def _parse(template: str) -> tuple[_Literal | _Field, ...]:
    pieces: list[_Literal | _Field] = []
    for literal, name, spec, conversion in Formatter().parse(template):
        # Backticks come in pairs, so every other text is code.
        for text, part in zip(literal.split("`"), cycle((Part.WORDS, Part.CODE)), strict=False):
            pieces.append(_Literal(text, part))
        # A literal at the end of the template has no field after it.
        if name is not None:
            pieces.append(_parse_field(name, spec or "", conversion))
    return tuple(pieces)


def _parse_field(name: str, spec: str, conversion: str | None) -> _Field:
    if conversion == "r":
        spec = "repr"
    kind, _, argument = spec.partition(" ")
    if kind.startswith("option="):
        # The value of an option may contain spaces.
        kind, argument = "option", spec.removeprefix("option")
    return _Field(name, spec, kind, argument)


def _write_option(option: _Field) -> str:
    """Return an option with a value or a placeholder for a value."""
    if option.argument.startswith("="):
        text = option.argument[1:]
        value: object = int(text) if text.isdecimal() else text
        return option_text(option.name, value)
    return option_usage(option.name, option.argument)


@record
class _Value:
    """The value of a field, with a method for each kind of format specification."""

    content: Any
    field: _Field
    write: Writer

    def any(self) -> str:
        """Return the text of a value without a kind, which may be a message."""
        return self._write_content(self.content, Part.TEXT, self.field.spec)

    def _write_content(self, content: Any, part: Part, spec: str = "") -> str:
        if isinstance(content, Message):
            return content.render(self.write)
        if isinstance(content, tuple):
            # Tuples accept no format specification.
            content = str(content)
        text = format(content, spec)
        # Only a text can come from a file.
        if isinstance(content, (int, float)):
            return text
        return self.write(text, part)

    def _write_name(self, content: Any) -> str:
        return self._write_content(content, Part.NAME)

    def _read_number(self, default: int) -> int:
        """Return the number in the argument of the field."""
        return int(self.field.argument or default)

    def words(self) -> str:
        return self.write(self.content, Part.WORDS)

    def name(self) -> str:
        return self._write_name(self.content)

    def quoted(self) -> str:
        # Other surfaces show that it is a name in their own way.
        if self.write is write_plain:
            return f"`{self.content}`"
        return self.write(self.content, Part.NAME)

    def repr(self) -> str:
        return self.write(repr(self.content), Part.NAME)

    def ranks(self) -> str:
        return ranks_text(self.content)

    def ranks_first(self) -> str:
        text = ranks_text(self.content)
        return text[:1].upper() + text[1:]

    def owner(self) -> str:
        return owner_text(self.content)

    def ranges(self) -> str:
        return ranks_as_ranges(self.content)

    def sets(self) -> str:
        return sets_text(self.content, self._read_number(4))

    def names(self) -> str:
        most = self._read_number(3)
        names = [self._write_name(name) for name in self.content[:most]]
        return names_text(names, most, len(self.content))

    def list(self) -> str:
        return self._join(", ")

    def either(self) -> str:
        # Codes contain no comma.
        return " or ".join(self._join(", ").rsplit(", ", 1))

    def statements(self) -> str:
        return self._join("; ")

    def _join(self, separator: str) -> str:
        return separator.join(self._write_name(item) for item in self.content)

    def by_rank(self) -> str:
        return by_rank_text(self.content, write_value=self._write_name)

    def on_ranks(self) -> str:
        return values_text(self.content, write_value=self._write_name)

    def count(self) -> str:
        singular, _, plural = self.field.argument.partition("|")
        if self.content == 1:
            return f"1 {singular}"
        return f"{self.content} {plural or singular + 's'}"

    def typed(self) -> str:
        return self.write(option_text(self.field.argument, self.content), Part.NAME)

    def verb(self) -> str:
        singular, _, plural = self.field.argument.partition("|")
        count = self.content
        if not isinstance(count, int):
            count = len(count)
        return singular if count == 1 else plural

    def number(self) -> str:
        return number_text(self.content, self._read_number(6))


# The kinds of format specifications; values without a kind may have one of `str.format`.
_FORMATS: dict[str, Callable[[_Value], str]] = {
    "words": _Value.words,
    "name": _Value.name,
    "quoted": _Value.quoted,
    "repr": _Value.repr,
    "ranks": _Value.ranks,
    "Ranks": _Value.ranks_first,
    "owner": _Value.owner,
    "ranges": _Value.ranges,
    "sets": _Value.sets,
    "names": _Value.names,
    "list": _Value.list,
    "either": _Value.either,
    "statements": _Value.statements,
    "by_rank": _Value.by_rank,
    "on_ranks": _Value.on_ranks,
    "count": _Value.count,
    "typed": _Value.typed,
    "verb": _Value.verb,
    "number": _Value.number,
}
