"""Faults of buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.trials.faults.base import Fault

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.trials.simulation import Rank, Run, Setup


class BuffersNeverSynced(Fault):
    """Nothing copies the buffers of rank 0."""

    name = "buffers never synchronized"
    codes = frozenset({"SYN202"})
    needs_steps = True
    from_start = True

    def fits(self, setup: Setup) -> bool:
        return setup.model == "conv"

    def start(self, run: Run) -> None:
        run.buffers_synced = False


class ExtraForward(Fault):
    """One rank runs a forward pass in training mode outside the steps."""

    name = "extra forward pass"
    codes = frozenset({"SYN203"})

    def fits(self, setup: Setup) -> bool:
        return setup.model == "conv"

    def start(self, run: Run) -> None:
        run.buffers_synced = False

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            x, _ = run.model.draw(run.setup.sizes, 4, run.odd.data)
            run.odd.module(x)


class LocalBuffer(Fault):
    """Each rank updates a buffer from its own data."""

    name = "buffer of local data"
    codes = frozenset({"SYN205"})
    local_buffers = frozenset({"observed_mean"})

    def start(self, run: Run) -> None:
        for rank in run.ranks:
            rank.module.register_buffer("observed_mean", torch.zeros(8))

    @torch.no_grad()
    def see_batch(self, run: Run, rank: Rank, x: Tensor) -> None:
        if run.began:
            observed = x.float().flatten()[:8]
            buffer = rank.module.get_buffer("observed_mean")
            buffer.lerp_(observed, 0.1)
