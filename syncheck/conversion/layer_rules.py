"""Turn pairings of tensors into a map with one rule for all layers of a name.

The rule of most layers counts for every layer. A layer whose data needs another rule, for example with gate and up
exchanged or with the data of another layer, gets this rule too, so its tensors differ and the difference is diagnosed.
Names without numbers are single tensors: nothing shows that they are exchanged. The same holds for `w1`, `w2` and `w3`
of a single block, if the data of most of them has another number: nothing shows that w2 should be fc2.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.conversion.affine_parameters import correct_kinds
from syncheck.conversion.numbering import MARK, find_numbering, split_numbers
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

    side: of the stored tensors.
    pattern: their name without numbers.
    parts: the names of their parts without numbers; one for all parts of a stack.
    pairings: of the layers whose data shows this rule.
    expected: the pairing of each stored tensor by this rule, as far as its parts exist.
    """

    side: int
    pattern: Pattern
    parts: tuple[Pattern, ...]
    layout: Layout
    pairings: list[Pairing] = field(default_factory=list)
    expected: dict[str, Pairing] = field(default_factory=dict)

    @property
    def votes(self) -> int:
        """The number of layers that show this rule."""
        return len(self.pairings)


class Assignment:
    """The parts of every stored tensor; each tensor of the other model is a part of one tensor at most.

    pairings: for each side, in the order in which they were added.
    claimed: stored tensors and parts, by side and name.
    """

    def __init__(self) -> None:
        self.pairings: tuple[list[Pairing], list[Pairing]] = ([], [])
        self.claimed: set[tuple[int, str]] = set()

    def list_pairings(self) -> list[Pairing]:
        """Return all pairings."""
        return [*self.pairings[0], *self.pairings[1]]

    def add(self, pairings: Iterable[Pairing]) -> None:
        """Add pairings in this order, and skip a pairing with a tensor of an earlier pairing."""
        for pairing in pairings:
            if self.claimed.isdisjoint(pairing.tensors):
                self.claimed.update(pairing.tensors)
                self.pairings[pairing.side].append(pairing)


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

    def number_modules(self, side: int, pattern: Pattern) -> bool:
        """Whether the numbers of a pattern count single modules from 1, like `w1` and `w2`.

        A layer contains several modules, which have names of their own behind the number.
        """
        before, *ends = pattern
        # Programs count from 0, and a number that is a whole part of a name has no mark.
        if not before.endswith(MARK) or len(ends) != 1 or (0,) in self.of(side, pattern):
            return False
        # A bias belongs to the weight of its module.
        weights = set()
        for first_text, *texts in self._names[side]:
            if first_text == before and not texts[-1].endswith("bias"):
                weights.add(tuple(texts))
        return len(weights) == 1


def assign_parts(candidates: Candidates) -> Assignment:
    """Return the parts of each stored tensor, by the rule of most layers where their names allow it."""
    pairings = correct_kinds(candidates.pairings, candidates.tensors)
    pairings = [_sort_numbered_parts(pairing) for pairing in pairings]
    assignment = Assignment()
    _assign_by_rules(assignment, _unify_rotary(pairings), candidates)
    _assign_siblings(assignment, candidates)
    return assignment


def assign_guesses(assignment: Assignment, guesses: Sequence[Pairing], candidates: Candidates) -> list[Pairing]:
    """Add pairings that only names show, by the rule of most layers. Return all pairings that were added."""
    earlier = set(assignment.list_pairings())
    _assign_by_rules(assignment, guesses, candidates)
    return [pairing for pairing in assignment.list_pairings() if pairing not in earlier]


def _assign_by_rules(assignment: Assignment, pairings: Sequence[Pairing], candidates: Candidates) -> None:
    """Add pairings to an assignment, with the rule of most layers for each layer that has the tensors for it."""
    rules = _list_rules(pairings, LayerNames(candidates.tensors))
    usual_rules = _find_usual_rules(rules)
    usual: list[Pairing] = []
    deviating: list[Pairing] = []
    for rule in rules:
        for pairing in rule.pairings:
            is_usual = _follows_usual_rules(pairing, rule, usual_rules)
            pairings_of_kind = usual if is_usual else deviating
            pairings_of_kind.append(pairing)

    assignment.add(usual)
    # Layers without equal data get the rule of most layers.
    for rule in rules:
        assignment.add(rule.expected.values())
    # The rule of most layers has no tensors for these layers.
    assignment.add(deviating)


