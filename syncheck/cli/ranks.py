"""`torchrun ... -m syncheck compare 'ckpts/rank_{rank}.pth'`: every process reads its own file, wherever that lies."""

from __future__ import annotations

import os
import string
import sys
from typing import TYPE_CHECKING, Any

from syncheck.cli import output
from syncheck.errors import SyncheckError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.records import Report

# What may stand in a path, and the variable of torchrun that has it.
FIELDS = {"rank": "RANK", "local_rank": "LOCAL_RANK", "node_rank": "GROUP_RANK", "world_size": "WORLD_SIZE"}
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def asked_for(paths: Sequence[str]) -> bool:
    """Whether a path names the rank of a process, as in 'ckpts/rank_{rank}.pth'; a file of that very name does not."""
    return any("{" in path and not os.path.exists(path) and _fields(path) & FIELDS.keys() for path in paths)


def leads() -> bool:
    """Whether this process is the one that reports."""
    return os.environ.get("RANK", "0") == "0"


def run(paths: Sequence[str], options: Options, tell: Callable[[Report], int], *, histograms: bool) -> int:
    """Compare the file of this process with those of all others. The first one tells; all end with its exit code.

    Does not return within a process group: the processes leave together, so that none is told that another failed.
    """
    [path] = _one(paths)
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UsageError(
            f"{path}: the rank in it is that of a process started by torchrun, which sets {', '.join(missing)}; "
            "needs: torchrun --nproc-per-node N -m syncheck compare PATH, or a glob such as 'ckpts/rank_*.pth'"
        )
    own = path.format_map({name: int(os.environ.get(of, "0")) for name, of in FIELDS.items()})
    try:
        import torch.distributed as dist

        from syncheck.live.channel import Channel
    except ImportError as error:
        raise UsageError(
            f"torch is needed to compare across processes ({error}): pip install 'syncheck[live]'"
        ) from None
    dist.init_process_group("gloo")
    channel = Channel()

    def compared() -> int:
        report = _compare(channel, options, own, path, histograms=histograms)
        return channel.led(lambda: tell(report), lambda _: None)

    try:
        code = channel.together(compared)
    except SyncheckError as error:
        if channel.leads:
            output.tell(f"error: {error}")
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    _wait(dist)
    os._exit(code)


def _wait(dist: Any) -> None:
    """Let all come here before the first one leaves: torchrun ends the others as soon as one has failed."""
    try:
        dist.barrier()
    except RuntimeError:  # one is gone already
        return


def _compare(channel: Channel, options: Options, own: str, path: str, *, histograms: bool) -> Report:
    from syncheck.blocks import Files
    from syncheck.live.exchange import compare_snapshots
    from syncheck.live.stored import opened

    if options.quick or options.group_by is not None:
        raise UsageError("--quick and --group-by are for one process that sees all files; leave them out")
    with Files(jobs=1) as reader:
        taken = opened(own, reader)
        name = (taken.metadata.run if taken.metadata else None) or os.path.splitext(path)[0]
        note = "each rank read its own file: digests first, and the bytes of what differs"
        return compare_snapshots(channel, taken, options, name=name, note=note, histograms=histograms)


def _fields(path: str) -> set[str]:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(path) if name}
    except ValueError:  # a brace without its other half
        return set()


def _one(paths: Sequence[str]) -> Sequence[str]:
    for path in paths:
        unknown = sorted(_fields(path) - FIELDS.keys())
        if unknown:
            raise UsageError(f"{path}: {unknown[0]} in braces; needs one of {', '.join(FIELDS)}")
    if len(paths) != 1:
        raise UsageError(f"{len(paths)} paths, one of them of a rank: needs that one alone, which each process reads")
    return paths
