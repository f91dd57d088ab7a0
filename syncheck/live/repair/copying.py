"""Copy the bytes of tensors from one rank to others, in place, whatever the backend, the device and the strides."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.digest.parts import as_bytes, as_plain_tensors, is_torch, lies_in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.live.channel import Channel
    from syncheck.live.repair.plan import Job

# Bytes that are under way between two moments at which all ranks tell that they are well.
BATCH = 256 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What a rank must know of a tensor to receive it: bytes, and the type of the device over which they come."""

    size: int
    device: str


class Copier:
    """Broadcasts rows of bytes over a group. All ranks call `copy` with the same jobs in the same order.

    channel: of all ranks; group: its process group. A tensor that only some ranks have is broadcast too, and thrown
    away by the others: every order of sends and receives is then free of deadlocks.
    """

    def __init__(self, channel: Channel, group: Any) -> None:
        self._channel = channel
        self._group = group
        self._dist: Any = sys.modules["torch.distributed"]

    def copy(self, jobs: Sequence[Job], live: Callable[[str], Any]) -> tuple[int, ...]:
        """Copy each job's tensor from its source into the tensors of the job's other ranks; return the bytes of each.

        live: this rank's tensor by name. What fails on one rank is told before the next bytes are sent, so that all
        ranks raise; what was copied by then stays.
        """
        mine = {i: self._shape(live(job.name)) for i, job in enumerate(jobs) if job.source == self._channel.rank}
        sent = self._channel.gather(mine, "shapes")
        shapes = [sent[job.source][i] for i, job in enumerate(jobs)]
        for batch in _batches([shape.size for shape in shapes]):
            rows = [(i, *self._row(jobs[i], shapes[i], live)) for i in batch]
            self._channel.carry([(row, jobs[i].source, arrived) for i, row, arrived in rows if shapes[i].size])
        return tuple(shape.size for shape in shapes)

    def _shape(self, tensor: Any) -> Shape:
        tensor = _as_tensor(tensor)
        return Shape(tensor.nbytes, self._way(tensor.device.type))

    def _way(self, device: str) -> str:
        """Return the type of the device over which the group's backend sends what is on another: NCCL has no CPU."""
        pairs = self._dist.get_backend_config(self._group).split(",")
        known = [pair.partition(":")[0] for pair in pairs]
        return device if device in known else known[0]

    def _row(self, job: Job, shape: Shape, live: Callable[[str], Any]) -> tuple[Any, Callable[[], None]]:
        """Return the row of bytes to broadcast or receive, and what to do with it when it is there."""
        torch: Any = sys.modules["torch"]
        if self._channel.rank not in job.ranks:
            return torch.empty(shape.size, dtype=torch.uint8, device=device_of(shape.device)), _nothing
        with as_plain_tensors():
            plain = _as_tensor(live(job.name)).detach().as_subclass(torch.Tensor)
        here = plain.device.type == shape.device
        # Those of inference mode may not be given to what writes to them outside of it.
        inferred = plain.is_inference()
        if job.source == self._channel.rank:
            row = as_bytes(plain.resolve_conj().resolve_neg().contiguous())
            row = row.clone() if inferred else row
            return row if here else row.to(device_of(shape.device)), _nothing
        if here and not inferred and lies_in_order(plain):
            return as_bytes(plain), _nothing
        row = torch.empty(shape.size, dtype=torch.uint8, device=plain.device if here else device_of(shape.device))

        def arrived() -> None:
            with torch.inference_mode(mode=inferred or torch.is_inference_mode_enabled()):
                _write(job.name, plain, row)

        return row, arrived


def _as_tensor(held: Any) -> Any:
    """Return a tensor as it is, and an array as a tensor of the same memory."""
    return held if is_torch(held) else sys.modules["torch"].from_numpy(held)


def _nothing() -> None:
    pass


def _write(name: str, plain: Any, row: Any) -> None:
    """Copy a row of bytes into a tensor. What `expand` made has one element for many: it is written once."""
    torch: Any = sys.modules["torch"]
    told, first = row.view(*plain.shape, plain.element_size()), plain
    for dim, (size, step) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
        if step == 0 and size > 1:
            first, told = first.narrow(dim, 0, 1), told.narrow(dim, 0, 1)
    if first is not plain and not torch.equal(told.expand(*plain.shape, -1).reshape(-1), row):
        raise UsageError(f"{name} has elements that share memory, as after expand(), and the source's differ")
    first.copy_(told.reshape(-1).view(plain.dtype).view(first.shape))


def device_of(kind: str) -> Any:
    """Return this process's device of a type."""
    torch: Any = sys.modules["torch"]
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Give the positions of what is sent together, in order: at most BATCH bytes, or one tensor that is larger."""
    batch: list[int] = []
    held = 0
    for i, size in enumerate(sizes):
        if batch and held + size > BATCH:
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += size
    if batch:
        yield batch
