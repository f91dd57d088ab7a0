"""The formats of a checkpoint: what one rank knows after a step, as the bytes of a file."""

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
    """What one rank knows after a step.

    model: its tensors without any wrapper's prefix. optimizer: the optimizer's own state dict. block: the
    metadata that syncheck.metadata() made of the run. scaler: state of the loss scale, where there is one. ema: the
    parameters' averages, where they are kept.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    epoch: int
    step: int
    block: dict[str, Any]
    ema: dict[str, Tensor] | None = None


def encode_pth(snapshot: Snapshot) -> bytes:
    """Serialize with torch.save, in a form that torch.load(weights_only=True) accepts."""
    buffer = io.BytesIO()
    content = {
        "model": snapshot.model,
        **({} if snapshot.ema is None else {"ema": snapshot.ema}),
        "optimizer": snapshot.optimizer,
        **({} if snapshot.scaler is None else {"scaler": snapshot.scaler}),
        "epoch": snapshot.epoch,
        "step": snapshot.step,
        "syncheck": snapshot.block,
    }
    torch.save(copied(content), buffer)
    return buffer.getvalue()


def encode_safetensors(snapshot: Snapshot) -> bytes:
    """Serialize flat: the model's tensors by name, the optimizer's as `optimizer.<parameter>.<state>`.

    The averages of --ema are `ema.<parameter>`. The format keeps tensors and strings only, so the optimizer's
    param_groups and the loss scale stay out. Raises UserError where the library is missing.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise UserError("--save-format safetensors: not installed; pip install -e '.[train]'") from error
    tensors = snapshot.model | {f"ema.{name}": tensor for name, tensor in (snapshot.ema or {}).items()}
    names = snapshot.block["optimizer_parameters"]  # in the order of the state dict's integer ids
    for index, states in snapshot.optimizer["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{names[index]}.{key}"] = value
    strings = {"syncheck": json.dumps(snapshot.block), "epoch": str(snapshot.epoch), "step": str(snapshot.step)}
    return save({name: copied(tensor).contiguous() for name, tensor in tensors.items()}, metadata=strings)


def copied(tree: Any) -> Any:
    """Copy all tensors of nested dicts, lists and tuples to the CPU, and pass anything else on.

    Even those that are there already: of a view torch.save would write the whole storage behind it, and
    safetensors refuses tensors that share memory.
    """
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(copied(value) for value in tree)
    return tree.detach().cpu().clone() if isinstance(tree, torch.Tensor) else tree


# Each turns a snapshot into the bytes of a file; the name is also the file's ending.
FORMATS: dict[str, Callable[[Snapshot], bytes]] = {
    "pth": encode_pth,
    "safetensors": encode_safetensors,
}
