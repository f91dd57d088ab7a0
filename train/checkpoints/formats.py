"""Checkpoint formats: encode the state of one rank after a step."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank after a step.

    model: tensors by name, without a wrapper's prefix. optimizer, scaler: state dicts; scaler is None if disabled.
    block: the result of syncheck.metadata(), written if syncheck is installed. ema: averaged parameters, with --ema.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    epoch: int
    step: int
    block: dict[str, Any]
    ema: dict[str, Tensor] | None = None


def encode_pth(snapshot: Snapshot) -> bytes:
    """Serialize with torch.save. torch.load(weights_only=True) accepts the result."""
    buffer = io.BytesIO()
    content: dict[str, Any] = {"model": snapshot.model}
    if snapshot.ema is not None:
        content["ema"] = snapshot.ema
    content["optimizer"] = snapshot.optimizer
    if snapshot.scaler is not None:
        content["scaler"] = snapshot.scaler
    content |= {"epoch": snapshot.epoch, "step": snapshot.step}
    if "schema" in snapshot.block:
        content["syncheck"] = snapshot.block
    torch.save(copy_to_cpu(content), buffer)
    return buffer.getvalue()


def encode_safetensors(snapshot: Snapshot) -> bytes:
    """Serialize as a flat safetensors file.

    Optimizer state is named `optimizer.<parameter>.<state>` and averaged parameters are named `ema.<parameter>`. The
    format stores only tensors and strings, so param_groups and the state of the GradScaler are omitted. Raises
    UserError if safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise UserError("--save-format safetensors: not installed; pip install -e '.[train]'") from error
    tensors = snapshot.model | {f"ema.{name}": tensor for name, tensor in (snapshot.ema or {}).items()}
    # In the order of the state dict's integer ids.
    names = snapshot.block["optimizer_parameters"]
    for index, states in snapshot.optimizer["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{names[index]}.{key}"] = value
    strings = {"epoch": str(snapshot.epoch), "step": str(snapshot.step)}
    if "schema" in snapshot.block:
        strings["syncheck"] = json.dumps(snapshot.block)
    return save({name: copy_to_cpu(tensor).contiguous() for name, tensor in tensors.items()}, metadata=strings)


def copy_to_cpu(tree: Any) -> Any:
    """Copy all tensors in nested dicts, lists and tuples to the CPU.

    CPU tensors are copied too: for a view, torch.save would write the whole storage, and safetensors rejects tensors
    that share memory.
    """
    if isinstance(tree, dict):
        return {key: copy_to_cpu(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(copy_to_cpu(value) for value in tree)
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    return tree


# Encoders by file extension.
FORMATS: dict[str, Callable[[Snapshot], bytes]] = {"pth": encode_pth, "safetensors": encode_safetensors}
