"""State files for --resume: `<out>/.resume/<run>/step_<n>/rank_<r>.pth`, one per rank and step.

The folder is hidden, so that tools that search `<out>` for checkpoints, like `syncheck report`, skip it. Given
explicitly, it is compared like any other folder of ranks.

To find the newest state that is complete on all ranks, the ranks exchange the steps that they can read, because the
folder may be local to each node.
"""

from __future__ import annotations

import io
import logging
import re
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.checkpoint_files import write_atomic
from train.checkpoints.formats import copy_to_cpu
from train.errors import UserError
from train.launch.signals import print_once

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from train.launch import RankContext

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


def newest_step_path(out: Path, run: str) -> Path:
    """Return the file with the step of a run's newest state. It is beside the states, and remains if they are lost."""
    return out / f".{run}.newest"


def record_newest_step(out: Path, run: str, step: int | None) -> None:
    """Record the step of the newest complete state; None before an earlier run's states are removed."""
    path = newest_step_path(out, run)
    with suppress(OSError):  # if the disk is full, the state itself is still complete
        if step is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(f"{step}\n")


def read_newest_step(out: Path, run: str) -> int | None:
    """Return the recorded step; None if no state was ever complete, or the record is damaged."""
    with suppress(OSError, ValueError):
        return int(newest_step_path(out, run).read_text())
    return None


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


@dataclass(frozen=True)
class FoundState:
    """A state to resume from.

    step: optimizer steps done. world_size: number of ranks that saved it. states: the contents needed by this rank, by
    saving rank. older: steps of older states.
    """

    step: int
    world_size: int
    states: dict[int, dict[str, Any]]
    older: tuple[int, ...]


def find_newest_state(folder: Path, run: str, ctx: RankContext, *, sharded: bool) -> FoundState | None:
    """Find the newest state of `run` usable on all ranks; None if no state was completed. A collective.

    Each skipped step is reported in one line. sharded: whether each file holds only a shard of the model or optimizer,
    so that another number of ranks needs all files. Raises UserError on all ranks if all existing states are unusable,
    or if the method cannot change the number of ranks.
    """
    with ctx.together():
        mine = list_visible_ranks(folder)
    visible = ctx.gather(mine)
    steps = sorted({step for ranks in visible for step in ranks}, reverse=True)
    damaged = False
    for at, step in enumerate(steps):
        known, lacking = [ranks.get(step, []) for ranks in visible], []
        # A rank without a file of its own reads any other, because every file contains the number of saving ranks.
        own = known[ctx.rank]
        states, identities, problem = _read_states(folder, run, step, [ctx.rank] if ctx.rank in own else own[:1], ctx)
        if not problem:
            ((_, saved_by),) = identities
            if saved_by == ctx.world_size:
                lacking = [rank for rank, ranks in enumerate(known) if rank not in ranks]
            elif max(ctx.mesh.size(name) for name in ("pipeline", "expert", "tensor")) > 1:
                found = f"{folder / f'step_{step}'} was saved by {saved_by} ranks, each with another part of the model"
                raise UserError(f"--resume: {found}; start {saved_by} ranks, or use another --out")
            else:
                wanted = [_choose_ranks(rank, saved_by, ranks, sharded=sharded) for rank, ranks in enumerate(known)]
                problem = _find_lacking_file(folder, step, saved_by, known, wanted)
                if not problem:
                    states, _, problem = _read_states(folder, run, step, wanted[ctx.rank], ctx)
            if not problem and not lacking:
                return FoundState(step, saved_by, states, tuple(steps[at + 1 :]))
        damaged = damaged or bool(problem)
        if lacking:
            problem = f"{state_path(folder, step, lacking[0])}: rank {lacking[0]} lacks this file"
        print_once(ctx, f"--resume: skipping step {step}: {problem}")
    if damaged or len(steps) > 1:
        raise UserError(f"--resume: no state in {folder} is usable; remove the folder to start at step 0")
    # No state, or an incomplete first state: the run stopped before all ranks had written it.
    print_once(ctx, f"--resume: no state in {folder} yet, starting at step 0")
    return None


def _choose_ranks(rank: int, saved_by: int, known: list[int], *, sharded: bool) -> list[int]:
    """Choose the files to read after a change of the number of ranks.

    A whole replica needs one file. If all files are visible, rank r reads the file of rank r modulo their number.
    """
    if sharded:
        return list(range(saved_by))
    known = [other for other in known if other < saved_by]
    return [known[rank % len(known)] if known else rank % saved_by]


def _find_lacking_file(folder: Path, step: int, saved_by: int, known: list[list[int]], wanted: list[list[int]]) -> str:
    for rank, (visible, needed) in enumerate(zip(known, wanted, strict=True)):
        for other in needed:
            if other not in visible:
                return (
                    f"rank {rank} cannot read {state_path(folder, step, other)}, which is required because the number "
                    f"of ranks changed from {saved_by} to {len(known)}; copy the files of all ranks to each node"
                )
    return ""


def _read_states(
    folder: Path, run: str, step: int, ranks: list[int], ctx: RankContext
) -> tuple[dict[int, dict[str, Any]], set[tuple[str, int]], str]:
    """Read the files of these saving ranks; a collective.

    Returns the contents by rank, and for the files of all ranks: the run ids with their numbers of ranks, and the first
    problem or an empty string.
    """
    states: dict[int, dict[str, Any]] = {}
    problem = ""
    try:
        for rank in ranks:
            path = state_path(folder, step, rank)
            states[rank] = state = read_state(path, run)
            if (state["step"], state["rank"]) != (step, rank):
                raise UnusableState(f"{path}: contains step {state['step']} of rank {state['rank']}")
    except UnusableState as error:
        problem = str(error)
    answers = ctx.gather(([(state["run_id"], state["world_size"]) for state in states.values()], problem))
    identities = {identity for found, _ in answers for identity in found}
    problem = next((text for _, text in answers if text), "")
    return states, identities, problem or "its files come from different runs" * (len(identities) > 1)
