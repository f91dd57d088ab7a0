"""Find the parts of each stored tensor by one rule for all layers of a name.

The rule of most layers counts for every layer. A layer whose data needs another rule, for example with gate and up
exchanged or with the data of another layer, gets this rule too, so its tensors differ and the difference is diagnosed.
Names without numbers are single tensors: nothing shows that they are exchanged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import find_numbering, split_numbers
from syncheck.conversion.pairings import Pairing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.arrangements import Layout
    from syncheck.conversion.numbering import Numbers, Pair
    from syncheck.conversion.pairings import Candidates, Pool

    Pattern = tuple[str, ...]


@dataclass(slots=True)
class LayerRule:
    """A rule for all layers of a name.

    side: of the stored tensors.
    pattern: their name without numbers.
    parts: the names of their parts without numbers; one for all parts of a stack.
    pairings: of the layers whose data shows this rule.
    """

    side: int
    pattern: Pattern
    parts: tuple[Pattern, ...]
    layout: Layout
    pairings: list[Pairing] = field(default_factory=list)

    @property
    def votes(self) -> int:
        """The number of layers that show this rule."""
        return len(self.pairings)

    def list_pairs(self, position: int) -> list[Pair]:
        """Return the numbers of the layers and of their parts at a position. The index in a stack is a number too."""
        pairs: list[Pair] = []
        for pairing in self.pairings:
            if self.layout.stacked:
                layers = _list_indices(pairing.numbers, len(pairing.parts))
                part_numbers = [split_numbers(part).numbers for part in pairing.parts]
                pairs += zip(layers, part_numbers, strict=True)
            else:
                part = pairing.parts[position]
                pairs.append((pairing.numbers, split_numbers(part).numbers))
        return pairs


def _list_indices(numbers: Numbers, length: int) -> list[Numbers]:
    """Return the numbers of a stack together with each index."""
    return [(*numbers, index) for index in range(length)]


class Assignment:
    """The parts of every stored tensor; each tensor of the other model is a part of one tensor at most.

    pairings: in the order in which they were added.
    claimed: stored tensors and parts, by side and name.
    """

    def __init__(self) -> None:
        self.pairings: list[Pairing] = []
        self.claimed: set[tuple[int, str]] = set()

    def add(self, *pairings: Pairing) -> None:
        """Add pairings in this order, except those with a tensor that is in an earlier one."""
        for pairing in pairings:
            if self.claimed.isdisjoint(pairing.tensors):
                self.claimed.update(pairing.tensors)
                self.pairings.append(pairing)


class LayerNames:
    """The names of the tensors of both sides, by pattern and numbers, and by module."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._names: dict[tuple[int, Pattern], dict[Numbers, str]] = defaultdict(dict)
        self._modules: dict[tuple[int, str], list[str]] = defaultdict(list)
        for side, pool in enumerate(pools):
            for name in pool.tensors:
                pattern, numbers = split_numbers(name)
                self._names[side, pattern][numbers] = name
                module = _find_module(name)
                self._modules[side, module].append(name)

    def find(self, side: int, pattern: Pattern) -> Mapping[Numbers, str]:
        """Return the names with this pattern, by their numbers."""
        return self._names.get((side, pattern), {})

    def find_siblings(self, side: int, name: str) -> Sequence[str]:
        """Return the names of all tensors in the module of a tensor."""
        return self._modules[side, _find_module(name)]


class Directions:
    """Which layers have other numbers in the other model: a model counts all layers of a module from the same end."""

    def __init__(self, pairings: Iterable[Pairing]) -> None:
        # For the beginnings of two names, how many tensors there are, and how many of them have other numbers.
        self._total: Counter[object] = Counter()
        self._changed: Counter[object] = Counter()
        for pairing in pairings:
            pattern, numbers = split_numbers(pairing.name)
            for part in pairing.parts:
                part_pattern, part_numbers = split_numbers(part)
                beginnings = _join_beginnings(pairing.side, pattern, part_pattern)
                self._total[beginnings] += 1
                self._changed[beginnings] += numbers != part_numbers

    def may_reverse(self, side: int, pattern: Pattern, part_pattern: Pattern) -> bool:
        """Whether most tensors in the modules of two names have other numbers."""
        beginnings = _join_beginnings(side, pattern, part_pattern)
        return 2 * self._changed[beginnings] > self._total[beginnings]


def _join_beginnings(side: int, pattern: Pattern, part_pattern: Pattern) -> object:
    """Return the texts before the first number of a name and of its part, whichever model stores the tensor."""
    return frozenset({(side, pattern[0]), (1 - side, part_pattern[0])})


class Expectations:
    """The pairings that the rules expect, those of the rule with the most layers first."""

    def __init__(self, candidates: Candidates, names: LayerNames) -> None:
        self.pairings: list[Pairing] = []
        directions = Directions(candidates.pairings)
        for rule in _list_rules(candidates.pairings):
            pool = candidates.pools[rule.side]
            self.pairings += _expect_pairings(rule, names, pool, directions)
        # The first pairing with each tensor, by side and name; it replaces later ones.
        self._first: dict[tuple[int, str], Pairing] = {}
        for pairing in reversed(self.pairings):
            self._first |= dict.fromkeys(pairing.tensors, pairing)

    def include(self, pairing: Pairing) -> bool:
        """Whether all tensors of a pairing follow the rule of most layers, or no rule."""
        expected = {self._first.get(tensor, pairing) for tensor in pairing.tensors}
        return expected == {pairing}


