"""Turn pairings of tensors into a map with one rule for all layers of a name.

The rule of most layers counts for every layer. A layer whose data needs another rule, for example with gate and up
exchanged or with the data of another layer, gets this rule too, so its tensors differ and the difference is diagnosed.
Names without numbers are single tensors: nothing shows that they are exchanged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import find_mirror, find_numbering, mirror, split_numbers
from syncheck.conversion.pairings import Layout, Pairing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.numbering import Numbers, Pair
    from syncheck.conversion.pairings import Candidates
    from syncheck.snapshots import Tensor

    Pattern = tuple[str, ...]


@dataclass(slots=True)
class LayerRule:
    """A rule for all layers of a name.

    side: of the stored tensors. pattern: their name without numbers. parts: the names of their parts without numbers.
    pairings: of the layers whose data shows this rule.
    """

    side: int
    pattern: Pattern
    parts: tuple[Pattern, ...]
    layout: Layout
    pairings: list[Pairing] = field(default_factory=list)
    expected: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The parts of each stored tensor by this rule."""


@dataclass(slots=True)
class Assignment:
    """The parts of every stored tensor; each tensor of the other model is a part of one tensor at most."""

    parts: tuple[dict[str, Pairing], dict[str, Pairing]] = field(default_factory=lambda: ({}, {}))
    claimed: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    """For each side, the names of stored tensors and of parts."""

    def list_pairings(self) -> list[Pairing]:
        """Return all pairings."""
        return [*self.parts[0].values(), *self.parts[1].values()]

    def add(self, pairing: Pairing) -> bool:
        """Add a pairing, unless another pairing has one of its tensors. Return whether it was added."""
        own, other = self.claimed[pairing.side], self.claimed[1 - pairing.side]
        if pairing.stored in own or not other.isdisjoint(pairing.parts):
            return False
        own.add(pairing.stored)
        other.update(pairing.parts)
        self.parts[pairing.side][pairing.stored] = pairing
        return True


class LayerNames:
    """The names of the tensors of both sides, by pattern and numbers."""

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        self.tensors = tensors
        self._names: list[dict[Pattern, dict[Numbers, str]]] = []
        for model in tensors:
            names: dict[Pattern, dict[Numbers, str]] = defaultdict(dict)
            for name in model:
                pattern, numbers = split_numbers(name)
                names[pattern][numbers] = name
            self._names.append(names)

    def of(self, side: int, pattern: Pattern) -> Mapping[Numbers, str]:
        """Return the names with this pattern, by their numbers."""
        return self._names[side].get(pattern, {})


def assign_parts(candidates: Candidates) -> Assignment:
    """Return the parts of each stored tensor, by the rule of most layers where their names allow it."""
    names = LayerNames(candidates.tensors)
    pairings = _unify_sides(_unify_heads(candidates.pairings))
    rules = _list_rules(pairings, names)
    # The rule of most layers for each tensor, as a whole and as a part.
    usual: dict[tuple[int, str], LayerRule] = {}
    for rule in rules:
        for stored, parts in rule.expected.items():
            usual.setdefault((rule.side, stored), rule)
            for part in parts:
                usual.setdefault((1 - rule.side, part), rule)
    assignment = Assignment()
    deviating: list[Pairing] = []
    for rule in rules:
        # Not all layers show this rule, so the tensors of its layers may belong to a rule of more layers.
        is_disputed = len(rule.pairings) < len(rule.expected)
        for pairing in rule.pairings:
            tensors = [(rule.side, pairing.stored)]
            if is_disputed:
                tensors += [(1 - rule.side, part) for part in pairing.parts]
            has_other_rule = any(usual.get(tensor, rule) is not rule for tensor in tensors)
            if has_other_rule or pairing.parts != rule.expected.get(pairing.stored, pairing.parts):
                deviating.append(pairing)
            else:
                assignment.add(pairing)
    for rule in rules:
        for stored, parts in rule.expected.items():
            assignment.add(Pairing(rule.side, stored, parts, rule.layout))
    # Layers for which the rule of most layers has no tensors left.
    for pairing in deviating:
        assignment.add(pairing)
    _assign_siblings(assignment, candidates)
    return assignment


def _unify_heads(pairings: Sequence[Pairing]) -> list[Pairing]:
    """Give all rotary layouts the size of a head that most of them have: a model has one size."""
    sizes = Counter(pairing.layout.head_dim for pairing in pairings if pairing.layout.head_dim)
    if len(sizes) < 2:
        return list(pairings)
    usual = sizes.most_common(1)[0][0]
    unified = []
    for pairing in pairings:
        layout = pairing.layout
        unified.append(replace(pairing, layout=replace(layout, head_dim=usual)) if layout.head_dim else pairing)
    return unified


def _unify_sides(pairings: Sequence[Pairing]) -> list[Pairing]:
    """Let one model store all single tensors: rules for a name can be compared if they start from the same model.

    A rotary rule has a direction, equal and transposed tensors have none.
    """
    sides = Counter(pairing.side for pairing in pairings if pairing.layout.head_dim)
    unified = []
    for pairing in pairings:
        has_direction = len(pairing.parts) > 1 or pairing.layout.stacked or pairing.layout.head_dim
        if sides and not has_direction and pairing.side != sides.most_common(1)[0][0]:
            pairing = Pairing(1 - pairing.side, pairing.parts[0], (pairing.stored,), pairing.layout)
        unified.append(pairing)
    return unified


