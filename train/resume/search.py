"""The newest state that all ranks can go on from: a question to all of them, for folders may be local to nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.launch import tell
from train.resume.files import Unusable, read, state_path, visible

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext


@dataclass(frozen=True)
class Found:
    """A state to go on from.

    step: after which it was saved, by how many ranks: world_size. states: what this rank needs of it, by the rank that
    saved it. older: steps of the states before it.
    """

    step: int
    world_size: int
    states: dict[int, dict[str, Any]]
    older: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What one rank says of one step, small enough to be sent to all.

    rank: whose file it has read, None where it sees none. problem: why that is of no use, or empty. identity: run_id
    and world size in it.
    """

    rank: int | None = None
    problem: str = ""
    identity: tuple[str, int] | None = None


def newest(folder: Path, run: str, ctx: RankContext, *, sharded: bool) -> Found | None:
    """Find the newest state of `run` that is whole on all ranks; None where none was ever completed.

    What is passed over is said, in a line each. sharded: whether a rank's file is a part of the model or optimizer, so
    that with another number of ranks each needs all files. A collective. Raises UserError, on all ranks alike, where
    there are states and none can be used.
    """
    with ctx.together():
        here = visible(folder)
    steps = sorted({step for ranks in ctx.gather(here) for step in ranks}, reverse=True)
    damaged = False
    for at, step in enumerate(steps):
        states, answers = _look(folder, step, run, ctx, here.get(step, []))
        old = _agreed(answers)
        problem = _first_problem(answers)
        if not problem and isinstance(old, str):
            problem = old
        if not problem and isinstance(old, int) and old != ctx.world_size:
            problem = _read_others(folder, step, run, ctx, old, here.get(step, []), states, sharded=sharded)
        damaged = damaged or bool(problem)
        if not problem:
            assert isinstance(old, int)
            lacking = [rank for rank, answer in enumerate(answers) if answer.rank != rank]
            if old != ctx.world_size or not lacking:
                return Found(step, old, states, tuple(steps[at + 1 :]))
            problem = f"{state_path(folder, step, lacking[0])}: rank {lacking[0]} has no such file"
        tell(ctx, f"--resume: step {step} is passed over: {problem}")
    if damaged or len(steps) > 1:
        raise UserError(
            f"--resume: none of the states in {folder} can be used; remove that folder to start at step 0 on purpose"
        )
    # Nothing, or one step that some ranks never came to write: the first save was cut short.
    tell(ctx, f"--resume: no state in {folder} yet, starting at step 0")
    return None


def _look(
    folder: Path, step: int, run: str, ctx: RankContext, ranks: list[int]
) -> tuple[dict[int, dict[str, Any]], list[Answer]]:
    """Read this rank's own file, or else another to see what ranks there were; returns it and all ranks' answers."""
    states: dict[int, dict[str, Any]] = {}
    answer = Answer()
    if ranks:
        rank = ctx.rank if ctx.rank in ranks else ranks[0]
        try:
            states[rank] = state = _read(folder, step, rank, run)
            answer = Answer(rank, identity=(state["run_id"], state["world_size"]))
        except Unusable as error:
            answer = Answer(rank, problem=str(error))
    return states, ctx.gather(answer)


def _read(folder: Path, step: int, rank: int, run: str) -> dict[str, Any]:
    path = state_path(folder, step, rank)
    state = read(path, run)
    if (state["step"], state["rank"]) != (step, rank):
        raise Unusable(f"{path}: holds step {state['step']} of rank {state['rank']}")
    return state


def _first_problem(answers: list[Answer]) -> str:
    return next((answer.problem for answer in answers if answer.problem), "")


def _agreed(answers: list[Answer]) -> int | str:
    """Give the number of ranks that saved the state, or say why it is not one state."""
    identities = {answer.identity for answer in answers if answer.identity is not None}
    if len(identities) > 1:
        return "its files are of different runs"
    return next((world_size for _, world_size in identities), 0)


def _read_others(
    folder: Path,
    step: int,
    run: str,
    ctx: RankContext,
    old: int,
    ranks: list[int],
    states: dict[int, dict[str, Any]],
    *,
    sharded: bool,
) -> str:
    """Read the files that this rank needs of another number of ranks; returns why that cannot be, or nothing."""
    known = [rank for rank in ranks if rank < old]
    # Of whole replicas one is enough. Where all are to be seen, rank r takes that of rank r modulo their number.
    wanted = list(range(old)) if sharded else known[ctx.rank % max(1, len(known)) :][:1]
    problem = ""
    if not wanted or not set(wanted) <= set(known):
        lacking = sorted(set(wanted) - set(known)) or [ctx.rank % old]
        problem = (
            f"rank {ctx.rank} cannot see {state_path(folder, step, lacking[0])}, which it needs where the "
            f"number of ranks changes ({old} then, {ctx.world_size} now): copy the files of all ranks to each node"
        )
    else:
        try:
            read_now = {rank: states.get(rank) or _read(folder, step, rank, run) for rank in wanted}
            if len({(state["run_id"], state["world_size"]) for state in read_now.values()}) > 1:
                raise Unusable("its files are of different runs")
            states.clear()
            states.update(read_now)
        except Unusable as error:
            problem = str(error)
    return next((text for text in ctx.gather(problem) if text), "")
