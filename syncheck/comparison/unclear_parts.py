"""Find plain tensors of which the files do not show whether ranks hold parts or copies, and whether they are equal.

Names of files and metadata place ranks in a mesh of model parallelism, but no file records that a plain tensor is a
part. A tensor with one name and one shape on several ranks may be either, unless its name shows that it is divided.
Ranks draw different parts, so equal bytes are evidence of copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.comparison.equal_shards import cluster_by_start
from syncheck.findings import UnclearParts
from syncheck.layout.distinct_shards import find_distinct_shards
from syncheck.tensors.clustering import cluster_replicas

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files


def find_unclear_parts(
    names: Iterable[str], tensors: Mapping[str, Mapping[int, Tensor]], alignment: Alignment, files: Files
) -> UnclearParts:
    """Return the tensors that may be parts or copies, equal and different.

    names: of the tensors that were not compared because they may be parts.
    tensors: by name and rank.
    Raises CheckpointError if a file can no longer be read.
    """
    equal: list[str] = []
    different: list[str] = []
    for name in names:
        replicas = tensors[name]
        if not _may_be_copies(name, replicas, alignment):
            continue
        if _are_equal([*replicas.values()], files):
            equal.append(name)
        else:
            different.append(name)

    return UnclearParts(tuple(equal), tuple(different))


def _may_be_copies(name: str, tensors: Mapping[int, Tensor], alignment: Alignment) -> bool:
    """Whether neither the name nor the shapes of a tensor show that its ranks hold parts. tensors: by rank."""
    layout = alignment.find_replica_groups(name, tensors)
    if layout.kind != "model parallel" or len(tensors) < 2:
        return False

    # Copies have one dtype and one shape, and can be read.
    first = tensors[min(tensors)]
    for tensor in tensors.values():
        if (tensor.dtype, tensor.shape, tensor.refused) != (first.dtype, first.shape, None):
            return False

    return not find_distinct_shards(name, tensors, alignment)


def _are_equal(replicas: Sequence[Tensor], files: Files) -> bool:
    """Whether all ranks hold equal bytes. Most parts differ in their checksums, or else in their first elements."""
    may_be_equal = len(cluster_by_start(replicas, files)) == 1
    return may_be_equal and len(cluster_replicas(replicas, files)) == 1
