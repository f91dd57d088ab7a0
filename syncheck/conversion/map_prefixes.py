"""Apply a map to models whose names lack the prefix of its names, as files of a model without its head do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import Rule
from syncheck.conversion.templates import parse_template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap
    from syncheck.snapshots import Tensor


def drop_prefix(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> NameMap:
    """Return the map without its prefix if no model has it, and a model has shortened names of the map."""
    model_a, model_b = models
    joined = {**model_a, **model_b}
    # Beside a model with the prefix, `add_prefix` renames the other model.
    if not _lacks_prefix(names, joined):
        return names
    rules = [_drop_from_rule(rule, names.prefix) for rule in names.rules]
    tied = [(first.removeprefix(names.prefix), second.removeprefix(names.prefix)) for first, second in names.tied]
    return replace(
        names,
        rules=tuple(rules),
        tied=tuple(tied),
        prefix="",
    )


def add_prefix(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """Return the models. If a single model has the prefix of a map, the names of the other model get the prefix."""
    completed: list[Mapping[str, Tensor]] = []
    for model, partner in (models, models[::-1]):
        if _lacks_prefix(names, model) and _has_prefix(names, partner):
            model = _rename(names, model, partner)
        completed.append(model)
    return completed


def _has_prefix(names: NameMap, model: Mapping[str, Tensor]) -> bool:
    """Whether a name of a model begins with the prefix of a map. All names begin with an empty prefix."""
    return any(name.startswith(names.prefix) for name in model)


def _lacks_prefix(names: NameMap, model: Mapping[str, Tensor]) -> bool:
    """Whether a model has names of the map without its prefix, and none with it."""
    if _has_prefix(names, model):
        return False
    known = _list_known(names)
    starts = tuple(parse_template(rule.name).literals[0] for rule in known.rules)
    # Most models of other libraries have no candidate, and matching all names takes seconds.
    candidates = [name for name in model if (names.prefix + name).startswith(starts)]
    # The rule of another library may have the same names without the prefix.
    with_rule = {match.name for match in names.match_names(candidates)}
    return any(known.find_rule(names.prefix + name) is not None for name in candidates if name not in with_rule)


def _list_known(names: NameMap) -> NameMap:
    """Return a map with one rule for each name and each part of the rules of a map."""
    known: dict[str, None] = {}
    for rule in names.rules:
        known |= dict.fromkeys((rule.name, *rule.parts))
    return replace(names, rules=tuple(map(Rule, known)))


def _rename(names: NameMap, model: Mapping[str, Tensor], partner: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model with the prefix in front of the names of the base model. partner: the other model."""
    known = _list_known(names)
    new_names = {}
    for name in model.keys() - partner.keys():
        longer = names.prefix + name
        # The output layer is outside of the model that has the prefix.
        if longer in partner or known.find_rule(longer) is not None:
            new_names[name] = longer
    return {new_names.get(name, name): tensor for name, tensor in model.items()}


def _drop_from_rule(rule: Rule, prefix: str) -> Rule:
    """Return a rule for names without a prefix."""
    parts = [part.removeprefix(prefix) for part in rule.parts]
    return replace(
        rule,
        name=rule.name.removeprefix(prefix),
        parts=tuple(parts),
        beside=rule.beside.removeprefix(prefix),
    )
