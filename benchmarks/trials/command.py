"""Run the trials: `python -m benchmarks trials` writes docs/diagnosis-trials.md.

python -m benchmarks trials                          # all trials, on two processes
python -m benchmarks trials --runs 21 --seed 7       # other runs; prints the tables and writes no page
python -m benchmarks trials --runs 120 --part report --most-false 0.01   # a third of them; for CI
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

from benchmarks.trials.table import describe_certainty, describe_faults, describe_rules, describe_total
from benchmarks.trials.trial import PARTS, draw_trajectories, run_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.trial import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis-trials.md"
RUNS = 840
SEED = 1


def run_all(runs: int, seed: int, jobs: int, part: str | None) -> list[Outcome]:
    """Run the trials of a design. jobs: number of processes. part: run only this part."""
    trajectories = [drawn for drawn in draw_trajectories(runs, seed) if part in (None, drawn.part)]
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, found in enumerate(pool.map(run_trial, trajectories), start=1):
            outcomes += found
            if number % 40 == 0:
                print(f"{number} of {len(trajectories)} runs, {len(outcomes)} comparisons", file=sys.stderr, flush=True)
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


INTRODUCTION = """# Trials of diagnosis

How often a stated cause is right, on simulated runs that the rules were not tuned on. `python -m benchmarks trials`
writes this page.

A trial trains a small model on 2 to 8 simulated ranks, which have the bits of real ranks under DistributedDataParallel
with gloo. A fault begins at step 1, 10 or 100. Checkpoints are saved 0 to 100 steps later and compared as files. Drawn
at random are the model (linear layers with LayerNorm, convolutions with BatchNorm, a small GPT, an embedding with
sparse rows, LoRA), the optimizer (SGD, with momentum, Nesterov, Adam, AdamW, Adafactor, Muon), the number of ranks and
samples, the learning rate, and what is saved.

Models of three sizes divide the trials into three parts. Rules and thresholds were chosen on the first part, certainty
is granted on the second, and the other tables are of the third. Four kinds of false statements were found in the second
part and fixed; nothing was changed after the first run of the third.

- *right*: the injected cause is stated, or is one of at most three causes with which a finding is consistent. If the
  files cannot show the cause (for example a learning rate, without the optimizer), "unexplained" is right.
- *open*: the cause is not named, and no other cause is stated.
- *false*: another cause is stated as `proved` or `likely`.

Not simulated are the faults of SYN104, SYN204, SYN206, SYN223 and SYN231.
"""


def describe(outcomes: Sequence[Outcome]) -> str:
    """Return the page: the tables of the reported part, and the certainty that the second part grants."""
    by_part = {part: [outcome for outcome in outcomes if outcome.trajectory.part == part] for part in PARTS}
    reported = by_part["report"]
    sections = [
        INTRODUCTION,
        "## By what is saved\n\n" + describe_total(reported) + "\n",
        "## By fault\n\nFindings with a question mark are only consistent with the evidence.\n\n"
        + describe_faults(reported)
        + "\n",
        "## By finding\n\nA finding may be right for several faults; *faults* counts those that its cause names.\n\n"
        + describe_rules(reported)
        + "\n",
    ]
    if by_part["certify"]:
        sections.append(
            "## Certainty\n\nStatements in the second part, and the lower 95 % bound of their precision. About 150 "
            "statements without a wrong one give a bound of 0.98.\n\n" + describe_certainty(by_part["certify"]) + "\n"
        )
    return "\n".join(sections)


def main(arguments: Sequence[str]) -> int:
    """Run the trials, print their tables, and write the page of the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks trials", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="number of simulated runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the design (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write each comparison as a line of JSON")
    parser.add_argument("--part", choices=PARTS, help="run only this part of the design")
    parser.add_argument("--most-false", type=float, metavar="SHARE", help="exit with 1 if more statements are false")
    options = parser.parse_args(arguments)
    if options.runs < len(PARTS) or options.jobs < 1:
        parser.error(f"--runs must be at least {len(PARTS)}, one for each part, and --jobs at least 1")
    outcomes = run_all(options.runs, options.seed, options.jobs, options.part)
    if options.outcomes is not None:
        write_outcomes(options.outcomes, outcomes)
    page = describe(outcomes)
    if (options.runs, options.seed, options.part) == (RUNS, SEED, None):
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)
    share = sum(outcome.kind == "false" for outcome in outcomes) / len(outcomes)
    return int(options.most_false is not None and share > options.most_false)