def _list_rules(pairings: Sequence[Pairing], names: LayerNames) -> list[LayerRule]:
    """Return the rules that the pairings show, those with the most layers first."""
    rules: dict[tuple[int, Pattern, tuple[Pattern, ...], Layout], LayerRule] = {}
    for pairing in sorted(pairings, key=_get_numbers):
        pattern = split_numbers(pairing.stored)[0]
        parts = tuple(split_numbers(part)[0] for part in pairing.parts)
        if pairing.layout.stacked:
            parts = tuple(set(parts))
            if len(parts) > 1:
                continue  # a rule for a stack names its parts by their index
        key = (pairing.side, pattern, parts, pairing.layout)
        rules.setdefault(key, LayerRule(*key)).pairings.append(pairing)
    ordered = sorted(rules.values(), key=lambda rule: -len(rule.pairings))
    numberings = _Numberings(pairings, names)
    for rule in ordered:
        rule.expected = numberings.expect_parts(rule)
    return ordered


def _get_numbers(pairing: Pairing) -> Numbers:
    return split_numbers(pairing.stored)[1]


class _Numberings:
    """The numbers of the parts of each layer, by the names of layers and parts."""

    def __init__(self, pairings: Iterable[Pairing], names: LayerNames) -> None:
        self._names = names
        # Layers and parts with the same data, by their patterns, and by the text before their first number.
        self._pairs: dict[tuple[int, Pattern, Pattern], list[Pair]] = defaultdict(list)
        self._containers: dict[tuple[int, str, str], list[Pair]] = defaultdict(list)
        for pairing in pairings:
            pattern, numbers = split_numbers(pairing.stored)
            for i, part in enumerate(pairing.parts):
                part_pattern, part_numbers = split_numbers(part)
                index = (i,) if pairing.layout.stacked else ()
                self._pairs[pairing.side, pattern, part_pattern].append(((*numbers, *index), part_numbers))
                if numbers and part_numbers:
                    self._containers[pairing.side, pattern[0], part_pattern[0]].append((numbers, part_numbers))

    def expect_parts(self, rule: LayerRule) -> dict[str, tuple[str, ...]]:
        """Return the parts of all layers of a rule, as far as these tensors exist."""
        expected: dict[str, list[str]] = {name: [] for name in self._names.of(rule.side, rule.pattern).values()}
        for part_pattern in rule.parts:
            parts = self._names.of(1 - rule.side, part_pattern)
            layers = self._list_layers(rule)
            numbering = self._find(rule, part_pattern, layers, parts)
            for numbers, name in layers.items():
                part_numbers = numbering.get(numbers, ())
                expected[name].append(parts.get(part_numbers, "") if numbers in numbering else "")
        complete = {}
        for name, part_names in expected.items():
            if "" not in part_names and len(set(part_names)) == len(part_names):
                complete[name] = tuple(part_names)
        return complete

    def _list_layers(self, rule: LayerRule) -> dict[Numbers, str]:
        """Return the names of the layers of a rule by their numbers; for stacks, with each index."""
        names = self._names.of(rule.side, rule.pattern)
        if not rule.layout.stacked:
            return dict(names)
        layers = {}
        for numbers, name in names.items():
            for i in range(self._names.tensors[rule.side][name].shape[0]):
                layers[*numbers, i] = name
        return layers

    def _find(
        self, rule: LayerRule, part_pattern: Pattern, layers: Mapping[Numbers, str], parts: Mapping[Numbers, str]
    ) -> Mapping[Numbers, Numbers]:
        pairs = self._pairs[rule.side, rule.pattern, part_pattern]
        container = self._containers.get((rule.side, rule.pattern[0], part_pattern[0]), ())
        total = find_mirror(container)
        if total is None:
            return find_numbering(pairs, layers, parts)
        mirrored_pairs = [(layer, mirror(part, total)) for layer, part in pairs]
        mirrored_parts = [mirror(part, total) for part in parts]
        numbering = find_numbering(mirrored_pairs, layers, mirrored_parts)
        return {layer: mirror(part, total) for layer, part in numbering.items()}


def _assign_siblings(assignment: Assignment, candidates: Candidates) -> None:
    """Try the rule of a weight for the other tensors of its module: biases that are all 0 have no data to pair."""
    for side in (0, 1):
        modules: dict[str, Pairing] = {}
        for pairing in assignment.parts[side].values():
            modules.setdefault(pairing.stored.rpartition(".")[0], pairing)
        for name, tensor in candidates.tensors[side].items():
            module, _, last = name.rpartition(".")
            weight = modules.get(module)
            if weight is None or not module or name in assignment.claimed[side] or weight.layout.stacked:
                continue
            parts = []
            for part in weight.parts:
                sibling = f"{part.rpartition('.')[0]}.{last}"
                if sibling in candidates.tensors[1 - side]:
                    parts.append(sibling)
            layout = weight.layout
            if len(tensor.shape) < 2:
                layout = replace(layout, transpose=False)
            if len(parts) == len(weight.parts):
                assignment.add(Pairing(side, name, tuple(parts), layout))
