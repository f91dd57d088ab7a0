"""Run the trials: `python -m benchmarks trials` writes docs/diagnosis-trials.md.

python -m benchmarks trials                          # all trials, on two processes
python -m benchmarks trials --runs 21 --seed 7       # other runs; prints the tables and writes no page
python -m benchmarks trials --outcomes FILE          # also each comparison, as JSON lines
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.trials.table import describe_faults, describe_rules, describe_total
from benchmarks.trials.trial import PARTS, draw_trajectories, run_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.trial import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis-trials.md"
RUNS = 840
SEED = 1


def run_all(runs: int, seed: int, jobs: int) -> list[Outcome]:
    """Run the trials of a design. jobs: number of processes."""
    trajectories = draw_trajectories(runs, seed)
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, found in enumerate(pool.map(run_trial, trajectories), start=1):
            outcomes += found
            if number % 35 == 0:
                print(f"{number} of {runs} runs, {len(outcomes)} comparisons", file=sys.stderr, flush=True)
    return outcomes


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write each comparison as a line of JSON."""
    with path.open("w", encoding="utf-8") as file:
        for outcome in outcomes:
            trajectory = outcome.trajectory
            setup = trajectory.setup
            line = {
                "part": trajectory.part,
                "fault": trajectory.fault.name,
                "model": setup.model,
                "optimizer": setup.optimizer,
                "ranks": setup.ranks,
                "onset": setup.onset,
                "seed": setup.seed,
                "lag": outcome.lag,
                "saved": outcome.saved,
                "kind": outcome.kind,
                "stated": outcome.stated,
                "hedged": outcome.hedged,
            }
            file.write(json.dumps(line) + "\n")


def describe(outcomes: Sequence[Outcome]) -> str:
    """Return the tables of the reported part, with the totals of the other parts."""
    by_part = {part: [outcome for outcome in outcomes if outcome.trajectory.part == part] for part in PARTS}
    reported = by_part["report"]
    sections = [
        "## All comparisons\n\n" + describe_total(reported),
        "## By fault\n\n" + describe_faults(reported),
        "## By finding\n\n" + describe_rules(reported),
    ]
    return "\n\n".join(sections)


def main(arguments: Sequence[str]) -> int:
    """Run the trials, print their tables, and write the page of the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks trials", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="number of simulated runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the design (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write each comparison as a line of JSON")
    options = parser.parse_args(arguments)
    outcomes = run_all(options.runs, options.seed, options.jobs)
    if options.outcomes is not None:
        write_outcomes(options.outcomes, outcomes)
    print(describe(outcomes))
    return 0
