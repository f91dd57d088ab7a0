"""Split a stored tensor in other ways than its rule: transposed, with its parts in another order, in other groups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.recognition import HEAD_SIZES
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncheck.conversion.model_pairs import Models
    from syncheck.conversion.name_maps import Rule
    from syncheck.snapshots import Tensor

# Limit of the parts of a tensor whose orders are tried.
_MOST_ORDERED = 5


class Alternative(NamedTuple):
    """Another rule for a stored tensor."""

    rule: Rule
    """The rule."""
    variables: Mapping[str, int]
    """The numbers of heads and their size."""
    relation: Relation
    """The relation of the parts, if the tensors of the other model are equal."""


class _Source(NamedTuple):
    """A stored tensor, and the rule that splits it."""

    side: str
    """A or B: the model that stores the tensor."""
    stored: Tensor
    """The stored tensor."""
    rule: Rule
    """The rule of the map for its name."""
    values: Mapping[str, str]
    """The values of the placeholders of the rule."""


def relate_stored(name: str, models: Models) -> dict[str, Relation]:
    """Find another rule for the stored tensor of a part, which gives the tensors of the other model."""
    for side, tensors in zip("AB", (models.a, models.b), strict=True):
        source = _find_source(name, side, models)
        # Without a rule with parts, the tensor is stored as it is compared.
        if source is None or not source.rule.parts:
            continue
        targets = _list_other_parts(source, tensors, models)
        for alternative in _list_alternatives(source, models.variables):
            parts = split_tensor(
                alternative.rule,
                values=source.values,
                tensor=source.stored,
                variables=alternative.variables,
            )
            if _equal_targets(parts or {}, targets, source, models):
                return dict.fromkeys(targets, alternative.relation)
    return {}


def _find_source(name: str, side: str, models: Models) -> _Source | None:
    """Return the stored tensor of a part in one model, and its rule; None without a rule."""
    stored = models.stored["AB".index(side)].get(name)
    if stored is None or models.map is None:
        return None
    match = models.map.find_rule(stored.name)
    if match is None:
        return None
    rule, values = match
    return _Source(side, stored, rule, values)


def _list_other_parts(source: _Source, tensors: Mapping[str, Tensor], models: Models) -> dict[str, Tensor]:
    """Return the tensors of the other model that have the names of the parts of a stored tensor.

    tensors: of the model with the stored tensor.
    """
    partner = models.b if source.side == "A" else models.a
    sources = models.stored["AB".index(source.side)]
    names = [name for name in tensors if sources.get(name) is source.stored]
    return {name: partner[name] for name in names if name in partner}


def _equal_targets(parts: Mapping[str, Tensor], targets: Mapping[str, Tensor], source: _Source, models: Models) -> bool:
    """Whether all parts that the other model has are equal, at least one part."""
    shared_names = [name for name in targets if name in parts]
    for name in shared_names:
        pair = (parts[name], targets[name])
        view, target = pair if source.side == "A" else pair[::-1]
        if models.equals(view, target) is None:
            return False
    return bool(shared_names)


def _list_alternatives(source: _Source, variables: Mapping[str, int]) -> Iterator[Alternative]:
    """Yield other rules for a stored tensor."""
    rule = source.rule
    exchanged = Relation(RelationKind.TRANSPOSED, {"dims": (0, 1)})
    yield Alternative(replace(rule, transpose=not rule.transpose), variables, exchanged)
    if rule.rotary:
        yield from _list_head_sizes(source, variables)
    # The number of orders grows fast.
    if 1 < len(rule.parts) <= _MOST_ORDERED:
        yield from _list_part_orders(source, variables)


def _list_head_sizes(source: _Source, variables: Mapping[str, int]) -> Iterator[Alternative]:
    """Yield the rule for rows that were permuted with another number of heads."""
    order = "interleaved" if source.side == "B" else "half"
    for size in HEAD_SIZES:
        relation = Relation(RelationKind.ROTARY, {"head_dim": size, "to": order})
        yield Alternative(source.rule, {**variables, "head_dim": size}, relation)


def _list_part_orders(source: _Source, variables: Mapping[str, int]) -> Iterator[Alternative]:
    """Yield the rules with the parts in another order, or in other groups, as far as the variables are known."""
    for reordered in _list_orders(source.rule):
        if not reordered.variables <= variables.keys():
            continue
        groups = reordered.groups
        parameters: dict[str, Any] = {
            "pattern": "parts",
            "parts": _name_modules(reordered),
            "expected": _name_modules(source.rule),
            "regrouped": groups != source.rule.groups,
            # Groups of single rows have no number.
            "groups": groups if isinstance(groups, int) else variables.get(groups, 0),
            "side": source.side,
            "stored": source.stored.name,
        }
        yield Alternative(reordered, variables, Relation(RelationKind.FUSED_ORDER, parameters))


def _list_orders(rule: Rule) -> Iterator[Rule]:
    """Yield the rule with its parts in each order, and in each number of groups."""
    shares = zip(rule.parts, rule.shares, strict=True)
    for order in itertools.permutations(shares):
        parts, sizes = zip(*order, strict=True)
        for groups in dict.fromkeys([rule.groups, 1, "rows", "kv_heads", "heads"]):
            yield replace(
                rule,
                parts=parts,
                sizes=sizes,
                groups=groups,
            )


def _name_modules(rule: Rule) -> str:
    """Return the names of the modules of the parts: 'q_proj, k_proj' for parts like 'layers.{i}.q_proj.weight'."""
    modules = [part.rpartition(".")[0] for part in rule.parts]
    return ", ".join(module.rpartition(".")[2] for module in modules)
