"""Data-parallel ranks that do not train on samples of their own. Replicas stay equal, so files do not show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from train.faults.base import Fault

if TYPE_CHECKING:
    from train.faults.base import TrainingSampler
    from train.methods.single import Method


class DataFault(Fault):
    """Base class of faults that leave the replicas equal; `syncheck watch` sees them in the running program."""

    in_files = False


class SameBatch(DataFault):
    """Every rank trains on the samples of rank 0.

    Examples: a loader without DistributedSampler and with one seed, a sampler that was created before the process
    group. The run costs as much as before, and trains as one process does.
    """

    summary = "all ranks train on the samples of rank 0 (found by syncheck watch)"
    code = "SYN401"

    def change_sampler(self, sampler: TrainingSampler) -> TrainingSampler:
        """Let every rank draw as rank 0."""
        sampler.rank = 0
        return sampler


class Overlap(DataFault):
    """Each rank shuffles the whole data set with its own seed, and takes its share of that order.

    An epoch then shows some samples several times, and other samples never.
    """

    summary = "each rank shuffles with its own seed, so ranks draw the same samples (found by syncheck watch)"
    code = "SYN402"

    def change_sampler(self, sampler: TrainingSampler) -> TrainingSampler:
        """Use another seed on each rank."""
        sampler.seed += self.ctx.rank
        return sampler


class NoSetEpoch(DataFault):
    """Show the samples in the same order in each epoch, as DistributedSampler does without `set_epoch`.

    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler.
    """

    summary = "every epoch has the order of the first one (found by syncheck watch, needs two epochs)"
    code = "SYN403"

    def change_sampler(self, sampler: TrainingSampler) -> TrainingSampler:
        """Ignore the number of the epoch."""
        set_epoch = sampler.set_epoch

        def keep_first_order(epoch: int, skip: int = 0) -> None:  # noqa: ARG001
            set_epoch(0, skip)

        sampler.set_epoch = keep_first_order  # type: ignore[method-assign]
        return sampler


class RngShared(DataFault):
    """Seed all ranks equally, so that dropout drops the same positions in every rank's share of a batch.

    Its noise then does not average out over the ranks. `transformers.set_seed` does it.
    """

    summary = "all ranks draw the same dropout masks (found by syncheck watch, needs --model mnist_convnet)"
    code = "SYN404"

    def before_training(self, method: Method) -> None:
        """Use one stream of random numbers on all ranks."""
        dropouts = [module for module in method.module.modules() if isinstance(module, nn.Dropout)]
        if not dropouts:
            self.refuse(f"--model {self.settings.model} draws no random numbers; use --model mnist_convnet")
        torch.manual_seed(self.settings.seed)
