"""Count the bytes that a process gives to collectives, whichever function of torch.distributed it calls."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Methods of a process group, to which all functions of torch.distributed come down, and which argument it sends.
# torch 2.15 has other names for some than 2.6; those that are not there are skipped.
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
    """What a rank gave to collectives. sent: bytes; calls: by name, barriers left out."""

    sent: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int) -> None:
        """Count one call."""
        self.sent += amount
        self.calls[name] = self.calls.get(name, 0) + 1


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count, until the block ends, what this process sends. Of a broadcast the bytes count at its source only.

    What counts is what the rank hands over: in an all_gather of R ranks each also receives what R - 1 others hand
    over, and by a ring passes it on.
    """
    traffic = Traffic()
    group: Any = dist.ProcessGroup
    # As they stand in the class: a method of C++ that was got through it is bound to no instance any more.
    kept = {name: vars(group)[name] for name in _SENDS if name in vars(group)}
    depth = [0]

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            depth[0] += 1
            try:
                # One may be written by means of another; the outer one is what was asked for.
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
    """Bytes of a tensor, or of all those in a list."""
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(_size, given)) if isinstance(given, (list, tuple)) else 0
