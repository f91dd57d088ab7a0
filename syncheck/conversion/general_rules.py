"""Write the rules of a map: one rule with placeholders for all layers, as far as their names follow one template."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import Rule
from syncheck.conversion.numbering import join_texts, split_texts, unmark
from syncheck.conversion.templates import escape, parse_template

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.conversion.pairings import Pairing
    from syncheck.conversion.templates import Template

    # The numbers of several names at one position, as they are written.
    Column = tuple[str, ...]
    Pattern = tuple[str, ...]

# The placeholders for the numbers of layers, and for the index in a stack.
_PLACEHOLDERS, _INDEX = ("{i}", "{j}", "{k}", "{l}", "{m}", "{n}"), "{e}"
# A placeholder, which is 0 here, that is a whole part of a name.
_BETWEEN_DOTS = re.compile(r"(?<![^.])\0(?![^.])")


def make_rules(pairings: Iterable[Pairing], models: Sequence[Iterable[str]]) -> list[Rule]:
    """Return the rules for the pairings, rules without placeholders first: the first rule of a name counts.

    models: the names of the tensors of A and of B that may be paired.
    """
    families: dict[tuple[int, Pattern], _Family] = defaultdict(_Family)
    paired_parts: set[str] = set()
    for pairing in pairings:
        pattern, _ = split_texts(pairing.stored)
        families[pairing.side, pattern].add(pairing)
        paired_parts.update(map(unmark, pairing.parts))
    names_by_pattern = [_group_by_pattern(names) for names in models]

    rules: list[Rule] = []
    for (side, pattern), family in families.items():
        names = names_by_pattern[side][pattern]
        rules += family.make_rules(names, paired_parts)
    return sorted(rules, key=_sort_key)


def _group_by_pattern(names: Iterable[str]) -> dict[Pattern, list[str]]:
    """Return the names that differ only in their numbers, by the text around the numbers."""
    groups: dict[Pattern, list[str]] = defaultdict(list)
    for name in names:
        pattern, _ = split_texts(name)
        groups[pattern].append(name)
    return groups


def _sort_key(rule: Rule) -> tuple[bool, int, str]:
    template = parse_template(rule.name)
    return bool(template.placeholders), _rank_literals(template), rule.name


def _rank_literals(template: Template) -> int:
    """Return a negative number for a template with a placeholder inside of a part: the longest literals come first.

    `h{i}_w` matches `h0_attn_w` too, which is for `h{i}_attn_w`. A placeholder between dots matches no longer name.
    """
    # Without its whole parts that are placeholders, the template keeps those inside of a part.
    edges = _BETWEEN_DOTS.sub("", "\0".join(template.literals))
    return -len(edges) if "\0" in edges else 0


class _Family:
    """The pairings of tensors whose names differ only in numbers."""

    def __init__(self) -> None:
        # The pairings that may have one rule, by the patterns and the layout of their parts.
        self._groups: dict[object, list[Pairing]] = defaultdict(list)
        self._paired_names: set[str] = set()

    def add(self, pairing: Pairing) -> None:
        """Add a pairing."""
        self._groups[pairing.part_patterns, pairing.layout].append(pairing)
        self._paired_names.add(pairing.stored)

    def make_rules(self, names: Iterable[str], paired_parts: AbstractSet[str]) -> list[Rule]:
        """Return one rule for each group, or for each of its pairings if their names follow no template.

        names: of all tensors of the family, with and without a pairing.
        paired_parts: the names of the parts of all families.
        """
        unpaired_names = [name for name in names if name not in self._paired_names]
        rules: list[Rule] = []
        larger_groups: list[Pairing] = []
        for group in sorted(self._groups.values(), key=len, reverse=True):
            rule = _make_common_rule(group, larger_groups, rules)
            if rule is None or _takes_parts(rule, unpaired_names, paired_parts):
                rules += _make_single_rules(group)
            else:
                rules.append(rule)
            larger_groups += group
        return rules


def _make_common_rule(group: Sequence[Pairing], larger_groups: Sequence[Pairing], rules: Iterable[Rule]) -> Rule | None:
    """Return one rule for a group; None if it would change what the rules of larger groups do."""
    rule = _make_rule(group)
    if rule is None or _match_any(rules, group):
        return None
    return None if _match_any([rule], larger_groups) else rule


def _takes_parts(rule: Rule, unpaired_names: Iterable[str], paired_parts: AbstractSet[str]) -> bool:
    """Whether a rule gives a tensor without a pairing a part that another tensor has."""
    for name in unpaired_names:
        values = rule.match(unmark(name))
        if values is not None and not paired_parts.isdisjoint(_fill_parts(rule, values)):
            return True
    return False


def _fill_parts(rule: Rule, values: Mapping[str, str]) -> list[str]:
    """Return the names of the parts of a tensor by a rule; none for a stack, whose parts have numbers of their own."""
    return [template.fill(values) for template in rule.part_templates if values.keys() >= set(template.placeholders)]


def _match_any(rules: Iterable[Rule], pairings: Sequence[Pairing]) -> bool:
    """Whether a rule matches the name of a stored tensor."""
    for rule in rules:
        for pairing in pairings:
            if rule.match(unmark(pairing.stored)) is not None:
                return True
    return False


def _make_single_rules(group: Iterable[Pairing]) -> list[Rule]:
    """Return a rule for each pairing of a group."""
    rules = [_make_rule([pairing]) for pairing in group]
    # A stack whose parts do not count from 0 has no rule.
    return [rule for rule in rules if rule is not None]


def _make_rule(group: Sequence[Pairing]) -> Rule | None:
    """Return one rule for all tensors of a group; None if their numbers follow no template."""
    rows = [(pairing.stored, *pairing.parts) for pairing in group]
    stored_names, *part_names = zip(*rows, strict=True)
    columns = _list_columns(stored_names)
    if len(columns) > len(_PLACEHOLDERS):
        return None
    by_position = dict(zip(columns, _PLACEHOLDERS, strict=False))
    by_column: dict[Column, str] = {}
    for position, column in columns.items():
        # Parts do not show which one of two equal numbers they have: it is the first.
        by_column.setdefault(column, by_position[position])

    if group[0].layout.stacked:
        parts = _make_stack_parts(group, part_names[0], by_column)
    else:
        parts = _make_parts(part_names, by_column)
    if parts is None:
        return None
    layout = group[0].layout
    return Rule(
        _make_template(stored_names[0], by_position),
        parts=tuple(parts),
        sizes=layout.sizes,
        groups=layout.groups,
        transpose=layout.transpose,
        rotary=layout.head_dim > 0,
    )


def _list_columns(names: Iterable[str]) -> dict[int, Column]:
    """Return the numbers of all names at each position where they differ."""
    rows = [split_texts(name)[1] for name in names]
    columns = enumerate(zip(*rows, strict=True))
    return {position: column for position, column in columns if len(set(column)) > 1}


def _make_parts(part_names: Iterable[Sequence[str]], by_column: Mapping[Column, str]) -> list[str] | None:
    """Return the templates of the parts; None if their numbers do not follow from the numbers of the layers.

    part_names: the names of each part in all layers.
    by_column: the placeholder for the numbers of all layers at a position.
    """
    templates = []
    for names in part_names:
        placeholders = _find_placeholders(names, by_column)
        if placeholders is None:
            return None
        templates.append(_make_template(names[0], placeholders))
    return templates


def _make_stack_parts(
    group: Sequence[Pairing], names: Sequence[str], by_column: Mapping[Column, str]
) -> list[str] | None:
    """Return the template of all parts of stacks; None if their numbers do not follow, or do not count from 0.

    names: of the first part of each stack.
    by_column: see `_make_parts`.
    """
    placeholders = _find_placeholders(names, by_column)
    _, texts = split_texts(names[0])
    index_positions = list(range(len(texts)))
    for pairing in group:
        index_positions = [position for position in index_positions if _counts_parts(pairing.parts, position)]
    if placeholders is None or not index_positions:
        return None
    placeholders[index_positions[0]] = _INDEX
    return [_make_template(names[0], placeholders)]


def _find_placeholders(names: Iterable[str], by_column: Mapping[Column, str]) -> dict[int, str] | None:
    """Return the placeholder at each position where the names of a part differ; None if there is no placeholder."""
    placeholders: dict[int, str] = {}
    for position, column in _list_columns(names).items():
        placeholder = by_column.get(column)
        # A template contains each placeholder once.
        if placeholder is None or placeholder in placeholders.values():
            return None
        placeholders[position] = placeholder
    return placeholders


def _counts_parts(parts: tuple[str, ...], position: int) -> bool:
    """Whether the names of the parts of a stack differ only in the number at a position, which counts from 0."""
    pattern, texts = split_texts(parts[0])
    counted = []
    for index in range(len(parts)):
        indexed = [*texts[:position], str(index), *texts[position + 1 :]]
        counted.append(join_texts(pattern, indexed))
    return parts == tuple(counted)


def _make_template(name: str, placeholders: Mapping[int, str]) -> str:
    """Return the template of a name. placeholders: for the numbers at some positions."""
    pattern, texts = split_texts(escape(name))
    texts = tuple(placeholders.get(position, text) for position, text in enumerate(texts))
    return unmark(join_texts(pattern, texts))
