"""Find how the numbers of layers and experts in the names of one model follow from those in another model.

A model that is converted correctly numbers its layers by one rule: equal numbers, numbers from another start, or
numbers in the same order. Data under another number is a mistake, so the rule of most layers counts for all of them.
Numbers from the other end are no rule: they are the same as layers in the reverse order.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    Numbers = tuple[int, ...]
    Numbering = Mapping[Numbers, Numbers]
    # The numbers of a tensor that has several parts, and of the part with the same data.
    Pair = tuple[Numbers, Numbers]

# Before and after a number inside of a part that is a layer's: see `layer_marks`. No library has this letter in a name,
# and a letter does not divide the words of a name.
MARK = "\N{MODIFIER LETTER TRIANGULAR COLON}"
# Without marks, longer numbers and numbers with leading zeros are text.
_NUMBER = re.compile(rf"(?<![^.])(?:0|[1-9][0-9]{{0,8}})(?![^.])|(?<={MARK})[0-9]{{1,9}}(?={MARK})")
# Limit of the numbers in a name whose order is tried.
_MOST_COLUMNS = 3


def split_numbers(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Return the text around the numbers of a name, and its numbers."""
    pattern, texts = split_texts(name)
    return pattern, tuple(map(int, texts))


def split_texts(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the text around the numbers of a name, and its numbers as they are written, with leading zeros."""
    return tuple(_NUMBER.split(name)), tuple(_NUMBER.findall(name))


def join_texts(pattern: Sequence[str], texts: Sequence[str]) -> str:
    """Return the name with the texts of its numbers."""
    segments = [pattern[0]]
    for number, text in zip(texts, pattern[1:], strict=True):
        segments += [number, text]
    return "".join(segments)


def unmark(name: str) -> str:
    """Return the name without marks."""
    return name.replace(MARK, "")


def find_numbering(pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]) -> Numbering:
    """Return the numbers of the part of each layer.

    pairs: layers and parts with the same data.
    layers: the numbers of all tensors with the name of the layers.
    parts: the numbers of all tensors of the other model with the name of the parts.
    """
    first_layer, first_part = pairs[0]
    # Numbers that are the same in all layers show no layer.
    if len(first_layer) != len(first_part):
        return _find_without_constants(pairs, layers, parts)

    # Layers and parts with other numbers follow another rule.
    numbers = set(parts)
    numberings = [numbering for numbering in _list_permutations(layers) if set(numbering.values()) == numbers]
    if not numberings:
        return _number_in_order(pairs, layers, parts)
    # A tie goes to the first numbering, in which all numbers keep their places.
    return max(numberings, key=lambda numbering: len(numbering.items() & pairs))


def _find_without_constants(
    pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]
) -> Numbering:
    """Return the numbering if one of the names has more numbers, like the position of a module in its layer."""
    paired_layers, paired_parts = zip(*pairs, strict=True)
    short_layers = _remove_constants(layers, _find_constants(paired_layers))
    short_parts = _remove_constants(parts, _find_constants(paired_parts))
    # A name without the constants is in no pair.
    variable_pairs = [(layer, part) for layer, part in pairs if layer in short_layers and part in short_parts]
    short_pairs = [(short_layers[layer], short_parts[part]) for layer, part in variable_pairs]
    # The names may have more variable numbers in one model, too.
    if not short_pairs or len(short_pairs[0][0]) != len(short_pairs[0][1]):
        return _number_in_order(pairs, layers, parts)
    numbering = find_numbering(short_pairs, short_layers.values(), short_parts.values())
    full_layers = dict(zip(short_layers.values(), short_layers.keys(), strict=True))
    full_parts = dict(zip(short_parts.values(), short_parts.keys(), strict=True))
    return {full_layers[layer]: full_parts[part] for layer, part in numbering.items()}


def _find_constants(rows: Sequence[Numbers]) -> set[tuple[int, int]]:
    """Return the positions where most names have one number, and this number."""
    constants = set()
    for position, column in enumerate(zip(*rows, strict=True)):
        number, count = Counter(column).most_common(1)[0]
        if count * 2 > len(rows):
            constants.add((position, number))
    return constants


def _remove_constants(rows: Collection[Numbers], constants: set[tuple[int, int]]) -> dict[Numbers, Numbers]:
    """Return the numbers of the names with these constants, but without the constants."""
    shortened = {}
    for row in rows:
        numbers = set(enumerate(row))
        # A name with another number at a position belongs to other layers.
        if numbers >= constants:
            variable_numbers = sorted(numbers - constants)
            shortened[row] = tuple(number for _, number in variable_numbers)
    return shortened


def _list_permutations(layers: Collection[Numbers]) -> Iterator[Numbering]:
    """Yield the numberings with the numbers of each name in another order, like layer and expert."""
    columns = tuple(zip(*layers, strict=True))
    # The number of orders grows fast, and no library exchanges four numbers.
    is_long = len(columns) > _MOST_COLUMNS
    orders: Iterable[tuple[Numbers, ...]] = [columns] if is_long else itertools.permutations(columns)
    for order in orders:
        part_numbers = zip(*order, strict=True)
        # Names without numbers have no columns, so their numbering is empty.
        yield dict(zip(layers, part_numbers, strict=False))


def _number_in_order(pairs: Sequence[Pair], layers: Collection[Numbers], parts: Collection[Numbers]) -> Numbering:
    """Return the numbering that keeps the order of the layers, like those of an nn.Sequential with gaps."""
    if len(layers) != len(parts):
        # The order shows nothing about layers that have no partner.
        layers, parts = zip(*pairs, strict=True)
    return dict(zip(sorted(layers), sorted(parts), strict=True))
