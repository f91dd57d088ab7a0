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

DIFFERENT_RUNS = "its files come from different runs"


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


@dataclass(frozen=True)
class ReadResult:
    """The result of one rank's attempt to read a step, small enough to send to all ranks.

    rank: the rank that saved the file, or None if no file is visible. problem: why the file is unusable, or empty.
    identity: the run id and world size in the file.
    """

    rank: int | None = None
    problem: str = ""
    identity: tuple[str, int] | None = None


def find_newest_state(folder: Path, run: str, ctx: RankContext, *, sharded: bool) -> FoundState | None:
    """Find the newest state of `run` usable on all ranks; None if no state was completed. A collective.

    Each skipped step is reported in one line. sharded: whether each file holds only a shard of the model or optimizer,
    so that another number of ranks needs all files. Raises UserError on all ranks if all existing states are unusable.
    """
    with ctx.together():
        search = Search(folder, run, ctx, list_visible_ranks(folder))
    steps = sorted({step for ranks in ctx.gather(search.visible_ranks) for step in ranks}, reverse=True)
    damaged = False
    for at, step in enumerate(steps):
        states, answers = search.read_step(step)
        problem, lacking = _find_problem(answers), []
        if not problem:
            # At least one rank read a file of this step, and all identities are equal.
            ((_, saved_by),) = {answer.identity for answer in answers if answer.identity is not None}
            if saved_by == ctx.world_size:
                lacking = [rank for rank, answer in enumerate(answers) if answer.rank != rank]
            else:
                problem = search.read_other_files(step, saved_by, states, sharded=sharded)
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


def _find_problem(answers: list[ReadResult]) -> str:
    """Return the reason why the files read do not form one complete state, or an empty string."""
    damaged = next((answer.problem for answer in answers if answer.problem), "")
    identities = {answer.identity for answer in answers if answer.identity is not None}
    return damaged or (DIFFERENT_RUNS if len(identities) > 1 else "")


@dataclass(frozen=True)
class Search:
    """The state files of a run as seen from one rank. visible_ranks: ranks whose files this rank can read, by step."""

    folder: Path
    run: str
    ctx: RankContext
    visible_ranks: dict[int, list[int]]

    def read_step(self, step: int) -> tuple[dict[int, dict[str, Any]], list[ReadResult]]:
        """Read this rank's own file, or any other visible file if it is missing; a collective.

        Returns the contents by saving rank, and the results of all ranks.
        """
        ranks = self.visible_ranks.get(step, [])
        states: dict[int, dict[str, Any]] = {}
        answer = ReadResult()
        if ranks:
            rank = self.ctx.rank if self.ctx.rank in ranks else ranks[0]
            try:
                states[rank] = state = self._read(step, rank)
                answer = ReadResult(rank, identity=(state["run_id"], state["world_size"]))
            except UnusableState as error:
                answer = ReadResult(rank, problem=str(error))
        return states, self.ctx.gather(answer)

    def read_other_files(self, step: int, saved_by: int, states: dict[int, dict[str, Any]], *, sharded: bool) -> str:
        """Read the files needed by this rank after a change from `saved_by` ranks; a collective.

        states: contents read so far; replaced by the needed contents. Returns the first problem on any rank, or an
        empty string.
        """
        ctx = self.ctx
        known = [rank for rank in self.visible_ranks.get(step, []) if rank < saved_by]
        # A whole replica needs one file. If all files are visible, rank r reads the file of rank r modulo their number.
        wanted = list(range(saved_by)) if sharded else known[ctx.rank % max(1, len(known)) :][:1]
        problem = ""
        if not wanted or not set(wanted) <= set(known):
            lacking = sorted(set(wanted) - set(known)) or [ctx.rank % saved_by]
            problem = (
                f"rank {ctx.rank} cannot read {state_path(self.folder, step, lacking[0])}, which is required because "
                f"the number of ranks changed from {saved_by} to {ctx.world_size}; copy the files of all ranks to each "
                "node"
            )
        else:
            try:
                needed = {rank: states.get(rank) or self._read(step, rank) for rank in wanted}
                if len({(state["run_id"], state["world_size"]) for state in needed.values()}) > 1:
                    raise UnusableState(DIFFERENT_RUNS)
                states.clear()
                states.update(needed)
            except UnusableState as error:
                problem = str(error)
        return next((text for text in ctx.gather(problem) if text), "")

    def _read(self, step: int, rank: int) -> dict[str, Any]:
        path = state_path(self.folder, step, rank)
        state = read_state(path, self.run)
        if (state["step"], state["rank"]) != (step, rank):
            raise UnusableState(f"{path}: contains step {state['step']} of rank {state['rank']}")
        return state
