"""Names of tensors and values in Megatron-Core: placements, numbers of layers and experts, and values of the run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLUMN = re.compile(
    r"(?:.*\.)?(?:word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_fc1)\.(?:weight|bias)"
)
_GATED = re.compile(r".*\.linear_fc1\.(?:weight|bias)")
_ROW = re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight")
_COPIED = re.compile(r"(?:.*\.)?(?:position_embeddings\.weight|(?:q|k)_layernorm\.(?:weight|bias)|linear_fc2\.bias)")
_CHUNK = re.compile(r"model(\d+)\.(.+)")
LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(.*)|(.*\.mlp\.experts\.)(linear_fc[12]\.\w+?)(\d+)")
# Names in files that contain the norm in the linear layer after it, and in files that do not.
_FUSED = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
# Values that describe the run and its layout, and not the model.
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
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None

        return cls(match[1] or match[4], int(match[2] or match[6]), match[3] or match[5])


def find_placement(name: str, *, gated: bool, replicated: bool) -> str | None:
    """Return the placement along tensor parallelism, in torch's notation; None if the name does not show it."""
    if _COLUMN.fullmatch(name):
        # Gate and up, one after the other.
        is_striped = gated and _GATED.fullmatch(name) is not None
        return "_S(0, 2)" if is_striped else "S(0)"

    if _ROW.fullmatch(name):
        return "S(1)"

    if replicated or _COPIED.fullmatch(name):
        return "R"

    return None


def unfuse(name: str) -> str:
    """Return the name of a norm of its own for a norm that is stored in the linear layer after it."""
    for fused, plain in _FUSED:
        name = name.replace(fused, plain)

    return name


def select_model_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that describe the run and its layout."""
    return {name: value for name, value in values.items() if not _LAYOUT.match(name)}
