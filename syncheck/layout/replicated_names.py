"""Names of tensors that all tensor-parallel ranks hold whole.

A file does not record whether a plain tensor is a shard or a replica in a tensor-parallel mesh, and to compare shards
as replicas would be a false alarm. Only names used by Megatron, transformers and torchtitan for replicated tensors are
accepted: norms over the hidden size and over a latent vector, routers, biases that row-parallel layers add after their
reduction, learned positions, and step counters of the optimizer. Norms of queries and keys and norms within a layer
(state-space mixers, experts, attention, MLP) are excluded because some models shard them, and biases of column-parallel
layers because they are sharded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_PLACE = "input|post|pre|final|self|cross|attn|attention|mlp|ffn|feed_?forward|word|embeddings?|embed|layer|rms"
_NORM = (
    rf"(?:(?:(?:{_PLACE})_?)*(?:layer_?norm|rms_?norm|norm)(?:_?(?:f|final|\d))?"
    r"|ln(?:_?(?:\d|f|final|attn|mlp))?|norm\d)"
)
# Not in modules whose norms are over an inner dimension.
_OUTSIDE_INNER = r"(?![^.]*(?:attn|attention|mlp|ffn|feed_?forward)\.)"
_ROUTER_LEAF = r"(?:weight|bias|expert_bias|e_score_correction_bias)"
# Parameters that all tensor-parallel ranks hold whole, by the last two modules and the leaf of the name.
_REPLICATED = "|".join(
    (
        # TransformerEngine stores a norm in the linear layer after it.
        r"[^.]*\.[^.]+\.layer_norm_(?:weight|bias)",
        rf"{_OUTSIDE_INNER}[^.]*\.{_NORM}\.(?:weight|bias)",
        rf"[^.]*\.router\.{_ROUTER_LEAF}",
        rf"router\.[^.]*\.{_ROUTER_LEAF}",
        r"[^.]*\.(?:o_proj|out_proj|down_proj|linear_proj|linear_fc2|fc2|dense_4h_to_h|c_proj)\.bias",
        r"(?:self_attention|attention|inter_attention|output)\.dense\.bias",
        # The latent vectors of DeepSeek's attention are computed on all ranks.
        r"[^.]*\.(?:q|kv)_a_(?:layer_?)?norm\.weight",
        r"[^.]*\.(?:wpe|embed_positions|position_embeddings)\.weight",
    )
)
# A gate is a router only beside experts, or in a module that is named after them.
_GATE = rf"[^.]*\.gate\.{_ROUTER_LEAF}"
_GATE_OF_EXPERTS = rf"(?:.*\.)?(?:(?:\w+_)?moe\.gate\.{_ROUTER_LEAF}|shared_experts?_gate\.weight)"
_STEP = r"(?s)optimizer(?:\..*)?\.step"
# Name segments of modules whose layers may be sharded in another way.
_DIVIDED = r"expert|mixer|mamba|ssm|rwkv|retention|linear_attn|delta_net|lora|adapter"


def find_replicated(names: Iterable[str]) -> frozenset[str]:
    """Return the names of model and optimizer tensors that tensor parallelism replicates."""
    names = tuple(names)
    with_experts: set[str] = set()
    for name in names:
        module, experts, _ = name.partition(".experts.")
        if experts:
            with_experts.add(module)

    replicated: set[str] = set()
    for name in names:
        parameter = get_parameter(name)
        if _is_step(name) or _is_replicated(parameter) or _is_router_gate(parameter, with_experts):
            replicated.add(name)

    return frozenset(replicated)


def _is_step(name: str) -> bool:
    """Whether a tensor counts the steps of a parameter; each shard of the parameter has the same count."""
    return re.fullmatch(_STEP, name) is not None


def get_parameter(name: str) -> str:
    """Return the parameter with an optimizer state; other names are unchanged."""
    if not name.startswith("optimizer."):
        return name

    return name.removeprefix("optimizer.").rpartition(".")[0]


def _get_ending(parameter: str) -> str:
    """Return the last two modules and the leaf of a name; empty if a module may be sharded in another way."""
    path, _, leaf = parameter.lower().rpartition(".")
    if re.search(_DIVIDED, path):
        return ""

    *_, parent, module = ("", *path.split("."))
    return f"{parent}.{module}.{leaf}"


def _is_replicated(parameter: str) -> bool:
    """Whether the name of a parameter shows that all tensor-parallel ranks hold it whole."""
    return re.fullmatch(_REPLICATED, _get_ending(parameter)) is not None


def _is_router_gate(parameter: str, with_experts: Collection[str]) -> bool:
    """Whether a parameter is of the router beside experts. with_experts: the modules with experts."""
    if re.fullmatch(_GATE_OF_EXPERTS, parameter.lower()):
        return True
    module = parameter.rpartition(".gate.")[0]
    return module in with_experts and re.fullmatch(_GATE, _get_ending(parameter)) is not None
