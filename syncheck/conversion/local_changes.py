"""Find differences in few elements of a tensor, which are no property of the whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert
from syncheck.conversion.merges import unit_roundoff
from syncheck.findings import Relation, RelationKind
from syncheck.snapshots import unravel_index
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Largest share of the elements. Conversions and updates change nearly all elements of a tensor.
_SHARE = 0.1


def list_local(diffs: Sequence[TensorDiff]) -> frozenset[str]:
    """Return the names of tensors with few different elements: a single element, or a small share."""
    names = set()
    for diff in diffs:
        # Without a reason, the values differ; the number of different elements may be unknown.
        if diff.status != "different" or diff.reason is not None:
            continue
        most = max(1, _SHARE * diff.numel)
        if diff.mismatched and diff.mismatched <= most and diff.numel > 1:
            names.add(diff.name)
    return frozenset(names)


def relate_local(name: str, models: Models) -> dict[str, Relation]:
    """Find the single element of B that a conversion of A to another dtype does not explain."""
    a, b = models.a[name], models.b[name]
    if a.dtype == b.dtype:
        return {}
    # The more precise tensor is converted.
    if unit_roundoff(a.dtype) > unit_roundoff(b.dtype):
        pair = a, convert(b, (a.dtype,), models.files)
    else:
        pair = convert(a, (b.dtype,), models.files), b
    change = _find_single_change(pair, models.files)
    if change is None:
        return {}
    position, bits = change
    index = unravel_index(position, a.shape)
    return {name: Relation(RelationKind.LOCAL, {"index": index, "bits": bits, "dtype": pair[0].dtype})}


def _find_single_change(pair: tuple[Tensor, Tensor], files: Files) -> tuple[int, int] | None:
    """Return the position of the only different element of two tensors, and its number of different bits."""
    import numpy as np

    size = DTYPES[pair[0].dtype].size
    change: tuple[int, int] | None = None
    for start, count in ranges(pair):
        words: list[Any] = []
        for slot, tensor in enumerate(pair):
            words.append(np.frombuffer(bytes(files.read(tensor, start, count, slot)), f"u{size}"))
        different = np.nonzero(words[0] != words[1])[0]
        if not different.size:
            continue
        if change is not None or different.size > 1:
            return None
        position = int(different[0])
        bits = int(words[0][position] ^ words[1][position]).bit_count()
        change = start + position, bits
    return change
