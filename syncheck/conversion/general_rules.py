"""Write the rules of a map: one rule with placeholders for all layers, as far as their names follow one template."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import Rule
from syncheck.conversion.numbering import join_numbers, split_numbers
from syncheck.conversion.templates import escape, parse_template

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.conversion.numbering import Numbers
    from syncheck.conversion.pairings import Pairing

# The placeholders of layers, and of the index in a stack.
_LETTERS, _INDEX = "ijklmn", "e"


def make_rules(pairings: Iterable[Pairing]) -> list[Rule]:
    """Return the rules for these pairings, those without placeholders first: the first rule of a name counts."""
    families: dict[object, dict[object, list[Pairing]]] = defaultdict(lambda: defaultdict(list))
    for pairing in pairings:
        pattern, _ = split_numbers(pairing.stored)
        part_patterns = tuple(split_numbers(part)[0] for part in pairing.parts)
        families[pairing.side, pattern][part_patterns, pairing.layout].append(pairing)
    rules: list[Rule] = []
    for family in families.values():
        groups = sorted(family.values(), key=len, reverse=True)
        rules += _make_family(groups)
    return sorted(rules, key=_sort_key)


def _sort_key(rule: Rule) -> tuple[bool, str]:
    return bool(parse_template(rule.name).placeholders), rule.name


def _make_family(groups: Sequence[Sequence[Pairing]]) -> list[Rule]:
    """Return the rules for tensors with names that differ only in numbers. groups: tensors with one rule each."""
    rules: list[Rule] = []
    covered: list[str] = []
    for group in groups:
        names = [pairing.stored for pairing in group]
        general = _make_rule(group)
        # A smaller group must not change what the rule of a larger group does.
        if general is not None and not _matches_any(general, covered) and not _match_any(rules, names):
            rules.append(general)
        else:
            singles = [_make_rule([pairing]) for pairing in group]
            rules += [rule for rule in singles if rule is not None]
        covered += names
    return rules


def _matches_any(rule: Rule, names: Iterable[str]) -> bool:
    return any(rule.match(name) is not None for name in names)


def _match_any(rules: Iterable[Rule], names: Sequence[str]) -> bool:
    return any(_matches_any(rule, names) for rule in rules)


def _make_rule(group: Sequence[Pairing]) -> Rule | None:
    """Return one rule for all tensors of a group; None if their numbers follow no template."""
    first = group[0]
    columns = _list_columns([split_numbers(pairing.stored)[1] for pairing in group])
    letters = dict(zip(columns, _LETTERS, strict=False))
    if len(letters) < len(columns):
        return None
    parts = []
    positions = [0] if first.layout.stacked else range(len(first.parts))
    for position in positions:
        part = _make_part(group, position, columns, letters)
        if part is None:
            return None
        parts.append(part)
    pattern, numbers = split_numbers(first.stored)
    return Rule(
        _fill(pattern, numbers, {place: letters[place] for place in columns}),
        tuple(parts),
        sizes=first.layout.sizes,
        groups=first.layout.groups,
        transpose=first.layout.transpose,
        rotary=bool(first.layout.head_dim),
    )


def _list_columns(rows: Sequence[Numbers]) -> dict[int, tuple[int, ...]]:
    """Return the numbers of all layers at each place where they differ."""
    columns = {}
    for place, column in enumerate(zip(*rows, strict=True)):
        if len(set(column)) > 1:
            columns[place] = column
    return columns


def _make_part(
    group: Sequence[Pairing], position: int, columns: dict[int, tuple[int, ...]], letters: dict[int, str]
) -> str | None:
    """Return the template of a part; None if its numbers do not follow from those of the layers."""
    first = group[0]
    pattern, numbers = split_numbers(first.parts[position])
    places: dict[int, str] = {}
    if first.layout.stacked:
        index_place = _find_index_place(group)
        if index_place is None:
            return None
        places[index_place] = _INDEX
    part_columns = _list_columns([split_numbers(pairing.parts[position])[1] for pairing in group])
    for part_place, column in part_columns.items():
        equal = [place for place, numbers_of_layers in columns.items() if numbers_of_layers == column]
        if not equal or letters[equal[0]] in places.values():
            return None
        places[part_place] = letters[equal[0]]
    return _fill(pattern, numbers, places)


def _find_index_place(group: Sequence[Pairing]) -> int | None:
    """Return the place of the index in the names of the parts of stacks; None if it does not count from 0."""
    for place in range(len(split_numbers(group[0].parts[0])[1])):
        counts = True
        for pairing in group:
            indices = [split_numbers(part)[1][place] for part in pairing.parts]
            # All other numbers of the parts of one stack are equal.
            names = {join_numbers(*_without(part, place)) for part in pairing.parts}
            counts = counts and indices == list(range(len(indices))) and len(names) == 1
        if counts:
            return place
    return None


def _without(part: str, place: int) -> tuple[Sequence[str], Sequence[int | str]]:
    """Return the pattern and the numbers of a name, without the number at a place."""
    pattern, numbers = split_numbers(part)
    return pattern, [*numbers[:place], "", *numbers[place + 1 :]]


def _fill(pattern: Sequence[str], numbers: Numbers, letters: dict[int, str]) -> str:
    """Return the template of a name. letters: the placeholders of some of its numbers."""
    texts: list[str] = []
    for place, number in enumerate(numbers):
        texts.append(f"{{{letters[place]}}}" if place in letters else str(number))
    return join_numbers([escape(text) for text in pattern], texts)
