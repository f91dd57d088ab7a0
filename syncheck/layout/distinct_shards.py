"""Find the shards of a tensor at different positions, whose bytes differ if they were drawn at random.

`replica_groups` determines which ranks must hold equal bytes. This module determines which ranks hold other parts of
the same tensor:

- DTensor: ranks at different coordinates in a mesh that divides the tensor. Partial sums have no position.
- Plain tensor in a mesh: a file does not record whether it is a part or a copy. Only the names of layers that tensor
  parallelism divides in Megatron, transformers and torchtitan are accepted, and experts along expert parallelism. Keys
  and values are excluded: ranks that share a head of grouped-query attention hold copies.

Shards of different shapes cannot be equal. Tensors of different pipeline stages are different tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.layout.dtensors import find_coordinate, is_sharded
from syncheck.layout.replica_groups import (
    DIFFERENT_PARAMETERS,
    PIPELINE,
    TENSOR_PARALLEL,
    exclude_dimensions,
    name_dimensions,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.layout.alignment import Alignment
    from syncheck.layout.replica_groups import Sets
    from syncheck.snapshots import Tensor

_EXPERT_PARALLEL = DIFFERENT_PARAMETERS - PIPELINE
# Weights that tensor parallelism divides in all libraries, by the last modules of their names.
_DIVIDED = (
    r"(?:.*\.)?(?:word_embeddings|output_layer|linear_qkv|linear_proj|linear_fc1|linear_fc2|query_key_value"
    r"|(?:self_)?attention\.dense|dense_h_to_4h|dense_4h_to_h|qkv_proj|q_proj|o_proj|gate_up_proj|gate_proj|up_proj"
    r"|down_proj|wq|wo|w1|w2|w3)\.weight"
)

# The last layer of an attention, whose inputs tensor parallelism divides.
_ATTENTION_OUTPUT = r"(?:.*\.)?(?:o_proj|wo|out_proj|linear_proj|(?:self_)?attention\.dense|attn\.proj)\.weight"


def find_distinct_shards(name: str, tensors: Mapping[int, Tensor], alignment: Alignment) -> list[Sets]:
    """Return the shards of a tensor that have the same shape and different positions; empty if it has no such shards.

    name: the common name of the tensor.
    tensors: by rank.

    The shards at all positions are one item, with the ranks that hold a copy of each shard.
    """
    dimensions = _find_dividing_dimensions(name)
    groups_by_tensor: dict[Hashable, list[tuple[int, ...]]] = defaultdict(list)
    for ranks in alignment.find_replica_groups(name, tensors).sets:
        first_rank = ranks[0]
        tensor = tensors[first_rank]
        identify = _identify_dtensor if is_sharded(tensor) else _identify_plain_tensor
        key = identify(
            first_rank,
            tensor,
            alignment,
            dimensions,
        )
        # Without a key, the files do not show which tensor a part belongs to.
        if key is not None:
            groups_by_tensor[key, tensor.dtype, tensor.shape].append(ranks)

    return [tuple(replica_groups) for replica_groups in groups_by_tensor.values() if len(replica_groups) > 1]


def is_attention_output(name: str) -> bool:
    """Whether a name is that of the weight of the last layer of an attention."""
    return re.fullmatch(_ATTENTION_OUTPUT, name) is not None


def is_always_divided(name: str) -> bool:
    """Whether tensor parallelism divides the weight of this name in all libraries."""
    return re.fullmatch(_DIVIDED, name) is not None


def _find_dividing_dimensions(name: str) -> frozenset[str]:
    """Return the mesh dimensions along which ranks hold other parts of a plain tensor, in lower case, by its name."""
    # Experts may be whole on all tensor-parallel ranks, so only expert parallelism counts.
    if ".experts." in f".{name}":
        return _EXPERT_PARALLEL

    return TENSOR_PARALLEL if is_always_divided(name) else frozenset()


def _identify_dtensor(rank: int, tensor: Tensor, alignment: Alignment, dimensions: frozenset[str]) -> Hashable | None:
    """Return a key that all shards of a DTensor have in common; None if the position of the shard is unknown.

    dimensions: along which ranks with other meshes hold other parts.
    """
    sharding = tensor.sharding
    assert sharding is not None
    has_position = find_coordinate(rank, sharding) is not None
    placements = "".join(sharding.placements)
    # Partial sums are whole tensors, and nobody drew them.
    if not has_position or "P" in placements:
        return None

    coordinates = alignment.positions.sharded.get(rank, ())
    own_dimensions = dimensions | name_dimensions(sharding)
    outer = exclude_dimensions(coordinates, own_dimensions)
    return sharding.mesh, sharding.names, placements, sharding.shape, outer


def _identify_plain_tensor(
    rank: int, _tensor: Tensor, alignment: Alignment, dimensions: frozenset[str]
) -> Hashable | None:
    """Return a key that all parts of a plain tensor have in common; None if it may be whole on all ranks.

    dimensions: along which ranks hold other parts.
    """
    coordinates = alignment.positions.plain.get(rank, ())
    outer = exclude_dimensions(coordinates, dimensions)
    # Without a coordinate along these dimensions, the rank holds the whole tensor.
    return None if len(outer) == len(coordinates) else outer
