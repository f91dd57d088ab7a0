"""Find plain tensors that tensor parallelism replicates, by name.

A file does not record whether a plain tensor is a shard or a replica, and to compare shards as replicas would be a
false alarm. Only names used by Megatron, transformers and torchtitan for replicated tensors are accepted: norms over
the hidden size, routers, biases that row-parallel layers add after their reduction, and step counters of the
optimizer. Norms of queries and keys and norms within a layer (state-space mixers, experts, attention, MLP) are
excluded because some models shard them, and biases of column-parallel layers because they are sharded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Names of the tensor-parallel mesh dimension. `mp` is excluded: it may be the pipeline's dimension.
TENSOR_PARALLEL = frozenset({"tp", "tensor", "tensor_parallel"})

_PLACE = "input|post|pre|final|self|cross|attn|attention|mlp|ffn|feed_?forward|word|embeddings?|embed|layer|rms"
_NORM = re.compile(
    rf"(?:(?:{_PLACE})_?)*(?:layer_?norm|rms_?norm|norm)(?:_?(?:f|final|\d))?|ln(?:_?(?:\d|f|final|attn|mlp))?|norm\d"
)
_NORM_LEAVES = frozenset({"weight", "bias"})
# TransformerEngine stores a norm in the linear layer after it.
_FUSED = frozenset({"layer_norm_weight", "layer_norm_bias"})
_ROUTER_LEAVES = frozenset({"weight", "bias", "expert_bias", "e_score_correction_bias"})
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "linear_proj", "linear_fc2", "dense_4h_to_h"})
_ATTENTION = frozenset({"self_attention", "attention", "inter_attention"})
# Name segments of modules whose layers may be sharded in another way.
_DIVIDED = re.compile(r"expert|mixer|mamba|ssm|rwkv|retention|linear_attn|delta_net|lora|adapter")
# Modules whose norms are over an inner dimension.
_INNER = re.compile(r".*(?:attn|attention|mlp|ffn|feed_?forward)")


def find_replicated(names: Iterable[str]) -> frozenset[str]:
    """Return the names of model and optimizer tensors that tensor parallelism replicates."""
    names = tuple(names)
    with_experts = {name[: name.index(".experts.")] for name in names if ".experts." in name}
    return frozenset(name for name in names if _is_step(name) or _is_replicated(_parameter_name(name), with_experts))


def _is_step(name: str) -> bool:
    """Whether a tensor counts the steps of a parameter; each shard of the parameter has the same count."""
    return name.startswith("optimizer.") and name.endswith(".step")


def _parameter_name(name: str) -> str:
    if not name.startswith("optimizer."):
        return name
    return name.removeprefix("optimizer.").rpartition(".")[0]


def _is_replicated(name: str, with_experts: Iterable[str]) -> bool:
    *above, leaf = name.lower().split(".")
    if not above:
        return False
    *higher, module = above
    if any(_DIVIDED.search(part) for part in above):
        return False
    if leaf in _FUSED:
        return True
    if leaf in _NORM_LEAVES and _NORM.fullmatch(module):
        return not (higher and _INNER.fullmatch(higher[-1]))
    if leaf in _ROUTER_LEAVES and "router" in above[-2:]:
        return True
    if leaf in _ROUTER_LEAVES and module == "gate" and name.rpartition(".gate.")[0] in with_experts:
        return True
    if leaf != "bias":
        return False
    return module in _ROW_PARALLEL or (module == "dense" and bool(higher) and higher[-1] in _ATTENTION)
