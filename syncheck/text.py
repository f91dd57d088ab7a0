"""Words for ranks, names and numbers, and the escaping of text from files. This module imports nothing of syncheck."""

from __future__ import annotations

import re
import reprlib
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

_Rank = TypeVar("_Rank")
_Value = TypeVar("_Value")

_MOST_RANKS = 8
# Larger floating-point numbers stand for several whole numbers.
_MOST_WHOLE = 2**53

# `::` at the start of a line, after blanks and colors.
_COLONS = re.compile(r"^((?:[^\S\n]|\x1b\[[0-9;]*m)*):(?=(?:\x1b\[[0-9;]*m)*:)", re.MULTILINE)

_HASHES = re.compile(r"##(?=\w*\[)")

# What options begin with in texts for a command line; empty in texts for Python: see `options_as_typed`.
_PREFIX = ContextVar("prefix of options", default="")
TYPED, TYPED_IN_PYTEST = "--", "--syncheck-"


class Side(IntEnum):
    """One of two models. Records of two models have sides in place of ranks, and texts name the sides."""

    A = 0
    B = 1


SIDES = (Side.A, Side.B)


def one_line(text: str) -> str:
    r"""Escape line breaks and control characters, because names in a file are untrusted."""
    if text.isprintable():
        return text

    # Such texts may be long, and most of them have a few control characters only.
    escapes: dict[int, str] = {}
    for character in set(text):
        if not character.isprintable():
            escapes[ord(character)] = character.encode("unicode_escape").decode()

    return text.translate(escapes)


def system_reason(error: BaseException) -> object:
    """Return why a file operation failed: the system's reason, or the error if Python raised it, as for a NUL."""
    return getattr(error, "strerror", None) or error


def logged(text: str) -> str:
    r"""Escape the commands of CI systems in the lines of a log, colored or not.

    GitHub runs a command after `::` if only blanks precede it, and after `##[` anywhere in a line. Azure Pipelines
    reads `##vso[`, TeamCity `##teamcity[`.
    https://github.com/actions/runner/blob/602c0085328df8cb595fc2641d69f640a11377a4/src/Runner.Worker/ActionCommand.cs
    """
    return _HASHES.sub(r"#\\x23", _COLONS.sub(r"\1\\x3a", text))


class _Brief(reprlib.Repr):
    """Sort the members of sets by their text, so that the text of a set is the same in every process."""

    def repr_set(self, x: set[Any], level: int) -> str:
        return self._members(x, level, super().repr_set)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return self._members(x, level, super().repr_frozenset)

    def _members(self, x: Any, level: int, ordered: Callable[[Any, int], str]) -> str:
        types = {type(member) for member in x}
        if level <= 0 or types in ({str}, {int}):
            return ordered(x, level)
        # Nested sets of all members could take forever.
        if len(x) > self.maxset:
            return f"<{type(x).__name__} of {len(x)}>"
        members = sorted(self.repr1(member, level - 1) for member in x)
        return f"{type(x).__name__}({{{', '.join(members)}}})"


def brief(value: object, most: int = 60) -> str:
    """Return a value from a file as text of at most `most` characters, in bounded time.

    `repr` would follow shared references without end, and fails for integers of more than 4,300 digits.
    """
    # The limits are attributes of an object, so each call makes its own.
    short = _Brief()
    short.maxstring = short.maxother = short.maxlong = most
    try:
        return short.repr(value)[:most]
    except ValueError:
        return f"a huge {type(value).__name__}"


def shorten(text: str, most: int = 403) -> str:
    """Return text in one line of at most `most` characters, without the middle of a long text.

    Both ends of a name distinguish it.
    """
    # A name in a file may be megabytes, and escaping takes longer than cutting.
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    line = one_line(text)
    if len(line) <= most:
        return line
    last = (most - len("...") + 1) // 2
    first = most - len("...") - last
    return f"{line[:first]}...{line[-last:]}"


def make_unique_name(name: str, used_names: Container[str], separator: str = "#", first: int = 2) -> str:
    """Return the name, or `name#2`, `name#3`, ... if it is used. first: the first number to try."""
    unique_name, number = name, first
    while unique_name in used_names:
        unique_name = f"{name}{separator}{number}"
        number += 1
    return unique_name


