"""Pair tensors whose data does not show their pairs, such as the norms of 1 of a freshly initialized model.

The data of each of these pairs is equal, so only the names can be wrong. The user reviews them: they are marked in the
written map.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import split_numbers
from syncheck.conversion.pairings import Pairing
from syncheck.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.conversion.layer_rules import Assignment
    from syncheck.conversion.pairings import Candidates, Pool
    from syncheck.kernel.blocks import Files

    # Names of A and of B.
    Names = tuple[list[str], list[str]]


class Guesses:
    """Tensors with equal data whose pairs no data shows.

    pairings: pairs in the order of their names.
    ambiguous: names of A and of B without a pair.
    """

    def __init__(self, assignment: Assignment, candidates: Candidates) -> None:
        self._assignment = assignment
        self.pairings: list[Pairing] = []
        self.ambiguous: Names = ([], [])
        for names_a, names_b in candidates.ambiguous:
            unpaired_a, unpaired_b = self._select_unpaired(0, names_a), self._select_unpaired(1, names_b)
            pairings = _pair_in_order(unpaired_a, unpaired_b)
            self.pairings += pairings
            if not pairings:
                self._add_ambiguous(unpaired_a, unpaired_b)
        # Constants of other shapes may be parts of each other.
        pool_a, pool_b = candidates.pools
        constants_a = _list_constants(pool_a, candidates.files)
        constants_b = _list_constants(pool_b, candidates.files)
        for value, names_a in constants_a.items():
            unpaired_a = self._select_unpaired(0, names_a)
            unpaired_b = self._select_unpaired(1, constants_b.get(value, []))
            # The model with more of them has tensors that the other one lacks.
            if pool_a.count_elements(unpaired_a) == pool_b.count_elements(unpaired_b):
                self._add_ambiguous(unpaired_a, unpaired_b)

    def _select_unpaired(self, side: int, names: Sequence[str]) -> list[str]:
        """Return the names of tensors that are in no pairing."""
        claimed = self._assignment.claimed
        return [name for name in names if (side, name) not in claimed]

    def _add_ambiguous(self, names_a: Sequence[str], names_b: Sequence[str]) -> None:
        """Add names of both models. A tensor that only one model has is missing, not ambiguous."""
        if names_a and names_b:
            self.ambiguous[0].extend(names_a)
            self.ambiguous[1].extend(names_b)


def _list_constants(pool: Pool, files: Files) -> dict[object, list[str]]:
    """Return the names of the unused tensors with one value everywhere, by dtype and value."""
    constants: dict[object, list[str]] = defaultdict(list)
    for name, digests in pool.select_rows().items():
        # The rows of a constant are equal, and so are the elements of its first row.
        if len(set(digests)) > 1:
            continue
        tensor = pool.tensors[name]
        length = tensor.numel // len(digests)
        row = bytes(files.read(tensor, 0, length, 0))
        size = DTYPES[tensor.dtype].size
        element = row[:size]
        is_constant = row == element * length
        if is_constant:
            constants[tensor.dtype, element].append(name)
    return constants


def _pair_in_order(names_a: Sequence[str], names_b: Sequence[str]) -> list[Pairing]:
    """Pair names of A and B with the same numbers, in their order; none if a number occurs more often on one side."""
    # Modules that have kept their names, such as norms, belong together.
    shared = _list_modules(names_a) & _list_modules(names_b)
    order_a = _sort_names(names_a, shared)
    order_b = _sort_names(names_b, shared)
    if len(order_a) != len(order_b):
        return []
    pairings = []
    for name_a, name_b in zip(order_a, order_b, strict=True):
        numbers_a = split_numbers(name_a).numbers
        numbers_b = split_numbers(name_b).numbers
        # A layer has more of these tensors in one model.
        if numbers_a != numbers_b:
            return []
        pairings.append(Pairing(1, name_b, (name_a,)))
    return pairings


def _sort_names(names: Sequence[str], shared_modules: Collection[str]) -> list[str]:
    """Return names in the order of their numbers, of shared modules, and of the file."""
    keys = {}
    for name in names:
        module = _find_module(name)
        # Renamed modules come first.
        if module not in shared_modules:
            module = ""
        keys[name] = (split_numbers(name).numbers, module)
    return sorted(names, key=keys.__getitem__)


def _list_modules(names: Sequence[str]) -> set[str]:
    """Return the last parts of the names of the modules of tensors."""
    return {_find_module(name) for name in names}


def _find_module(name: str) -> str:
    """Return the last part of the name of the module of a tensor."""
    parts = name.split(".")
    # A name of one part has no module but itself.
    return parts[-2:][0]
