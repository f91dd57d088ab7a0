"""`torchrun ... -m syncheck compare 'ckpts/rank_{rank}.pth'`: each process reads its own file on its own machine."""

from __future__ import annotations

import glob
import os
import re
import string
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from syncheck.cli import output, streams
from syncheck.cli.streams import CLOSED
from syncheck.errors import RankFailed, SyncheckError, UsageError
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.records import Report

# Fields of a path, and torchrun's environment variables with their values.
FIELDS = {"rank": "RANK", "local_rank": "LOCAL_RANK", "node_rank": "GROUP_RANK", "world_size": "WORLD_SIZE"}
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The time for the last process to exit, after all processes have received the last message.
_EXIT_TIMEOUT = timedelta(seconds=30)


class Task(NamedTuple):
    """The requested comparison. write_report: prints and writes the report, and returns the exit code."""

    options: Options
    histograms: bool
    write_report: Callable[[Report], int]


def names_rank(paths: Sequence[str]) -> bool:
    """Whether a path has a field for the rank, as in 'ckpts/rank_{rank}.pth', and is not an existing file."""
    return any(not os.path.lexists(path) and _has_field(path) for path in paths)


def run(paths: Sequence[str], prepare: Callable[[], Task]) -> NoReturn:
    """Compare the files of all processes, report on the first process, and exit all with the same exit code.

    prepare: reads the options after the processes are connected, so that its errors reach all of them. All processes
    exit at the same time, because torchrun reports an early exit as a failure. Raises UsageError outside torchrun.
    """
    leave(*compare(_select_path(paths), prepare))


def leave(channel: Channel, code: int) -> NoReturn:
    """Exit with a code when all processes are ready to exit."""
    sys.stderr.flush()
    if not channel.broken:
        _wait_for_all()
    # A normal exit could wait for torch's threads forever if a process has died.
    os._exit(code)


def compare(path: str, prepare: Callable[[], Task]) -> tuple[Channel, int]:
    """Compare and report. A collective call: it returns the same exit code on all processes."""
    channel = _connect_for(path)
    return channel, work_together(channel, lambda: _compare_own_file(channel, path, prepare()))


def work_together(channel: Channel, work: Callable[[], int]) -> int:
    """Return the exit code of the work of all processes, or of its error, which is reported. A collective call."""
    try:
        return channel.run_together(work)
    except SyncheckError as error:
        cause = error.__cause__
        # If messages are lost, the first process may have died, so every process reports the error.
        if channel.is_leader or channel.broken:
            output.print_error(error)
        if isinstance(cause, Exception) and not isinstance(cause, (SyncheckError, OSError)) and not channel.broken:
            import traceback

            # A bug of syncheck.
            traceback.print_exception(cause)
        return error.exit_code


def _compare_own_file(channel: Channel, path: str, task: Task) -> int:
    from syncheck.cli.rank_files import compare_files

    try:
        values = {name: int(os.environ[key]) for name, key in FIELDS.items() if key in os.environ}
        own_path = path.format_map(values)
    except (ValueError, KeyError) as error:
        raise UsageError(f"{path}: invalid field in braces: {error}; must be {{rank}} or {{rank:02d}}") from None
    pattern = os.path.splitext(re.sub(r"{[^{}]*}", "*", path))[0]
    report = compare_files(channel, own_path, pattern, task.options, histograms=task.histograms)
    return write_on_leader(channel, report, task.write_report)


def write_on_leader(channel: Channel, report: Report, write_report: Callable[[Report], int]) -> int:
    """Print and write a report on the first process, and return its exit code on all processes."""
    return channel.run_on_leader(lambda: _write_report(report, write_report), lambda _: None)


def _write_report(report: Report, write_report: Callable[[Report], int]) -> int:
    try:
        code = write_report(report)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, for example `| head`, closed the pipe, as in a comparison without ranks.
        streams.redirect_to_null(sys.stdout)
        return CLOSED
    return code


def _connect_for(path: str) -> Channel:
    """Connect to the other processes. Raises UsageError outside torchrun, and RankFailed if the connection fails."""
    needed = dict.fromkeys((*NEEDED, *(FIELDS[name] for name in sorted(_list_fields(path)))))
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise UsageError(
            f"{path}: torchrun sets the values in braces, but these variables are not set: {', '.join(missing)}; "
            "use torchrun --nproc-per-node N -m syncheck compare PATH, or a glob such as 'ckpts/rank_*.pth'"
        )
    return connect()


def connect() -> Channel:
    """Connect to the other processes of torchrun. Raises UsageError without torch, and RankFailed."""
    try:
        import torch.distributed as dist

        from syncheck.live.channel import Channel
    except ImportError as error:
        raise UsageError(f"comparing across processes requires torch ({error}): pip install 'syncheck[live]'") from None
    if not dist.is_available():
        raise UsageError("comparing across processes requires torch.distributed, and this build of torch lacks it")
    if not dist.is_initialized():
        try:
            dist.init_process_group("gloo")
        except (RuntimeError, ValueError) as error:  # the base classes of torch.distributed's errors
            text = one_line(str(error).strip().splitlines()[0][:300])
            raise RankFailed(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the other ranks at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {text}; on several nodes, set "
                "GLOO_SOCKET_IFNAME to the network interface that connects them"
            ) from error
    return Channel()


def _wait_for_all() -> None:
    """Wait until all processes are ready to exit, because torchrun kills the remaining processes after a failure."""
    dist: Any = sys.modules["torch.distributed"]
    try:
        dist.monitored_barrier(timeout=_EXIT_TIMEOUT)
    except RuntimeError:  # a process has already exited
        return


def _has_field(path: str) -> bool:
    """Whether a path has a field in braces.

    Unknown fields count too, so that a misspelled field is reported, unless the path is a glob of files with braces in
    their names.
    """
    fields = _list_fields(path)
    return bool(fields & FIELDS.keys()) or (bool(fields) and not glob.glob(path))


def _list_fields(path: str) -> set[str]:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(path) if name is not None}
    except ValueError:  # an unmatched brace
        return set()


def _select_path(paths: Sequence[str]) -> str:
    """Return the only path. Raises UsageError for several paths and for an unknown field."""
    for path in paths:
        unknown = sorted(_list_fields(path) - FIELDS.keys())
        if unknown:
            fields = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise UsageError(f"{path}: no such file, and {{{unknown[0]}}} is not a field; must be one of {fields}")
    if len(paths) != 1:
        raise UsageError(f"{len(paths)} paths: a path with a rank in braces must be the only path")
    return paths[0]
