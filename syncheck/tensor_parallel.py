"""Which plain tensors every tensor-parallel rank holds whole, by their names.

Nothing in a file tells a part from a copy, and a part that is taken for a copy is a wrong alarm. So only names are
taken that Megatron, transformers and torchtitan give to what is replicated over the tensor-parallel ranks: norms at
the width of the model, routers, and the biases that row-parallel layers add after their sum. Not taken are norms of
queries and keys, and those within a layer's own width (of a state-space mixer, of an expert, inside an attention or
an MLP), which some models divide, and biases of column-parallel layers, which are divided.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of a mesh of ranks, as the libraries and their examples call it. `mp` may be pipeline stages too.
TENSOR_PARALLEL = frozenset({"tp", "tensor", "tensor_parallel"})

_PLACE = "input|post|pre|final|self|cross|attn|attention|mlp|ffn|feed_?forward|word|embeddings?|embed|layer|rms"
_NORM = re.compile(
    rf"(?:(?:{_PLACE})_?)*(?:layer_?norm|rms_?norm|norm)(?:_?(?:f|final|\d))?|ln(?:_?(?:\d|f|final|attn|mlp))?|norm\d"
)
_NORM_LEAVES = frozenset({"weight", "bias"})
# TransformerEngine keeps a norm in the linear layer that follows it.
_FUSED = frozenset({"layer_norm_weight", "layer_norm_bias"})
_ROUTER_LEAVES = frozenset({"weight", "bias", "expert_bias", "e_score_correction_bias"})
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "linear_proj", "linear_fc2", "dense_4h_to_h"})
_ATTENTION = frozenset({"self_attention", "attention", "inter_attention"})
# Parts of names above a tensor whose own layers may be divided in other ways.
_DIVIDED = re.compile(r"expert|mixer|mamba|ssm|rwkv|retention|linear_attn|delta_net|lora|adapter")
# A norm right in one of these is of its inner width.
_INNER = re.compile(r".*(?:attn|attention|mlp|ffn|feed_?forward)")


def replicated(names: Iterable[str]) -> frozenset[str]:
    """Return those of a model's tensors, and of its optimizer's, that tensor parallelism does not divide."""
    names = tuple(names)
    with_experts = {name[: name.index(".experts.")] for name in names if ".experts." in name}
    return frozenset(name for name in names if _is_replicated(_parameter(name), with_experts))


def _parameter(name: str) -> str:
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
