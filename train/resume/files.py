"""State files for --resume: `<out>/.resume/<run>/step_<n>/rank_<r>.pth`, one per rank and step.

The folder is hidden, so that tools that search `<out>` for checkpoints, like `syncheck report`, skip it. Given
explicitly, it is compared like any other folder of ranks.
"""

from __future__ import annotations

import io
import logging
import re
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.files import write_atomic
from train.checkpoints.formats import copy_to_cpu
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

FORMAT, VERSION = "train-resume", 1
# torch warns that the process groups of a saved mesh are missing, but tensors get the current mesh.
logging.getLogger("torch.distributed.device_mesh").addFilter(lambda record: "unpickling" not in str(record.msg))


class UnusableState(Exception):
    """A state file cannot be used; the message contains the reason."""


def states_folder(out: Path, run: str) -> Path:
    """Return the folder of a run's states."""
    return out / ".resume" / run


def state_path(folder: Path, step: int, rank: int) -> Path:
    """Return the state file of one rank after `step` optimizer steps. folder: from `states_folder`."""
    return folder / f"step_{step}" / f"rank_{rank}.pth"


def list_visible_ranks(folder: Path) -> dict[int, list[int]]:
    """List the ranks with a state file visible to this process, by step. Raises UserError if that fails."""
    found: dict[int, list[int]] = {}
    try:
        for path in folder.glob("step_*/rank_*.pth"):
            step = re.fullmatch(r"step_(\d+)", path.parent.name)
            rank = re.fullmatch(r"rank_(\d+)\.pth", path.name)
            if step and rank:
                found.setdefault(int(step[1]), []).append(int(rank[1]))
    except OSError as error:
        raise UserError(f"--resume: cannot read {folder}: {error.strerror}") from error
    return {step: sorted(ranks) for step, ranks in found.items()}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state file atomically. Raises UserError with the system's reason."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **copy_to_cpu(state)}, buffer)
    write_atomic(path, buffer.getvalue())


def read_state(path: Path, run: str) -> dict[str, Any]:
    """Read and validate a state of `run`, without executing anything in the file.

    Raises UnusableState with the file and the reason.
    """
    try:
        # torch.load ignores the CRC-32 checksums written by torch.save: a flipped bit would become a weight.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise UnusableState(f"{path}: damaged at {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UnusableState:
        raise
    except OSError as error:
        raise UnusableState(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged file can make torch and zipfile raise anything
        raise UnusableState(f"{path}: damaged or truncated ({_first_line(error)})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UnusableState(f"{path}: not a state file of --resume")
    if state.get("version") != VERSION:
        raise UnusableState(f"{path}: version {state.get('version')}; expected version {VERSION}")
    if state["run"] != run:
        raise UnusableState(f"{path}: belongs to another run, {state['run']}")
    return state


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def remove_states(folder: Path, keep: Collection[int]) -> None:
    """Remove the states of all steps except `keep`, including temporary files. Raises UserError."""
    try:
        for step in folder.glob("step_*"):
            number = re.fullmatch(r"step_(\d+)", step.name)
            if number and int(number[1]) not in keep:
                for path in step.iterdir():
                    if re.fullmatch(r"rank_\d+\.pth|\.rank_\d+\.pth\.tmp", path.name) and not path.is_dir():
                        path.unlink(missing_ok=True)
                with suppress(OSError):  # contains files of the user
                    step.rmdir()
    except FileNotFoundError:
        pass  # a rank on another node removed it first, in a shared folder
    except OSError as error:
        raise UserError(f"cannot remove the old state {error.filename}: {error.strerror}") from error
