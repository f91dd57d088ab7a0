"""Load the batches of training, in the rank's process or in worker processes, and of the evaluation."""

from __future__ import annotations

import math
import multiprocessing
import signal
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from train.errors import UserError
from train.launch.signals import block_signals, exit_with_parent

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Sampler

    from train.data import Data, DistributedBatchSampler, OwnSharesSampler
    from train.data.dataset import Images
    from train.launch import RankContext

Batches = DataLoader[tuple["Tensor", ...]]


@dataclass(frozen=True)
class Loaders:
    """The data set of training with its sampler, and the batches of training and evaluation."""

    dataset: Images
    sampler: DistributedBatchSampler | OwnSharesSampler
    train_batches: Batches
    test_batches: Batches

    @classmethod
    def build(
        cls, data: Data, sampler: DistributedBatchSampler | OwnSharesSampler, ctx: RankContext, workers: int
    ) -> Loaders:
        """Build the loaders of this rank. workers: processes that load the training batches."""
        batches = training_batches(data.train, sampler, ctx, workers)
        return cls(data.train, sampler, batches, evaluation_batches(data.test, ctx))


# Maximum samples per rank and forward; does not affect the score.
EVALUATION_BATCH = 512
# Workers must not be forked from this process: its threads (gloo's, a monitor's) may hold locks, which would stay
# locked in the child, and its signal handlers would run twice. spawn starts Python and imports torch for each worker in
# each epoch, which takes seconds. A fork server does this once, has no threads, and forks in milliseconds.
# https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def training_batches(samples: Images, sampler: Sampler[list[int]], ctx: RankContext, workers: int) -> Batches:
    """Load the batches in the sampler's order, bitwise equal for any number of workers.

    workers: processes that load ahead, two batches each. They are started for each epoch, so that they see changes by
    `set_epoch`. With 0 the rank loads each batch when it is needed.
    """
    loader: dict[str, Any] = {}
    if workers:
        context = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload(["torch", "numpy"])
            # A terminal, SLURM or systemd signals all processes at once. The rank continues to an agreed step and needs
            # its workers until then; they end with the rank.
            with block_signals(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                forkserver.ensure_running()
        loader = {"num_workers": workers, "multiprocessing_context": context, "worker_init_fn": end_with_rank}
    return DataLoader(
        samples,
        # The sampler yields whole batches, and the data set returns each as one item.
        sampler=sampler,
        batch_size=None,
        # Copies from pinned memory to the GPU are asynchronous.
        pin_memory=ctx.device.type == "cuda",
        # torch draws a seed for the workers at each epoch. With a separate generator, the number of epochs and
        # evaluations does not affect dropout.
        generator=torch.Generator().manual_seed(0),
        **loader,
    )


def end_with_rank(_worker: int) -> None:
    """Ignore Ctrl-C, which the rank handles, and exit when the rank is killed. Runs in the worker.

    torch's workers check every 5 s whether their parent is alive. Here the parent is the fork server, which lives as
    long as the workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()


def evaluation_batches(samples: Images, ctx: RankContext) -> Batches:
    """Partition the test samples over the data ranks. Each sample is counted once, without padding.

    All ranks get equally many batches, because under FSDP every forward is a collective. Raises UserError if there are
    fewer samples than ranks.
    """
    rank, ranks = ctx.mesh.data_rank, ctx.mesh.data_size
    if len(samples) < ranks:
        raise UserError(f"{len(samples)} test samples for {ranks} ranks: each rank needs a sample; use fewer ranks")
    mine = torch.arange(rank, len(samples), ranks)
    largest_share = math.ceil(len(samples) / ranks)
    parts = mine.tensor_split(math.ceil(largest_share / EVALUATION_BATCH))
    # batch_size=None: the sampler yields whole batches. A separate generator, as in training: a run resumed at the end
    # of an epoch evaluates again, which must not affect dropout.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(samples, sampler=[part.tolist() for part in parts], batch_size=None, generator=generator)
