"""State files for --resume: `<out>/.resume/<run>/step_<n>/rank_<r>.pth`, one per rank and step.

The folder is hidden, so that tools that search `<out>` for checkpoints, like `syncheck report`, skip it. Given
explicitly, it is compared like any other folder of ranks.

To find the newest state that is complete on all ranks, the ranks exchange the steps that they can read, because the
folder may be local to each node.
"""

from __future__ import annotations

import io
import logging
import shutil
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.checkpoint_files import STEP_FOLDER, copy_to_cpu, list_matching, write_atomic
from train.errors import UserError, explain_os_error, first_line, refuse
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
    ranks_by_step: dict[int, list[int]] = {}
    with explain_os_error(f"--resume: cannot read {folder}"):
        for step_folder in list_matching(folder, STEP_FOLDER):
            for path in list_matching(step_folder, r"rank_\d+\.pth"):
                ranks_by_step.setdefault(read_number(step_folder), []).append(read_number(path))
    return {step: sorted(ranks) for step, ranks in ranks_by_step.items()}


def read_number(path: Path) -> int:
    """Return the number in the name of a step's folder, or of a rank's file."""
    return int(path.stem.rpartition("_")[2])


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state file atomically. Raises UserError with the system's reason."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **copy_to_cpu(state)}, buffer)
    write_atomic(path, buffer.getvalue())


def read_state(path: Path, run: str) -> dict[str, Any]:
    """Read and validate a state of `run`, without executing anything in the file.

    Raises UnusableState with the file and the reason.
    """
    state: Any = None
    try:
        # torch.load ignores the CRC-32 checksums written by torch.save: a flipped bit would become a weight.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UnusableState(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged file can make torch and zipfile raise anything
        raise UnusableState(f"{path}: damaged or truncated ({first_line(error)[:200]})") from error
    content: dict[str, Any] = state if isinstance(state, dict) else {}
    version, saved_run = content.get("version"), content.get("run")
    refuse(
        (damaged is not None, f"{path}: damaged at {damaged}"),
        (content.get("format") != FORMAT, f"{path}: not a state file of --resume"),
        (version != VERSION, f"{path}: version {version}; expected version {VERSION}"),
        (saved_run != run, f"{path}: belongs to another run, {saved_run}"),
        error=UnusableState,
    )
    return content


def remove_states(folder: Path, keep: Collection[int]) -> None:
    """Remove the states of all steps except `keep`, including temporary files. Raises UserError."""
    try:
        for step in list_matching(folder, STEP_FOLDER):
            if read_number(step) in keep:
                continue
            shutil.rmtree(sharded_folder(step), ignore_errors=True)
            for path in list_matching(step, r"rank_\d+\.pth|\.rank_\d+\.pth\.tmp"):
                if not path.is_dir():
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # contains files of the user
                step.rmdir()
    except FileNotFoundError:
        # A rank on another node removed it first, in a shared folder.
        pass
    except OSError as error:
        raise UserError(f"cannot remove the old state {error.filename}: {error.strerror}") from error


@dataclass(frozen=True)
class FoundState:
    """A state to resume from.

    step: optimizer steps done. world_size: number of ranks that saved it. state: the contents of this rank's file;
    after a change of the number of ranks, of the file of rank r modulo the old number. older: steps of older states.
    """

    step: int
    world_size: int
    state: dict[str, Any]
    older: tuple[int, ...]


@dataclass(frozen=True)
class StepFiles:
    """The files of one step.

    problem: why the step is unusable, or empty. is_incomplete: whether a rank lacks its file, which is then the
    problem: the run stopped before all ranks had written.
    """

    world_size: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    is_incomplete: bool = False


