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


def relate_stored(name: str, models: Models) -> dict[str, Relation]:
    """Find another rule for the stored tensor of a part, which gives the tensors of the other model."""
    if models.map is None:
        return {}
    for side, tensors in enumerate((models.a, models.b)):
        stored = models.stored[side].get(name)
        if stored is None:
            continue
        match = models.map.find_rule(stored.name)
        if match is None or not match[0].parts:
            continue
        rule, values = match
        targets = _list_other_parts(stored, side, tensors, models)
        for alternative in _list_alternatives(rule, models.variables, "AB"[side], stored.name):
            parts = split_tensor(alternative.rule, values, stored, alternative.variables)
            if parts is not None and _equal_targets(parts, targets, side, models):
                return dict.fromkeys(targets, alternative.relation)
    return {}


def _list_other_parts(stored: Tensor, side: int, tensors: Mapping[str, Tensor], models: Models) -> dict[str, Tensor]:
    """Return the tensors of the other model that have the names of the parts of a stored tensor.

    side: the position of the model with the stored tensor; tensors: of this model.
    """
    partner = (models.b, models.a)[side]
    targets = {}
    for name in tensors:
        if name in partner and models.stored[side].get(name) is stored:
            targets[name] = partner[name]
    return targets


def _equal_targets(parts: Mapping[str, Tensor], targets: Mapping[str, Tensor], side: int, models: Models) -> bool:
    """Whether all parts that the other model has are equal, at least one part."""
    shared_names = [name for name in targets if name in parts]
    for name in shared_names:
        pair = (parts[name], targets[name])
        view, target = pair if side == 0 else pair[::-1]
        if models.equals(view, target) is None:
            return False
    return bool(shared_names)


def _list_alternatives(rule: Rule, variables: Mapping[str, int], side: str, stored_name: str) -> Iterator[Alternative]:
    """Yield other rules for a stored tensor. side, stored_name: of the tensor."""
    exchanged = Relation(RelationKind.TRANSPOSED, {"dims": (0, 1)})
    yield Alternative(replace(rule, transpose=not rule.transpose), variables, exchanged)
    if rule.rotary:
        # Rows that were permuted with another number of heads.
        order = "interleaved" if side == "B" else "half"
        for size in HEAD_SIZES:
            relation = Relation(RelationKind.ROTARY, {"head_dim": size, "to": order})
            yield Alternative(rule, {**variables, "head_dim": size}, relation)
    if 1 < len(rule.parts) <= _MOST_ORDERED:
        for reordered in _list_orders(rule):
            if reordered.variables <= variables.keys():
                parameters: dict[str, Any] = {"pattern": "parts", "parts": _name_modules(reordered)}
                groups = reordered.groups
                parameters["groups"] = groups if isinstance(groups, int) else variables.get(groups, 0)
                parameters |= {"side": side, "stored": stored_name}
                yield Alternative(reordered, variables, Relation(RelationKind.FUSED_ORDER, parameters))


def _list_orders(rule: Rule) -> Iterator[Rule]:
    """Yield the rule with its parts in each order, and in each number of groups."""
    sizes = rule.sizes or (1,) * len(rule.parts)
    for order in itertools.permutations(range(len(rule.parts))):
        parts = tuple(rule.parts[position] for position in order)
        ordered_sizes = tuple(sizes[position] for position in order)
        for groups in dict.fromkeys([rule.groups, 1, "rows", "kv_heads", "heads"]):
            yield replace(rule, parts=parts, sizes=ordered_sizes, groups=groups)


def _name_modules(rule: Rule) -> str:
    """Return the names of the modules of the parts: 'q_proj, k_proj' for parts like 'layers.{i}.q_proj.weight'."""
    names = []
    for part in rule.parts:
        module = part.rpartition(".")[0]
        names.append(module.rpartition(".")[2])
    return ", ".join(names)
