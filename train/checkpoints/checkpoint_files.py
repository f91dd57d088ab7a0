"""The files of checkpoints: their content, formats and names, atomic writes, and removal.

    <out>/<run>_rank<r>.<ext>                          the end of the run
    <out>/history/<run>/step_<n>/rank_<r>.<ext>        after step n
    <out>/best/<run>/rank_<r>.<ext>                    the best epoch

Most trainers save only rank 0. This trainer saves every rank, because replicas must be equal and a file from one rank
cannot show a difference.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError, explain_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from torch import Tensor

STEP_FOLDER = r"step_\d+"


@dataclass(frozen=True)
class Checkpoint:
    """The state of one rank after a step.

    model: tensors by name, without a wrapper's prefix. optimizer, scaler: state dicts; scaler is None if disabled.
    block: the result of syncheck.metadata(), written if syncheck is installed. ema: averaged parameters, with --ema.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    epoch: int
    step: int
    block: dict[str, Any]
    ema: dict[str, Tensor] | None = None


def encode_pth(checkpoint: Checkpoint) -> bytes:
    """Serialize with torch.save. torch.load(weights_only=True) accepts the result."""
    buffer = io.BytesIO()
    content: dict[str, Any] = {"model": checkpoint.model}
    if checkpoint.ema is not None:
        content["ema"] = checkpoint.ema
    content["optimizer"] = checkpoint.optimizer
    if checkpoint.scaler is not None:
        content["scaler"] = checkpoint.scaler
    content |= {"epoch": checkpoint.epoch, "step": checkpoint.step}
    if "schema" in checkpoint.block:
        content["syncheck"] = checkpoint.block
    torch.save(copy_to_cpu(content), buffer)
    return buffer.getvalue()


def encode_safetensors(checkpoint: Checkpoint) -> bytes:
    """Serialize as a flat safetensors file.

    Optimizer state is named `optimizer.<parameter>.<state>` and averaged parameters are named `ema.<parameter>`. The
    format stores only tensors and strings, so param_groups and the state of the GradScaler are omitted. Raises
    UserError if safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise UserError("--save-format safetensors: not installed; pip install -e '.[train]'") from error
    tensors = checkpoint.model | {f"ema.{name}": tensor for name, tensor in (checkpoint.ema or {}).items()}
    # In the order of the state dict's integer ids.
    names = checkpoint.block["optimizer_parameters"]
    for index, states in checkpoint.optimizer["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{names[index]}.{key}"] = value
    strings = {"epoch": str(checkpoint.epoch), "step": str(checkpoint.step)}
    if "schema" in checkpoint.block:
        strings["syncheck"] = json.dumps(checkpoint.block)
    return save({name: copy_to_cpu(tensor).contiguous() for name, tensor in tensors.items()}, metadata=strings)


def copy_to_cpu(tree: Any) -> Any:
    """Copy all tensors in nested dicts, lists and tuples to the CPU.

    CPU tensors are copied too: for a view, torch.save would write the whole storage, and safetensors rejects tensors
    that share memory.
    """
    if isinstance(tree, dict):
        return {key: copy_to_cpu(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(copy_to_cpu(value) for value in tree)
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    return tree


# Encoders by file extension.
FORMATS: dict[str, Callable[[Checkpoint], bytes]] = {"pth": encode_pth, "safetensors": encode_safetensors}


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


def list_matching(folder: Path, pattern: str) -> list[Path]:
    """List the entries of a folder whose whole names match a regular expression; none if there is no folder.

    A list, so that the caller can remove files while it iterates. Raises OSError.
    """
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]


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