def _sort_numbered_parts(pairing: Pairing) -> Pairing:
    """Return the pairing of a fused tensor with its parts in the order of their numbers, if they have one name.

    Layers and experts in another order are a finding.
    """
    patterns = set(pairing.part_patterns)
    # Parts of other sizes have names of their own, and the rule of stacks sorts their parts.
    if len(patterns) > 1 or pairing.layout.sizes or pairing.layout.stacked:
        return pairing
    parts = sorted(pairing.parts, key=_get_numbers)
    return replace(pairing, parts=tuple(parts))


def _unify_rotary(pairings: Sequence[Pairing]) -> list[Pairing]:
    """Make rules comparable that differ only because each pairing was found alone.

    All rotary layouts get the size of a head that most of them have, because a model has one size. A rotary rule has a
    direction, equal and transposed tensors have none: one model stores all of them.
    """
    rotary = [pairing for pairing in pairings if pairing.layout.head_dim]
    if not rotary:
        return list(pairings)
    sizes = Counter(pairing.layout.head_dim for pairing in rotary)
    sides = Counter(pairing.side for pairing in rotary)
    ((head_dim, _),) = sizes.most_common(1)
    ((side, _),) = sides.most_common(1)
    return [_unify_layout(pairing, head_dim, side) for pairing in pairings]


def _unify_layout(pairing: Pairing, head_dim: int, side: int) -> Pairing:
    """Return a pairing with this size of a head if it is rotary, and else with the stored tensor of this side."""
    layout = pairing.layout
    if layout.head_dim:
        return replace(pairing, layout=replace(layout, head_dim=head_dim))
    # The parts of a fused tensor or of a stack have no layout that contains it.
    is_single = len(pairing.parts) == 1 and not layout.stacked
    if pairing.side == side or not is_single:
        return pairing
    (part,) = pairing.parts
    return Pairing(
        side,
        stored=part,
        parts=(pairing.stored,),
        layout=layout,
    )


def _find_usual_rules(rules: Iterable[LayerRule]) -> dict[tuple[int, str], LayerRule]:
    """Return the rule of most layers for each tensor, stored or part, by side and name."""
    usual_rules: dict[tuple[int, str], LayerRule] = {}
    for rule in rules:
        for pairing in rule.expected.values():
            for tensor in pairing.tensors:
                usual_rules.setdefault(tensor, rule)
    return usual_rules


def _follows_usual_rules(pairing: Pairing, rule: LayerRule, usual_rules: Mapping[tuple[int, str], LayerRule]) -> bool:
    """Whether a pairing has the parts that its rule expects, and no rule of more layers has its tensors."""
    if rule.expected.get(pairing.stored, pairing) != pairing:
        return False
    # If all layers show a rule, its parts belong to it.
    is_complete = len(rule.pairings) >= len(rule.expected)
    tensors = pairing.tensors[:1] if is_complete else pairing.tensors
    return all(usual_rules.get(tensor, rule) is rule for tensor in tensors)


def _list_rules(pairings: Sequence[Pairing], names: LayerNames) -> list[LayerRule]:
    """Return the rules that the pairings show, the rules of most layers first."""
    rules: dict[object, LayerRule] = {}
    for pairing in sorted(pairings, key=_get_stored_numbers):
        pattern, _ = split_numbers(pairing.stored)
        parts = pairing.part_patterns
        if pairing.layout.stacked:
            parts = tuple(set(parts))
            # A rule for a stack names its parts by their index.
            if len(parts) > 1:
                continue
        key = (pairing.side, pattern, parts, pairing.layout)
        rule = rules.setdefault(key, LayerRule(*key))
        rule.pairings.append(pairing)

    numberings = _Numberings(pairings, names)
    for rule in rules.values():
        rule.expected = numberings.expect_pairings(rule)
    return sorted(rules.values(), key=attrgetter("votes"), reverse=True)


def _get_stored_numbers(pairing: Pairing) -> Numbers:
    return _get_numbers(pairing.stored)


def _get_numbers(name: str) -> Numbers:
    _, numbers = split_numbers(name)
    return numbers


