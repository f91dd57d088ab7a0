"""A process group of any size in one process: it plays each kind of rank in turn until every message is known.

The network and copies of ranks are simulated. The messages are byte-identical to the messages of real ranks, and the
real code processes them. A pass ends at the first collective with a missing message of some kind of rank; the next pass
has the message and proceeds further. Therefore, the played code must send equal messages in each pass.
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
_PLAYED: list[Any] = []  # the group of the currently played rank


class Waiting(BaseException):
    """A required message is not sent yet. A BaseException, so no `except Exception` handles it as a failure."""


@dataclass(frozen=True)
class Kinds:
    """Kinds of ranks with equal state. first: the played rank of each kind; of: the kind of each rank."""

    first: Mapping[str, int]
    of: Sequence[str]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.of)


@dataclass
class Played:
    """The result of the ranks of one kind. seconds: CPU time of the last pass, which has every message."""

    result: Any
    seconds: float
    sent: int
    received: int
    calls: int


@dataclass
class _Talk:
    """All messages so far: of each kind of rank for each collective, and between pairs of ranks."""

    kinds: Kinds
    said: list[dict[str, torch.Tensor]] = field(default_factory=list)
    letters: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(map(len, self.said)) + sum(map(len, self.letters.values()))

    def say(self, at: int, kind: str, message: torch.Tensor) -> dict[str, torch.Tensor]:
        """Add a message to the collective number `at`; return the messages of this collective."""
        if at == len(self.said):
            self.said.append({})
        said = self.said[at]
        if kind not in said:
            said[kind] = message.detach().clone()
        elif (
            said[kind].shape != message.shape
        ):  # contents may differ: the bytes after a pickled object are uninitialized
            raise RuntimeError(f"{kind}: not the message that it sent in the pass before, at collective {at}")
        return said

    def send(self, pair: tuple[int, int], number: int, message: torch.Tensor) -> None:
        """Send message `number` from one rank to another."""
        sent = self.letters.setdefault(pair, [])
        if number == len(sent):
            sent.append(message.detach().clone())


class Group(dist.ProcessGroup):
    """The process group of one rank: implements the collectives of checks, and counts bytes."""

    def __init__(self, talk: _Talk, kind: str) -> None:
        self._rank = talk.kinds.first[kind]
        super().__init__(self._rank, talk.kinds.size)
        self._talk, self._kind = talk, kind
        self.at = self.sent = self.received = 0
        self._letters: dict[tuple[int, int], int] = {}

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        said = self._talk.say(self.at, self._kind, message)
        if len(said) < len(self._talk.kinds.first):
            raise Waiting
        self.at += 1
        self.sent += message.nbytes
        self.received += message.nbytes * (self._talk.kinds.size - 1)
        return [said[kind] for kind in self._talk.kinds.of]

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:  # noqa: ARG002
        """Copy the message of each rank to the list of outputs."""
        for output, sent in zip(outputs[0], self._gather(inputs[0]), strict=True):
            output.copy_(sent)
        return _done(outputs)

    def _allgather_base(self, output: Any, given: Any, options: Any = None) -> Any:  # noqa: ARG002
        torch.cat([sent.reshape(-1) for sent in self._gather(given)], out=output.view(-1))
        return _done(output)

    all_gather_single = _allgather_base  # type: ignore[assignment]  # the name since torch 2.15

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Copy the message of the root rank. It counts as sent once, because real broadcasts use a tree."""
        root = options.rootRank
        if root == self._rank:
            self._talk.say(self.at, self._kind, tensors[0])
            self.sent += tensors[0].nbytes
        else:
            if self.at >= len(self._talk.said):
                raise Waiting
            tensors[0].copy_(self._talk.said[self.at][self._talk.kinds.of[root]])
            self.received += tensors[0].nbytes
        self.at += 1
        return _done(tensors)

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:  # noqa: ARG002
        """Store a message for one rank."""
        pair = self._rank, to
        self._letters[pair] = self._letters.get(pair, 0) + 1
        self._talk.send(pair, self._letters[pair] - 1, tensors[0])
        self.sent += tensors[0].nbytes
        return _done(tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:  # noqa: ARG002
        """Copy the next message of one rank. Raises Waiting if it is not sent yet."""
        pair = source, self._rank
        number = self._letters.get(pair, 0)
        if number >= len(self._talk.letters.get(pair, ())):
            raise Waiting
        self._letters[pair] = number + 1
        tensors[0].copy_(self._talk.letters[pair][number])
        self.received += tensors[0].nbytes
        return _done(tensors)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # noqa: SLF001


@contextmanager
def _joined(talk: _Talk, kind: str) -> Iterator[Group]:
    """Act as one rank of the simulated job. Raises RuntimeError if the process already has a process group."""
    group = Group(talk, kind)
    _PLAYED[:] = [group]
    if not hasattr(dist.Backend, BACKEND.upper()):  # older versions of torch accept a name only once
        dist.Backend.register_backend(BACKEND, lambda *_: _PLAYED[0], devices=["cpu"])
    dist.init_process_group(BACKEND, rank=talk.kinds.first[kind], world_size=talk.kinds.size, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        yield group
    finally:
        dist.destroy_process_group()


def play(kinds: Kinds, work: Callable[[str], Any]) -> dict[str, Played]:
    """Run a collective call on ranks of every kind; return the result of each kind.

    work: the call on a rank of a kind, which runs several times. Its exceptions are raised.
    """
    talk = _Talk(kinds)
    while True:
        known = talk.messages
        done: dict[str, Played] = {}
        for kind in kinds.first:
            with _joined(talk, kind) as group:
                start = time.process_time()
                try:
                    result = work(kind)
                except Waiting:
                    continue
                seconds = time.process_time() - start
                done[kind] = Played(result, seconds, group.sent, group.received, group.at)
        if len(done) == len(kinds.first):
            return done
        if talk.messages == known:
            raise RuntimeError("the ranks wait for one another: they do not make the same collective calls")
