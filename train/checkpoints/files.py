"""The files of a run, one per rank: their names, how they are written, and how those of an earlier run go.

Of the end of a run `<out>/<run>_rank<r>.<ext>`, of its steps `<out>/history/<run>/step_<n>/rank_<r>.<ext>`, and of its
best epoch `<out>/best/<run>/rank_<r>.<ext>`. One per rank, and not rank 0's only as most trainers do: the replicas of a
model ought to be equal, and a file of one of them can never show that they are not.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from train.checkpoints.formats import FORMATS
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path


def final_path(out: Path, run: str, rank: int, extension: str) -> Path:
    """Name the file of one rank at the end of the run."""
    return out / f"{run}_rank{rank}.{extension}"


def step_path(out: Path, run: str, step: int, rank: int, extension: str) -> Path:
    """Name the file of one rank after `step` optimizer steps."""
    return out / "history" / run / f"step_{step}" / f"rank_{rank}.{extension}"


def best_path(out: Path, run: str, rank: int, extension: str) -> Path:
    """Name the file of one rank after the epoch that was best on the test set."""
    return out / "best" / run / f"rank_{rank}.{extension}"


def write_atomic(path: Path, payload: bytes) -> None:
    """Write a file that is either whole or not there; an older one stays until the new one is safe on disk.

    The bytes go to a hidden file beside it, which takes the name only once they have reached the disk. A
    process that is killed on the way leaves that hidden file, which matches no glob for checkpoints and is
    overwritten by the next run. Raises UserError with the system's reason: no space, no permission, not a
    folder.
    """
    try:
        write_beside(path, payload)
        take_name(path)
    finally:
        with suppress(OSError):
            beside(path).unlink()  # the folder stays: another rank may be about to write there


def beside(path: Path) -> Path:
    """Name the hidden file that is to become `path`."""
    return path.with_name(f".{path.name}.tmp")


def write_beside(path: Path, payload: bytes) -> None:
    """Write the hidden file, to the disk itself; `path` stays as it is. Raises UserError with the system's reason."""
    if path.is_dir():  # found now, before any rank's file takes its name
        raise UserError(f"cannot write {path}: {os.strerror(errno.EISDIR)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path).open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def take_name(path: Path) -> None:
    """Let the hidden file become `path`, at once or not at all. Raises UserError with the system's reason."""
    try:
        beside(path).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def remove_beside(path: Path) -> None:
    """Remove the hidden file if it is there, and a folder that was made for it alone: they must not fill the disk.

    Only when no rank writes any more: one between `mkdir` and `open` would report a missing folder, not a full disk.
    """
    with suppress(OSError):
        beside(path).unlink()
        path.parent.rmdir()  # fails where anything is in it


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(out: Path) -> None:
    """Make the folder and try a file in it, before hours of training go into it. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}") from error


def remove_run(out: Path, run: str, keep: Collection[Path] = ()) -> int:
    """Remove what an earlier run of the same name left: any rank, any step, any format; nothing else.

    keep: files of a run that goes on.

    Without this a run on 2 ranks would leave ranks 2 and 3 of an earlier one on 4 beside its own files.
    Returns the number of its checkpoints. Raises UserError.
    """
    removed = 0
    try:
        for path in set(_files_of(out, run)) - set(keep):
            if path.is_dir():  # somebody else's
                continue
            path.unlink(missing_ok=True)
            removed += not path.name.endswith(".tmp")
        history, best = out / "history" / run, out / "best" / run
        # Not history/ and best/: a run of another name may be between its `mkdir` and `open` there.
        for folder in (*history.glob("step_*"), history, best):
            with suppress(OSError):  # not there, or something of the user's is in it
                folder.rmdir()
    except OSError as error:
        raise UserError(f"cannot remove {error.filename} of an earlier run: {error.strerror}") from error
    return removed


def _files_of(out: Path, run: str) -> Iterator[Path]:
    """Find the files of one run, half-written ones too; whole names, for `ddp` is not `ddp-syncbn`."""
    ending = rf"\.(?:{'|'.join(FORMATS)})"
    final = re.compile(rf"{re.escape(run)}_rank\d+{ending}|\.{re.escape(run)}_rank\d+{ending}\.tmp")
    moment = re.compile(rf"rank_\d+{ending}|\.rank_\d+{ending}\.tmp")
    yield from [path for path in out.iterdir() if final.fullmatch(path.name)]
    steps = [f for f in (out / "history" / run).glob("step_*") if re.fullmatch(r"step_\d+", f.name)]
    for folder in (*steps, out / "best" / run):
        if folder.is_dir():
            yield from [path for path in folder.iterdir() if moment.fullmatch(path.name)]
