"""Tensors of a checkpoint's pickle whose bytes are not compared: counted, with the reason and what is known of them.

Also what only describes a tensor: its class, device and layout.

Formats: torch/_utils.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import pickle
from typing import Any

from syncheck.errors import brief
from syncheck.readers.pickles.stand_ins import DTypeName, StandIn, TensorPlace, TypeName, refused_place


def _refuse(reason: str) -> StandIn:
    def refuse(*given: Any) -> TensorPlace:
        return refused_place(reason, inner={str(i): x for i, x in enumerate(given) if isinstance(x, TensorPlace)})

    return StandIn(refuse)


def _sparse(_layout: Any, parts: Any) -> TensorPlace:
    """Stand in for a sparse tensor: of indices, values and size; the compressed layouts have two of indices."""
    listed = list(parts) if isinstance(parts, (tuple, list)) else []
    at = next((i for i, part in enumerate(listed) if not isinstance(part, TensorPlace)), 0)
    values = listed[at - 1] if at else None
    names = ("indices", "values") if at == 2 else ("compressed_indices", "plain_indices", "values")
    inner = dict(zip(names, listed[:at], strict=False))
    return refused_place("a sparse tensor", listed[at] if at else (), getattr(values, "dtype", None), inner)


def _quantized(
    storage: Any, _offset: Any, shape: Any, _strides: Any = None, scheme: Any = None, *_: Any
) -> TensorPlace:
    return refused_place("a quantized tensor", shape, inner={"storage": storage, "quantizer": scheme})


def _meta(dtype: Any, shape: Any, *_: Any) -> TensorPlace:
    known = dtype.dtype if isinstance(dtype, DTypeName) else None
    return refused_place("a meta tensor: it has no values", shape, known)


def _text(*parts: Any) -> str:
    """Write what only describes as torch does: torch.device('cuda', 1) is cuda:1."""
    if not all(isinstance(part, (str, int)) for part in parts):
        raise pickle.UnpicklingError(f"a device or layout of {brief(parts)}")
    return ":".join(brief(part) if isinstance(part, int) else part for part in parts)


DESCRIBING: dict[str, Any] = {
    **{f"torch.{name}": TypeName(name) for name in ("Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer")},
    **{f"torch.per_{what}": f"torch.per_{what}" for what in ("tensor_affine", "channel_affine")},
    "torch.device": StandIn(_text),
    "torch.serialization._get_layout": StandIn(_text),
}

UNREAD: dict[str, Any] = {
    "torch._utils._rebuild_wrapper_subclass": _refuse("a wrapper tensor that is not read"),
    "torch._utils._rebuild_qtensor": StandIn(_quantized),
    "torch._utils._rebuild_sparse_tensor": StandIn(_sparse),
    "torch._utils._rebuild_sparse_csr_tensor": StandIn(_sparse),
    "torch._utils._rebuild_nested_tensor": _refuse("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": StandIn(_meta),
    "torch._utils._rebuild_device_tensor_from_numpy": _refuse("a tensor stored as a numpy array"),
}
