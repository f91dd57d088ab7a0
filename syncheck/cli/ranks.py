"""`torchrun ... -m syncheck compare 'ckpts/rank_{rank}.pth'`: every process reads its own file, wherever that lies."""

from __future__ import annotations

import glob
import os
import re
import string
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from syncheck.cli import CLOSED, output, streams
from syncheck.errors import RankFailed, SyncheckError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.records import Report

# What may stand in a path, and the variable of torchrun that has it.
FIELDS = {"rank": "RANK", "local_rank": "LOCAL_RANK", "node_rank": "GROUP_RANK", "world_size": "WORLD_SIZE"}
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Until the last process has come to its end, after all have had the last message.
_PATIENCE = timedelta(seconds=30)


class Task(NamedTuple):
    """What a process was asked for. tell: prints and writes the report, and returns the exit code."""

    options: Options
    histograms: bool
    tell: Callable[[Report], int]


def asked_for(paths: Sequence[str]) -> bool:
    """Whether a path names the rank of a process, as in 'ckpts/rank_{rank}.pth'; a file of that very name does not."""
    return any(not os.path.lexists(path) and _names_field(path) for path in paths)


def is_leader() -> bool:
    """Whether this process is the one that reports."""
    return os.environ.get("RANK", "0") == "0"


def run(paths: Sequence[str], prepare: Callable[[], Task]) -> NoReturn:
    """Compare the file of this process with those of all others. The first one tells; all end with its exit code.

    prepare: reads the options, once the processes know each other: where it fails on one of them, all hear of it.
    The processes leave together, so that none is told that another failed. Raises UsageError where this process was
    not started as one of several.
    """
    channel, code = compared(_path(paths), prepare)
    sys.stderr.flush()
    if not channel.broken:
        _wait()
    # What is left to be ended are torch's threads, which need not come to an end once a process is gone.
    os._exit(code)


def compared(path: str, prepare: Callable[[], Task]) -> tuple[Channel, int]:
    """Do all of `run` but to leave. A collective call: returns the same exit code on all processes."""
    channel = _channel(path)

    def work() -> int:
        return _compared(channel, path, prepare())

    try:
        return channel, channel.run_together(work)
    except SyncheckError as error:
        cause = error.__cause__
        # Where no message comes through, the first process may be the one that is gone.
        if channel.is_leader or channel.broken:
            output.tell(f"error: {error}")
        if isinstance(cause, Exception) and not isinstance(cause, (SyncheckError, OSError)) and not channel.broken:
            import traceback

            traceback.print_exception(cause)  # of ours, and to be reported
        return channel, error.exit_code


def _compared(channel: Channel, path: str, task: Task) -> int:
    from syncheck.live.files import compare_files

    try:
        own = path.format_map({name: int(os.environ[of]) for name, of in FIELDS.items() if of in os.environ})
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{path}: what is in braces cannot be filled in: {error}; needs {{rank}} or {{rank:02d}}"
        ) from None
    pattern = os.path.splitext(re.sub(r"{[^{}]*}", "*", path))[0]
    report = compare_files(channel, own, pattern, task.options, histograms=task.histograms)
    return channel.run_on_leader(lambda: _told(report, task), lambda _: None)


def _told(report: Report, task: Task) -> int:
    try:
        code = task.tell(report)
        sys.stdout.flush()
    except BrokenPipeError:
        # As without ranks: the reader (`| head`) has seen enough.
        streams.silence(sys.stdout)
        return CLOSED
    return code


def _channel(path: str) -> Channel:
    """Join the other processes."""
    needed = dict.fromkeys((*_NEEDED, *(FIELDS[name] for name in sorted(_fields(path)))))
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise UsageError(
            f"{path}: what is in braces is told by torchrun, and not set: {', '.join(missing)}; "
            "needs: torchrun --nproc-per-node N -m syncheck compare PATH, or a glob such as 'ckpts/rank_*.pth'"
        )
    try:
        import torch.distributed as dist

        from syncheck.live.channel import Channel
    except ImportError as error:
        raise UsageError(
            f"torch is needed to compare across processes ({error}): pip install 'syncheck[live]'"
        ) from None
    if not dist.is_available():
        raise UsageError("this torch is built without torch.distributed, which is needed to compare across processes")
    if not dist.is_initialized():
        try:
            dist.init_process_group("gloo")
        except (RuntimeError, ValueError) as error:  # torch.distributed's own are of these kinds
            text = one_line(str(error).strip().splitlines()[0][:300])
            raise RankFailed(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the others at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {text}; on several nodes, "
                "GLOO_SOCKET_IFNAME names the network device that leads to the others"
            ) from error
    return Channel()


def _wait() -> None:
    """Let all come here before the first one leaves: torchrun ends the others as soon as one has failed."""
    dist: Any = sys.modules["torch.distributed"]
    try:
        dist.monitored_barrier(timeout=_PATIENCE)
    except RuntimeError:  # one is gone already
        return


def _names_field(path: str) -> bool:
    """Whether a path that is no file has a field to be filled in.

    Braces without a known field may be a misspelt one, which is to be told; but not where the path is a glob of files
    that do have braces in their names.
    """
    fields = _fields(path)
    return bool(fields & FIELDS.keys()) or (bool(fields) and not glob.glob(path))


def _fields(path: str) -> set[str]:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(path) if name is not None}
    except ValueError:  # a brace without its other half
        return set()


def _path(paths: Sequence[str]) -> str:
    """Return the one path, of which each process has its own."""
    for path in paths:
        unknown = sorted(_fields(path) - FIELDS.keys())
        if unknown:
            raise UsageError(f"{path}: no such file, and {{{unknown[0]}}} is not known; needs one of {_known()}")
    if len(paths) != 1:
        raise UsageError(
            f"{len(paths)} paths, one of which names the rank: needs that one alone, of which each process has its own"
        )
    return paths[0]


def _known() -> str:
    return ", ".join(f"{{{name}}}" for name in FIELDS)
