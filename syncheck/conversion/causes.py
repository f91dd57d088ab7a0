"""Find how the differing tensors of B follow from A: the evidence of the findings SYN301 to SYN313.

Each relation is a view of A, or of another model, whose bytes equal those of B, if necessary after one conversion to
the dtype of B. Wrong candidates cost little: a few elements of each are read first, and reading stops at the first
difference. Only `scaled` and `unrelated` are numerical.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert
from syncheck.conversion.merges import Replaced, find_adapted, fit_factor, unit_roundoff, view_base
from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.quantized import Quantized, fit_scales, has_scales, measure_rounding
from syncheck.conversion.recognition import HEAD_SIZES, get_computed, is_readable, read_pairs
from syncheck.conversion.rows import MOST_ROWS, describe_order, digest_rows, find_order, may_have_rows
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.records import Evidence
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements of the first, quick comparison: so many positions, with so many elements each.
_PROBES, _PROBE = 8, 16
# Possible dtypes of a model in between, the most precise dtype first.
_CASTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_EXPERT = re.compile(r"(.*\bexperts?\.(?:local_experts\.)?)(\d+)(\..*)")
# Fewer elements than this do not show a factor or the absence of a correlation.
_LEAST = 64
# Absolute correlations below this, or below `_SIGMAS` standard deviations of the correlation of independent numbers,
# show unrelated tensors. Fine-tuned, averaged and pruned models are far above: docs/conversion-trials.md.
_CORRELATION, _SIGMAS = 0.05, 4.0
# Elements that a correlation is computed from, unless a factor fits all of them.
_CORRELATED = 1 << 22
# Largest difference of a quantized value, relative to half a step and the rounding of its scale.
_BOUND = 1.001
# Fewer elements than this can be equal by chance.
_FEW = 16
# Limit of the parts of a tensor whose orders are tried.
_MOST_ORDERED = 5
# Limit of the compared boxes of a tensor.
_MOST_BOXES = 1 << 12


@dataclass(slots=True)
class Models:
    """The tensors of two models by name.

    stored: for each side, the stored tensor of each tensor after a map. map, variables: of the names. base: the tensors
    of the model before the update.
    """

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    files: Files
    stored: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = field(default_factory=lambda: ({}, {}))
    map: NameMap | None = None
    variables: Mapping[str, int] = field(default_factory=dict)
    base: Mapping[str, Tensor] = field(default_factory=dict)
    _probes: dict[tuple[str, tuple[int, ...]], dict[bytes, list[str]]] = field(default_factory=dict)

    def equals(self, view: Tensor, b: Tensor) -> dict[str, Any] | None:
        """Return the parameters of an additional conversion if a view has the bytes of a tensor of B, else None."""
        if view.shape != b.shape or not has_elements(view):
            return None
        converted = view.dtype != b.dtype
        if converted:
            if not (is_readable(view) and is_readable(b)):
                return None
            view = convert(view, (b.dtype,), self.files)
        if self.probe(view) != self.probe(b) or len(cluster_replicas([view, b], self.files)) > 1:
            return None
        return {"dtype": b.dtype} if converted else {}

    def probe(self, tensor: Tensor) -> bytes:
        """Return some elements from all parts of a tensor."""
        count = min(_PROBE, tensor.numel)
        starts = sorted({(tensor.numel - count) * i // (_PROBES - 1) for i in range(_PROBES)})
        return b"".join(bytes(self.files.read(tensor, start, count, 0)) for start in starts)

    def find_elsewhere(self, name: str) -> tuple[str, dict[str, Any]] | None:
        """Return the other tensor of A with the bytes of a tensor of B, if one exists and is not constant."""
        b = self.b[name]
        key = b.dtype, b.shape
        if key not in self._probes:
            self._probes[key] = defaultdict(list)
            for other, tensor in self.a.items():
                same = tensor.shape == b.shape and has_elements(tensor)
                if same and (tensor.dtype == b.dtype or (is_readable(tensor) and is_readable(b))):
                    view = tensor if tensor.dtype == b.dtype else convert(tensor, (b.dtype,), self.files)
                    self._probes[key][self.probe(view)].append(other)
        probe = self.probe(b)
        if b.numel < _FEW or _is_constant(probe, b):
            return None
        for other in self._probes[key].get(probe, ()):
            if other != name and (extra := self.equals(self.a[other], b)) is not None:
                return other, extra
        return None


def _is_constant(data: bytes, tensor: Tensor) -> bool:
    size = DTYPES[tensor.dtype].size
    return data == data[:size] * (len(data) // size)


def add_relations(diffs: Sequence[TensorDiff], models: Models) -> tuple[TensorDiff, ...]:
    """Return the diffs with the relations found between their tensors."""
    names = [diff.name for diff in diffs if diff.out_of_sync]
    left = [n for n in names if all(n in own and has_elements(own[n]) for own in (models.a, models.b))]
    found: dict[str, Relation] = {}
    for relate in (_relate_operation, _relate_stored, _relate_elsewhere, _relate_boxes, _relate_rows, _relate_numbers):
        for name in left:
            if name not in found:
                found |= relate(name, models)
    return tuple(_with_relation(diff, found[diff.name]) if diff.name in found else diff for diff in diffs)


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
    if len(longer) == 1 and a.numel and b.numel:
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
    found = models.find_elsewhere(name)
    if found is None:
        return {}
    other, extra = found
    expert, others = _EXPERT.fullmatch(name), _EXPERT.fullmatch(other)
    if expert and others and (expert[1], expert[3]) == (others[1], others[3]):
        kind = RelationKind.EXPERT
    elif name.rpartition(".")[0].rpartition(".")[0] == other.rpartition(".")[0].rpartition(".")[0]:
        kind = RelationKind.FUSED_ORDER  # tensors of one module, like gate_proj and up_proj
        extra = {**extra, "pattern": "other-part"}
    else:
        kind = RelationKind.SHARD
    return {name: Relation(kind, {**extra, "other": other})}


def _relate_boxes(name: str, models: Models) -> dict[str, Relation]:
    """Find the shards of B among the boxes of A, and of the other parts of A's stored tensor.

    Uneven shards, like shards of a padded vocabulary, are compared as far as the smallest of them.
    """
    for side, (one, other) in enumerate(((models.b, models.a), (models.a, models.b))):
        stored = models.stored[1 - side]
        whole = stored.get(name)
        names = [name, *(n for n in one if n != name and whole is not None and stored.get(n) is whole and n in other)]
        boxes = [(n, box) for n in names for box in views.list_boxes(one[n])]
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


def _relate_rows(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of experts or rows."""
    a, b = models.a[name], models.b[name]
    if a.shape[1:] != b.shape[1:] or not a.shape or not a.numel or not b.numel:
        return {}
    if a.dtype != b.dtype:
        if not (is_readable(a) and is_readable(b)):
            return {}
        a = convert(a, (b.dtype,), models.files)
    levels = [len(a.shape) - 1] if a.shape == b.shape and len(a.shape) > 1 else []
    for level in dict.fromkeys([1, *levels]):
        rows = [math.prod(tensor.shape[:level]) for tensor in (a, b)]
        if max(rows) > MOST_ROWS or min(rows) < 2:
            continue
        if not may_have_rows(a, b, rows[1], models.files):
            continue
        digests = [digest_rows(tensor, models.files, n) for tensor, n in zip((a, b), rows, strict=True)]
        experts = level == 1 and len(a.shape) > 2 and "expert" in name
        if experts and set(digests[1]) <= set(digests[0]):
            held = tuple(digests[0].index(digest) for digest in digests[1])
            return {name: Relation(RelationKind.EXPERT, {"experts": held, "of": rows[0]})}
        # Masks and other tensors with few different rows have an equal number of them by chance.
        distinct = a.numel >= _FEW and 2 * len(set(digests[0])) > rows[0]
        order = find_order(*digests) if a.shape == b.shape and distinct else None
        if order is not None:
            return {name: Relation(RelationKind.FUSED_ORDER, describe_order(order))}
    return {}


