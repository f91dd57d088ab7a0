"""A process group of any size in one process: it plays each kind of rank in turn until every message is known.

What is simulated is the network and the ranks that are like another one. The messages are those that real ranks
would send, byte for byte, and what a rank makes of them is the program itself. A pass ends at the first collective
for which some kind of rank has not spoken yet; the next pass knows its message and gets further. So whatever runs has
to send the same in each pass.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

BACKEND = "simulated"


class Waiting(BaseException):
    """A message that is needed has not been sent yet. No `except Exception` may take it for a failure."""


@dataclass(frozen=True)
class Kinds:
    """Ranks by what they hold. first: a rank of each kind, which is played; of: the kind of each rank, by position."""

    first: Mapping[str, int]
    of: Sequence[str]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.of)


@dataclass
class Played:
    """What the ranks of one kind did. seconds: of the last pass, in which every message was there."""

    result: Any
    seconds: float
    sent: int
    received: int
    calls: int


@dataclass
class _Talk:
    """All messages so far: of each collective what each kind of rank gave to it."""

    kinds: Kinds
    said: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def exchange(self, at: int, kind: str, message: torch.Tensor) -> list[torch.Tensor]:
        """Give a message to the collective number `at`; return those of all ranks, in order. Raises Waiting."""
        if at == len(self.said):
            self.said.append({})
        said = self.said[at]
        if kind not in said:
            said[kind] = message.detach().clone()
        elif said[kind].shape != message.shape:  # the bytes after a pickled object are whatever was in memory
            raise RuntimeError(f"{kind}: not the message that it sent in the pass before, at collective {at}")
        if len(said) < len(self.kinds.first):
            raise Waiting
        return [said[of] for of in self.kinds.of]


class Group(dist.ProcessGroup):
    """The process group as one rank sees it; offers what checks use, and counts."""

    def __init__(self, talk: _Talk, kind: str) -> None:
        super().__init__(talk.kinds.first[kind], talk.kinds.size)
        self._talk, self._kind = talk, kind
        self.at = self.sent = self.received = 0

    def getBackendName(self) -> str:  # noqa: N802
        """Name the backend, as torch asks for it."""
        return BACKEND

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        self.at += 1
        found = self._talk.exchange(self.at - 1, self._kind, message)
        size = message.numel() * message.element_size()
        self.sent += size
        self.received += size * (len(found) - 1)
        return found

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Copy what each rank sent into the list of outputs."""
        for output, sent in zip(outputs[0], self._gather(inputs[0]), strict=True):
            output.copy_(sent)
        return _done(outputs)

    def _allgather_base(self, output: Any, given: Any, options: Any = None) -> Any:
        torch.cat([sent.reshape(-1) for sent in self._gather(given)], out=output.view(-1))
        return _done(output)

    all_gather_single = _allgather_base  # as torch calls it since 2.15


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # noqa: SLF001


@contextmanager
def _joined(talk: _Talk, kind: str) -> Iterator[Group]:
    """Be one rank of the simulated job. Raises RuntimeError in a process that has a process group already."""
    group = Group(talk, kind)
    dist.Backend.register_backend(BACKEND, lambda *_: group, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=talk.kinds.first[kind], world_size=talk.kinds.size, store=dist.HashStore())
    try:
        yield group
    finally:
        dist.destroy_process_group()


def play(kinds: Kinds, work: Callable[[str], Any]) -> dict[str, Played]:
    """Run a collective call on ranks of every kind; return what each did.

    work: what a rank of a kind does; called several times. Raises whatever it raises.
    """
    talk = _Talk(kinds)
    while True:
        known = sum(map(len, talk.said))
        done: dict[str, Played] = {}
        for kind in kinds.first:
            with _joined(talk, kind) as group:
                start = time.perf_counter()
                try:
                    result = work(kind)
                except Waiting:
                    continue
                seconds = time.perf_counter() - start
                done[kind] = Played(result, seconds, group.sent, group.received, group.at)
        if len(done) == len(kinds.first):
            return done
        if sum(map(len, talk.said)) == known:
            raise RuntimeError("the ranks wait for one another: they do not make the same collective calls")
