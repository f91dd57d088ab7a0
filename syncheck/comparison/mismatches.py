"""Find tensors whose bytes cannot be compared: different shapes, dtypes or layouts, or refused by the reader."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.layout.dtensors import is_whole, layout_text
from syncheck.messages import SHARD_REFUSALS, Detail, Refusal
from syncheck.records import Reason, TensorDiff, largest_first, minority_of
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.layout.replica_groups import ReplicaGroups, Sets
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor


def make_bare_diff(name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff:
    """Return the diff of a tensor that is not compared yet. tensors: by rank; the first one counts."""
    first = next(iter(tensors.values()))
    return TensorDiff(
        name,
        kind,
        first.dtype,
        first.shape,
        "not_compared",
        numel=first.numel,
    )


def with_clusters(bare: TensorDiff, ranks: Iterable[int], sets: Sets, **changes: Any) -> TensorDiff:
    """Return the diff of one replica group. sets: ranks with equal values, largest first."""
    return replace(
        bare,
        replica_groups=(tuple(ranks),),
        clusters=sets,
        minority=minority_of(sets),
        **changes,
    )


def skip_tensor(name: str, kind: str, tensors: Mapping[int, Tensor], reason: Reason, detail: Message) -> TensorDiff:
    """Return the diff of a tensor that is not compared. reason: other than its shapes and dtypes."""
    bare = make_bare_diff(name, kind, tensors)
    return replace(bare, reason=reason, detail=detail)


def find_mismatch(bare: TensorDiff, tensors: Mapping[int, Tensor], replica_groups: ReplicaGroups) -> TensorDiff | None:
    """Return a diff if the values cannot be compared: different shapes, dtypes or layouts, or refused by the reader."""
    # The common case first. A loop takes half the time of any() with a generator.
    plain = (bare.shape, bare.dtype, None, None)
    for tensor in tensors.values():
        if (tensor.shape, tensor.dtype, tensor.refused, tensor.sharding) != plain:
            break
    else:
        return None

    # From the strongest to the weakest reason: shards of several layouts may have several shapes, too.
    searches = (
        _find_refused_shards,
        _find_refused_kinds,
        _find_shapes,
        _find_dtypes,
        _find_layouts,
    )
    for find in searches:
        diff = find(bare, tensors, replica_groups)
        if diff is not None:
            return diff

    refused = next(iter(tensors.values())).refused
    if not refused:
        return None

    reason = Reason.PARTS if refused.code is Refusal.IN_PARTS else Reason.REFUSED
    return replace(bare, reason=reason, detail=Detail.REFUSED(refusal=refused))


def _find_refused_shards(
    bare: TensorDiff, tensors: Mapping[int, Tensor], _replica_groups: ReplicaGroups
) -> TensorDiff | None:
    """Return a diff if some ranks hold shards that the reader refuses."""
    refusals: dict[int, Message] = {}
    for rank, tensor in tensors.items():
        refusal = tensor.refused
        if refusal is not None and refusal.code in SHARD_REFUSALS:
            refusals[rank] = refusal

    if not refusals:
        return None

    first = next(iter(refusals.values()))
    if len(refusals) < len(tensors):
        detail = Detail.REFUSED_ON_SOME(refusal=first, ranks=tuple(refusals))
        return replace(bare, reason=Reason.REFUSED, detail=detail)

    # Shards of one tensor may have different shapes.
    return replace(bare, reason=Reason.SHARDED, detail=Detail.REFUSED(refusal=first))


def _find_refused_kinds(
    bare: TensorDiff, tensors: Mapping[int, Tensor], _replica_groups: ReplicaGroups
) -> TensorDiff | None:
    """Return a diff if the reader refuses tensors for different reasons, or only on some ranks.

    For example, a sparse and a dense tensor, or a meta tensor and a tensor with values.
    """
    if not any(tensor.refused for tensor in tensors.values()):
        return None

    kinds: dict[int, str] = {}
    for rank, tensor in tensors.items():
        # As text, because fingerprints store the text of a refusal.
        kinds[rank] = str(tensor.refused) if tensor.refused else f"{tensor.dtype} with values"

    return find_unequal(bare, Reason.DTYPE, kinds, tensors)


def _find_shapes(bare: TensorDiff, tensors: Mapping[int, Tensor], replica_groups: ReplicaGroups) -> TensorDiff | None:
    """Return a diff if ranks hold tensors of different global shapes."""
    shapes: dict[int, tuple[int, ...]] = {}
    for rank, tensor in tensors.items():
        shape = tensor.full_shape
        # A scalar of an unknown dtype stands for a tensor of an unknown shape.
        if not shape and _has_unknown_dtype(tensor):
            return None

        shapes[rank] = shape

    # Uneven parts of plain tensors.
    is_divided = replica_groups.kind == "model parallel"
    if is_divided and _is_equal_within(shapes, replica_groups):
        return None

    return find_unequal(bare, Reason.SHAPE, shapes, tensors)


def _has_unknown_dtype(tensor: Tensor) -> bool:
    """Whether the reader refuses a tensor and does not know its dtype."""
    if tensor.refused is None:
        return False

    return tensor.dtype == "unknown"


def _is_equal_within(values: Mapping[int, Any], replica_groups: ReplicaGroups) -> bool:
    """Whether the values are equal within each replica group."""
    for ranks in replica_groups.sets:
        values_of_group = {values[rank] for rank in ranks}
        if len(values_of_group) > 1:
            return False

    return True


def _find_dtypes(bare: TensorDiff, tensors: Mapping[int, Tensor], _replica_groups: ReplicaGroups) -> TensorDiff | None:
    """Return a diff if ranks hold tensors of different dtypes."""
    if any(map(_has_unknown_dtype, tensors.values())):
        return None

    dtypes = {rank: tensor.dtype for rank, tensor in tensors.items()}
    return find_unequal(bare, Reason.DTYPE, dtypes, tensors)


def _find_layouts(bare: TensorDiff, tensors: Mapping[int, Tensor], _replica_groups: ReplicaGroups) -> TensorDiff | None:
    """Return a diff if ranks hold shards of different layouts, which are never replicas."""
    texts: dict[int, str] = {}
    layouts: dict[int, str] = {}
    for rank, tensor in tensors.items():
        sharding = tensor.sharding
        if sharding is None or is_whole(sharding):
            continue

        # Ranks share sharding objects.
        if id(sharding) not in texts:
            texts[id(sharding)] = layout_text(sharding)

        layouts[rank] = texts[id(sharding)]

    return find_unequal(bare, Reason.SHAPE, layouts, tensors)


def find_unequal(
    bare: TensorDiff, reason: Reason, values: Mapping[int, Any], tensors: Mapping[int, Tensor]
) -> TensorDiff | None:
    """Return a diff of values by rank: shapes, dtypes or layouts. None if all values are equal."""
    distinct_values = set(values.values())
    if len(distinct_values) < 2:
        return None

    # The values of most ranks come first, like the clusters of compared bytes.
    ranks_by_value = group_ranks(values)
    sets = largest_first(ranks_by_value.values())
    value_of_set = {tuple(ranks): value for value, ranks in ranks_by_value.items()}
    unequal = tuple((value_of_set[ranks], ranks) for ranks in sets)
    return with_clusters(
        bare,
        tensors,
        sets,
        reason=reason,
        detail=Detail.UNEQUAL(values=unequal),
    )
