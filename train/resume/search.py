"""Find the newest state complete on all ranks.

Ranks exchange the steps they can read, because the folder may be local to each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.launch.exits import print_once
from train.resume.files import UnusableState, list_visible_ranks, read_state, state_path

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext


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
