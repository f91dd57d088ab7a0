"""Messages among the ranks of a process group, on which nobody raises alone.

Every phase begins with one `all_gather_object`, also one in which ranks then broadcast or answer questions. So a rank
that failed between two phases knows which collective call its peers wait for: it sends its failure there, and all ranks
raise the same error. Within a phase only this module runs code that may fail, and it sends the failure in place of the
message that is due.
"""

from __future__ import annotations

import pickle
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck.errors import RankFailed, SyncheckError, UsageError, one_line
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    A = TypeVar("A")
    T = TypeVar("T")

_MAX_TEXT = 500  # characters of a failure's text
MAX_ANSWERS = 8  # different answers that an error tells of
# `share` lets few senders broadcast, one after another; where more than one rank in four sends, all gather at once.
_FEW = 4
_MARK = b"syncheck:"
_DONE = "done"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank sends in place of a message when it failed. usage: the call was wrong."""

    text: str
    usage: bool


@dataclass(frozen=True, slots=True)
class _Envelope:
    """kind: of a question, the rank that is asked. message: pickled by itself, as a rank may fail to unpickle it."""

    kind: str | int
    message: bytes


class _RequestFailed(Exception):
    """A rank that was asked sent its failure."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(failure.text)
        self.by_rank = {rank: failure}


