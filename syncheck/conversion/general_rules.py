"""Write pairings of tensors as rules of a map: rules with placeholders for all layers, and rules for single tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import attrgetter
from os.path import commonprefix
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import join_numbers, split_numbers
from syncheck.conversion.templates import escape, parse_template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.name_maps import Rule
    from syncheck.conversion.pairings import Pairing

# The placeholders for the numbers of a name, and for the index in a stack.
_LETTERS, _STACK = "ijklmn", "e"


def make_rules(pairings: Sequence[Pairing]) -> list[Rule]:
    """Return rules with placeholders for all layers with the same rule, after rules for single tensors."""
    votes: dict[object, Counter[Rule]] = defaultdict(Counter)
    for pairing in pairings:
        pattern = split_numbers(pairing.name).pattern
        votes[pattern].update(_make_general(pairing))

    # Each name has one general rule, the rule of most layers.
    general: set[Rule] = set()
    for votes_of_name in votes.values():
        usual = dict(votes_of_name.most_common(1))
        general.update(usual)
    single: list[Rule] = []
    for pairing in pairings:
        if general.isdisjoint(_make_general(pairing)):
            single += _make_rule(pairing, {})

    # The first rule that matches a name applies to it, so single tensors come first.
    by_name = attrgetter("name")
    return sorted(single, key=by_name) + sorted(general, key=by_name)


def _make_general(pairing: Pairing) -> list[Rule]:
    """Return the rule with placeholders for all numbers of a name, none if the numbers of the parts are others."""
    placeholders = {}
    # Names with more numbers than letters have no general rule.
    for number, letter in zip(pairing.numbers, _LETTERS, strict=False):
        placeholders[number] = f"{{{letter}}}"
    # Parts do not show which one of two equal numbers they have.
    if len(placeholders) < len(pairing.numbers):
        return []
    return _make_rule(pairing, placeholders)


def _make_rule(pairing: Pairing, placeholders: Mapping[int, str]) -> list[Rule]:
    """Return the rule with placeholders instead of these numbers, none if it does not give the parts."""
    name = _replace_numbers(pairing.name, placeholders)
    parts = [_replace_numbers(part, placeholders) for part in pairing.parts]
    if pairing.layout.stacked:
        # The first names of a stack that counts from 0 have the digits 0 and 1 at the same position.
        begin = commonprefix(pairing.parts[:2])  # noqa: RUF071  # names of tensors, not paths
        end = pairing.parts[0][len(begin) + 1 :]
        begin_template = _replace_numbers(begin, placeholders)
        end_template = _replace_numbers(end, placeholders)
        parts = [f"{begin_template}{{{_STACK}}}{end_template}"]
    rule = pairing.layout.make_rule(name, parts)
    # The numbers of the parts may be others than those of the name.
    if _gives_parts(rule, pairing):
        return [rule]
    return []


def _replace_numbers(name: str, placeholders: Mapping[int, str]) -> str:
    """Return the template with placeholders instead of these numbers."""
    pattern, numbers = split_numbers(escape(name))
    texts = [placeholders.get(number, str(number)) for number in numbers]
    return join_numbers(pattern, texts)


def _gives_parts(rule: Rule, pairing: Pairing) -> bool:
    """Whether a rule gives the parts of a pairing, and other parts to other layers."""
    values = rule.match(pairing.name) or {}
    placeholders = sorted(values)
    if pairing.layout.stacked:
        placeholders = sorted([*values, _STACK])
    # Of a stack, the only name in the rule stands for all parts.
    part_count = len(rule.parts)
    count = len(pairing.parts) // part_count
    names = []
    for part in rule.parts:
        template = parse_template(part)
        # Without a placeholder, all layers would have one part. With a placeholder twice, the map would be refused.
        if sorted(template.placeholders) != placeholders:
            return False
        for index in range(count):
            indexed = {**values, _STACK: str(index)}
            names.append(template.fill(indexed))
    return tuple(names) == pairing.parts
