"""Recognize the names of tensors that libraries store as the parts of one fused tensor."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.snapshots import Tensor

# The last part of a module's name, in Hugging Face's, Meta's, Megatron's, timm's and diffusers' models.
_ATTENTION = re.compile(r"(?:(?:to_|c_|linear_|lin_|w)?[qkv]|[qkv]_(?:lin|linear)|query|key|value)(?:_proj)?")
_GATE = re.compile(r"(?:gate|up)(?:_proj)?|w[13]|fc1_[gx]|wi_[01]")
_VALUE = re.compile(r".*(?:v|v_proj|v_lin|v_linear|value|value_proj)")


def are_parts_of_one(name: str, other: str, stored: Mapping[str, Tensor]) -> bool:
    """Whether two tensors may be parts of one fused tensor.

    name, other: of two tensors of a model.
    stored: the stored tensor of each tensor after a map.
    """
    # Without a map, the names are all that shows it.
    if is_fused(name, other, stored):
        return True
    container, last, parameter = _split(name)
    other_container, other_last, other_parameter = _split(other)
    # A weight and a bias are never parts of one tensor.
    if (container, parameter) != (other_container, other_parameter):
        return False
    return any(part.fullmatch(last) and part.fullmatch(other_last) for part in (_ATTENTION, _GATE))


def is_fused(name: str, other: str, stored: Mapping[str, Tensor]) -> bool:
    """Whether a model stores two tensors as parts of one tensor. Parameters as for `are_parts_of_one`."""
    return name in stored and stored[name] is stored.get(other)


def has_rotary_rows(name: str) -> bool:
    """Whether a tensor has the name of the query or key of attention, whose rows are permuted for rotary embeddings."""
    _, last, _ = _split(name)
    return _ATTENTION.fullmatch(last) is not None and _VALUE.fullmatch(last) is None


def _split(name: str) -> tuple[str, str, str]:
    """Return the container and the last part of the name of a tensor's module, and the name of the parameter."""
    module, _, parameter = name.rpartition(".")
    container, _, last = module.rpartition(".")
    return container, last, parameter
