"""Pair tensors whose data does not show their pairs, like the norms of 1 of a freshly initialized model.

The data of a pair is equal, so only its names can be wrong. The written map marks the pairs, and the user reviews it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.affine_parameters import correct_kinds, get_kind
from syncheck.conversion.layer_rules import assign_guesses
from syncheck.conversion.numbering import split_numbers
from syncheck.conversion.pairings import Pairing
from syncheck.conversion.shared_weights import is_shared_weight
from syncheck.conversion.vocabularies import get_module
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from syncheck.conversion.layer_rules import Assignment
    from syncheck.conversion.pairings import Candidates

    # Names of A and of B.
    Names = tuple[list[str], list[str]]
    # The text before the first number of a name, and this number.
    Layer = tuple[str, int]


class Guesses:
    """Pairs of tensors with equal data that their names suggest.

    pairings: also of layers with other data, if most layers show their rule.
    tied: copies of a tensor in one model, and the name in A of the tensor that the other model stores once.
    ambiguous: names of A and of B whose pairs nothing suggests.
    """

    def __init__(self, assignment: Assignment, candidates: Candidates) -> None:
        """Pair the ambiguous candidates, and add their pairings to an assignment."""
        self.pairings: list[Pairing] = []
        self.tied: list[tuple[str, str]] = []
        self.ambiguous: Names = ([], [])
        self._assignment = assignment
        self._candidates = candidates
        self._pair_in_layers()
        for names_a, names_b in candidates.ambiguous:
            if not _is_constant(candidates, 0, names_a[0]):
                self._pair_copies(names_a, names_b)
            unpaired_a, unpaired_b = self._select_unpaired(0, names_a), self._select_unpaired(1, names_b)
            self._add_ambiguous(unpaired_a, unpaired_b)
        self._add_constants()

    def _pair_in_layers(self) -> None:
        """Pair tensors in the same layer, by one rule for all layers of a name."""
        layers = _Layers(self._assignment.list_pairings())
        pairings: list[Pairing] = []
        for names_a, names_b in self._candidates.ambiguous:
            unpaired_a, unpaired_b = self._select_unpaired(0, names_a), self._select_unpaired(1, names_b)
            pairs = _pair_by_layer(unpaired_a, unpaired_b, layers.find)
            if not pairs:
                # Without any other pair, layers have equal numbers.
                pairs = _pair_by_layer(unpaired_a, unpaired_b, _get_numbers)
            pairings += pairs
        pairings = correct_kinds(pairings, self._candidates.tensors)
        self.pairings += assign_guesses(self._assignment, pairings, self._candidates)

    def _pair_copies(self, names_a: Sequence[str], names_b: Sequence[str]) -> None:
        """Pair as many tensors as both models have, and tie further copies of a shared weight to a paired tensor.

        All further copies are missing in the other model.
        """
        if len(names_a) == len(names_b):
            return
        unpaired_a, unpaired_b = self._select_unpaired(0, names_a), self._select_unpaired(1, names_b)
        # The model with fewer tensors has no partner for the last names.
        pairings = _pair_in_order(unpaired_a, unpaired_b)
        self._assignment.add(pairings)
        self.pairings += pairings

        # The model with more tensors has the further copies.
        side = 1 if len(names_a) < len(names_b) else 0
        names = (names_a, names_b)[side]
        copies = self._select_unpaired(side, names)
        if copies and is_shared_weight(names, self._candidates.tensors[side]):
            # Every tensor of the group has the data of all.
            stored_once = next(name for name in names_a if (0, name) in self._assignment.claimed)
            self.tied += [(copy, stored_once) for copy in copies]

    def _add_constants(self) -> None:
        """Add constants of other shapes, which may be parts of each other, if both models have as many elements."""
        for names_a, names_b in _group_constants(self._candidates):
            unpaired_a, unpaired_b = self._select_unpaired(0, names_a), self._select_unpaired(1, names_b)
            count_a = _count_elements(self._candidates, 0, unpaired_a)
            count_b = _count_elements(self._candidates, 1, unpaired_b)
            if count_a == count_b:
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


class _Layers:
    """The layer of a name, as in the names of A."""

    def __init__(self, pairings: Sequence[Pairing]) -> None:
        votes: dict[Layer, Counter[Layer]] = defaultdict(Counter)
        for pairing in pairings:
            for part in pairing.parts:
                names = (pairing.stored, part)
                # The stored tensor is the one of A if its side is 0.
                layer_a = _find_layer(names[pairing.side])
                layer_b = _find_layer(names[1 - pairing.side])
                # Names without numbers are in no layer.
                if layer_a is not None and layer_b is not None:
                    votes[layer_b][layer_a] += 1
        self._layers_of_a = {layer_b: counter.most_common(1)[0][0] for layer_b, counter in votes.items()}

    def find(self, name: str, side: int) -> Layer | None:
        """Return the layer of a name of A (side 0) or B; a layer of B without any pairing has its own name."""
        layer = _find_layer(name)
        if side == 0 or layer is None:
            return layer
        return self._layers_of_a.get(layer, layer)


def _find_layer(name: str) -> Layer | None:
    """Return the layer of a name, None if it has no number."""
    pattern, numbers = split_numbers(name)
    return (pattern[0], numbers[0]) if numbers else None


def _get_numbers(name: str, _: int) -> tuple[int, ...]:
    """Return the numbers of a name."""
    return split_numbers(name)[1]


def _pair_by_layer(
    names_a: Sequence[str], names_b: Sequence[str], find_layer: Callable[[str, int], Hashable]
) -> list[Pairing]:
    """Pair names of A and B in the same layer, except in layers where the numbers of names differ.

    find_layer: returns the layer of a name of a side.
    """
    layers: dict[Hashable, Names] = defaultdict(lambda: ([], []))
    for side, names in enumerate((names_a, names_b)):
        for name in names:
            layers[find_layer(name, side)][side].append(name)
    pairs: list[Pairing] = []
    for layer_a, layer_b in layers.values():
        # Nothing shows which tensor is missing in the other model.
        if len(layer_a) == len(layer_b):
            pairs += _pair_in_order(layer_a, layer_b)
    return pairs


def _pair_in_order(names_a: Sequence[str], names_b: Sequence[str]) -> list[Pairing]:
    """Pair names of A and B: modules that have kept their names, then tensors of one kind, then all in order."""
    pairs: list[Pairing] = []
    unpaired_a, unpaired_b = list(names_a), list(names_b)
    for get_key in (_get_module_and_kind, get_kind, get_module, _get_no_key):
        names_by_key: dict[Hashable, list[str]] = defaultdict(list)
        for name_b in unpaired_b:
            names_by_key[get_key(name_b)].append(name_b)
        for name_a in list(unpaired_a):
            partners = names_by_key[get_key(name_a)]
            if partners:
                partner = partners.pop(0)
                unpaired_a.remove(name_a)
                unpaired_b.remove(partner)
                pairs.append(Pairing(1, partner, (name_a,)))
    return pairs


def _get_module_and_kind(name: str) -> tuple[str, str]:
    return get_module(name), get_kind(name)


def _get_no_key(_: str) -> str:
    return ""


def _group_constants(candidates: Candidates) -> list[Names]:
    """Return the names of the unused tensors of A and of B with one value everywhere, by this value."""
    groups: dict[object, Names] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for name in candidates.unused(side):
            if not _is_constant(candidates, side, name):
                continue
            # The first element is the value of all.
            tensor = candidates.tensors[side][name]
            value = bytes(candidates.files.read(tensor, 0, 1, 0))
            groups[tensor.dtype, value][side].append(name)
    return list(groups.values())


def _is_constant(candidates: Candidates, side: int, name: str) -> bool:
    """Whether a tensor has one value everywhere."""
    tensor, digests = candidates.tensors[side][name], candidates.rows[side][name]
    # The rows of a constant are equal, and so are the elements of its first row.
    if len(set(digests)) > 1:
        return False
    length = tensor.numel // len(digests)
    row = bytes(candidates.files.read(tensor, 0, length, 0))
    size = DTYPES[tensor.dtype].size
    return row == row[:size] * length


def _count_elements(candidates: Candidates, side: int, names: Sequence[str]) -> int:
    """Return the number of elements of tensors of a side."""
    return sum(candidates.tensors[side][name].numel for name in names)
