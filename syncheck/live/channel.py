"""Messages among the ranks of a process group, on which nobody raises alone.

Every message is one `all_gather_object`. A rank that failed sends its failure in place of the message that is due,
whichever that is; the others find it there, and all raise the same error. So no rank waits for one that has left.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck.errors import RankFailed, SyncheckError, UsageError, one_line
from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    T = TypeVar("T")

_LONGEST = 500  # characters of a failure's text
_MARK = "syncheck"
DONE = "done"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank sends in place of a message when it failed. usage: the call was wrong."""

    text: str
    usage: bool


@dataclass(frozen=True, slots=True)
class _Sent:
    kind: str
    message: Any


def world_size() -> int:
    """Return the number of processes of the default process group, 0 where there is none."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    return int(dist.get_world_size())


class Channel:
    """The ranks of one process group. rank: this process's; ranks: of the group; both count in the whole world.

    group: of torch.distributed, by default all ranks. whole: the group has all ranks. over: an error was raised on
    all ranks, or no message comes through any more. Raises UsageError without a process group, and on a rank that is
    not in the group given.
    """

    def __init__(self, group: Any = None) -> None:
        if not world_size():
            raise UsageError(
                "no process group: comparing across ranks needs torch.distributed.init_process_group() on every rank"
            )
        self._dist: Any = sys.modules["torch.distributed"]
        self._group = group if group is not None else self._dist.group.WORLD
        self.rank = int(self._dist.get_rank())
        if self._dist.get_rank(self._group) < 0:
            raise UsageError(f"rank {self.rank} is not in the process group given; call this on its members only")
        self.ranks = tuple(int(rank) for rank in self._dist.get_process_group_ranks(self._group))
        self.whole = len(self.ranks) == world_size()
        self.over = False

    def gather(self, message: Any, kind: str) -> dict[int, Any]:
        """Send a message and return those of all ranks, by rank. Raises on all ranks if a rank sent a failure.

        kind: what is sent at this point of the conversation. Raises RankFailed where a rank sent anything else: it is
        in another collective call, so what it sent would be taken for something that it is not.
        """
        # Pickled beforehand: what cannot be pickled has to fail before the others are waiting for this message.
        data = pickle.dumps((_MARK, message if isinstance(message, Failure) else _Sent(kind, message)))
        received: list[Any] = [None] * len(self.ranks)
        self.over = True  # until it has come through
        try:
            self._dist.all_gather_object(received, data, group=self._group)
        except (pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:  # bytes that are no pickle of ours
            raise RankFailed(_mixed("some rank")) from error
        found = {rank: _unpacked(part) for rank, part in zip(self.ranks, received, strict=True)}
        strangers = [rank for rank, sent in found.items() if sent is None]
        # A failure stands in place of any message, so the kinds of the others are compared with each other.
        if strangers or len({sent.kind for sent in found.values() if isinstance(sent, _Sent)}) > 1:
            raise RankFailed(_mixed(ranks_text(strangers or self.ranks)))
        failures = {rank: sent for rank, sent in found.items() if isinstance(sent, Failure)}
        if failures:
            raise _error(failures, len(self.ranks))
        self.over = False
        return {rank: sent.message for rank, sent in found.items()}

    def together(self, work: Callable[[], T]) -> T:
        """Run every rank's work, which may gather; where it fails on some rank, raise the same error on all."""
        try:
            result = work()
        except Exception as error:
            if self.over:
                raise
            kind = "" if isinstance(error, SyncheckError) else f"{type(error).__name__}: "
            failure = Failure(f"{kind}{error}"[:_LONGEST], isinstance(error, UsageError))
            try:
                self.gather(failure, DONE)
            except SyncheckError as told:
                raise told from error
            raise
        self.gather(None, DONE)  # learns of a rank whose work failed after its last message
        return result


def _unpacked(part: Any) -> Any:
    """Return what a rank sent; None for what is not of ours."""
    try:
        # As all_gather_object itself does: the ranks of a group run one program and trust each other.
        mark, sent = pickle.loads(part)  # noqa: S301
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, AttributeError, ImportError, IndexError):
        return None
    return sent if mark == _MARK and isinstance(sent, (Failure, _Sent)) else None


def _mixed(who: str) -> str:
    return (
        f"{who} sent something that is no part of this comparison; every rank has to make the same collective calls, "
        "these included, in the same order"
    )


def _error(failures: Mapping[int, Failure], ranks: int) -> SyncheckError:
    """Return the one error that all ranks raise: it names the ranks unless all failed alike."""
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.text, []).append(rank)
    everyone = len(by_text) == 1 and len(failures) == ranks
    text = "; ".join(text if everyone else f"{ranks_text(of)}: {text}" for text, of in list(by_text.items())[:8])
    return (UsageError if all(failure.usage for failure in failures.values()) else RankFailed)(one_line(text))
