"""From the launcher's environment to a RankContext, and the few collectives that the trainer needs.

Today's launcher is torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables), or none: one
process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
import torch.distributed as dist

from train.errors import RankError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

T = TypeVar("T")

TORCHRUN = "torchrun --nproc-per-node 2 train/run.py"
CPU = torch.device("cpu")
LINGER = 10.0  # seconds that the other ranks give rank 0 to print the error; torchrun ends them sooner


@dataclass(frozen=True)
class RankContext:
    """Who this process is among its peers.

    rank: 0..world_size-1 over all nodes. local_rank: the same within this node. device: where this rank
    computes. backend: of the process group, or None where there is none, so that a collective of one process
    is the identity.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    backend: str | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place; every rank gets the sum."""
        if self.backend is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Give every rank the list of all ranks' small picklable values, in the order of the ranks."""
        if self.backend is None:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every None has been replaced

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may fail on some ranks only: afterwards all go on, or all raise.

        Where one rank raised alone, the others would wait for it in their next collective. The block itself
        must hold no collective. Raises UserError on every rank when it was raised on one; another exception
        goes its own way.
        """
        failure = None
        try:
            yield
        except UserError as error:
            failure = str(error)
        failures = self.gather(failure)
        if all(text == failures[0] for text in failures):
            if failures[0] is not None:
                raise UserError(failures[0])
        else:
            rank = next(i for i, text in enumerate(failures) if text is not None)
            raise UserError(f"rank {rank}: {failures[rank]}")


def from_environment(environment: Mapping[str, str], method: str, *, grouped: bool) -> RankContext:
    """Read who this process is.

    grouped: whether `method` needs a process group, hence a launcher. Raises UserError when launcher and
    method do not fit, RankError when the launcher's variables are missing or contradict each other.
    """
    if not launched(environment):
        if grouped:
            raise UserError(f"--method {method} needs a launcher: start it with '{TORCHRUN}'")
        return RankContext(device=pick_device(0, 1))
    rank, world_size = _place(environment, "RANK", "WORLD_SIZE", default=None)
    local_rank, local_world_size = _place(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE", default=(rank, world_size))
    device = pick_device(local_rank, local_world_size)
    if not grouped:
        if world_size > 1:
            raise UserError(f"--method {method} is one process, the launcher started {world_size}")
        return RankContext(device=device)
    if "MASTER_ADDR" not in environment:
        raise RankError(f"RANK is set but MASTER_ADDR is not: start with '{TORCHRUN}', or unset RANK")
    _number(environment, "MASTER_PORT")
    backend = "nccl" if device.type == "cuda" else "gloo"
    return RankContext(rank, world_size, local_rank, device, backend)


def launched(environment: Mapping[str, str]) -> bool:
    """Tell whether a launcher set this process up."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def _place(environment: Mapping[str, str], rank: str, size: str, *, default: tuple[int, int] | None) -> tuple[int, int]:
    """Read a rank and the number of ranks that it is one of."""
    if default is not None and rank not in environment and size not in environment:
        return default
    place = _number(environment, rank), _number(environment, size)
    if not place[0] < place[1]:
        raise RankError(f"{rank}={place[0]} with {size}={place[1]}: it needs to be below; use torchrun")
    return place


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not (text.isascii() and text.isdigit()):
        found = "is not set" if text is None else f"is {text!r}, not a number"
        raise RankError(f"the environment variable {name} {found}: start with '{TORCHRUN}'")
    return int(text)


def pick_device(local_rank: int, local_world_size: int) -> torch.device:
    """Give each process of this node a GPU of its own, or all the CPU: NCCL refuses two ranks on one GPU."""
    if torch.cuda.is_available() and local_world_size <= torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


@contextmanager
def process_group(ctx: RankContext, timeout: float) -> Iterator[None]:
    """Hold the process group open for the block.

    timeout: seconds after which a rank stops waiting for its peers; torch's default of 30 minutes is a hang
    to whoever watches. Raises RankError when the ranks do not find each other.
    """
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
        torch.backends.cudnn.deterministic = True  # two runs with one seed shall give the same bits
    if ctx.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # torchrun sets this; otherwise the ranks of a node would fight for its cores
    if ctx.backend is None:
        yield
        return
    try:
        dist.init_process_group(
            ctx.backend,
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=ctx.device if ctx.backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise RankError(f"rank {ctx.rank} of {ctx.world_size} cannot join at {where}: {reason}") from error
    try:
        yield
    except UserError:
        dist.destroy_process_group()
        raise
    # After any other exception the group is left alone: the peers may be inside a collective, and closing it
    # could wait for them. The process is about to end anyway.
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process, rank 0 first where something went wrong.

    torchrun ends all ranks as soon as one has failed: were rank 1 faster, rank 0 would be killed before it
    has printed what is wrong. So the others wait to be told, and then leave with the same code.

    The interpreter is not torn down: gloo's threads may still be letting go of the last collective's tensors,
    need the interpreter for it, and abort the process when it is gone
    (https://github.com/pytorch/pytorch/pull/179291; a DDP script of 20 lines on torch 2.15 died of it in
    every fifth run).
    """
    if code != 0 and os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:

        def told(_signal: int, _frame: FrameType | None) -> None:
            os._exit(code)

        signal.signal(signal.SIGTERM, told)
        time.sleep(LINGER)
    with suppress(OSError):  # whoever reads may have gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
