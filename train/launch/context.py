"""Who a process is among its peers, and the few collectives that the trainer needs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankContext:
    """Who this process is among its peers: all that the trainer needs to know of any launcher.

    rank: 0..world_size-1 over all nodes. local_rank: 0..local_world_size-1 within this node. node: index of
    this machine. device: where this rank computes. devices: all GPUs that this process may use, of which
    `device` is the first; empty on the CPU. backend: of the process group, or None where there is none, so
    that a collective of one process is the identity. init_method: where the ranks meet, as torch writes it:
    env://, tcp://host:port or file:///path.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    backend: str | None = None
    local_world_size: int = 1
    node: int = 0
    devices: tuple[torch.device, ...] = ()
    init_method: str = "env://"

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place; every rank gets the sum."""
        if self.backend is not None:
            dist.all_reduce(values)
        return values

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Take the largest of each element over all ranks, in place; every rank gets them."""
        if self.backend is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Give every rank all ranks' numbers, a row for each rank; one small collective."""
        row = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.backend is None:
            return [row.tolist()]
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return [row.tolist() for row in rows]

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
