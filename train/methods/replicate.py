"""Replicas on the machinery of FSDP2: as ddp.py, but each block reduces its gradients with a collective of its own.

Compare with fsdp.py: `replicate` takes the place of `fully_shard`, and every rank keeps whole parameters. Nothing is
gathered, and gradients are averaged with an all-reduce. Parameters become DTensors with the placement Replicate, so
each file records which ranks must hold equal tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from train.errors import UserError
from train.methods.fsdp import Fsdp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from train.settings import Settings


class Replicate(Fsdp):
    """Parameters and optimizer state stay bitwise equal on all ranks; BatchNorm's statistics drift as under fsdp.

    Do not confuse it with torch.distributed._composable.replicate, which is built on DDP: together with tensor
    parallelism that function silently trains another model (see docs/methods.md), and the trainer never calls it.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        **Fsdp.refuses,
        "--join": "FSDP has no join, and the remaining ranks need the gradients of a rank without batches",
        "--ema": "AveragedModel copies the model, and FSDP does not support deepcopy",
        "--save-format safetensors": "parameters are DTensors, and the format has only plain tensors; use pth",
    }

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:  # noqa: ARG003 - as in the base class
        """Return a one-dimensional mesh: every rank has a replica."""
        return {"replicate": world_size}

    def shard_module(self, module: nn.Module, **arguments: Any) -> None:
        """Replicate a module. Raises UserError if torch is too old."""
        try:
            from torch.distributed._composable.replicate_with_fsdp import replicate
        except ImportError as error:
            raise UserError(
                f"--method replicate: torch {torch.__version__} has no replicate on FSDP2; use --method ddp"
            ) from error
        replicate(module, **arguments)
