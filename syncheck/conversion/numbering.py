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
    # For each position in the numbers of a part, a position in the stored numbers and the offset; a position of None
    # stands for a constant. Then the stored positions without a partner, with their constants.
    Formula = tuple[tuple[tuple[int | None, int], ...], tuple[tuple[int, int], ...]]

# Longer numbers and numbers with leading zeros are text.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
# Limits of the numbers in a name whose order is tried, and of the layers that show a reversed order: two exchanged
# layers are a mistake.
_MOST_PLACES, _LEAST_REVERSED = 3, 3


def split_numbers(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Return the text around the numbers of a name, and its numbers."""
    return tuple(_NUMBER.split(name)), tuple(map(int, _NUMBER.findall(name)))


def join_numbers(pattern: Sequence[str], numbers: Sequence[int | str]) -> str:
    """Return the name with these numbers."""
    pieces = [pattern[0]]
    for number, text in zip(numbers, pattern[1:], strict=True):
        pieces += [str(number), text]
    return "".join(pieces)


def find_numbering(
    pairs: Sequence[tuple[Numbers, Numbers]], stored: Collection[Numbers], parts: Collection[Numbers]
) -> Mapping[Numbers, Numbers]:
    """Return the numbers of the part of each layer.

    pairs: the numbers of stored tensors, and of the parts with the same data.
    stored, parts: the numbers of all tensors with these names.
    """
    places = len(pairs[0][0])
    if places == len(pairs[0][1]) and places <= _MOST_PLACES:
        numbering = _find_equal(pairs, stored, parts)
        if numbering is not None:
            return numbering
    # Numbers with gaps, such as the layers of an nn.Sequential: the order of the numbers is the order of the layers.
    complete = len(stored) == len(parts)
    ours = sorted(stored if complete else [numbers for numbers, _ in pairs])
    theirs = sorted(parts if complete else [numbers for _, numbers in pairs])
    ordered = dict(zip(ours, theirs, strict=True))
    votes_for_order = sum(ordered[numbers] == part for numbers, part in pairs) if complete else 0
    formulas = Counter(itertools.chain.from_iterable(map(_list_formulas, pairs)))
    for formula, votes in formulas.most_common(1):
        if votes > votes_for_order and votes * 2 > len(pairs):
            return _apply_formula(formula, stored)
    return ordered


def _find_equal(
    pairs: Sequence[tuple[Numbers, Numbers]], stored: Collection[Numbers], parts: Collection[Numbers]
) -> Mapping[Numbers, Numbers] | None:
    """Return the numbering of two models that use the same numbers, maybe in another order; None for other numbers."""
    best: Mapping[Numbers, Numbers] | None = None
    most = -1
    for order in itertools.permutations(range(len(pairs[0][0]))):
        numbering = {numbers: tuple(numbers[place] for place in order) for numbers in stored}
        if set(numbering.values()) != set(parts):
            continue
        votes = sum(numbering[numbers] == part for numbers, part in pairs)
        if votes > most:
            best, most = numbering, votes
    if best is None or most == len(pairs):
        return best
    for place in range(len(pairs[0][0])):
        values = {numbers[place] for numbers in stored}
        ends = min(values) + max(values)
        reverse = {n: (*n[:place], ends - n[place], *n[place + 1 :]) for n in stored}
        if len(values) >= _LEAST_REVERSED and all(reverse[numbers] == part for numbers, part in pairs):
            return reverse
    return best


def _list_formulas(pair: tuple[Numbers, Numbers]) -> Iterator[Formula]:
    """Yield the formulas that give the numbers of a part from stored numbers; those with fewer constants first."""
    stored, part = pair
    if max(len(stored), len(part)) > _MOST_PLACES:
        return
    choices = itertools.product([*range(len(stored)), None], repeat=len(part))
    for places in sorted(choices, key=lambda choice: choice.count(None)):
        linked = [place for place in places if place is not None]
        if len(set(linked)) < len(linked):
            continue
        terms = []
        for place, number in zip(places, part, strict=True):
            terms.append((place, number if place is None else number - stored[place]))
        constants = [(place, stored[place]) for place in range(len(stored)) if place not in linked]
        yield tuple(terms), tuple(constants)


def _apply_formula(formula: Formula, stored: Collection[Numbers]) -> dict[Numbers, Numbers]:
    """Return the numbers of the parts, for the stored numbers that the formula applies to."""
    terms, constants = formula
    numbering = {}
    for numbers in stored:
        if all(numbers[place] == constant for place, constant in constants):
            numbering[numbers] = tuple(offset if place is None else numbers[place] + offset for place, offset in terms)
    return numbering