def _relate_numbers(name: str, models: Models) -> dict[str, Relation]:
    """Compute a constant factor from all elements, or the correlation."""
    a, b = models.a[name], models.b[name]
    multiple = fit_factor(a, b, models.files)
    if multiple is not None:
        return {name: Relation(RelationKind.ADAPTER, {"factor": multiple})}
    if a.shape == b.shape and (quantized := _relate_quantized(name, models)):
        return {name: quantized}
    if a.shape != b.shape or a.numel < _LEAST or not (is_readable(a) and is_readable(b)):
        return {}
    return _relate_scaled(name, a, b, models.files)


def _relate_scaled(name: str, a: Tensor, b: Tensor, files: Files) -> dict[str, Relation]:
    """Find a constant factor between two tensors, or the absence of a correlation."""
    import numpy as np

    step = max(unit_roundoff(tensor.dtype) for tensor in (a, b))
    sums, factor, fits, nonzero, count = np.zeros(5), 0.0, True, 0, 0
    for x, y in read_pairs(a, b, files):
        with np.errstate(all="ignore"):
            sums += (x.sum(), y.sum(), x @ x, y @ y, x @ y)
        if not np.isfinite(sums).all():
            return {}  # NaN and infinity have no factor and no correlation
        if not factor and x.any():
            top = int(np.argmax(np.abs(x)))
            factor = float(y[top] / x[top])
        count, nonzero = count + x.size, nonzero + int(np.count_nonzero(x))
        fits = fits and bool((np.abs(y - factor * x) <= 4 * step * np.abs(y)).all())
        if not fits and count >= _CORRELATED:
            break
    with np.errstate(all="ignore"):
        means = sums[:2] / count
        deviations = np.sqrt(np.maximum(sums[2:4] / count - means**2, 0))
        correlation = float((sums[4] / count - means[0] * means[1]) / (deviations[0] * deviations[1]))
    constant = deviations < 1e-7 * np.sqrt(np.maximum(sums[2:4] / count, 1e-300))
    if fits and factor and abs(factor - 1) > 16 * step and nonzero >= _LEAST and not constant[0]:
        return {name: Relation(RelationKind.SCALED, {"factor": factor})}
    if constant[1] and not constant[0]:
        return {name: Relation(RelationKind.UNRELATED, {"value": float(means[1])})}
    if abs(correlation) < max(_CORRELATION, _SIGMAS / math.sqrt(count)):
        return {name: Relation(RelationKind.UNRELATED, {"correlation": correlation})}
    return {}


def _relate_quantized(name: str, models: Models) -> Relation | None:
    """Compare quantized values with the original values, within half a step of plausible scales."""
    for tensors, others in ((models.b, models.a), (models.a, models.b)):
        own, other = tensors[name], others[name]
        if not is_readable(other) or isinstance(other.data, Quantized):
            continue
        quantized = get_computed(own, Quantized)
        if quantized is None and not has_scales(name, tensors):
            quantized = fit_scales(own, other, models.files)
        if quantized is None:
            continue
        rounding = measure_rounding(quantized, other, models.files)
        if rounding.plausible and rounding.largest <= _BOUND:
            return Relation(RelationKind.QUANTIZED, {"scheme": quantized.scheme, "steps": rounding.largest / 2})
    return None
