"""Baselines for a live check: reading the bytes once, Megatron-LM's method, and a naive broadcast."""

from __future__ import annotations

import array
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


def words(tensor: torch.Tensor) -> NDArray[np.uint64]:
    """Return the memory of a contiguous CPU tensor as 8-byte words, without an incomplete last word."""
    row = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return row[: len(row) // 8 * 8].view(np.uint64)


def reading(tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """Return a function to read every byte once on one thread, by a sum over 8-byte words with prepared views."""
    views = [words(tensor) for tensor in tensors]
    return lambda: [view.sum() for view in views]


def megatron(model: torch.nn.Module) -> bool:
    """Compare parameters as Megatron-LM's check_param_hashes_across_dp_replicas does; return whether all are equal.

    SHA-1 on the CPU of each parameter as float32, then an all_gather of [parameters, 20] bytes. Buffers and the
    optimizer are not compared. github.com/NVIDIA/Megatron-LM, megatron/core/utils.py:936 at d98e8a64.
    """
    hashes = [
        torch.frombuffer(
            array.array("B", hashlib.sha1(parameter.data.to("cpu").float().numpy(force=True).data).digest()),
            dtype=torch.uint8,
        )
        for _, parameter in model.named_parameters()
    ]
    local = torch.stack(hashes)
    everyone = [torch.zeros_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, local)
    return torch.equal(local, everyone[0])


def naive(model: torch.nn.Module) -> bool:
    """Broadcast the parameters of rank 0; return whether this rank's parameters are equal."""
    same = True
    with torch.no_grad():
        for parameter in model.parameters():
            other = parameter.detach().clone()
            dist.broadcast(other, 0)
            same &= torch.equal(parameter, other)
    return same
