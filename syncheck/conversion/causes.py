"""Find how the differing tensors of B follow from A: the evidence of the findings SYN301 to SYN317.

Most relations are a view of A, or of another model, whose bytes equal those of B, if necessary after one conversion to
the dtype of B. Wrong candidates cost little: a few elements of each are read first, and reading stops at the first
difference. Numerical relations come last: they need nearly all elements to differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert
from syncheck.conversion.correlations import relate_unrelated
from syncheck.conversion.factors import relate_blocks, relate_constants
from syncheck.conversion.fused_parts import are_parts_of_one
from syncheck.conversion.local_changes import list_local, relate_local
from syncheck.conversion.merges import Replaced, find_adapted, fit_factor, view_base
from syncheck.conversion.missing_scales import relate_fitted, relate_unscaled
from syncheck.conversion.model_pairs import FEW, Models
from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.quantized import Quantized, fit_scales, has_scales, measure_rounding
from syncheck.conversion.recognition import HEAD_SIZES, get_computed, is_readable
from syncheck.conversion.rounding_grids import relate_grid
from syncheck.conversion.row_relations import relate_columns, relate_copies, relate_rows
from syncheck.conversion.rows import digest_rows
from syncheck.conversion.ties import list_partners, relate_tied, relate_untied
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.layout.copies import find_shared_tensors
from syncheck.records import Evidence
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.name_maps import Rule
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Possible dtypes of a model in between, the most precise dtype first.
_CASTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_EXPERT = re.compile(r"(.*\bexperts?\.(?:local_experts\.)?)(\d+)(\..*)")
# Fewer different values than this in a rounded tensor may be its initial values.
_FEWEST_VALUES = 3
# Largest difference of a quantized value, relative to half a step and the rounding of its scale.
_BOUND = 1.001
# Limit of the parts of a tensor whose orders are tried.
_MOST_ORDERED = 5
# Limit of the compared boxes of a tensor.
_MOST_BOXES = 1 << 12


def add_relations(diffs: Sequence[TensorDiff], models: Models) -> tuple[TensorDiff, ...]:
    """Return the diffs with the relations found between their tensors."""
    differing = [diff for diff in diffs if diff.out_of_sync]
    models.kinds = {diff.name: diff.kind for diff in differing}
    models.local = list_local(differing)
    models.partners = list_partners(models)
    names = [name for name in models.kinds if _is_comparable(name, models)]
    relations: dict[str, Relation] = {}
    for relate in _PROOFS:
        for name in names:
            if name not in relations:
                relations |= relate(name, models)
    relations = _drop_chance_casts(relations, models)
    for relate in _FITS:
        for name in names:
            # A few wrong elements are no property of the whole tensor, and training changes the state of an optimizer.
            if name not in relations and name not in models.local and models.kinds[name] not in OPTIMIZER:
                relations |= relate(name, models)
    return tuple(_with_relation(diff, relations[diff.name]) if diff.name in relations else diff for diff in diffs)


def _drop_chance_casts(relations: Mapping[str, Relation], models: Models) -> dict[str, Relation]:
    """Return the relations without roundings by chance, unless another tensor shows the same rounding.

    A step counter of 19 is 20 in an 8-bit dtype, a rounded bias of 4 elements is no evidence either, and a norm near 1
    is 1 in a dtype with few bits.
    """
    shown: set[object] = set()
    small: dict[str, object] = {}
    for name, relation in relations.items():
        if relation.kind is not RelationKind.CAST or models.a[name].dtype != models.b[name].dtype:
            continue
        rounding = relation.parameters["side"], relation.parameters["dtype"]
        copy = (models.a if relation.parameters["side"] == "A" else models.b)[name]
        if copy.numel < FEW or models.count_values(copy) < _FEWEST_VALUES:
            small[name] = rounding
        else:
            shown.add(rounding)
    return {name: relation for name, relation in relations.items() if name not in small or small[name] in shown}


def _is_comparable(name: str, models: Models) -> bool:
    """Whether both models have the elements of a tensor."""
    return all(name in tensors and has_elements(tensors[name]) for tensors in (models.a, models.b))


def _with_relation(diff: TensorDiff, relation: Relation) -> TensorDiff:
    facts = tuple(_with_relation(fact, relation) for fact in diff.facts)
    return replace(diff, evidence=replace(diff.evidence or Evidence(), relation=relation), facts=facts)


def _relate_operation(name: str, models: Models) -> dict[str, Relation]:
    """Compare B with single operations on the tensor of the same name."""
    for kind, parameters, view, target in _list_operations(name, models):
        if (extra := models.equals(view, target)) is not None:
            return {name: Relation(kind, {**extra, **parameters})}
    return {}


def _list_operations(name: str, models: Models) -> Iterator[tuple[RelationKind, dict[str, Any], Tensor, Tensor]]:
    """Yield common operations of conversions: kind, parameters, and two tensors to compare after the operation."""
    a, b = models.a[name], models.b[name]
    adapted = find_adapted(a)
    base = None if adapted is None else view_base(a, adapted)
    # Before the model before the update, which explains less.
    if base is not None:
        parameters = {"pattern": "replaced"} if isinstance(adapted, Replaced) else {}
        yield RelationKind.ADAPTER, parameters, base, b
    if name in models.base:
        yield RelationKind.BASE, {}, models.base[name], b
    same = a.shape == b.shape
    if same and is_readable(a) and is_readable(b):
        for side, source, copy in (("B", a, b), ("A", b, a)):
            if source.dtype != copy.dtype:
                yield RelationKind.CAST, {"side": side}, source, copy
            for dtype in _CASTS:
                if DTYPES[dtype].size < DTYPES[source.dtype].size and dtype != copy.dtype:
                    rounded = convert(source, (dtype, copy.dtype), models.files)
                    yield RelationKind.CAST, {"side": side, "dtype": dtype}, rounded, copy
    dims = [*range(len(a.shape))]
    for i, j in itertools.combinations(dims, 2):
        order = [{i: j, j: i}.get(dim, dim) for dim in dims]
        if a.shape[i] > 1 and a.shape[j] > 1 and tuple(a.shape[dim] for dim in order) == b.shape:
            yield RelationKind.TRANSPOSED, {"dims": (i, j)}, views.permute(a, order), b
    for head in (
        dict.fromkeys([models.variables.get("head_dim", 0), *HEAD_SIZES]) if same and len(dims) in (1, 2) else ()
    ):
        if head > 2 and head % 2 == 0 and a.shape[0] % head == 0:
            for to, sizes in (("interleaved", (2, head // 2)), ("half", (head // 2, 2))):
                part = views.unflatten(a, 0, (a.shape[0] // head, *sizes))
                part = views.permute(part, (0, 2, 1, *range(3, len(part.shape))))
                view = views.flatten(views.flatten(part, 0), 0)
                yield RelationKind.ROTARY, {"head_dim": head, "to": to}, view, b
    longer = [dim for dim in dims if len(b.shape) == len(dims) and a.shape[dim] != b.shape[dim]]
    # The values of a sparse tensor have any length.
    if len(longer) == 1 and a.numel and b.numel and not models.is_part(name):
        (dim,) = longer
        least = min(a.shape[dim], b.shape[dim])
        cut_a, cut_b = (t if t.shape[dim] == least else views.narrow(t, dim, 0, least) for t in (a, b))
        yield RelationKind.PADDED, {"dim": dim, "added": b.shape[dim] - a.shape[dim]}, cut_a, cut_b


def _relate_stored(name: str, models: Models) -> dict[str, Relation]:
    """Divide a stored tensor in other ways: transposed, with other orders of its parts, in other numbers of groups."""
    for side, (own, other) in enumerate(((models.a, models.b), (models.b, models.a))):
        stored = models.stored[side].get(name)
        found = models.map.find_rule(stored.name) if stored is not None and models.map is not None else None
        if stored is None or found is None or not found[0].parts:
            continue
        rule, values = found
        wanted = {n: other[n] for n in own if models.stored[side].get(n) is stored and n in other}
        for tried, variables, relation in _list_rules(rule, models.variables, "AB"[side], stored.name):
            split = split_tensor(tried, values, stored, variables) or {}
            pairs = [(split[n], tensor) for n, tensor in wanted.items() if n in split]
            if pairs and all(models.equals(*(pair if side == 0 else pair[::-1])) is not None for pair in pairs):
                return dict.fromkeys(wanted, relation)
    return {}


def _list_rules(
    rule: Rule, variables: Mapping[str, int], side: str, stored: str
) -> Iterator[tuple[Rule, Mapping[str, int], Relation]]:
    """Yield other rules and variables for a stored tensor, and the relation that each of them shows.

    side, stored: of the tensor.
    """
    yield (
        replace(rule, transpose=not rule.transpose),
        variables,
        Relation(RelationKind.TRANSPOSED, {"dims": (0, 1)}),
    )
    for size in HEAD_SIZES if rule.rotary else ():
        # Rows that were permuted with another number of heads.
        other = "interleaved" if side == "B" else "half"
        yield rule, {**variables, "head_dim": size}, Relation(RelationKind.ROTARY, {"head_dim": size, "to": other})
    sizes = rule.sizes or (1,) * len(rule.parts)
    for order in itertools.permutations(range(len(rule.parts))) if 1 < len(rule.parts) <= _MOST_ORDERED else ():
        for groups in dict.fromkeys([rule.groups, 1, "rows", "kv_heads", "heads"]):
            parts = tuple(rule.parts[i] for i in order)
            tried = replace(rule, parts=parts, sizes=tuple(sizes[i] for i in order), groups=groups)
            if tried.variables <= variables.keys():
                count = groups if isinstance(groups, int) else variables.get(groups, 0)
                named = ", ".join(part.rpartition(".")[0].rpartition(".")[2] for part in parts)
                parameters: dict[str, Any] = {"pattern": "parts", "parts": named, "groups": count}
                relation = Relation(RelationKind.FUSED_ORDER, {**parameters, "side": side, "stored": stored})
                yield tried, variables, relation


def _relate_elsewhere(name: str, models: Models) -> dict[str, Relation]:
    """Find the tensor of A that B holds under another name."""
    # A tensor with one wrong element may have had the values of another tensor, like a tied weight.
    found = None if name in models.local else models.find_elsewhere(name)
    if found is None:
        return {} if name in models.local else _relate_transposed_elsewhere(name, models)
    other, extra = found
    expert, others = _EXPERT.fullmatch(name), _EXPERT.fullmatch(other)
    if expert and others and (expert[1], expert[3]) == (others[1], others[3]):
        kind = RelationKind.EXPERT
    elif are_parts_of_one(name, other, models.stored[0]) or are_parts_of_one(name, other, models.stored[1]):
        kind = RelationKind.FUSED_ORDER
        extra = {**extra, "pattern": "other-part"}
    else:
        kind = RelationKind.SHARD
    return {name: Relation(kind, {**extra, "other": other})}


def _relate_transposed_elsewhere(name: str, models: Models) -> dict[str, Relation]:
    """Find the matrix of A that B holds transposed under another name."""
    if len(models.b[name].shape) != 2 or min(models.b[name].shape) < 2:
        return {}
    match = models.find_elsewhere(name, transposed=True)
    if match is None:
        return {}
    other, extra = match
    return {name: Relation(RelationKind.SHARD, {**extra, "other": other, "dims": (0, 1)})}


def _relate_boxes(name: str, models: Models) -> dict[str, Relation]:
    """Find the shards of B among the boxes of A, and of the other parts of A's stored tensor.

    Uneven shards, like shards of a padded vocabulary, are compared as far as the smallest of them.
    """
    for side, (one, other) in enumerate(((models.b, models.a), (models.a, models.b))):
        stored = models.stored[1 - side]
        whole = stored.get(name)
        fused = [n for n in one if n != name and whole is not None and stored.get(n) is whole and n in other]
        # A tied weight is the same part under a second name.
        names = [name, *(n for n in fused if not find_shared_tensors((one[name], one[n])))]
        boxes = [(n, box) for n in names for box in views.list_shards(one[n])]
        if one[name].dtype != other[name].dtype or not 1 < len(boxes) <= _MOST_BOXES:
            continue
        if any(one[n].shape != other[n].shape for n in names):
            continue
        if len({len(box.start) for _, box in boxes}) > 1:
            continue
        least = [min(sizes) for sizes in zip(*(box.tensor.shape for _, box in boxes), strict=True)]
        held = {(n, box.start): _digest_region(other[n], box.start, least, models.files) for n, box in boxes}
        parts = {digest: n for (n, _), digest in reversed(held.items())}  # equal boxes: the first part
        zeros = (0,) * len(least)
        found = [(b, _digest_region(b.tensor, zeros, least, models.files)) for n, b in boxes if n == name]
        wrong = [(box, digest) for box, digest in found if digest != held[name, box.start]]
        if wrong and all(digest in parts for _, digest in wrong):
            files = ", ".join(sorted({box.tensor.path for box, _ in wrong}))
            own = all(parts[digest] == name for _, digest in wrong)
            kind = RelationKind.SHARD if own else RelationKind.FUSED_ORDER
            numbers: dict[str, Any] = {"pattern": "boxes", "boxes": len(wrong), "of": len(found)}
            return {name: Relation(kind, {**numbers, "files": files, "side": "BA"[side]})}
    return {}


def _digest_region(tensor: Tensor, start: Sequence[int], shape: Sequence[int], files: Files) -> bytes:
    for dim, (first, size) in enumerate(zip(start, shape, strict=True)):
        tensor = views.narrow(tensor, dim, first, size)
    return digest_rows(tensor, files, 1)[0]


def _relate_merge(name: str, models: Models) -> dict[str, Relation]:
    """Find another multiple of the product of an adapter."""
    factor = fit_factor(models.a[name], models.b[name], models.files)
    return {} if factor is None else {name: Relation(RelationKind.ADAPTER, {"factor": factor})}


def _relate_quantized(name: str, models: Models) -> dict[str, Relation]:
    """Compare quantized values with the original values, within half a step of plausible scales."""
    for tensors, others in ((models.b, models.a), (models.a, models.b)):
        own, other = tensors[name], others[name]
        if own.shape != other.shape or not is_readable(other) or isinstance(other.data, Quantized):
            continue
        quantized = get_computed(own, Quantized)
        if quantized is None and not has_scales(name, tensors):
            quantized = fit_scales(own, other, models.files)
        if quantized is None:
            continue
        rounding = measure_rounding(quantized, other, models.files)
        if rounding.plausible and rounding.largest <= _BOUND:
            steps = rounding.largest / 2
            return {name: Relation(RelationKind.QUANTIZED, {"scheme": quantized.scheme, "steps": steps})}
    return {}


_Relate = Callable[[str, Models], dict[str, Relation]]
# In the order of precedence: relations that the bytes prove, and relations that fit the numbers.
_PROOFS: tuple[_Relate, ...] = (
    relate_copies,
    _relate_operation,
    relate_local,
    _relate_stored,
    relate_unscaled,
    relate_tied,
    _relate_elsewhere,
    _relate_boxes,
    relate_rows,
    relate_columns,
)
_FITS: tuple[_Relate, ...] = (
    _relate_merge,
    _relate_quantized,
    relate_grid,
    relate_fitted,
    relate_constants,
    relate_blocks,
    relate_untied,
    relate_unrelated,
)
