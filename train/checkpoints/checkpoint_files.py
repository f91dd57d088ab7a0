"""Names, atomic writes and removal of checkpoint files.

    <out>/<run>_rank<r>.<ext>                          the end of the run
    <out>/history/<run>/step_<n>/rank_<r>.<ext>        after step n
    <out>/best/<run>/rank_<r>.<ext>                    the best epoch

Most trainers save only rank 0. This trainer saves every rank, because replicas must be equal and a file from one rank
cannot show a difference.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from train.checkpoints.formats import FORMATS
from train.errors import UserError, explain_os_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path


STEP_FOLDER = r"step_\d+"


def list_matching(folder: Path, pattern: str) -> list[Path]:
    """List the entries of a folder whose whole names match a regular expression; none if there is no folder.

    A list, so that the caller can remove files while it iterates. Raises OSError.
    """
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]


def write_atomic(path: Path, payload: bytes) -> None:
    """Replace a file atomically: `path` contains either the old data or all of the new data.

    The data is written to a hidden temporary file, flushed to disk, and renamed. A killed process leaves the temporary
    file, which no checkpoint glob matches and the next run overwrites. Raises UserError with the system's reason.
    """
    try:
        write_temporary(path, payload)
        rename_into_place(path)
    finally:
        with suppress(OSError):
            # Keep the folder: another rank may be about to write to it.
            temporary_path(path).unlink()


def temporary_path(path: Path) -> Path:
    """Return the hidden temporary file for `path`."""
    return path.with_name(f".{path.name}.tmp")


def write_temporary(path: Path, payload: bytes) -> None:
    """Write the temporary file for `path` and flush it to disk. Raises UserError with the system's reason."""
    if path.is_dir():  # fail before any rank renames its file
        raise UserError(f"cannot write {path}: {os.strerror(errno.EISDIR)}")
    with explain_os_error(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_path(path).open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())


def rename_into_place(path: Path) -> None:
    """Rename the temporary file to `path` atomically. Raises UserError with the system's reason."""
    with explain_os_error(f"cannot write {path}"):
        temporary_path(path).replace(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            # Flush the folder, so that the new name survives a power failure.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_temporary(path: Path) -> None:
    """Remove the temporary file and its folder if the folder is empty, to free the disk.

    Call it only when no rank is writing: a rank between `mkdir` and `open` would report a missing folder instead of a
    full disk.
    """
    with suppress(OSError):
        temporary_path(path).unlink()
        path.parent.rmdir()  # fails if the folder is not empty


def check_writable(out: Path) -> None:
    """Create the output folder and test that it is writable, before the training starts. Raises UserError."""
    with explain_os_error(f"cannot write to --out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass


def remove_run(out: Path, run: str, keep: Collection[Path] = ()) -> int:
    """Remove the files of an earlier run with the same name: all ranks, steps and formats.

    Otherwise a run on 2 ranks would leave ranks 2 and 3 of an earlier run on 4 ranks beside its own files.
    keep: files of a resumed run. Returns the number of removed checkpoints. Raises UserError.
    """
    removed = 0
    try:
        for path in set(_find_run_files(out, run)) - set(keep):
            if path.is_dir():  # not written by this trainer
                continue
            path.unlink(missing_ok=True)
            removed += not path.name.endswith(".tmp")
        history, best = out / "history" / run, out / "best" / run
        # Keep history/ and best/: a run with another name may be between its `mkdir` and `open` there.
        for folder in (*history.glob("step_*"), history, best):
            with suppress(OSError):  # missing, or contains files of the user
                folder.rmdir()
    except OSError as error:
        raise UserError(f"cannot remove {error.filename} of an earlier run: {error.strerror}") from error
    return removed


def _find_run_files(out: Path, run: str) -> Iterator[Path]:
    """List the checkpoints of one run and their temporary files. `ddp` must not match `ddp-syncbn`."""
    ending = rf"\.(?:{'|'.join(FORMATS)})"
    final = rf"{re.escape(run)}_rank\d+{ending}|\.{re.escape(run)}_rank\d+{ending}\.tmp"
    moment = rf"rank_\d+{ending}|\.rank_\d+{ending}\.tmp"
    yield from list_matching(out, final)
    for folder in (*list_matching(out / "history" / run, STEP_FOLDER), out / "best" / run):
        yield from list_matching(folder, moment)
