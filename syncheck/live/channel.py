"""Messages between the ranks of a process group. If a rank fails, all ranks raise the same error.

Every phase begins with one `all_gather_object`, even if ranks then broadcast or send requests. A rank that fails
between two phases therefore knows which collective its peers are waiting in: it sends its failure there, and all ranks
raise the same error. Within a phase only this module runs code that may fail, and it sends the failure instead of the
message.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck.errors import RankFailed, SyncheckError, UsageError
from syncheck.frozen import record
from syncheck.loaded import find_loaded
from syncheck.text import group_ranks, one_line, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    A = TypeVar("A")
    T = TypeVar("T")

_MAX_TEXT = 500  # characters of a failure's text
MAX_VALUES = 8  # distinct values in an error
# `share` broadcasts if at most one rank in four sends, and gathers otherwise.
_FEW = 4
_MARK = b"syncheck:"
_DONE = "done"
# Names of process groups of syncheck begin so.
_PREFIX = "syncheck-"
# The number of groups of each set of ranks, created in this process.
_groups_created: Counter[tuple[int, ...]] = Counter()


@record
class Failure:
    """The message of a rank that failed.

    text: of the error.
    usage: the error is a UsageError.
    """

    text: str
    usage: bool


@record
class _Envelope:
    """A message and its kind.

    kind: the topic of the message, or the rank that a request addresses.
    message: pickled separately, because a rank may fail to unpickle it.
    """

    kind: str | int
    message: bytes


class _RequestFailed(Exception):
    """The rank that received a request sent a failure."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(failure.text)
        self.by_rank = {rank: failure}


def world_size() -> int:
    """Return the number of processes in the default process group, or 0 without a process group."""
    dist = find_loaded("torch.distributed")
    # torch may be built without support for process groups.
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    return int(dist.get_world_size()) if has_group else 0


def count_messages() -> int | None:
    """Return how many collectives and messages this process has begun in the program's own process groups.

    None if a backend does not number them.
    """
    module = find_loaded("torch.distributed.distributed_c10d")
    if module is None:
        return 0
    count = 0
    for group, name in list(module._world.pg_names.items()):  # noqa: SLF001 - there is no public list of groups
        if name.startswith(_PREFIX):
            continue
        try:
            count += group._get_sequence_number_for_group()  # noqa: SLF001
        except RuntimeError:
            return None
    return count


def create_group(ranks: tuple[int, ...], **options: Any) -> Any:
    """Create a gloo group of some ranks, of which no other rank need know.

    torch takes the name of a group from a counter, which must be equal on all ranks: the names of the groups that the
    program creates later depend on it. So this group has a name of its own.

    options: of `torch.distributed.new_group`.
    """
    distributed: Any = sys.modules["torch.distributed"]
    naming: Any = sys.modules["torch.distributed.distributed_c10d"]
    # A second group of the same name would read the addresses of the first one.
    _groups_created[ranks] += 1
    name = f"{_PREFIX}{'-'.join(map(str, ranks))}-{_groups_created[ranks]}"
    make_name = naming._process_group_name  # noqa: SLF001 - new_group has no argument for it
    naming._process_group_name = lambda *_, **__: name  # noqa: SLF001
    try:
        return distributed.new_group(list(ranks), backend="gloo", use_local_synchronization=True, **options)
    finally:
        naming._process_group_name = make_name  # noqa: SLF001


