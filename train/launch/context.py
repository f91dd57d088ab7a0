"""The rank of a process, and the collectives of the trainer."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from train.errors import UserError
from train.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankContext:
    """Rank, device and rendezvous address of this process, the same for every launcher.

    rank: 0..world_size-1 over all nodes. local_rank: 0..local_world_size-1 within this node. node: index of this
    machine. devices: all GPUs available to this process, `device` first; empty on the CPU. backend: of the process
    group; None without a group, and then a collective returns its input. init_method: tcp://host:port or file:///path.
    mesh: coordinates of this rank in the method's mesh; by default every rank has its own samples.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    backend: str | None = None
    local_world_size: int = 1
    node: int = 0
    devices: tuple[torch.device, ...] = ()
    init_method: str = ""
    mesh: Mesh = field(default_factory=Mesh)

    def __post_init__(self) -> None:
        if not self.mesh.names:
            object.__setattr__(self, "mesh", Mesh(self.rank, ("data",), (self.world_size,)))

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints."""
        return self.rank == 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.backend is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Gather small picklable values: a list in rank order, on every rank."""
        if self.backend is None:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every None has been replaced

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block without collectives, and raise UserError on every rank if any rank raised it.

        If a rank raised it alone, the other ranks would wait in their next collective. Exceptions of other types are
        not exchanged.
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
