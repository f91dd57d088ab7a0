"""The files that --resume reads: `<out>/.resume/<run>/step_<n>/rank_<r>.pth`, one per rank and step.

The folder is hidden, so that whoever walks `<out>` for checkpoints, `syncheck report` for one, finds the same with and
without it; named itself, it is compared like any other folder of ranks.
"""

from __future__ import annotations

import io
import re
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.files import write_atomic
from train.checkpoints.formats import copied
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

FORMAT, VERSION = "train-resume", 1
# What `read` promises to be there, and of which type.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "run": str,
    "run_id": str,
    "rank": int,
    "world_size": int,
    "replicas": int,
    "step": int,
    "epoch": int,
    "steps_per_epoch": int,
    "config": dict,
    "position": dict,
    "model": dict,
    "optimizer": dict,
    "optimizer_names": list,
    "scaler": (dict, type(None)),
    "ema": (dict, type(None)),
    "method": dict,
    "also": dict,
    "rng": dict,
    "saved": list,
    "syncheck": dict,
}


class Unusable(Exception):
    """A file cannot be resumed from; the text says why."""


def states_folder(out: Path, run: str) -> Path:
    """Name the folder of one run's states."""
    return out / ".resume" / run


def state_path(folder: Path, step: int, rank: int) -> Path:
    """Name the file of one rank after `step` optimizer steps. folder: of `states_folder`."""
    return folder / f"step_{step}" / f"rank_{rank}.pth"


def visible(folder: Path) -> dict[int, list[int]]:
    """List the ranks whose files this process can see, by step. Raises UserError where the folder cannot be read."""
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


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a state that is either whole or not there. Raises UserError with the system's reason."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **copied(state)}, buffer)
    write_atomic(path, buffer.getvalue())


def read(path: Path, run: str) -> dict[str, Any]:
    """Read a state of `run` and check that it is one, whole; nothing in it is executed.

    Raises Unusable with the file and the reason.
    """
    try:
        # torch.load does not look at the checksums that torch.save has written; a flipped bit would become a weight.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise Unusable(f"{path}: damaged at {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Unusable:
        raise
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged file can make torch and zipfile raise anything
        raise Unusable(f"{path}: damaged or cut short ({_first_line(error)})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Unusable(f"{path}: not a state that --resume reads")
    if state.get("version") != VERSION:
        raise Unusable(f"{path}: of version {state.get('version')}, and {VERSION} is needed")
    for name, kind in FIELDS.items():
        if not isinstance(state.get(name), kind):
            raise Unusable(f"{path}: {name} is missing, or not what it should be")
    if state["run"] != run:
        raise Unusable(f"{path}: of another run, {state['run']}")
    return state


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def remove_states(folder: Path, keep: Collection[int]) -> None:
    """Remove the states of all steps but `keep`, half-written ones too, and nothing else. Raises UserError."""
    try:
        for step in folder.glob("step_*"):
            number = re.fullmatch(r"step_(\d+)", step.name)
            if number and int(number[1]) not in keep:
                for path in step.iterdir():
                    if re.fullmatch(r"rank_\d+\.pth|\.rank_\d+\.pth\.tmp", path.name) and not path.is_dir():
                        path.unlink(missing_ok=True)
                with suppress(OSError):  # something of the user's is in it
                    step.rmdir()
    except FileNotFoundError:
        pass  # another node's rank was faster, in a folder that they share
    except OSError as error:
        raise UserError(f"cannot remove {error.filename}, a state no longer needed: {error.strerror}") from error