class Channel:
    """The ranks of one process group.

    group: a torch.distributed group, all ranks by default.
    rank: this process, as rank of the whole world.
    ranks: the group's, as ranks of the whole world.
    is_world: the group contains all ranks.
    ended: all ranks have raised an error, or no message arrives any more.
    broken: no message arrives any more.

    Raises UsageError without a process group, if the group is invalid, and on a rank outside the group.
    """

    def __init__(self, group: Any = None) -> None:
        if not world_size():
            raise UsageError(
                "no process group to compare across ranks; call torch.distributed.init_process_group() on every rank"
            )

        self._dist: Any = sys.modules["torch.distributed"]
        self._group = group if group is not None else self._dist.group.WORLD
        self.rank = int(self._dist.get_rank())
        try:
            rank_in_group = self._dist.get_rank(self._group)
        except (TypeError, ValueError):
            raise UsageError(
                f"group= of class {type(group).__name__}: expected a torch.distributed process group that was not "
                "destroyed"
            ) from None

        if rank_in_group < 0:
            raise UsageError(f"rank {self.rank} is not in group=; call this on its members only")

        self.ranks = tuple(int(rank) for rank in self._dist.get_process_group_ranks(self._group))
        self.is_world = len(self.ranks) == world_size()
        self.ended = self.broken = False

    def gather(self, message: Any, kind: str) -> dict[int, Any]:
        """Send a message and return the messages of all ranks, by rank. If a rank sent a failure, all ranks raise it.

        kind: the topic of the message. Raises RankFailed if another rank sent a message of another kind, because it is
        then in a different collective call, and if a rank has exited or does not respond within the group's timeout.
        """
        # Pickling may fail, so it happens before the other ranks wait for this message.
        envelope = message
        if not isinstance(message, Failure):
            envelope = _Envelope(kind, pickle.dumps(message))

        data = _add_mark(envelope)
        received: list[Any] = [None] * len(self.ranks)
        with self._translate_errors():
            self._dist.all_gather_object(received, data, group=self._group)

        messages = {rank: _remove_mark(part) for rank, part in zip(self.ranks, received, strict=True)}
        self._check_kinds(messages)
        return self._unpack_all(messages)

    def _check_kinds(self, messages: Mapping[int, Any]) -> None:
        """Raise RankFailed unless all messages are of one kind. A failure replaces a message of any kind."""
        foreign_ranks = []
        kinds = set()
        for rank, message in messages.items():
            if isinstance(message, _Envelope):
                kinds.add(message.kind)
            elif not isinstance(message, Failure):
                foreign_ranks.append(rank)

        if foreign_ranks:
            raise self._report_mismatch(ranks_text(foreign_ranks))

        # Nobody knows which of the ranks make the wrong call.
        if len(kinds) > 1:
            raise self._report_mismatch(ranks_text(self.ranks))

    def share(self, make: Callable[[], Any], senders: Collection[int], kind: str) -> dict[int, Any]:
        """Broadcast a message from some ranks, and return the messages by rank. If one fails, all ranks raise.

        With few senders, each rank in `senders` broadcasts, because in a gather every rank would receive a message
        from each other rank.
        """
        if len(senders) * _FEW > len(self.ranks):
            return self.gather(make() if self.rank in senders else None, kind)

        self.gather(None, f"{kind} follow")
        messages: dict[int, Any] = {}
        for sender in senders:
            message = _try_to_pack(make, kind) if sender == self.rank else None
            messages[sender] = self._broadcast(message, sender)

        return self._unpack_all({rank: self._unpack_expected(part) for rank, part in messages.items()})

    def broadcast_rows(self, rows: Sequence[tuple[Any, int, Callable[[], None]]]) -> None:
        """Broadcast byte tensors, each from its source, and call the function of each row on arrival."""
        # A rank that ran out of memory reports it here, before its peers wait for rows.
        self.gather(None, "rows follow")
        errors: list[Exception] = []
        for row, source, handle_arrival in rows:
            with self._translate_errors():
                self._dist.broadcast(row, source, group=self._group)

            try:
                handle_arrival()
            except Exception as error:  # noqa: BLE001 - other ranks wait for the next row
                errors.append(error)

        if errors:
            raise errors[0]

    def run_together(self, work: Callable[[], T]) -> T:
        """Run the work of every rank, which may gather. If it fails on one rank, raise the same error on all."""
        try:
            result = work()
        except Exception as error:
            # The other ranks have the error already, or cannot be reached.
            if self.ended:
                raise

            try:
                self.gather(_make_failure(error), _DONE)
            except SyncheckError as combined:
                raise combined from error
            raise

        # Receives the failures of ranks that failed after their last message.
        self.gather(None, _DONE)
        return result

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work of `run_on_leader`. The leader is the lowest rank."""
        return self.rank == min(self.ranks)

    def run_on_leader(self, work: Callable[[], T], respond: Callable[[Any], Any]) -> T:
        """Run the work on the leader and return its result on all ranks.

        The leader may call `request`; the other ranks `respond`. If the work or a response fails, all ranks raise the
        same error.
        """
        self.gather(None, "requests follow")
        if not self.is_leader:
            return self._respond_to_requests(respond)  # type: ignore[no-any-return]

        try:
            result = work()
            # Pickling may fail, and then the broadcast has not begun.
            self._broadcast(_Envelope(_DONE, pickle.dumps(result)))
        except Exception as error:
            if self.ended:
                raise

            failures = {self.rank: _make_failure(error)}
            if isinstance(error, _RequestFailed):
                failures = error.by_rank
            self._broadcast(failures)
            raise self._make_error(failures) from error

        return result

    def request(self, rank: int, message: Any) -> Any:
        """Return another rank's response. Only for work on the leader, within `run_on_leader`."""
        # Every rank receives every request, because it waits for the result of the leader in the same call.
        self._broadcast(_Envelope(rank, pickle.dumps(message)))
        replies: list[Any] = [None]
        with self._translate_errors():
            self._dist.recv_object_list(replies, src=rank, group=self._group)

        reply = self._unpack_expected(replies[0])
        if isinstance(reply, Failure):
            raise _RequestFailed(rank, reply)

        return _load(reply)

    def _respond_to_requests(self, respond: Callable[[Any], Any]) -> Any:
        """Respond to the leader until it sends its result, and return the result."""
        while True:
            request = self._unpack_expected(self._broadcast(None))
            if isinstance(request, dict):  # the failures that end the work
                raise self._make_error(request)

            if request.kind == _DONE:
                return _load(request)

            if request.kind == self.rank:
                reply = _try_to_pack(partial(_respond, respond, request), _DONE)
                with self._translate_errors():
                    self._dist.send_object_list([_add_mark(reply)], dst=min(self.ranks), group=self._group)

    def _broadcast(self, message: Any, source: int | None = None) -> Any:
        """Broadcast a message from one rank, the leader by default, and return it as received."""
        if source is None:
            source = min(self.ranks)

        messages = [_add_mark(message)]
        with self._translate_errors():
            self._dist.broadcast_object_list(messages, source, self._group)

        return messages[0]

    def _unpack_all(self, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Return the contents of messages. Raises the error of all failures."""
        failures = {rank: message for rank, message in messages.items() if isinstance(message, Failure)}
        if failures:
            raise self._make_error(failures)

        return {rank: _load(message) for rank, message in messages.items()}

    def _unpack_expected(self, part: Any) -> Any:
        """Unpack a message. Raises RankFailed if this module did not send it."""
        message = _remove_mark(part)
        if message is None:
            raise self._report_mismatch("some rank")

        return message

    def _report_mismatch(self, who: str) -> RankFailed:
        self.ended = True
        return RankFailed(
            f"mismatched collective: {who} sent a message that is not part of this comparison; every rank must make "
            "the same collective calls in the same order"
        )

    def _make_error(self, failures: Mapping[int, Failure]) -> SyncheckError:
        """Return the error that all ranks raise. It lists the ranks unless all failed in the same way."""
        self.ended = True
        ranks_by_text = group_ranks({rank: failure.text for rank, failure in failures.items()})
        texts = []
        for text, ranks in ranks_by_text.items():
            # Errors that all ranks have in common need no ranks, for example an invalid argument.
            is_common = len(ranks) == len(self.ranks)
            texts.append(text if is_common else f"{ranks_text(ranks)}: {text}")

        kind = UsageError if all(failure.usage for failure in failures.values()) else RankFailed
        return kind(one_line("; ".join(texts[:MAX_VALUES])))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn torch's communication errors into a one-line RankFailed."""
        # Until the message has arrived, this rank cannot send a failure.
        self.ended = True
        try:
            yield
        except RuntimeError as error:  # torch.distributed raises RuntimeErrors
            self.broken = True
            raise RankFailed(
                f"rank {self.rank} cannot communicate: {_first_sentence(error)}; another rank has exited, or did not "
                "make this call within the group's timeout; see the last output of the other ranks"
            ) from error
        # This module sends only bytes, so torch failed to unpickle a foreign message.
        except Exception as error:
            raise self._report_mismatch("some rank") from error
        self.ended = False


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of torch's error, without source location and suspected reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^\[[^\]]*\]\s*", "", lines[0])
    sentence, _, _ = text.partition(". ")
    return sentence[:200]


def _try_to_pack(make: Callable[[], Any], kind: str) -> _Envelope | Failure:
    """Return the message that a function makes, or the failure: other ranks wait for either of them."""
    try:
        return _Envelope(kind, pickle.dumps(make()))
    except Exception as error:  # noqa: BLE001 - raised on all ranks by the caller
        return _make_failure(error)


def _respond(respond: Callable[[Any], Any], request: _Envelope) -> Any:
    """Return the response to a request. Unpickling it may fail, too."""
    return respond(_load(request))


def _make_failure(error: Exception) -> Failure:
    return Failure(describe_error(error)[:_MAX_TEXT], isinstance(error, UsageError))


def describe_error(error: Exception) -> str:
    """Return the text of an error, with the class of errors that syncheck does not raise itself."""
    if isinstance(error, SyncheckError):
        return str(error)

    return f"{type(error).__name__}: {error}"


def _add_mark(message: Any) -> bytes:
    return _MARK + pickle.dumps(message)


def _remove_mark(part: Any) -> Any:
    """Return the message of a rank, or None if this module did not send it."""
    if not (isinstance(part, bytes) and part.startswith(_MARK)):
        return None
    # all_gather_object unpickles too: the ranks of a group run one program and trust each other.
    return pickle.loads(memoryview(part)[len(_MARK) :])  # noqa: S301


def _load(envelope: _Envelope) -> Any:
    return pickle.loads(envelope.message)  # noqa: S301 - as in `_remove_mark`
