"""How the training batches reach the training loop: by the rank itself, or by processes that load ahead."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from train.launch.exits import exit_with_parent
from train.launch.signals import block_signals

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from train.data.dataset import Images
    from train.launch import RankContext
    from train.scoring import Batches

# Of the ways to start a worker, fork is out: this process has threads (gloo's, a monitor's) whose locks a child would
# inherit as they are, for ever locked, and signal handlers that would answer for two. spawn starts a Python and imports
# torch for each worker of each epoch, some seconds; a fork server does so once, has no threads, and forks in
# milliseconds. https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def training_batches(samples: Images, sampler: Sampler[list[int]], ctx: RankContext, workers: int) -> Batches:
    """Load what the sampler says, in its order; the same bits whatever the number of workers.

    workers: processes of this rank that load ahead, two batches each; started anew for each epoch, so that they see
    what `set_epoch` has changed in the samples. 0: the rank loads each batch when it needs it.
    """
    loader: dict[str, Any] = {}
    if workers:
        context = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload(["torch", "numpy"])
            # Where a signal goes to all processes at once, as from a terminal, SLURM or systemd, the rank goes on to an
            # agreed step, and needs its workers for it; they end with the rank.
            with block_signals(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                forkserver.ensure_running()
        loader = {"num_workers": workers, "multiprocessing_context": context, "worker_init_fn": end_with_rank}
    return DataLoader(
        samples,
        # The data set is asked for a whole batch at once, and there is nothing to put together.
        sampler=sampler,
        batch_size=None,
        # From pinned memory a GPU copies while the CPU goes on.
        pin_memory=ctx.device.type == "cuda",
        # torch draws a seed for the workers at each epoch; from a generator of its own, or dropout would draw other
        # numbers with another number of evaluations or epochs so far.
        generator=torch.Generator().manual_seed(0),
        **loader,
    )


def end_with_rank(_worker: int) -> None:
    """Leave Ctrl-C to the rank, and end at once when the rank has been killed; in the worker.

    torch's own workers ask every 5 s whether their parent lives, which here is the fork server, and that lives as long
    as they do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()
