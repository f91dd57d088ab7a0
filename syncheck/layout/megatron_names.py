"""Names of tensors and values in Megatron-Core: placements, numbers of layers and experts, and values of the run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

_Content = TypeVar("_Content")

_COLUMN = re.compile(
    r"(?:.*\.)?(?:word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_fc1)\.(?:weight|bias)"
)
_GATED = re.compile(r".*\.linear_fc1\.(?:weight|bias)")
_ROW = re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight")
_COPIED = re.compile(r"(?:.*\.)?(?:position_embeddings\.weight|(?:q|k)_layernorm\.(?:weight|bias)|linear_fc2\.bias)")
_PLACEMENTS = ((_COLUMN, "S(0)"), (_ROW, "S(1)"), (_COPIED, "R"))
_CHUNK = re.compile(r"model(\d+)\.(.+)")
LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..*)")
# The names of experts that are modules of their own, and of experts in one grouped layer.
_EXPERTS = (
    re.compile(r"(?P<start>.*\.mlp\.experts\.)local_experts\.(?P<number>\d+)\.(?P<end>.*)"),
    re.compile(r"(?P<start>.*\.mlp\.experts\.)(?P<end>linear_fc[12]\.\w+?)(?P<number>\d+)"),
)
# Names in files that contain the norm in the linear layer after it, and in files that do not.
_FUSED = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
# Values, and bytes in tensors, about the run, its layout and the casts of a layer, and not about the model.
_LAYOUT = re.compile(
    r"(?:args|rng_state|content_metadata|rerun_state_machine)(?:\.|$)|(?:.*\.)?_extra_state(?:[./].*)?$"
)


def split_chunk(name: str) -> tuple[int, str]:
    """Return the number of the virtual pipeline stage within the rank, and the name without it."""
    match = _CHUNK.fullmatch(name)
    if match is None:
        return 0, name

    return int(match[1]), match[2]


class Expert(NamedTuple):
    """The name of a tensor of an expert: the text before and after its number."""

    start: str
    number: int
    end: str

    @classmethod
    def find(cls, name: str) -> Expert | None:
        """Return the parts of a name; None if it is of no expert."""
        for pattern in _EXPERTS:
            match = pattern.fullmatch(name)
            if match is not None:
                return cls(match["start"], int(match["number"]), match["end"])

        return None


def find_placement(name: str, *, gated: bool, replicated: bool) -> str | None:
    """Return the placement along tensor parallelism, in torch's notation; None if the name does not show it."""
    # Gate and up, one after the other.
    if gated and _GATED.fullmatch(name):
        return "_S(0, 2)"

    for pattern, placement in _PLACEMENTS:
        if pattern.fullmatch(name):
            return placement

    return "R" if replicated else None


def unfuse(name: str) -> str:
    """Return the name of a norm of its own for a norm that is stored in the linear layer after it."""
    for fused, plain in _FUSED:
        name = name.replace(fused, plain)

    return name


def select_of_model(content: Mapping[str, _Content]) -> dict[str, _Content]:
    """Return tensors or values without the description of the run, its layout and its casts."""
    return {name: item for name, item in content.items() if not _LAYOUT.match(name)}
