"""Turn pairings of tensors into a map with one rule for all layers of a name.

The rule of most layers counts for every layer. A layer whose data needs another rule, for example with gate and up
exchanged or with the data of another layer, gets this rule too, so its tensors differ and the difference is diagnosed.
Names without numbers are single tensors: nothing shows that they are exchanged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import Rule
from syncheck.conversion.numbering import find_numbering, join_numbers, split_numbers
from syncheck.conversion.pairings import Layout, Pairing
from syncheck.conversion.templates import escape, parse_template

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.numbering import Numbers
    from syncheck.conversion.pairings import Candidates
    from syncheck.snapshots import Tensor

    Pattern = tuple[str, ...]

_LETTERS = "ijklmn"
_STACK = "e"  # the placeholder for the index in a stack


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

    def add(self, pairing: Pairing) -> bool:
        """Add a pairing, unless one of its tensors is in another one. Return whether it was added."""
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
    # The rule of most layers of each name.
    main: dict[tuple[int, Pattern], LayerRule] = {}
    for rule in rules:
        main.setdefault((rule.side, rule.pattern), rule)
    assignment = Assignment()
    deviating: list[Pairing] = []
    for rule in rules:
        usual = main[rule.side, rule.pattern]
        for pairing in rule.pairings:
            has_other_rule = rule is not usual and pairing.stored in usual.expected
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
    """Let one model store all layers of a name: a rotary rule has a direction, equal tensors have none."""
    directed = set()
    for pairing in pairings:
        if pairing.layout.head_dim:
            directed.add((pairing.side, split_numbers(pairing.stored)[0], split_numbers(pairing.parts[0])[0]))
    unified = []
    for pairing in pairings:
        turned = (1 - pairing.side, split_numbers(pairing.parts[0])[0], split_numbers(pairing.stored)[0])
        if len(pairing.parts) == 1 and not pairing.layout.stacked and turned in directed:
            pairing = Pairing(1 - pairing.side, pairing.parts[0], (pairing.stored,), pairing.layout)
        unified.append(pairing)
    return unified


def _list_rules(pairings: Iterable[Pairing], names: LayerNames) -> list[LayerRule]:
    """Return the rules that the pairings show, those with the most layers first."""
    rules: dict[tuple[int, Pattern, tuple[Pattern, ...], Layout], LayerRule] = {}
    for pairing in sorted(pairings, key=lambda pairing: split_numbers(pairing.stored)[1]):
        pattern = split_numbers(pairing.stored)[0]
        parts = tuple(split_numbers(part)[0] for part in pairing.parts)
        if pairing.layout.stacked:
            parts = tuple(set(parts))
            if len(parts) > 1:
                continue  # a rule for a stack names its parts by their index
        key = (pairing.side, pattern, parts, pairing.layout)
        rules.setdefault(key, LayerRule(*key)).pairings.append(pairing)
    ordered = sorted(rules.values(), key=lambda rule: -len(rule.pairings))
    for rule in ordered:
        rule.expected = _expect_parts(rule, names)
    return ordered


def _expect_parts(rule: LayerRule, names: LayerNames) -> dict[str, tuple[str, ...]]:
    """Return the parts of all layers of a rule, as far as these tensors exist."""
    stored = names.of(rule.side, rule.pattern)
    expected: dict[str, list[str]] = {name: [] for name in stored.values()}
    positions = range(1) if rule.layout.stacked else range(len(rule.parts))
    for position in positions:
        others = names.of(1 - rule.side, rule.parts[position])
        pairs, layers = [], {}
        for pairing in rule.pairings:
            members = pairing.parts if rule.layout.stacked else pairing.parts[position : position + 1]
            for i, part in enumerate(members):
                index = (i,) if rule.layout.stacked else ()
                pairs.append((split_numbers(pairing.stored)[1] + index, split_numbers(part)[1]))
        for numbers, name in stored.items():
            count = names.tensors[rule.side][name].shape[0] if rule.layout.stacked else 0
            indices = [(i,) for i in range(count)] if rule.layout.stacked else [()]
            for index in indices:
                layers[*numbers, *index] = name
        numbering = find_numbering(pairs, layers, others)
        for numbers, name in layers.items():
            part_numbers = numbering.get(numbers)
            expected[name].append("" if part_numbers is None else others.get(part_numbers, ""))
    complete = {}
    for name, parts in expected.items():
        if "" not in parts and len(set(parts)) == len(parts):
            complete[name] = tuple(parts)
    return complete


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


def make_rules(assignment: Assignment) -> list[Rule]:
    """Return rules with placeholders for all layers with the same rule, after rules for single tensors."""
    groups: dict[tuple[int, Pattern], list[Pairing]] = defaultdict(list)
    for side in (0, 1):
        for pairing in assignment.parts[side].values():
            groups[side, split_numbers(pairing.stored)[0]].append(pairing)
    single: list[Rule] = []
    general: list[Rule] = []
    for pairings in groups.values():
        rules = [_widen(pairing) for pairing in pairings]
        usual = Counter(rule for rule in rules if rule is not None).most_common(1)
        for pairing, rule in zip(pairings, rules, strict=True):
            if rule is None or rule != usual[0][0]:
                single += _make_single(pairing)
            elif rule not in general:
                general.append(rule)
    return sorted(single, key=_sort_key) + sorted(general, key=_sort_key)


def _sort_key(rule: Rule) -> str:
    return rule.name


def _widen(pairing: Pairing) -> Rule | None:
    """Return a rule with placeholders instead of numbers; None if the numbers of the parts do not follow from it."""
    pattern, numbers = split_numbers(pairing.stored)
    if len(set(numbers)) < len(numbers) or len(numbers) > len(_LETTERS):
        return None
    letters = {number: f"{{{letter}}}" for number, letter in zip(numbers, _LETTERS, strict=False)}
    parts = []
    for part in pairing.parts[:1] if pairing.layout.stacked else pairing.parts:
        part_pattern, part_numbers = split_numbers(part)
        if pairing.layout.stacked:
            # The index in the stack is the number that differs between its parts.
            second = split_numbers(pairing.parts[1])[1]
            texts = []
            for number, other in zip(part_numbers, second, strict=True):
                texts.append(letters.get(number, str(number)) if number == other else f"{{{_STACK}}}")
        elif any(number not in letters for number in part_numbers):
            return None
        else:
            texts = [letters[number] for number in part_numbers]
        parts.append(join_numbers([escape(text) for text in part_pattern], texts))
    name = join_numbers([escape(text) for text in pattern], [letters[number] for number in numbers])
    rule = _make_rule(name, parts, pairing.layout)
    return rule if _gives_parts(rule, pairing) else None


def _gives_parts(rule: Rule, pairing: Pairing) -> bool:
    """Whether the rule gives the parts of a pairing."""
    values = rule.match(pairing.stored)
    if values is None:
        return False
    templates = [parse_template(part) for part in rule.parts]
    if pairing.layout.stacked:
        if set(templates[0].placeholders) - values.keys() != {_STACK}:
            return False
        parts = [templates[0].fill({**values, _STACK: str(i)}) for i in range(len(pairing.parts))]
    elif any(set(template.placeholders) != values.keys() for template in templates):
        return False
    else:
        parts = [template.fill(values) for template in templates]
    return tuple(parts) == pairing.parts


def _make_single(pairing: Pairing) -> list[Rule]:
    """Return the rule for one tensor; none for a stack whose parts are not counted from 0."""
    if pairing.layout.stacked:
        return []
    return [_make_rule(escape(pairing.stored), [escape(part) for part in pairing.parts], pairing.layout)]


def _make_rule(name: str, parts: Sequence[str], layout: Layout) -> Rule:
    return Rule(
        name,
        tuple(parts),
        sizes=layout.sizes,
        groups=layout.groups,
        transpose=layout.transpose,
        rotary=bool(layout.head_dim),
    )
