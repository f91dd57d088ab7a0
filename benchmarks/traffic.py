"""Count the bytes passed to collectives by a process through any function of torch.distributed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Methods of a process group, called by all functions of torch.distributed, with the index of the sent argument. Names
# differ between torch 2.6 and 2.15; missing methods are skipped.
_SENDS = {
    "allgather": 1,
    "_allgather_base": 1,
    "all_gather_single": 1,
    "allgather_coalesced": 1,
    "allreduce": 0,
    "reduce": 0,
    "broadcast": 0,
    "send": 0,
    "gather": 1,
    "gather_single": 1,
    "scatter": 1,
    "alltoall": 1,
    "alltoall_base": 1,
    "all_to_all_single": 1,
    "reduce_scatter": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1,
}


@dataclass
class Traffic:
    """The bytes sent by a rank to collectives, and the number of calls by name, without barriers."""

    sent: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int) -> None:
        """Count one call."""
        self.sent += amount
        self.calls[name] = self.calls.get(name, 0) + 1


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the bytes sent by this process within the block. A broadcast counts only on its source.

    The count covers a rank's own data: in an all_gather of R ranks, each rank also receives the data of R - 1 ranks
    and forwards it in a ring.
    """
    traffic = Traffic()
    group: Any = dist.ProcessGroup
    # From the dictionary of the class: getattr of a C++ method returns an object without binding to instances.
    kept = {name: vars(group)[name] for name in _SENDS if name in vars(group)}
    depth = [0]

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            depth[0] += 1
            try:
                # A method may call another method; only the outer call counts.
                if depth[0] == 1 and _is_sender(self, name, arguments):
                    given = arguments[_SENDS[name]] if len(arguments) > _SENDS[name] else next(iter(options.values()))
                    traffic.add(name, _size(given))
                return method(self, *arguments, **options)
            finally:
                depth[0] -= 1

        return call

    for name in kept:
        setattr(group, name, counting(name, getattr(group, name)))
    try:
        yield traffic
    finally:
        for name, method in kept.items():
            setattr(group, name, method)


def _is_sender(group: Any, name: str, arguments: tuple[Any, ...]) -> bool:
    if name != "broadcast":
        return True
    root = getattr(arguments[1], "rootRank", arguments[1]) if len(arguments) > 1 else 0
    return bool(root == group.rank())


def _size(given: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in a list."""
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(_size, given)) if isinstance(given, (list, tuple)) else 0