def group_ranks(values: Mapping[_Rank, _Value]) -> dict[_Value, list[_Rank]]:
    """Return the ranks of each value, in the order of the first occurrence of the values. values: hashable, by rank."""
    ranks_of: dict[_Value, list[_Rank]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def find_set(rank: int, sets: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the set of ranks that includes a rank; empty if no set does."""
    for ranks in sets:
        if rank in ranks:
            return ranks
    return ()


@contextmanager
def options_as_typed(prefix: str = TYPED) -> Iterator[None]:
    """Spell options as the user types them, `--group-by REGEX`, in all texts that the block renders.

    Texts for Python, such as errors and failed assertions, name an option by its field: `group_by=REGEX`.

    prefix: of the options on this command line. Empty: by field, for a text about Python or a file within a block.
    """
    token = _PREFIX.set(prefix)
    try:
        yield
    finally:
        _PREFIX.reset(token)


def to_flag(name: str, prefix: str = TYPED) -> str:
    """Return the flag of a field on the command line: `--group-by` for `group_by`."""
    return prefix + name.replace("_", "-")


def option_text(name: str, value: object) -> str:
    """Return an option with its value: "group_by='a b'" and 'rtol=0.1', or "--group-by 'a b'" on the command line."""
    prefix = _PREFIX.get()
    if not prefix:
        # A path is of no use without its middle.
        return f"{name}={shorten(value)!r}" if isinstance(value, str) else f"{name}={brief(value)}"
    if isinstance(value, (list, tuple)):
        return " ".join(option_text(name, item) for item in value)
    flag = to_flag(name, prefix)
    return flag if value is True else f"{flag} {_quote_argument(value)}"


def _quote_argument(value: object) -> str:
    """Return a value as an argument in a shell, of bounded length."""
    # Only messages of the command line need it.
    import shlex

    return shlex.quote(shorten(value)) if isinstance(value, str) else brief(value)


def option_usage(name: str, placeholder: str = "") -> str:
    """Return an option without its value: 'group_by=REGEX' or 'quick', with dashes on the command line."""
    prefix = _PREFIX.get()
    separator = "="
    if prefix:
        name, separator = to_flag(name, prefix), " "
    return f"{name}{separator}{placeholder}" if placeholder else name


def ranks_text(ranks: Sequence[int]) -> str:
    """Return 'rank 1', 'ranks 0, 2, 3', or the number and the first four of more than eight ranks.

    For the sides of two models: 'A and B'.
    """
    if _are_sides(ranks):
        return " and ".join(Side(rank).name for rank in ranks)
    if len(ranks) > _MOST_RANKS:
        return f"{len(ranks)} ranks ({_join_numbers(ranks[:4])}, ...)"
    return f"{_ranks_noun(ranks)} {_join_numbers(ranks)}"


def _are_sides(ranks: Sequence[int]) -> bool:
    # Ranks of two models are all sides.
    return isinstance(next(iter(ranks), None), Side)


def _ranks_noun(ranks: Sequence[int]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


def _join_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def owner_text(ranks: Sequence[int]) -> str:
    """Return where a value is: 'on ranks 0, 2', or 'in B' for a side."""
    preposition = "in" if _are_sides(ranks) else "on"
    return f"{preposition} {ranks_text(ranks)}"


def sets_text(sets: Sequence[Sequence[int]], most: int = 4) -> str:
    """'ranks 0, 2 and ranks 1, 3', or the first few sets and how many more there are."""
    texts = [ranks_text(ranks) for ranks in sets[:most]]
    return names_text(texts, most, len(sets), " and ")


def ranges_text(ranks: Sequence[int]) -> str:
    """Return ranks as ranges: (0, 1, 2, 5) gives '0-2,5'."""
    # The last rank of each range by its first rank.
    ranges: dict[int, int] = {}
    first = previous = -2
    for rank in ranks:
        if rank != previous + 1:
            first = rank
        ranges[first] = previous = rank
    texts = []
    for first, last in ranges.items():
        text = f"{first}-{last}" if last > first else str(first)
        texts.append(text)
    return ",".join(texts)


def ranks_as_ranges(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: 'rank 1', 'ranks 0-2,5'."""
    return f"{_ranks_noun(ranks)} {ranges_text(ranks)}"


def by_rank_text(values: Mapping[int, object], most: int = 4, write_value: Callable[[str], str] = str) -> str:
    """'0.25 on ranks 0, 1 and 1e-20 on rank 2', the most common value first; None is a missing value.

    write_value: formats the text of values that are not numbers.
    """
    digits = _count_distinct_digits({value for value in values.values() if isinstance(value, float)})
    texts: dict[int, str] = {}
    for rank, value in values.items():
        if value is None:
            texts[rank] = "missing"
        elif isinstance(value, float):
            texts[rank] = number_text(value, digits)
        else:
            texts[rank] = write_value(brief(value))
    sets = sorted(group_ranks(texts).items(), key=_count_ranks, reverse=True)
    parts = [f"{text} {owner_text(ranks)}" for text, ranks in sets[:most]]
    # The number of further values, not of further ranks.
    return names_text(parts, most, len(sets), " and ")


def _count_ranks(entry: tuple[str, Sequence[int]]) -> int:
    return len(entry[1])


def _count_distinct_digits(numbers: set[float]) -> int:
    """Return the fewest digits that show which numbers differ."""
    for digits in (6, 9):
        if len({f"{number:.{digits}g}" for number in numbers}) == len(numbers):
            return digits
    return 17


def number_text(number: float, digits: int = 6) -> str:
    """Return a whole number with all of its digits, any other number with so many: '1000001', '0.0925'.

    A number other than 1 has as many digits as it needs to differ from 1.
    """
    is_whole = isinstance(number, int) or (abs(number) < _MOST_WHOLE and number == int(number))
    if is_whole:
        return str(int(number))
    while abs(float(f"{number:.{digits}g}")) == 1:
        digits += 1
    return f"{number:.{digits}g}"


def names_text(names: Sequence[str], most: int = 3, count: int | None = None, separator: str = ", ") -> str:
    """Return the first names and the number of further names. count: number of all names; default: len(names)."""
    if count is None:
        count = len(names)
    text = separator.join(names[:most])
    if count > most:
        text += f" and {count - most} more"
    return text


def values_text(
    values: Sequence[tuple[Any, Sequence[int]]], most: int = 6, write_value: Callable[[str], str] = str
) -> str:
    """Return values with their ranks: 'float32 on ranks 0, 2 and float64 on rank 1'. Shapes are written as lists.

    write_value: formats the text of each value.
    """
    texts = []
    for value, ranks in values:
        text = str(list(value) if isinstance(value, tuple) else value)
        texts.append(f"{write_value(text)} {owner_text(ranks)}")
    return names_text(texts, most, separator=" and ")
