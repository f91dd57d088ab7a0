"""The newest state that all ranks can go on from: a question to all of them, for folders may be local to nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.launch.exits import print_once
from train.resume.files import Unusable, read, state_path, visible

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext

DIFFERENT_RUNS = "its files are of different runs"


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
        search = Search(folder, run, ctx, visible(folder))
    steps = sorted({step for ranks in ctx.gather(search.here) for step in ranks}, reverse=True)
    damaged = False
    for at, step in enumerate(steps):
        states, answers = search.look(step)
        problem, lacking = _problem(answers), []
        if not problem:
            # One identity: somebody sees files of this step, and whoever does has read one.
            ((_, saved_by),) = {answer.identity for answer in answers if answer.identity is not None}
            if saved_by == ctx.world_size:
                lacking = [rank for rank, answer in enumerate(answers) if answer.rank != rank]
            else:
                problem = search.read_others(step, saved_by, states, sharded=sharded)
            if not problem and not lacking:
                return Found(step, saved_by, states, tuple(steps[at + 1 :]))
        damaged = damaged or bool(problem)
        if lacking:
            problem = f"{state_path(folder, step, lacking[0])}: rank {lacking[0]} has no such file"
        print_once(ctx, f"--resume: step {step} is passed over: {problem}")
    if damaged or len(steps) > 1:
        raise UserError(
            f"--resume: none of the states in {folder} can be used; remove that folder to start at step 0 on purpose"
        )
    # Nothing, or one step that some ranks never came to write: the first save was cut short.
    print_once(ctx, f"--resume: no state in {folder} yet, starting at step 0")
    return None


def _problem(answers: list[Answer]) -> str:
    """Say why the files that the ranks have read are not those of one whole state; empty if they are."""
    damaged = next((answer.problem for answer in answers if answer.problem), "")
    identities = {answer.identity for answer in answers if answer.identity is not None}
    return damaged or (DIFFERENT_RUNS if len(identities) > 1 else "")


@dataclass(frozen=True)
class Search:
    """What one rank looks through. here: the ranks whose files it can see, by step."""

    folder: Path
    run: str
    ctx: RankContext
    here: dict[int, list[int]]

    def look(self, step: int) -> tuple[dict[int, dict[str, Any]], list[Answer]]:
        """Read this rank's own file, or else another to see what ranks there were; a collective.

        Returns what was read, by the rank that saved it, and all ranks' answers.
        """
        ranks = self.here.get(step, [])
        states: dict[int, dict[str, Any]] = {}
        answer = Answer()
        if ranks:
            rank = self.ctx.rank if self.ctx.rank in ranks else ranks[0]
            try:
                states[rank] = state = self._read(step, rank)
                answer = Answer(rank, identity=(state["run_id"], state["world_size"]))
            except Unusable as error:
                answer = Answer(rank, problem=str(error))
        return states, self.ctx.gather(answer)

    def read_others(self, step: int, saved_by: int, states: dict[int, dict[str, Any]], *, sharded: bool) -> str:
        """Read the files that this rank needs where the number of ranks was `saved_by`; a collective.

        states: those read so far, replaced by those that are needed. Returns why it cannot be, on any rank, or nothing.
        """
        ctx = self.ctx
        known = [rank for rank in self.here.get(step, []) if rank < saved_by]
        # Of whole replicas one is enough. Where all are to be seen, rank r takes that of rank r modulo their number.
        wanted = list(range(saved_by)) if sharded else known[ctx.rank % max(1, len(known)) :][:1]
        problem = ""
        if not wanted or not set(wanted) <= set(known):
            lacking = sorted(set(wanted) - set(known)) or [ctx.rank % saved_by]
            problem = (
                f"rank {ctx.rank} cannot see {state_path(self.folder, step, lacking[0])}, which it needs where the "
                f"number of ranks changes ({saved_by} then, {ctx.world_size} now): copy the files of all ranks to each "
                "node"
            )
        else:
            try:
                needed = {rank: states.get(rank) or self._read(step, rank) for rank in wanted}
                if len({(state["run_id"], state["world_size"]) for state in needed.values()}) > 1:
                    raise Unusable(DIFFERENT_RUNS)
                states.clear()
                states.update(needed)
            except Unusable as error:
                problem = str(error)
        return next((text for text in ctx.gather(problem) if text), "")

    def _read(self, step: int, rank: int) -> dict[str, Any]:
        path = state_path(self.folder, step, rank)
        state = read(path, self.run)
        if (state["step"], state["rank"]) != (step, rank):
            raise Unusable(f"{path}: holds step {state['step']} of rank {state['rank']}")
        return state