def assign_parts(candidates: Candidates) -> Assignment:
    """Return the parts of each stored tensor, by the rule of most layers where their names allow it."""
    names = LayerNames(candidates.pools)
    expectations = Expectations(candidates, names)
    following = [pairing for pairing in candidates.pairings if expectations.include(pairing)]
    assignment = Assignment()
    assignment.add(*following)
    # Layers without equal data get the rule of most layers.
    assignment.add(*expectations.pairings)
    # Layers for which the rule of most layers has no tensors left.
    assignment.add(*candidates.pairings)
    _assign_siblings(assignment, names, candidates.pools)
    return assignment


def _list_rules(pairings: Iterable[Pairing]) -> list[LayerRule]:
    """Return the rules that the pairings show, those with the most layers first."""
    rules: dict[object, LayerRule] = {}
    for pairing in sorted(pairings, key=attrgetter("numbers")):
        parts = []
        for part in pairing.parts:
            parts.append(split_numbers(part).pattern)
        # A rule for a stack has one name for all parts, with their index.
        if pairing.layout.stacked:
            parts = list(set(parts))
            if len(parts) > 1:
                continue
        pattern = split_numbers(pairing.name).pattern
        key = (pairing.side, pattern, tuple(parts), pairing.layout)
        rule = rules.setdefault(key, LayerRule(*key))
        rule.pairings.append(pairing)
    return sorted(rules.values(), key=attrgetter("votes"), reverse=True)


def _expect_pairings(rule: LayerRule, names: LayerNames, pool: Pool, directions: Directions) -> list[Pairing]:
    """Return the pairings of all layers of a rule, as far as their tensors exist."""
    layers = _list_layers(rule, names, pool)
    parts: dict[str, list[str]] = defaultdict(list)
    for position, pattern in enumerate(rule.parts):
        part_names = names.find(1 - rule.side, pattern)
        pairs = rule.list_pairs(position)
        # A reversed order needs the data of all layers: layers with equal data would hide an exchange of the others.
        has_all_data = len(pairs) == len(layers)
        may_reverse = has_all_data and directions.may_reverse(rule.side, rule.pattern, pattern)
        numbering = find_numbering(pairs, list(layers), part_names, may_reverse=may_reverse)
        # The order shows a number for layers whose part does not exist.
        for layer, part_numbers in numbering.items():
            if part_numbers in part_names:
                name = layers[layer]
                parts[name].append(part_names[part_numbers])

    expected = []
    indices = Counter(layers.values())
    for name, own_parts in parts.items():
        # A layer may lack a part, or have a part twice.
        if len(set(own_parts)) == indices[name] * len(rule.parts):
            expected.append(Pairing(rule.side, name, tuple(own_parts), rule.layout))
    return expected


def _list_layers(rule: LayerRule, names: LayerNames, pool: Pool) -> dict[Numbers, str]:
    """Return the names of the stored tensors by the numbers of their layers. The index in a stack is a number too."""
    stored_names = names.find(rule.side, rule.pattern)
    if not rule.layout.stacked:
        return dict(stored_names)
    layers: dict[Numbers, str] = {}
    for numbers, name in stored_names.items():
        length = pool.tensors[name].shape[0]
        layers |= dict.fromkeys(_list_indices(numbers, length), name)
    return layers


def _assign_siblings(assignment: Assignment, names: LayerNames, pools: Sequence[Pool]) -> None:
    """Try the rule of a weight for the other tensors of its module: biases that are all 0 have no data to pair."""
    weights = list(assignment.pairings)
    for weight in weights:
        # The rule of a stack depends on its number of dimensions, so a bias needs a rule of its own.
        if weight.layout.stacked:
            continue
        part_names = pools[1 - weight.side].tensors.keys()
        for name in names.find_siblings(weight.side, weight.name):
            sibling = _move_rule(weight, name, pools[weight.side])
            # The other model may lack the bias of a part.
            if part_names >= set(sibling.parts):
                assignment.add(sibling)


def _move_rule(weight: Pairing, name: str, pool: Pool) -> Pairing:
    """Return the pairing of another tensor of the module of a weight by the rule of the weight."""
    last = name.rpartition(".")[2]
    parts = tuple(_find_module(part) + last for part in weight.parts)
    layout = weight.layout
    # A bias has one dimension, so it is not transposed.
    if len(pool.tensors[name].shape) < 2:
        layout = replace(layout, transpose=False)
    return Pairing(weight.side, name, parts, layout)


def _find_module(name: str) -> str:
    """Return the name of the module of a tensor, with the dot at its end."""
    return name.removesuffix(name.rpartition(".")[2])
