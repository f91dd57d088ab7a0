"""Find how the numbers of layers and experts in the names of one model follow from those in another model.

A model that is converted correctly numbers its layers by one rule: equal numbers, numbers from another start, or
numbers in the same order. Data under another number is a mistake, so the rule of most layers counts for all of them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Numbers = tuple[int, ...]
    Numbering = Mapping[Numbers, Numbers]
    # The numbers of a tensor that has several parts, and of the part with the same data.
    Pair = tuple[Numbers, Numbers]

# Longer numbers and numbers with leading zeros are text.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
# Limit of the numbers in a name whose order is tried.
_MOST_PLACES = 3
# Fewer layers do not show a reversed order: two exchanged layers of two or three are a mistake.
_LEAST_REVERSED = 4


def split_numbers(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Return the text around the numbers of a name, and its numbers."""
    numbers = [int(text) for text in _NUMBER.findall(name)]
    return tuple(_NUMBER.split(name)), tuple(numbers)


def join_numbers(pattern: Sequence[str], numbers: Sequence[int | str]) -> str:
    """Return the name with these numbers."""
    pieces = [pattern[0]]
    for number, text in zip(numbers, pattern[1:], strict=True):
        pieces += [str(number), text]
    return "".join(pieces)


def find_numbering(pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]) -> Numbering:
    """Return the numbers of the part of each layer.

    pairs: layers and parts with the same data.
    layers: the numbers of all tensors with the name of the layers.
    parts: the numbers of all tensors of the other model with the name of the parts.
    """
    if len(pairs[0][0]) != len(pairs[0][1]):
        return _find_without_constants(pairs, layers, parts)
    same_numbers = []
    for numbering in _list_permutations(layers):
        if set(numbering.values()) == set(parts):
            same_numbers.append(numbering)
    if not same_numbers:
        return _number_in_order(pairs, layers, parts)
    votes = [_count_votes(numbering, pairs) for numbering in same_numbers]
    # A tie goes to the first numbering, in which all numbers keep their places.
    return same_numbers[votes.index(max(votes))]


def find_mirror(pairs: Collection[Pair]) -> int | None:
    """Return the sum of the first numbers of layers and parts, if one model counts from the other end, else None.

    pairs: of all tensors in these layers, because exchanged layers of one tensor may look like another order.
    """
    sums = {layer[0] + part[0] for layer, part in pairs}
    layers = {layer[0] for layer, _ in pairs}
    if len(sums) == 1 and len(layers) >= _LEAST_REVERSED:
        return sums.pop()
    return None


def mirror(numbers: Numbers, total: int) -> Numbers:
    """Return the numbers of a name with the first of them counted from the other end."""
    return (total - numbers[0], *numbers[1:])


def _find_without_constants(
    pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]
) -> Numbering:
    """Return the numbering if one of the names has more numbers, such as the position of a module in its layer."""
    layer_constants = _find_constants([layer for layer, _ in pairs])
    part_constants = _find_constants([part for _, part in pairs])
    short_layers = _remove_constants(layers, layer_constants)
    short_parts = _remove_constants(parts, part_constants)
    short_pairs = []
    for layer, part in pairs:
        if layer in short_layers and part in short_parts:
            short_pairs.append((short_layers[layer], short_parts[part]))
    if not short_pairs or len(short_pairs[0][0]) != len(short_pairs[0][1]):
        return _number_in_order(pairs, layers, parts)
    numbering = find_numbering(short_pairs, short_layers.values(), short_parts.values())
    full_parts = {short: part for part, short in short_parts.items()}
    full_numbering = {}
    for layer, short in short_layers.items():
        if short in numbering:
            full_numbering[layer] = full_parts[numbering[short]]
    return full_numbering


def _find_constants(rows: Sequence[Numbers]) -> dict[int, int]:
    """Return the places where most names have one number, and this number."""
    constants = {}
    for place, column in enumerate(zip(*rows, strict=True)):
        number, count = Counter(column).most_common(1)[0]
        if count * 2 > len(rows):
            constants[place] = number
    return constants


def _remove_constants(rows: Collection[Numbers], constants: Mapping[int, int]) -> dict[Numbers, Numbers]:
    """Return the numbers of the names with these constants, but without the constants."""
    shortened = {}
    for row in rows:
        if all(row[place] == number for place, number in constants.items()):
            shortened[row] = tuple(number for place, number in enumerate(row) if place not in constants)
    return shortened


def _count_votes(numbering: Numbering, pairs: Sequence[Pair]) -> int:
    """Return the number of pairs that follow a numbering."""
    votes = 0
    for layer, part in pairs:
        votes += numbering[layer] == part
    return votes


def _list_permutations(layers: Collection[Numbers]) -> Iterator[Numbering]:
    """Yield the numberings with the numbers of each name in another order, such as layer and expert."""
    places = len(next(iter(layers)))
    # The number of orders grows fast, and no library exchanges four numbers.
    orders = itertools.permutations(range(places)) if places <= _MOST_PLACES else [range(places)]
    for order in orders:
        yield {layer: tuple(layer[place] for place in order) for layer in layers}


def _number_in_order(pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]) -> Numbering:
    """Return the numbering that keeps the order of the layers, such as those of an nn.Sequential with gaps."""
    if len(layers) != len(parts):
        # The order shows nothing about layers that have no partner.
        layers = [layer for layer, _ in pairs]
        parts = [part for _, part in pairs]
    return dict(zip(sorted(layers), sorted(parts), strict=True))