def find_newest_state(folder: Path, run: str, ctx: RankContext, *, sharded: bool) -> FoundState | None:
    """Find the newest state of `run` usable on all ranks; None if no state was completed. A collective.

    Each skipped step is reported in one line. sharded: whether another number of ranks needs the folder of
    torch.distributed.checkpoint too. Raises UserError on all ranks if all existing states are unusable, or if the
    method cannot change the number of ranks.
    """
    with ctx.share_errors():
        mine = list_visible_ranks(folder)
    visible_by_rank = ctx.gather(mine)
    steps = sorted({step for visible in visible_by_rank for step in visible}, reverse=True)
    all_incomplete = True
    for index, step in enumerate(steps):
        saved_ranks = [visible.get(step, []) for visible in visible_by_rank]
        files = _read_step(folder, run, step, saved_ranks, ctx, sharded=sharded)
        if not files.problem:
            return FoundState(step, files.world_size, files.state, tuple(steps[index + 1 :]))
        all_incomplete = all_incomplete and files.is_incomplete
        print_once(ctx, f"--resume: skipping step {step}: {files.problem}")
    if not all_incomplete or len(steps) > 1:
        raise UserError(f"--resume: no state in {folder} is usable; remove the folder to start at step 0")
    # No state, or an incomplete first state: the run stopped before all ranks had written it.
    print_once(ctx, f"--resume: no state in {folder} yet, starting at step 0")
    return None


def _read_step(
    folder: Path, run: str, step: int, saved_ranks: list[list[int]], ctx: RankContext, *, sharded: bool
) -> StepFiles:
    """Read this rank's file of a step; a collective. saved_ranks: the ranks whose files each rank can read."""
    state, problem = _read_rank(folder, run, step, ctx.rank, saved_ranks[ctx.rank])
    mine: tuple[str, int] | None = (state["run_id"], state["world_size"]) if state else None
    answers = ctx.gather((mine, problem))
    for _, text in answers:
        if text:
            return StepFiles(problem=text)
    identities = {identity for identity, _ in answers if identity is not None}
    if len(identities) > 1:
        return StepFiles(problem="its files come from different runs")
    ((_, saved_by),) = identities
    if saved_by == ctx.world_size:
        for rank, readable in enumerate(saved_ranks):
            if rank not in readable:
                problem = f"{state_path(folder, step, rank)}: rank {rank} lacks this file"
                return StepFiles(problem=problem, is_incomplete=True)
        return StepFiles(saved_by, state)
    if max(ctx.mesh.size(name) for name in ("pipeline", "expert", "tensor")) > 1:
        text = f"{folder / f'step_{step}'} was saved by {saved_by} ranks, each with another part of the model"
        raise UserError(f"--resume: {text}; start {saved_by} ranks, or use another --out")
    shards = sharded_folder(folder / f"step_{step}")
    needed_path = None
    if not state:
        needed_path = state_path(folder, step, ctx.rank % saved_by)
    elif sharded and not (shards / ".metadata").is_file():  # torch writes it last
        needed_path = shards
    for reader, path in enumerate(ctx.gather(needed_path)):
        if path is not None:
            problem = f"rank {reader} cannot read {path}, which is required because the number of ranks changed from "
            problem += f"{saved_by} to {ctx.world_size}; copy the files of all ranks to each node"
            return StepFiles(problem=problem)
    return StepFiles(saved_by, state)


def _read_rank(folder: Path, run: str, step: int, rank: int, readable: list[int]) -> tuple[dict[str, Any], str]:
    """Read the file of a rank; return its contents, empty without a file, and the problem or an empty string.

    readable: the ranks whose files this process can read. A rank without a file of its own reads another, because every
    file contains the number of saving ranks.
    """
    if not readable:
        return {}, ""
    if rank not in readable:
        rank = readable[rank % len(readable)]
    path = state_path(folder, step, rank)
    try:
        state = read_state(path, run)
    except UnusableState as error:
        return {}, str(error)
    if (state["step"], state["rank"]) != (step, rank):
        return {}, f"{path}: contains step {state['step']} of rank {state['rank']}"
    return state, ""


def sharded_folder(step_folder: Path) -> Path:
    """Return the folder of a step's sharded tensors, in the format of torch.distributed.checkpoint.

    It is hidden, so `syncheck compare` of the step compares the files of the ranks alone.
    """
    return step_folder / ".sharded"