class _Numberings:
    """The numbers of the parts of each layer, by the names of layers and parts."""

    def __init__(self, pairings: Iterable[Pairing], names: LayerNames) -> None:
        self._names = names
        # Layers and parts with the same data, by their patterns; the layers of stacks have one number more.
        self._pairs: dict[tuple[int, Pattern, Pattern, bool], list[Pair]] = defaultdict(list)
        for pairing in pairings:
            pattern, numbers = split_numbers(pairing.stored)
            stacked = pairing.layout.stacked
            layer = numbers
            for index, part in enumerate(pairing.parts):
                part_pattern, part_numbers = split_numbers(part)
                if stacked:
                    layer = (*numbers, index)
                self._pairs[pairing.side, pattern, part_pattern, stacked].append((layer, part_numbers))

    def expect_pairings(self, rule: LayerRule) -> dict[str, Pairing]:
        """Return the pairings of all layers of a rule by stored name, as far as their parts exist."""
        layers = self._list_layers(rule)
        parts: dict[str, list[str]] = defaultdict(list)
        for part_pattern in rule.parts:
            part_names = self._names.of(1 - rule.side, part_pattern)
            pairs = self._pairs[rule.side, rule.pattern, part_pattern, rule.layout.stacked]
            numbering = find_numbering(pairs, layers, part_names)
            for layer, name in layers.items():
                part = _find_part(layer, numbering, part_names)
                parts[name].append(part)

        expected: dict[str, Pairing] = {}
        for name, parts_of_layer in parts.items():
            # A layer may lack a part, or have a part twice.
            existing_parts = set(parts_of_layer) - {""}
            if len(existing_parts) == len(parts_of_layer):
                expected[name] = Pairing(
                    rule.side,
                    stored=name,
                    parts=tuple(parts_of_layer),
                    layout=rule.layout,
                )
        if self._is_refuted(rule, expected):
            return {pairing.stored: pairing for pairing in rule.pairings}
        return expected

    def _is_refuted(self, rule: LayerRule, expected: Mapping[str, Pairing]) -> bool:
        """Whether the numbers are no layers', and at least half of the modules with equal data have other numbers."""
        numbers_modules = self._names.number_modules
        patterns = [(rule.side, rule.pattern), *((1 - rule.side, part) for part in rule.parts)]
        if rule.layout.stacked or not all(numbers_modules(side, pattern) for side, pattern in patterns):
            return False
        confirmed = sum(expected.get(pairing.stored) == pairing for pairing in rule.pairings)
        return 2 * confirmed <= rule.votes

    def _list_layers(self, rule: LayerRule) -> dict[Numbers, str]:
        """Return the names of the layers of a rule by their numbers; for stacks, with each index."""
        names = self._names.of(rule.side, rule.pattern)
        if not rule.layout.stacked:
            return dict(names)
        layers: dict[Numbers, str] = {}
        for numbers, name in names.items():
            shape = self._names.tensors[rule.side][name].shape
            # A tensor without dimensions may have the name of a stack, but no index.
            length = sum(shape[:1])
            for index in range(length):
                layers[*numbers, index] = name
        return layers


def _find_part(layer: Numbers, numbering: Mapping[Numbers, Numbers], part_names: Mapping[Numbers, str]) -> str:
    """Return the name of the part of a layer, empty if there is no such tensor."""
    part_numbers = numbering.get(layer)
    return "" if part_numbers is None else part_names.get(part_numbers, "")


def _assign_siblings(assignment: Assignment, candidates: Candidates) -> None:
    """Try the rule of a weight for the other tensors of its module: biases that are all 0 have no data to pair."""
    for side in (0, 1):
        weights = _group_by_module(assignment.pairings[side])
        part_tensors = candidates.tensors[1 - side]
        for name, tensor in candidates.tensors[side].items():
            weight = weights.get(_find_module(name))
            # A bias has no rows of a stack, so it needs a rule of its own.
            if weight is None or weight.layout.stacked:
                continue
            sibling = _move_rule(weight, name, tensor)
            # The other model may lack the bias of a part.
            if part_tensors.keys() >= set(sibling.parts):
                assignment.add([sibling])


def _group_by_module(pairings: Iterable[Pairing]) -> dict[str, Pairing]:
    """Return the first pairing of each module."""
    weights: dict[str, Pairing] = {}
    for pairing in pairings:
        weights.setdefault(_find_module(pairing.stored), pairing)
    # Tensors outside of all modules do not belong together.
    weights.pop("", None)
    return weights


def _find_module(name: str) -> str:
    """Return the name of the module of a tensor."""
    return name.rpartition(".")[0]


def _move_rule(weight: Pairing, name: str, tensor: Tensor) -> Pairing:
    """Return the pairing of another tensor in the module of a weight by the rule of the weight."""
    _, _, last = name.rpartition(".")
    parts = [f"{_find_module(part)}.{last}" for part in weight.parts]
    layout = weight.layout
    # A bias has one dimension, so it is not transposed.
    if len(tensor.shape) < 2:
        layout = replace(layout, transpose=False)
    return Pairing(
        weight.side,
        stored=name,
        parts=tuple(parts),
        layout=layout,
    )
