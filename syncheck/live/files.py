"""Compare checkpoints of which each rank's process can read its own only, as where each node has its own disk."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck.errors import UsageError, brief
from syncheck.kernel.blocks import Files
from syncheck.kinds import selector
from syncheck.layout.groups import title_of
from syncheck.live.channel import MAX_ANSWERS, group_ranks_by_value
from syncheck.live.exchange import compare_snapshots
from syncheck.live.exchange.stored import open_checkpoint
from syncheck.messages import Grouping, Problem, ranks_text
from syncheck.names import normalize
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.records import Report
    from syncheck.snapshots import Snapshot, Tensor

# Differs from one start of a machine to the next, and so between machines; several may have one name.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SECOND = 10**9  # in nanoseconds


@dataclass(frozen=True)
class FileInfo:
    """What is known of a rank's file before it is read.

    path: on its host. marks: two files with one of these in common are one and the same. rank, run, run_id: by the
    metadata in the file; a run of None is one that no metadata tells.
    """

    path: str
    host: str
    marks: frozenset[Hashable]
    rank: int | None
    run: tuple[str | None, str | None] | None


def compare_files(channel: Channel, path: str, pattern: str, options: Options, *, histograms: bool = False) -> Report:
    """Compare this rank's checkpoint with those of the others; to be run by `channel.run_together` on all ranks.

    path: of this rank's file, or of a folder that is one checkpoint. pattern: of all paths, for a name where no
    metadata has one. histograms: as in `api.judge`. Every rank returns the same report. Every byte is read once by the
    rank that has it, but for tensors that include and exclude leave out; of what differs the first rank fetches bytes.
    Raises CheckpointError for a file that cannot be read, UsageError for one that is no checkpoint of this rank, and
    where ranks read one file or those of several runs. Through `run_together` all ranks raise it.
    """
    if options.quick or options.group_by is not None:
        raise UsageError(Problem.NEEDS_ALL_FILES())
    if len(channel.ranks) < 2:
        raise UsageError(
            f"{path}: one process, and so one file: there is no other replica to compare it with; needs a process for "
            "each file: torchrun --nproc-per-node N"
        )
    with Files(jobs=1) as reader:
        snapshot = open_checkpoint(path, reader)
        found: dict[int, FileInfo] = channel.gather(_describe_file(snapshot), "files")
        _check_owners(found)
        snapshot = replace(snapshot, tensors=_skip_unselected(snapshot.tensors, options))
        if len({file.host for file in found.values()}) > 1:
            snapshot = replace(snapshot, path=f"{found[channel.rank].host}:{path}")
        runs = [file.run[0] for file in found.values() if file.run and file.run[0]]
        name = runs[0] if runs else title_of(pattern)
        return compare_snapshots(
            channel, snapshot, options, name=name, how=Grouping.LIVE_FILES(), histograms=histograms
        )


def _skip_unselected(tensors: Mapping[str, Tensor], options: Options) -> Mapping[str, Tensor]:
    """Return the tensors, and of those that no report will tell of the name alone: their bytes need not be read."""
    asked = selector(frozenset(), options.include, options.exclude)
    short = normalize(tensors)
    return {name: t if asked(short[name], "") else replace(t, data=b"") for name, t in tensors.items()}


def _describe_file(snapshot: Snapshot) -> FileInfo:
    known = snapshot.metadata or Metadata()
    host = os.uname().nodename
    machine = host
    with suppress(OSError):
        machine = _BOOT.read_text(encoding="ascii")
    real = os.path.realpath(snapshot.path)
    at = os.stat(real)
    marks: set[Hashable] = {(machine, at.st_dev, at.st_ino)}
    # One file system may have another number on each machine that mounts it. What has the same name, number and size
    # and was written in the same nanosecond is one file; not every file system counts these.
    if at.st_ctime_ns % _SECOND:
        marks.add((real, at.st_ino, at.st_size, at.st_ctime_ns))
    run = None if snapshot.metadata is None else (known.run, known.run_id)
    return FileInfo(snapshot.path, host, frozenset(marks), known.rank, run)


def _check_owners(files: Mapping[int, FileInfo]) -> None:
    """Raise UsageError where the files cannot be replicas, one of each rank. The same on all ranks.

    Otherwise a file would be compared with itself, and found in sync.
    """
    owner: dict[Hashable, int] = {}
    for rank, file in files.items():
        first = next((owner[mark] for mark in file.marks if mark in owner), None)
        if first is not None:
            raise UsageError(
                f"ranks {first} and {rank} read one and the same file: {files[first].path}; needs a file for "
                "each of them: name it by {rank}, for {local_rank} and {node_rank} alone are not unique"
            )
        owner |= dict.fromkeys(file.marks, rank)
    for rank, file in files.items():
        if file.rank not in (None, rank):
            raise UsageError(
                f"rank {rank} reads {file.path} on {file.host}, which rank {file.rank} saved, as its metadata says; "
                "needs its own: name it by {rank}, and start node N with --node-rank N. Copies of one rank's file are "
                "compared by 'syncheck fingerprint' on each node and one 'syncheck compare' of what it writes"
            )
    runs = group_ranks_by_value({rank: file.run for rank, file in files.items() if file.run is not None})
    if len(runs) > 1:
        told = "; ".join(f"{ranks_text(of)} of {_run_text(*run)}" for run, of in list(runs.items())[:MAX_ANSWERS])
        raise UsageError(f"the files are of several runs, as their metadata says: {told}; needs those of one run")


def _run_text(run: str | None, run_id: str | None) -> str:
    name = "a run without a name" if run is None else f"run {brief(run)}"
    return name if run_id is None else f"{name} with run_id {brief(run_id)}"
