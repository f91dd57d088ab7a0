"""Match the regular expressions of an adapter's settings to names of modules, in bounded time.

The expressions come from untrusted files, and Python's `re` needs exponential time for some of them. Here a node of the
parsed expression maps a set of positions in the name to the positions after it, so the time is polynomial, and a budget
of steps limits it. `re` only finds single characters and the edges of the name.

Expressions consist of literals, `.`, classes, groups, `|`, `^`, `$` and quantifiers. Lookarounds, references, flags,
possessive quantifiers, and escapes of letters other than d, w and s are not supported.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Iterable

# Limits of an expression and of a name in characters, of nested groups, and of the count of a quantifier.
_LONGEST, _DEEPEST, _MOST_COUNT = 1024, 20, 1000
# Only literals and `.`: Python's `re` matches these expressions in linear time.
_PLAIN = re.compile(r"[\w.-]*")
_WORD = re.compile(r"\w")
# Letters that stand for a set of characters after a backslash.
_CATEGORIES = frozenset("dDwWsS")
# Characters that repeat the part before them, and the numbers of repetitions of those without braces.
_QUANTIFIERS = frozenset("*+?{")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
# Braces have a number at least, and few digits: Python refuses to read integers of many digits. `re` takes braces with
# digits of other alphabets as literals.
_BRACES = re.compile(r"\{(?!,?\})(?=[0-9,]{1,10}\})([0-9]*)(,?)([0-9]*)\}")
# A hyphen before the closing bracket of a class is a literal.
_HYPHEN = re.compile(r"-(?!\])")
_ENDS_OF_SEQUENCE = frozenset(("", "|", ")"))


class UnsupportedPatternError(ValueError):
    """An expression that is not supported, or that needs too many steps."""


def _require(supported: bool, problem: str) -> None:
    """Raise UnsupportedPatternError if a condition of supported expressions is false."""
    if not supported:
        raise UnsupportedPatternError(problem)


@dataclass(slots=True)
class Budget:
    """The number of steps that are left for all expressions and names of an adapter."""

    steps: int = 2_000_000

    def spend(self) -> None:
        """Count one step. Raises UnsupportedPatternError if none is left."""
        self.steps -= 1
        _require(self.steps >= 0, "too many steps")


def find_pattern(patterns: Iterable[str], name: str, budget: Budget) -> str | None:
    """Return the first pattern that matches a whole name or its end after a dot; None without a match.

    The result is that of PEFT's `get_pattern_key` (peft/utils/other.py). Raises UnsupportedPatternError for a pattern
    that this module does not support, if no earlier pattern matches.
    """
    for pattern in patterns:
        budget.spend()
        if _matches(pattern, name, budget):
            return pattern
    return None


def matches_whole(pattern: str, name: str, budget: Budget) -> bool:
    """Whether a pattern matches a whole name, as `re.fullmatch` does. Raises UnsupportedPatternError."""
    require_short(pattern, name)
    text = _Text(name, budget)
    reached = _parse(pattern).advance(text, 1)
    return bool(reached >> len(name) & 1)


def find_segment_ends(pattern: str, name: str, budget: Budget) -> list[int]:
    """Return the positions after all matches that begin with the name or after a dot of its first line.

    Raises UnsupportedPatternError, also for alternatives outside a group, which would divide a longer expression.
    """
    require_short(pattern, name)
    node = _parse(pattern)
    _require(len(node.options) == 1, "alternatives outside a group")
    reached = _advance_from_segments(node, _Text(name, budget))
    return [position for position in range(len(name) + 1) if reached >> position & 1]


def require_short(*texts: str) -> None:
    """Raise UnsupportedPatternError for a text that is too long to match."""
    longest = max(map(len, texts))
    _require(longest <= _LONGEST, "too long")


def _matches(pattern: str, name: str, budget: Budget) -> bool:
    """Whether a pattern matches a whole name or its end after a dot."""
    require_short(pattern, name)
    if _PLAIN.fullmatch(pattern):
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    text = _Text(name, budget)
    reached = _advance_from_segments(_parse(pattern), text)
    return reached & text.find("$") != 0


def _advance_from_segments(node: _Node, text: _Text) -> int:
    """Return the positions after an expression that begins with the name or after a dot in its first line."""
    # As `(.*\.)?`, whose `.` matches no line break.
    first_line = text.name.partition("\n")[0]
    line_positions = (1 << len(first_line)) - 1
    dots = text.find(r"\.") & line_positions
    return node.advance(text, 1 | (dots << 1))


@dataclass(slots=True)
class _Text:
    """A name to match. Sets of positions are integers: bit i is the position before character i."""

    name: str
    budget: Budget
    masks: dict[str, int] = field(default_factory=dict)
    """The positions of each expression."""

    def find(self, expression: str) -> int:
        """Return the positions of a set of characters, or of an edge. expression: at most one character long."""
        # A pattern may repeat a set many times.
        if expression not in self.masks:
            mask = 0
            for match in re.finditer(expression, self.name):
                mask |= 1 << match.start()
            self.masks[expression] = mask
        return self.masks[expression]


class _Node(ABC):
    """A part of an expression."""

    __slots__ = ()

    def advance(self, text: _Text, positions: int) -> int:
        """Return the positions after the part from all positions before it. Counts one step."""
        text.budget.spend()
        return self._advance(text, positions)

    @abstractmethod
    def _advance(self, text: _Text, positions: int) -> int: ...


@record
class _Chars(_Node):
    """One character of a set."""

    expression: str
    """An expression of `re` for one character, without a quantifier: `re` matches it in constant time."""

    def _advance(self, text: _Text, positions: int) -> int:
        matching = positions & text.find(self.expression)
        return matching << 1


@record
class _Edge(_Node):
    """The start or the end of the name."""

    expression: str
    """`^` or `$`; the end is before a line break at the end of the name, too."""

    def _advance(self, text: _Text, positions: int) -> int:
        return positions & text.find(self.expression)


@record
class _Sequence(_Node):
    """One part after another."""

    parts: tuple[_Node, ...]

    def _advance(self, text: _Text, positions: int) -> int:
        for part in self.parts:
            # Most names differ from a pattern early.
            if not positions:
                break
            positions = part.advance(text, positions)
        return positions


@record
class _Choice(_Node):
    """Any of several alternatives."""

    options: tuple[_Node, ...]

    def _advance(self, text: _Text, positions: int) -> int:
        reached = 0
        for option in self.options:
            reached |= option.advance(text, positions)
        return reached


@record
class _Repeat(_Node):
    """A part, several times."""

    part: _Node
    least: int
    most: int | None
    """None without a limit."""

    def _advance(self, text: _Text, positions: int) -> int:
        for _ in range(self.least):
            positions = self.part.advance(text, positions)
        reached, count = positions, self.least
        while positions and count != self.most:
            # A position that fewer repetitions reach needs no second visit.
            positions = self.part.advance(text, positions) & ~reached
            reached |= positions
            count += 1
        return reached


_SPECIAL: dict[str, _Node] = {"^": _Edge("^"), "$": _Edge("$"), ".": _Chars(".")}


@lru_cache(maxsize=4096)
def _parse(pattern: str) -> _Choice:
    parser = _Parser(pattern)
    node = parser.read_choice(0)
    _require(not parser.next, f"unbalanced {parser.next}")
    return node


class _Parser:
    """A recursive descent through an expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._position = pattern, 0

    @property
    def next(self) -> str:
        """The next character, empty at the end."""
        return self._pattern[self._position : self._position + 1]

    def _take(self) -> str:
        """Return the next character, and move to the character after it."""
        char = self.next
        _require(char != "", "ends too early")
        self._position += 1
        return char

    def _skip(self, char: str) -> bool:
        """Move after the next character if it is `char`. Returns whether it is."""
        if self.next != char:
            return False
        self._position += 1
        return True

    def read_choice(self, depth: int) -> _Choice:
        """Read alternatives up to a closing parenthesis or the end."""
        _require(depth <= _DEEPEST, "too many nested groups")
        options = [self._read_sequence(depth)]
        while self._skip("|"):
            options.append(self._read_sequence(depth))
        return _Choice(tuple(options))

    def _read_sequence(self, depth: int) -> _Node:
        parts = []
        while self.next not in _ENDS_OF_SEQUENCE:
            parts.append(self._read_repeat(depth))
        return _Sequence(tuple(parts))

    def _read_repeat(self, depth: int) -> _Node:
        """Read an atom with its quantifier, if it has any."""
        node = self._read_atom(depth)
        if self.next not in _QUANTIFIERS:
            return node
        _require(not isinstance(node, _Edge), "a repeated edge")
        least, most = self._read_counts()
        # A lazy quantifier matches the same names. Other characters make it possessive, or repeat it.
        self._skip("?")
        _require(self.next not in _QUANTIFIERS, "a repeated or possessive quantifier")
        return _Repeat(node, least, most)

    def _read_counts(self) -> tuple[int, int | None]:
        """Read a quantifier: the least and the most repetitions."""
        if self.next != "{":
            return _COUNTS[self._take()]
        braces = _BRACES.match(self._pattern, self._position)
        if braces is None:
            raise UnsupportedPatternError("braces")
        self._position = braces.end()
        first, comma, last = braces.groups()
        # Without the first number, the part may be absent.
        least = int(f"0{first}")
        most = int(last or _MOST_COUNT) if comma else least
        _require(least <= most <= _MOST_COUNT, "counts")
        # A comma without a number after it: any number of times.
        if braces[0].endswith(",}"):
            return least, None
        return least, most

    def _read_atom(self, depth: int) -> _Node:
        """Read a group, or the set of one character."""
        char = self._take()
        _require(char not in _QUANTIFIERS, "nothing to repeat")
        if char == "(":
            return self._read_group(depth)
        if char == "[":
            return self._read_class()
        if char == "\\":
            return _Chars(self._read_escape())
        return _SPECIAL.get(char, _Chars(re.escape(char)))

    def _read_group(self, depth: int) -> _Node:
        """Read the content of a group and its closing parenthesis."""
        if self._skip("?"):
            _require(self._take() == ":", "a group with an extension")
        node = self.read_choice(depth + 1)
        _require(self._take() == ")", "an open group")
        return node

    def _read_escape(self) -> str:
        """Read the character after a backslash. Returns an expression for one character."""
        char = self._take()
        if char in _CATEGORIES:
            return f"\\{char}"
        # Other letters have meanings that this module lacks; Python escapes punctuation only.
        _require(_WORD.match(char) is None, f"\\{char}")
        return re.escape(char)

    def _read_class(self) -> _Chars:
        """Read a class and its closing bracket."""
        expression = "[^" if self._skip("^") else "["
        # The first character is a member even if it is a bracket.
        expression += self._read_range()
        while not self._skip("]"):
            expression += self._read_range()
        return _Chars(f"{expression}]")

    def _read_range(self) -> str:
        """Read a member of a class, and the range that begins with it."""
        first = self._read_member()
        if _HYPHEN.match(self._pattern, self._position) is None:
            return first
        self._take()
        last = self._read_member()
        bounds = f"{first}-{last}"
        try:
            re.compile(f"[{bounds}]")
        except re.error:  # the last character is before the first, or a category
            raise UnsupportedPatternError("a range of characters") from None
        return bounds

    def _read_member(self) -> str:
        """Read a character of a class."""
        char = self._take()
        if char == "\\":
            return self._read_escape()
        return re.escape(char)
