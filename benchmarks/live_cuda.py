"""Digests of tensors on a GPU against a copy of the same tensors on the same GPU. Requires a GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.live_models import MODELS, tensors_of
from benchmarks.timing import take_turns
from syncheck.live.digest import digest_all

if TYPE_CHECKING:
    from collections.abc import Callable

# A model whose time depends on its bytes; for small tensors, kernel launches dominate.
BY_BYTES = "transformer, AdamW"


def _timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, Any]:
    """Time copies and digests in turn for each model, on the GPU of the calling rank.

    Returns the device and, by model, bytes, seconds and whether the limit applies. A copy reads and writes every byte.
    """
    cases: dict[str, Any] = {}
    for name, build in MODELS.items():
        tensors = [tensor.cuda() for tensor in tensors_of(*build())]
        copies = [torch.empty_like(tensor) for tensor in tensors]

        def copy(copies: list[torch.Tensor] = copies, tensors: list[torch.Tensor] = tensors) -> None:
            for target, source in zip(copies, tensors, strict=True):
                target.copy_(source)

        def digests(tensors: list[torch.Tensor] = tensors) -> None:
            digest_all(tensors)

        times = take_turns({"copy": copy, "digests": digests}, rounds, measure=_timed)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        cases[name] = {"bytes": size, "times": times, "bar": name == BY_BYTES}
    return {"device": torch.cuda.get_device_name(), "cases": cases}