def world_size() -> int:
    """Return the number of processes of the default process group, 0 where there is none."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    return int(dist.get_world_size())


def group_ranks_by_value(answers: Mapping[int, A]) -> dict[A, list[int]]:
    """Return the ranks of each different answer. answers: by rank, hashable."""
    found: dict[A, list[int]] = {}
    for rank, answer in answers.items():
        found.setdefault(answer, []).append(rank)
    return found


class Channel:
    """The ranks of one process group. rank: this process's; ranks: of the group; both count in the whole world.

    group: of torch.distributed, by default all ranks. whole: the group has all ranks. over: an error was raised on
    all ranks, or no message comes through any more; lost: the latter. Raises UsageError without a process group, for a
    group that is none, and on a rank that is not in the group given.
    """

    def __init__(self, group: Any = None) -> None:
        if not world_size():
            raise UsageError(
                "no process group: comparing across ranks needs torch.distributed.init_process_group() on every rank"
            )
        self._dist: Any = sys.modules["torch.distributed"]
        self._group = group if group is not None else self._dist.group.WORLD
        self.rank = int(self._dist.get_rank())
        try:
            inside = self._dist.get_rank(self._group) >= 0
        except (TypeError, ValueError):
            raise UsageError(
                f"group= of class {type(group).__name__}: needs a process group of torch.distributed that still exists"
            ) from None
        if not inside:
            raise UsageError(f"rank {self.rank} is not in the process group given; call this on its members only")
        self.ranks = tuple(int(rank) for rank in self._dist.get_process_group_ranks(self._group))
        self.is_world = len(self.ranks) == world_size()
        self.ended = self.broken = False

    def gather(self, message: Any, kind: str) -> dict[int, Any]:
        """Send a message and return those of all ranks, by rank. Raises on all ranks if a rank sent a failure.

        kind: what is sent at this point of the conversation. Raises RankFailed where a rank sent anything else: it is
        in another collective call, so what it sent would be taken for something that it is not; and where a rank has
        ended, or does not answer within the group's timeout.
        """
        # Pickled beforehand: what cannot be pickled has to fail before the others are waiting for this message.
        data = _add_mark(message if isinstance(message, Failure) else _Envelope(kind, pickle.dumps(message)))
        received: list[Any] = [None] * len(self.ranks)
        with self._translate_errors():
            self._dist.all_gather_object(received, data, group=self._group)
        found = {rank: _remove_mark(part) for rank, part in zip(self.ranks, received, strict=True)}
        strangers = [rank for rank, sent in found.items() if not isinstance(sent, (Failure, _Envelope))]
        # A failure stands in place of any message, so the kinds of the others are compared with each other.
        if strangers or len({sent.kind for sent in found.values() if isinstance(sent, _Envelope)}) > 1:
            raise self._report_mismatch(ranks_text(strangers or self.ranks))
        return self._unpack_all(found)

    def share(self, make: Callable[[], Any], senders: Collection[int], kind: str) -> dict[int, Any]:
        """Let some ranks send what they make to all, and return that, by rank. Raises on all ranks if one failed.

        Of few senders each broadcasts: in a gather every rank would receive as much from each of the others too.
        """
        if len(senders) * _FEW > len(self.ranks):
            return self.gather(make() if self.rank in senders else None, kind)
        self.gather(None, f"{kind} are due")
        found: dict[int, Any] = {}
        for rank in senders:
            message: Any = None
            if rank == self.rank:
                try:
                    message = _Envelope(kind, pickle.dumps(make()))
                except Exception as error:  # noqa: BLE001 - raised on all ranks below
                    message = _make_failure(error)
            found[rank] = self._broadcast(message, rank)
        return self._unpack_all({rank: self._unpack_expected(part) for rank, part in found.items()})

    def broadcast_rows(self, rows: Sequence[tuple[Any, int, Callable[[], None]]]) -> None:
        """Broadcast tensors of bytes, each from its source; then do with each what is to be done when it is there."""
        self.gather(None, "rows are due")  # whoever has no memory left says it here, where the others still listen
        failed: list[Exception] = []
        for row, source, arrived in rows:
            with self._translate_errors():
                self._dist.broadcast(row, source, group=self._group)
            try:
                arrived()
            except Exception as error:  # noqa: BLE001 - the others are waiting for the next row first
                failed.append(error)
        if failed:
            raise failed[0]

    def run_together(self, work: Callable[[], T]) -> T:
        """Run every rank's work, which may gather; where it fails on some rank, raise the same error on all."""
        try:
            result = work()
        except Exception as error:
            if self.ended:
                raise
            try:
                self.gather(_make_failure(error), _DONE)
            except SyncheckError as told:
                raise told from error
            raise
        self.gather(None, _DONE)  # learns of a rank whose work failed after its last message
        return result

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work of `run_on_leader`: the first one."""
        return self.rank == min(self.ranks)

    def run_on_leader(self, work: Callable[[], T], answer: Callable[[Any], Any]) -> T:
        """Let the first rank work for all: it may `ask`, the others `answer`; return on all ranks what it made.

        Where it fails, or a rank that it asked, all raise the same error.
        """
        self.gather(None, "questions are due")
        if not self.is_leader:
            return self._answer_requests(answer)  # type: ignore[no-any-return]
        try:
            made = work()
            self._broadcast(_Envelope(_DONE, pickle.dumps(made)))  # what cannot be pickled fails before it is due
        except Exception as error:
            if self.ended:
                raise
            by_rank = error.by_rank if isinstance(error, _RequestFailed) else {self.rank: _make_failure(error)}
            self._broadcast(by_rank)
            raise self._make_error(by_rank) from error
        return made

    def request(self, rank: int, what: Any) -> Any:
        """Return what another rank answers; only within `run_on_leader`, on the rank that works."""
        self._broadcast(_Envelope(rank, pickle.dumps(what)))  # all wait for the next question, whosever it is
        listed: list[Any] = [None]
        with self._translate_errors():
            self._dist.recv_object_list(listed, src=rank, group=self._group)
        reply = self._unpack_expected(listed[0])
        if isinstance(reply, Failure):
            raise _RequestFailed(rank, reply)
        return _load(reply)

    def _answer_requests(self, answer: Callable[[Any], Any]) -> Any:
        first = min(self.ranks)
        while True:
            sent = self._unpack_expected(self._broadcast(None))
            if isinstance(sent, dict):
                raise self._make_error(sent)
            if sent.kind == _DONE:
                return _load(sent)
            if sent.kind != self.rank:
                continue
            try:
                # What cannot be pickled fails before it is due.
                reply: Any = _Envelope(_DONE, pickle.dumps(answer(_load(sent))))
            except Exception as error:  # noqa: BLE001 - the first rank raises it on all
                reply = _make_failure(error)
            with self._translate_errors():
                self._dist.send_object_list([_add_mark(reply)], dst=first, group=self._group)

    def _broadcast(self, message: Any, source: int | None = None) -> Any:
        """Send what one rank gives, by default the first, and return it as it came."""
        listed = [_add_mark(message)]
        with self._translate_errors():
            self._dist.broadcast_object_list(listed, min(self.ranks) if source is None else source, self._group)
        return listed[0]

    def _unpack_all(self, found: Mapping[int, Any]) -> dict[int, Any]:
        failures = {rank: sent for rank, sent in found.items() if isinstance(sent, Failure)}
        if failures:
            raise self._make_error(failures)
        return {rank: _load(sent) for rank, sent in found.items()}

    def _unpack_expected(self, part: Any) -> Any:
        """Return what a rank sent. Raises RankFailed if it is not of this module."""
        sent = _remove_mark(part)
        if sent is None:
            raise self._report_mismatch("some rank")
        return sent

    def _report_mismatch(self, who: str) -> RankFailed:
        self.ended = True
        return RankFailed(
            f"{who} sent something that is no part of this comparison; every rank has to make the same collective "
            "calls, these included, in the same order"
        )

    def _make_error(self, failures: Mapping[int, Failure]) -> SyncheckError:
        """Return the one error that all ranks raise: it names the ranks unless all failed alike."""
        self.ended = True
        by_text = group_ranks_by_value({rank: failure.text for rank, failure in failures.items()})
        everyone = len(by_text) == 1 and len(failures) == len(self.ranks)
        told = (text if everyone else f"{ranks_text(of)}: {text}" for text, of in list(by_text.items())[:MAX_ANSWERS])
        kind = UsageError if all(failure.usage for failure in failures.values()) else RankFailed
        return kind(one_line("; ".join(told)))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Say in one line what torch raises when a message does not come through; then no other will."""
        self.ended = True  # until it has come through
        try:
            yield
        except RuntimeError as error:  # torch.distributed's own are of this kind
            self.broken = True
            raise RankFailed(
                f"rank {self.rank} got no message through: {_first_sentence(error)}; a rank has ended, or did not make this "
                "call within the group's timeout: see what the others printed last"
            ) from error
        except Exception as error:  # torch unpickles what came; of this module come bytes only, and these cannot fail
            raise self._report_mismatch("some rank") from error
        self.ended = False


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of what torch says, without the place in its sources and its guess at the reason."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\]\s*", "", first).partition(". ")[0][:200]


def _make_failure(error: Exception) -> Failure:
    kind = "" if isinstance(error, SyncheckError) else f"{type(error).__name__}: "
    return Failure(f"{kind}{error}"[:_MAX_TEXT], isinstance(error, UsageError))


def _add_mark(sent: Any) -> bytes:
    return _MARK + pickle.dumps(sent)


def _remove_mark(part: Any) -> Any:
    """Return what a rank sent; None for what is not of this module."""
    if not (isinstance(part, bytes) and part.startswith(_MARK)):
        return None
    # As all_gather_object itself does: the ranks of a group run one program and trust each other.
    return pickle.loads(memoryview(part)[len(_MARK) :])  # noqa: S301


def _load(sent: _Envelope) -> Any:
    return pickle.loads(sent.message)  # noqa: S301 - as in `_remove_mark`
