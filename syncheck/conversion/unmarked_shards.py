"""Recognize shards of tensor parallelism in files without a recorded position, by sizes and contents.

Files such as `rank0.safetensors` or `consolidated.00.pth` look like replicas: their tensors have equal names and equal
shapes. Ranks with other initial weights look alike, too, so all of the following must be true:

- Neither the user, nor the files, nor their names state the position of a rank in a mesh.
- Sizes: the output projection of each attention has 1/N of the inputs that a configuration beside the files states.
  Without a configuration, it has 1/N of the hidden size, and norms of the hidden size are equal on all ranks.
- Contents: the weights of divided layers differ in nearly all elements, in unrelated directions, and
  between the same sets of ranks, at most N. All other tensors are equal, or differ in the same way.

A file is no proof of a shard, so the verdict is undecided. Without a configuration, shards whose norms differ are
compared as replicas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.comparison.replicas import compare_group
from syncheck.conversion.name_maps import find_variables
from syncheck.diagnose.measures import is_at_least, is_share_below, median_cosine, most_common
from syncheck.frozen import record
from syncheck.layout.distinct_shards import is_always_divided, is_attention_output
from syncheck.layout.replica_groups import mesh_of
from syncheck.layout.replicated_names import find_replicated, get_parameter
from syncheck.messages import Grouping, Undecided
from syncheck.records import Reason
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.comparison.selection import Selection
    from syncheck.layout.groups import CheckpointGroup
    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Tensor

    _Sets = frozenset[tuple[int, ...]]

_KINDS = ("parameter", "optimizer")
# Share of elements. Different shards differ nearly everywhere, except for chance in narrow dtypes.
_NEARLY_ALL = 0.9
# Cosine between ranks. Different shards have unrelated directions; replicas with a drift do not.
_UNRELATED = 0.5


@record
class _Sizes:
    """The sizes of the output projections of the attention in the file of a rank."""

    shards: int
    """Into how many shards they are divided; 1 for whole layers, 0 if the sizes do not show it."""
    hidden_size: int
    is_stated: bool
    """Whether a configuration states the size of the whole layer."""


def compare_unmarked_shards(
    comparison: Comparison, replicas: CheckpointGroup, selection: Selection
) -> tuple[Comparison, CheckpointGroup]:
    """Return the comparison of the ranks as shards if their files look like shards, and the ranks with positions.

    comparison: of the ranks as replicas.
    replicas: the ranks.
    Raises CheckpointError if a file can no longer be read.
    """
    if _is_position_stated(replicas):
        return comparison, replicas

    _, first = replicas.ranks[0]
    tensors = normalize_keys(first.tensors)
    sizes = _measure(tensors, replicas)
    sets = _find_sets(comparison, tensors, sizes)
    if not 1 < len(sets) <= sizes.shards:
        return comparison, replicas

    placed_replicas = _place_ranks(replicas, sets)
    compared = compare_group(placed_replicas, selection)
    doubt = Undecided.UNMARKED_SHARDS(shards=sizes.shards)
    evidence = replace(compared.evidence, doubt=doubt)
    return replace(compared, evidence=evidence), placed_replicas


def _is_position_stated(replicas: CheckpointGroup) -> bool:
    """Whether the user groups the files, or a file states the position of a rank."""
    codes = [message.code for message in replicas.grouping]
    return Grouping.EXPRESSION in codes or any(mesh_of(snapshot) for _, snapshot in replicas.ranks)


def _place_ranks(replicas: CheckpointGroup, sets: _Sets) -> CheckpointGroup:
    """Return ranks with their coordinate along tensor parallelism. sets: the ranks of each coordinate."""
    coordinates = _number_sets(sorted(sets))
    placed_ranks = []
    for rank, snapshot in replicas.ranks:
        mesh = {"tp": coordinates[rank]}
        placed_ranks.append((rank, replace(snapshot, mesh=mesh)))

    return replace(replicas, ranks=tuple(placed_ranks))


def _number_sets(sets: Collection[Sequence[int]]) -> dict[int, int]:
    """Return the number of its set for each rank."""
    numbers: dict[int, int] = {}
    for number, ranks in enumerate(sets):
        numbers |= dict.fromkeys(ranks, number)

    return numbers


def _measure(tensors: Mapping[str, Tensor], replicas: CheckpointGroup) -> _Sizes:
    """Return the sizes of the output projections of the attention. tensors: of a rank."""
    shapes: set[tuple[int, ...]] = set()
    for name, tensor in tensors.items():
        if is_attention_output(name):
            shapes.add(tuple(tensor.full_shape))

    unknown = _Sizes(
        shards=0,
        hidden_size=0,
        is_stated=False,
    )
    shape = shapes.pop() if shapes else ()
    # Models with layers of several sizes are not recognized.
    if shapes or len(shape) != 2:
        return unknown

    hidden_size, inputs = shape
    paths = [snapshot.path for _, snapshot in replicas.ranks]
    variables = find_variables(paths, {})
    is_stated = variables.keys() >= {"heads", "head_dim"}
    # The attention of most models is as wide as the model.
    width = hidden_size
    if is_stated:
        width = variables["heads"] * variables["head_dim"]

    shards, remainder = divmod(width, max(1, inputs))
    if remainder:
        return unknown

    return _Sizes(
        shards,
        hidden_size,
        is_stated,
    )


def _find_sets(comparison: Comparison, tensors: Mapping[str, Tensor], sizes: _Sizes) -> _Sets:
    """Return the sets of ranks with equal weights; empty if the tensors differ in another way than shards do.

    tensors: of a rank.
    """
    diffs = {diff.name: diff for diff in comparison.tensors}
    # The attention of replicas may be narrower than the model, but then nothing keeps their norms equal.
    if not sizes.is_stated and not _has_equal_norms(diffs, tensors, sizes.hidden_size):
        return frozenset()

    names = _list_divided(comparison)
    # Equal weights are no shards. Equal moments of different weights show equal gradients of replicas.
    if not diffs.keys() >= set(names):
        return frozenset()

    # Shards of a vocabulary may have different sizes.
    divided = [diffs[name] for name in names if diffs[name].reason is not Reason.SHAPE]
    # Moments of one sign have a common direction.
    cosine = median_cosine(diff for diff in divided if diff.kind == "parameter")
    if not divided or is_at_least(cosine, _UNRELATED):
        return frozenset()

    # The copies of a shard may differ in some weights.
    sets = most_common(frozenset(diff.clusters) for diff in divided)
    for diff in diffs.values():
        conditions = (
            # RNG states and similar tensors were not compared.
            diff.out_of_sync,
            diff.reason is not Reason.SHAPE,
            not _differs_like_shards(diff, sets),
        )
        if all(conditions):
            return frozenset()

    return sets


def _list_divided(comparison: Comparison) -> list[str]:
    """Return the names of the weights of divided layers, and of their moments."""
    names: list[str] = []
    for name, kind in comparison.evidence.names.items():
        parameter = get_parameter(name)
        is_divided = (is_always_divided(parameter), is_attention_output(parameter))
        if any(is_divided) and kind in _KINDS:
            names.append(name)

    return names


def _has_equal_norms(diffs: Mapping[str, TensorDiff], tensors: Mapping[str, Tensor], hidden_size: int) -> bool:
    """Whether there are norms of the hidden size, and all norms are equal on all ranks."""
    replicated = find_replicated(tensors)
    if not replicated.isdisjoint(diffs):
        return False

    shapes = {tuple(tensors[name].full_shape) for name in replicated}
    return (hidden_size,) in shapes


def _differs_like_shards(diff: TensorDiff, sets: _Sets) -> bool:
    """Whether a tensor differs as shards do. sets: the ranks with equal weights."""
    # Ranks with a common head of grouped-query attention hold copies, and copies of a shard may differ.
    are_nested = _are_nested(sets, diff.clusters)
    # Biases have constant elements, and moments of an embedding have rows of zeros.
    is_matrix = diff.kind == "parameter" and len(diff.shape) > 1
    return are_nested and not (is_matrix and is_share_below([diff], _NEARLY_ALL))


def _are_nested(sets: Collection[Sequence[int]], other_sets: Collection[Sequence[int]]) -> bool:
    """Whether the ranks of each set are together in the second sets, or the other way round."""
    numbers, other_numbers = _number_sets(sets), _number_sets(other_sets)
    pairs = {(number, other_numbers.get(rank)) for rank, number in numbers.items()}
    return len(pairs) == max(len(sets), len(other_sets))
