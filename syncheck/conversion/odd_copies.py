"""Compare copies of a tensor that differ within one model with the other model, which may equal some of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.other_positions import cut_box
from syncheck.conversion.sides import LABELS
from syncheck.layout.alignment import align
from syncheck.layout.dtensors import find_shards, is_sharded
from syncheck.messages import Note
from syncheck.snapshots import Shard
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.records import Group, TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Limit of the tensors that are compared once more: all copies of a tensor differ for one reason.
_MOST_TENSORS = 64


def add_other_model(sides: Sequence[Side], copies: Sequence[Group | None], files: Files) -> list[Group | None]:
    """Return the groups of copies, with notes on which of the differing copies equal the other model.

    sides: A and B after a map. copies: the results by side; None for a side in one file. Objects in memory are not read
    again, because other ranks may hold their bytes.
    """
    described = [*copies]
    for label, group in find_differing_copies(copies).items():
        index = LABELS.index(label)
        side, other = sides[index], sides[1 - index]
        notes = _describe_copies(side, other, group, files)
        described[index] = replace(group, notes=(*group.notes, *notes))
    return described


def find_differing_copies(copies: Sequence[Group | None]) -> dict[str, Group]:
    """Return the groups of copies that differ from each other, by the label of the model."""
    differing = {}
    for label, group in zip(LABELS, copies, strict=True):
        if group is not None and group.verdict == "out_of_sync":
            differing[label] = group
    return differing


def _describe_copies(side: Side, other: Side, group: Group, files: Files) -> Iterator[Message]:
    """Yield which ranks of a side hold the values of the other model, and which of them hold other values."""
    snapshots = dict(side.group.ranks)
    # An adapter beside the copies is no copy.
    tensors_by_name = align({rank: snapshots[rank] for rank in group.ranks}).tensors
    names_by_ranks: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for diff, partner in _list_partners(side, other, group):
        by_rank = tensors_by_name.get(diff.name, {})
        names_by_ranks[_split_ranks(diff, by_rank, partner, files)].append(diff.name)
    for sets_of_ranks, names in names_by_ranks.items():
        # If the other model equals no copy, the comparison of the models lists the difference.
        if all(sets_of_ranks):
            equal_ranks, other_ranks = sets_of_ranks
            yield Note.COPIES_AND_OTHER_MODEL(
                other=other.label,
                equal=equal_ranks,
                ranks=other_ranks,
                names=names,
            )


def _list_partners(side: Side, other: Side, group: Group) -> Iterator[tuple[TensorDiff, Tensor]]:
    """Yield the differing tensors of a side with the tensor of the other model, which may have another name."""
    partners: dict[str, Tensor] = {}
    for name in side.model.tensors.keys() & other.model.tensors.keys():
        stored = side.stored.get(name, side.model.tensors[name])
        partners[stored.name] = other.model.tensors[name]
    # Without a reason, the values differ.
    differing = [diff for diff in group.tensors if (diff.status, diff.reason) == ("different", None)]
    for diff in differing[:_MOST_TENSORS]:
        if diff.name in partners:
            yield diff, partners[diff.name]


def _split_ranks(
    diff: TensorDiff, by_rank: Mapping[int, Tensor], partner: Tensor, files: Files
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks whose copies equal the tensor of the other model, and the ranks with other values."""
    ranks_by_answer: dict[bool | None, list[int]] = defaultdict(list)
    for ranks in diff.clusters:
        # The copies of a cluster are equal.
        tensor = by_rank[ranks[0]]
        answer = _equals(ranks[0], tensor, partner, files) if _is_comparable(tensor, partner) else None
        ranks_by_answer[answer] += ranks
    return tuple(sorted(ranks_by_answer[True])), tuple(sorted(ranks_by_answer[False]))


def _is_comparable(tensor: Tensor, partner: Tensor) -> bool:
    """Whether a copy, or a shard of a copy, has the type of the tensor of the other model, and both can be read."""
    conditions = (
        # A tensor that a map joins or divides has another shape.
        (tensor.dtype, tensor.full_shape) == (partner.dtype, partner.shape),
        has_elements(partner),
        # Fingerprints, and tensors whose bytes are not read, have digests alone.
        tensor.refused is None,
        tensor.digest is None,
        not tensor.same,
    )
    return all(conditions)


def _equals(rank: int, tensor: Tensor, partner: Tensor, files: Files) -> bool | None:
    """Whether all shards of a rank have the bytes of the other model; None if their positions are unknown."""
    shards = find_shards(rank, tensor) if is_sharded(tensor) else [Shard(tensor, (0,) * len(tensor.shape))]
    if not shards:
        return None
    return all(_equals_box(shard, partner, files) for shard in shards)


def _equals_box(shard: Shard, partner: Tensor, files: Files) -> bool:
    """Whether a shard has the bytes of its box of a whole tensor."""
    box = cut_box(partner, shard.start, shard.tensor.shape)
    return len(cluster_replicas([shard.tensor, box], files)) == 1
