"""Find how the numbers of layers and experts in the names of one model follow from those in another model.

A model that is converted correctly numbers its layers by one rule: equal numbers, numbers from another start, or
numbers in the same order. Data under another number is a mistake, so the rule of most layers counts for all of them.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Numbers = tuple[int, ...]
    Numbering = Mapping[Numbers, Numbers]
    # The numbers of a tensor that has several parts, and of the part with the same data.
    Pair = tuple[Numbers, Numbers]

# Longer numbers and numbers with leading zeros are text.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
# Limit of the orders of the numbers in a name: all orders of four numbers.
_MOST_ORDERS = 24
# Fewer layers do not show a reversed order: with three layers, the reversed order is an exchange of two of them.
_LEAST_REVERSED = 4


class NumberedName(NamedTuple):
    """A name.

    pattern: the text before, between and after its numbers.
    numbers: one fewer than the texts of the pattern.
    """

    pattern: tuple[str, ...]
    numbers: Numbers


def split_numbers(name: str) -> NumberedName:
    """Return the text around the numbers of a name, and its numbers."""
    pattern = tuple(_NUMBER.split(name))
    numbers = tuple(int(text) for text in _NUMBER.findall(name))
    return NumberedName(pattern, numbers)


def join_numbers(pattern: Sequence[str], numbers: Sequence[str]) -> str:
    """Return the name with these numbers."""
    name = pattern[0]
    for number, text in zip(numbers, pattern[1:], strict=True):
        name += number + text
    return name


def find_numbering(
    pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers], *, may_reverse: bool = True
) -> Numbering:
    """Return the numbers of the part of each layer.

    pairs: layers and parts with the same data.
    layers: the numbers of all tensors with the name of the layers.
    parts: the numbers of all tensors of the other model with the name of the parts.
    may_reverse: whether the layers may be counted from the other end.
    """
    numberings = list(_list_permutations(layers))
    if may_reverse:
        numberings += _list_reversed(layers)

    part_numbers = set(parts)
    same_numbers = []
    # Other numbers show only the order of the layers.
    for numbering in numberings:
        if set(numbering.values()) == part_numbers:
            same_numbers.append(numbering)
    # Models with the same numbers use them for the same layers.
    if not same_numbers:
        return _number_in_order(pairs, layers, parts)
    # A tie goes to the first numbering, in which all numbers keep their positions.
    return max(same_numbers, key=partial(_count_votes, pairs))


def _count_votes(pairs: Sequence[Pair], numbering: Numbering) -> int:
    """Return the number of pairs that follow a numbering."""
    return len(numbering.items() & set(pairs))


def _list_permutations(layers: Collection[Numbers]) -> Iterator[Numbering]:
    """Yield the numberings with the numbers of each name in another order, such as layer and expert."""
    columns = zip(*layers, strict=True)
    # The first order keeps the positions of all numbers.
    for order in itertools.islice(itertools.permutations(columns), _MOST_ORDERS):
        permuted = zip(*order, strict=True)
        yield dict(zip(layers, permuted, strict=False))


def _list_reversed(layers: Collection[Numbers]) -> Iterator[Numbering]:
    """Yield the numberings that count one of the numbers from the other end."""
    columns = list(zip(*layers, strict=True))
    for position, numbers in enumerate(columns):
        if len(set(numbers)) < _LEAST_REVERSED:
            continue
        ends = min(numbers) + max(numbers)
        from_the_end = tuple(ends - number for number in numbers)
        # The other numbers stay.
        changed = [*columns[:position], from_the_end, *columns[position + 1 :]]
        yield dict(zip(layers, zip(*changed, strict=True), strict=True))


def _number_in_order(pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]) -> Numbering:
    """Return the numbering that keeps the order of the layers, such as those of an nn.Sequential with gaps."""
    # The order shows nothing about layers that have no partner.
    if len(layers) != len(parts):
        layers, parts = zip(*pairs, strict=True)
    in_order = zip(sorted(layers), sorted(parts), strict=True)
    return dict(in_order)
