"""Code of the user in a check: an error is one line with method and place, and reaches the other ranks if possible.

A failed rank may leave the other ranks in a collective of the program. Messages therefore have a separate process
group, and the failed rank waits only a short time for its peers. A rank that stays in code of the user writes where it
is, because it may wait in a collective that another rank has skipped. The process group ends the wait by its own
timeout, which is half an hour by default.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer, get_ident
from typing import TYPE_CHECKING, Any

from syncheck.errors import PeersBlocked, SyncheckError, UsageError
from syncheck.live.channel import Channel, Failure, create_group, world_size
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from syncheck.parity.case import ParityCase

# Seconds that a failed rank waits for ranks that may be inside a collective of the program.
_GRACE = 5.0
# Seconds until a rank reports that peers are late, or that it is still in code of the user.
_PATIENCE = 20.0
# Frames of these folders are not code of the user.
_LIBRARIES = ("site-packages", sysconfig.get_paths()["stdlib"], str(Path(__file__).resolve().parents[1]))
START = "start the case with torchrun --nproc-per-node 2, or in a test under @pytest.mark.syncheck(ranks=2)"


class Alone:
    """The channel of a program without a process group."""

    rank = 0
    ranks = (0,)

    def gather(self, message: Any, _kind: str) -> dict[int, Any]:
        """Return the message of the only rank."""
        return {0: message}

    def run_together(self, work: Callable[[], Any]) -> Any:
        """Return the result of the work."""
        return work()


class ProgramChannel(Channel):
    """The channel of ranks that also run the program."""

    def gather(self, message: Any, kind: str) -> dict[int, Any]:
        """Send a message like `Channel`. Raises PeersBlocked if a failure does not reach the other ranks."""
        if isinstance(message, Failure):
            return self._send_failure(message, kind)
        with _noticed(self._report_waiting):
            return super().gather(message, kind)

    def _send_failure(self, failure: Failure, kind: str) -> dict[int, Any]:
        errors: list[SyncheckError] = []

        def send() -> None:
            try:
                Channel.gather(self, failure, kind)
            except SyncheckError as error:
                errors.append(error)

        thread = Thread(target=send, daemon=True)
        thread.start()
        thread.join(_GRACE)
        # A failure always ends with the common error of all ranks.
        if errors and not self.broken:
            raise errors[0]
        self.ended = self.broken = True
        raise PeersBlocked(
            f"rank {self.rank}: {failure.text}; the other ranks have ended or wait in a collective of the program"
        )

    def _report_waiting(self) -> None:
        _write_line(
            f"rank {self.rank} has waited {_PATIENCE:.0f} s for the other ranks; compare the collectives of all ranks "
            "if the wait goes on"
        )


@contextmanager
def _noticed(report: Callable[[], None]) -> Iterator[None]:
    """Call a function in another thread if the block takes longer than `_PATIENCE`."""
    notice = Timer(_PATIENCE, report)
    # A process that ends does not wait for the timer.
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
        # A test leaves no thread behind, or its processes could not run another one.
        notice.join()


def _write_line(text: str) -> None:
    sys.stderr.write(f"syncheck: {one_line(text)}\n")
    sys.stderr.flush()


@contextmanager
def open_channel(group: Any) -> Iterator[Any]:
    """Yield the channel of a check, with a separate process group; `Alone` without a process group."""
    if not world_size():
        yield Alone()
        return
    import torch.distributed as dist

    # Refuses an invalid group.
    channel = Channel(group)
    own_group = create_group(tuple(channel.ranks))
    program_channel = ProgramChannel(own_group)
    yield program_channel
    # After a failure, other ranks may still use the group.
    if not program_channel.broken:
        dist.destroy_process_group(own_group)


def run_user_code(case: ParityCase, work: Callable[[], Any]) -> Any:
    """Return the result of code of the user. An error becomes one line with class, method and place.

    Code that takes long writes a line with its rank, its method and its place.
    """
    thread = get_ident()

    def report_place() -> None:
        stack = [*traceback.walk_stack(sys._current_frames().get(thread))]  # noqa: SLF001 - the only way to a stack
        # From the outermost frame, as in the traceback of an error.
        method, place = _find_place(case, reversed(stack))
        if method and world_size():
            _write_line(
                f"rank {_find_rank()} has been in {case.title}{method}{place} for {_PATIENCE:.0f} s; if this is a "
                "collective, find the rank that does not call it"
            )

    try:
        with _noticed(report_place):
            return work()
    except SyncheckError:
        raise
    except SystemExit as error:
        text = f"called sys.exit({error.code!r}), which would end the check without a result; remove the call"
        raise UsageError(f"{_locate(case, error)}: {text}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        # DDP and other wrappers need a process group.
        if not world_size() and "process group" in str(error):
            text = f"{text}; {START}"
        raise UsageError(f"{_locate(case, error)}: {text}") from error


def _locate(case: ParityCase, error: BaseException) -> str:
    """Return the method of the case and the last line of the user's code in a traceback."""
    return case.title + "".join(_find_place(case, traceback.walk_tb(error.__traceback__)))


def _find_rank() -> int:
    """Return the rank of this process."""
    import torch.distributed as dist

    return dist.get_rank()


def _find_place(case: ParityCase, frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """Return the method of the case and the last line of the user's code: `.backward`, ` (mine.py:41)`.

    frames: with their lines, the outermost first.
    """
    method = ""
    place = ""
    for frame, line in frames:
        path = frame.f_code.co_filename
        # syncheck has called the first method.
        if not method and frame.f_locals.get("self") is case:
            method = f".{frame.f_code.co_name}"
        if not any(library in path for library in _LIBRARIES):
            place = f" ({Path(path).name}:{line})"
    return method, place
