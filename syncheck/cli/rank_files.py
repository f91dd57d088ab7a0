"""Compare checkpoints of which each rank reads only its own, for example on node-local disks."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck.errors import OptionError, UsageError
from syncheck.frozen import record
from syncheck.layout.copies import find_shared_tensors
from syncheck.layout.groups import title_of
from syncheck.live.channel import MAX_VALUES
from syncheck.live.exchange import compare_snapshots
from syncheck.live.exchange.manifest import FileBytes
from syncheck.messages import Grouping, Usage
from syncheck.readers import find
from syncheck.snapshots import Metadata, contiguous_strides
from syncheck.tensors.blocks import Files, is_plain
from syncheck.tensors.kinds import make_selector
from syncheck.tensors.names import normalize
from syncheck.text import brief, group_ranks, ranks_text

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.records import Report
    from syncheck.snapshots import Snapshot, Tensor

# Unique per boot, and therefore per machine; host names may repeat.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SECOND = 10**9  # in nanoseconds


@record
class FileInfo:
    """A rank's file before it is read.

    path: on its host. marks: two files with a common mark are the same file. rank, run: from the metadata in the file;
    run is None without metadata.
    """

    path: str
    host: str
    marks: frozenset[Hashable]
    rank: int | None
    run: tuple[str | None, str | None] | None


def compare_files(channel: Channel, path: str, pattern: str, options: Options, *, histograms: bool = False) -> Report:
    """Compare this rank's checkpoint with the checkpoints of the other ranks.

    To be called within `channel.run_together`. path: this rank's file, or a folder with one checkpoint. pattern: of all
    paths, used to name the group without metadata. histograms: as in `api.judge`. All ranks return the same report.
    Each rank reads every byte of its file once, except tensors that include= and exclude= skip; the first rank fetches
    the bytes of differing tensors. Raises, on all ranks: CheckpointError for an unreadable file; UsageError for a path
    that is not a checkpoint of this rank, for ranks that read the same file, and for files of several runs.
    """
    if options.quick or options.group_by is not None:
        raise OptionError(Usage.ONE_PROCESS())
    if len(channel.ranks) < 2:
        raise UsageError(
            f"{path}: one process reads one file, so there is no other replica to compare with; start one process per "
            "file: torchrun --nproc-per-node N"
        )
    with Files(jobs=1) as reader:
        snapshot = _open_checkpoint(path, reader)
        files: dict[int, FileInfo] = channel.gather(_describe_file(snapshot), "files")
        _check_owners(files)
        snapshot = replace(snapshot, tensors=_skip_unselected(snapshot.tensors, options))
        if len({file.host for file in files.values()}) > 1:
            snapshot = replace(snapshot, path=f"{files[channel.rank].host}:{path}")
        runs = [file.run[0] for file in files.values() if file.run and file.run[0]]
        name = runs[0] if runs else title_of(pattern)
        return compare_snapshots(
            channel, snapshot, options, name=name, how=Grouping.LIVE_FILES(), histograms=histograms
        )


def _open_checkpoint(path: str, files: Files) -> Snapshot:
    """Open the checkpoint at a path; its tensors are read through `files`.

    Raises CheckpointError for unreadable files, UsageError for a folder of several checkpoints and for a fingerprint.
    """
    opened = find.open_checkpoints([path])
    for broken in opened.unreadable:
        raise UsageError(f"{broken.path}: {broken.reason}")
    if len(opened.snapshots) != 1:
        raise UsageError(f"{path}: {len(opened.snapshots)} checkpoints; expected the checkpoint of this rank")
    snapshot = opened.snapshots[0]
    if any(tensor.digest is not None for tensor in snapshot.tensors.values()):
        raise UsageError(f"{path}: a fingerprint; compare fingerprints without torchrun: syncheck compare *.json")
    tensors = {name: _make_readable(tensor, files) for name, tensor in snapshot.tensors.items()}
    # Ties follow from offsets in the file, which other ranks do not see.
    return replace(snapshot, tensors=tensors, ties=tuple(map(tuple, find_shared_tensors(snapshot.tensors.values()))))


def _make_readable(tensor: Tensor, files: Files) -> Tensor:
    if tensor.refused:
        return tensor
    # Reading resolves the memory order of the file.
    return replace(
        tensor,
        strides=contiguous_strides(tensor.shape),
        offset=0,
        big_endian=False,
        lazy="",
        shards=(),
        crc32=tensor.crc32 if is_plain(tensor) else None,
        record=None,
        opened=None,
        data=FileBytes(tensor, files),
    )


def _skip_unselected(tensors: Mapping[str, Tensor], options: Options) -> Mapping[str, Tensor]:
    """Return the tensors, without bytes for tensors that the options exclude by name."""
    is_selected = make_selector(frozenset(), options.include, options.exclude)
    normalized = normalize(tensors)
    return {name: t if is_selected(normalized[name], "") else replace(t, data=b"") for name, t in tensors.items()}


def _describe_file(snapshot: Snapshot) -> FileInfo:
    metadata = snapshot.metadata or Metadata()
    host = os.uname().nodename
    machine = host
    # Only Linux has a boot id.
    with suppress(OSError):
        machine = _BOOT.read_text(encoding="ascii")
    real = os.path.realpath(snapshot.path)
    status = os.stat(real)
    marks: set[Hashable] = {(machine, status.st_dev, status.st_ino)}
    # Machines may number a shared file system differently. Files with equal path, inode, size and write time in
    # nanoseconds are the same file; some file systems store whole seconds only.
    if status.st_ctime_ns % _SECOND:
        marks.add((real, status.st_ino, status.st_size, status.st_ctime_ns))
    run = None if snapshot.metadata is None else (metadata.run, metadata.run_id)
    return FileInfo(snapshot.path, host, frozenset(marks), metadata.rank, run)


def _check_owners(files: Mapping[int, FileInfo]) -> None:
    """Raise UsageError unless every rank has a file of its own from one run. The same on all ranks.

    Otherwise a file could be compared with itself, and appear in sync.
    """
    owner: dict[Hashable, int] = {}
    for rank, file in files.items():
        first = next((owner[mark] for mark in file.marks if mark in owner), None)
        if first is not None:
            raise UsageError(
                f"ranks {first} and {rank} read the same file: {files[first].path}; use {{rank}} in the path to give "
                "each rank its own file, because {local_rank} or {node_rank} alone is not unique"
            )
        owner |= dict.fromkeys(file.marks, rank)
    for rank, file in files.items():
        if file.rank not in (None, rank):
            raise UsageError(
                f"rank {rank} reads {file.path} on {file.host}, but its metadata has rank {file.rank}; use {{rank}} in "
                "the path, and start node N with --node-rank N. To compare copies of one rank's file, run 'syncheck "
                "fingerprint' on each node and 'syncheck compare' on the fingerprints"
            )
    # Replicas of two runs differ by design.
    runs = group_ranks({rank: file.run for rank, file in files.items() if file.run is not None})
    if len(runs) > 1:
        texts = [f"{ranks_text(ranks)} of {_run_text(*run)}" for run, ranks in list(runs.items())[:MAX_VALUES]]
        raise UsageError(
            f"the files are from several runs according to their metadata: {'; '.join(texts)}; pass files from one run"
        )


def _run_text(run: str | None, run_id: str | None) -> str:
    name = "an unnamed run" if run is None else f"run {brief(run)}"
    return name if run_id is None else f"{name} with run_id {brief(run_id)}"
