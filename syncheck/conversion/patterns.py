"""Match the regular expressions of an adapter's settings to names of modules, in bounded time.

The expressions come from untrusted files, and Python's `re` needs exponential time for some of them. Here a node of the
parsed expression maps a set of positions in the name to the positions after it, so the time is polynomial, and a budget
of steps limits it. Expressions consist of literals, `.`, classes, groups, `|`, `^`, `$` and quantifiers. Lookarounds,
references, flags, possessive quantifiers, and escapes of letters other than d, w and s are not supported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Limits of an expression and of a name in characters, of nested groups, and of the count of a quantifier.
_LONGEST, _LONGEST_NAME, _DEEPEST, _MOST_COUNT = 1024, 1024, 20, 1000
# Only literals and `.`: Python's `re` matches these expressions in linear time.
_PLAIN = re.compile(r"[\w.-]*")
_CATEGORIES = {"d": str.isdecimal, "w": lambda char: char.isalnum() or char == "_", "s": str.isspace}
_COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}")


class UnsupportedPatternError(ValueError):
    """An expression that is not supported, or that needs too many steps."""


@dataclass(slots=True)
class Budget:
    """The number of steps that are left for all expressions and names of an adapter."""

    steps: int = 2_000_000

    def spend(self) -> None:
        """Count one step. Raises UnsupportedPatternError if none is left."""
        self.steps -= 1
        if self.steps < 0:
            raise UnsupportedPatternError("too many steps")


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


def _matches(pattern: str, name: str, budget: Budget) -> bool:
    if max(len(pattern), len(name)) > _LONGEST:
        raise UnsupportedPatternError("too long")
    if _PLAIN.fullmatch(pattern):
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    text = _Text(name, budget)
    # As `(.*\.)?`: the start of the name, or the position after a dot in its first line.
    starts = 1
    for position, char in enumerate(name.partition("\n")[0], 1):
        if char == ".":
            starts |= 1 << position
    return bool(_advance(_parse(pattern), text, starts) & text.ends)


@dataclass(frozen=True, slots=True)
class _Chars:
    """A set of characters."""

    single: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    categories: str = ""
    """Letters of escapes: a capital letter is the complement."""
    negated: bool = False

    def holds(self, char: str) -> bool:
        """Whether a character belongs to the set."""
        belongs = char in self.single
        for first, last in self.ranges:
            belongs |= first <= char <= last
        for letter in self.categories:
            belongs |= _CATEGORIES[letter.lower()](char) == letter.islower()
        return belongs != self.negated


@dataclass(frozen=True, slots=True)
class _Edge:
    """The start or the end of the name."""

    start: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node = _Chars | _Edge | _Sequence | _Choice | _Repeat


@dataclass(slots=True)
class _Text:
    """A name to match. Sets of positions are integers: bit i is the position before character i."""

    name: str
    budget: Budget
    masks: dict[_Chars, int] = field(default_factory=dict)

    @property
    def ends(self) -> int:
        """The positions of `$`: the end, and before a line break at the end."""
        end = 1 << len(self.name)
        if self.name.endswith("\n"):
            end |= end >> 1
        return end

    def find(self, chars: _Chars) -> int:
        """Return the positions before the characters of a set."""
        if chars not in self.masks:
            mask = 0
            for position, char in enumerate(self.name):
                if chars.holds(char):
                    mask |= 1 << position
            self.masks[chars] = mask
        return self.masks[chars]


def _advance(node: _Node, text: _Text, positions: int) -> int:
    """Return the positions after a node from all positions before it."""
    text.budget.spend()
    if isinstance(node, _Chars):
        return (positions & text.find(node)) << 1
    if isinstance(node, _Edge):
        if node.start:
            return positions & 1
        return positions & text.ends
    if isinstance(node, _Repeat):
        return _advance_repeat(node, text, positions)
    if isinstance(node, _Choice):
        reached = 0
        for option in node.options:
            reached |= _advance(option, text, positions)
        return reached
    for part in node.parts:
        # Most names differ from a pattern early.
        if not positions:
            break
        positions = _advance(part, text, positions)
    return positions


def _advance_repeat(node: _Repeat, text: _Text, positions: int) -> int:
    for _ in range(node.least):
        positions = _advance(node.part, text, positions)
    reached, count = positions, node.least
    while positions and (node.most is None or count < node.most):
        # A position that fewer repetitions reach needs no second visit.
        positions = _advance(node.part, text, positions) & ~reached
        reached |= positions
        count += 1
    return reached


@lru_cache(maxsize=4096)
def _parse(pattern: str) -> _Node:
    parser = _Parser(pattern)
    node = parser.read_choice(0)
    if parser.next:
        raise UnsupportedPatternError(f"unbalanced {parser.next}")
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
        char = self.next
        if not char:
            raise UnsupportedPatternError("ends too early")
        self._position += 1
        return char

    def read_choice(self, depth: int) -> _Node:
        """Read alternatives up to a closing parenthesis or the end."""
        if depth > _DEEPEST:
            raise UnsupportedPatternError("too many nested groups")
        options = [self._read_sequence(depth)]
        while self.next == "|":
            self._take()
            options.append(self._read_sequence(depth))
        return _Choice(tuple(options))

    def _read_sequence(self, depth: int) -> _Node:
        parts = []
        while self.next and self.next not in "|)":
            parts.append(self._read_repeat(depth))
        return _Sequence(tuple(parts))

    def _read_repeat(self, depth: int) -> _Node:
        node = self._read_atom(depth)
        if not self.next or self.next not in "*+?{":
            return node
        if isinstance(node, _Edge):
            raise UnsupportedPatternError("a repeated edge")
        least, most = self._read_counts()
        # A lazy quantifier matches the same names. Other characters make it possessive, or repeat it.
        if self.next == "?":
            self._take()
        if self.next and self.next in "*+?{":
            raise UnsupportedPatternError("a repeated or possessive quantifier")
        return _Repeat(node, least, most)

    def _read_counts(self) -> tuple[int, int | None]:
        counts = _COUNTS.match(self._pattern, self._position)
        if self.next != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._take()]
        if counts is None or counts[0] in ("{}", "{,}") or len(counts[0]) > 12:
            raise UnsupportedPatternError("braces")
        self._position = counts.end()
        least = int(counts[1] or 0)
        most = least
        if counts[2]:
            most = int(counts[3] or _MOST_COUNT)
        if not least <= most <= _MOST_COUNT:
            raise UnsupportedPatternError("counts")
        # A comma without a number after it: any number of times.
        if counts[2] and not counts[3]:
            return least, None
        return least, most

    def _read_atom(self, depth: int) -> _Node:
        char = self._take()
        if char in "*+?{":
            raise UnsupportedPatternError("nothing to repeat")
        if char == "(":
            return self._read_group(depth)
        if char == "[":
            return self._read_class()
        if char in "^$":
            return _Edge(start=char == "^")
        if char == ".":
            return _Chars("\n", negated=True)
        if char == "\\":
            return self._read_escape()
        return _Chars(char)

    def _read_group(self, depth: int) -> _Node:
        if self.next == "?":
            self._take()
            if self._take() != ":":
                raise UnsupportedPatternError("a group with an extension")
        node = self.read_choice(depth + 1)
        if self._take() != ")":
            raise UnsupportedPatternError("an open group")
        return node

    def _read_escape(self) -> _Chars:
        char = self._take()
        if char.lower() in _CATEGORIES and char.isascii():
            return _Chars(categories=char)
        # Other letters have meanings that this module lacks; Python escapes punctuation only.
        if char.isalnum() or char == "_":
            raise UnsupportedPatternError(f"\\{char}")
        return _Chars(char)

    def _read_class(self) -> _Node:
        negated = self.next == "^"
        if negated:
            self._take()
        single, categories, ranges = "", "", []
        # A closing bracket in the first place is a literal.
        first = True
        while first or self.next != "]":
            first = False
            item = self._read_member()
            # A hyphen before the closing bracket is a literal.
            is_range = self._pattern[self._position : self._position + 1] == "-" and not self._pattern.startswith(
                "-]", self._position
            )
            if is_range:
                self._take()
                last = self._read_member()
                if item.categories or last.categories or last.single < item.single:
                    raise UnsupportedPatternError("a range of characters")
                ranges.append((item.single, last.single))
            else:
                single, categories = single + item.single, categories + item.categories
        self._take()
        return _Chars(single, tuple(ranges), categories, negated)

    def _read_member(self) -> _Chars:
        char = self._take()
        if char == "\\":
            return self._read_escape()
        return _Chars(char)
