"""Run the trials: `python -m benchmarks trials` writes docs/diagnosis-trials.md.

python -m benchmarks trials                          # all trials, on two processes
python -m benchmarks trials --part fit --seed 7      # other runs; prints the tables and writes no page
python -m benchmarks trials --runs 40 --part report --most-false 0.01    # a few of them; for CI
python -m benchmarks trials --outcomes FILE          # also each comparison, as JSON lines
python -m benchmarks trials --live 500               # the same findings in live checks and in files
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.trials.conversions import count_likely_of_conversions
from benchmarks.trials.live import compare_doors
from benchmarks.trials.table import count_likely, describe_certainty, describe_faults, describe_rules, describe_total
from benchmarks.trials.trial import PARTS, draw_part, run_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.trial import Outcome, Trajectory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis-trials.md"
# How often each likely cause was stated and wrong in the second part. A test requires 98 % of each.
CERTAINTY = Path(__file__).resolve().parent / "certainty.json"
# Runs and seed of the parts on the page. Many runs grant certainty: some causes are stated in few of them.
RUNS = {"certify": 1998, "report": 270}
SEEDS = {"certify": 2, "report": 1}
# Changed copies of models, for the likely causes of two models.
CONVERSIONS = 2400


def run_all(trajectories: Sequence[Trajectory], jobs: int) -> list[Outcome]:
    """Run trials. jobs: number of processes."""
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
                "likely": outcome.likely,
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
is granted on the second, and the other tables are of the third. Four kinds of false statements were found in an earlier
sample of the second part and fixed; no rule was chosen by the third.

- *right*: the injected cause is stated, or is one of at most three causes with which a finding is consistent. If the
  files cannot show the cause (for example a learning rate, without the optimizer), "unexplained" is right.
- *open*: the cause is not named, and no other cause is stated.
- *false*: another cause is stated as `proved` or `likely`.

Not simulated are the faults of SYN104, SYN204, SYN206, SYN223 and SYN231.
"""

UNDECIDABLE = """## What cannot be decided

Some faults leave no mark of their own in a checkpoint, so their share of right answers stays low, and the finding lists
what the evidence excludes:

- *one noisy, zeroed, negated or half lost gradient*: a single step adds a difference to all tensors. One step later its
  size and direction depend on the optimizer, and the moments hold the sum of the wrong and of all other gradients. A
  lost step, a gradient of the rank's own batch, and a scaled gradient leave the same kind of difference.
  "Unexplained" is right here, and "open" means that the report lists causes which are possible and not true.
  Checkpoints of the steps before and after, or a live check at every step, decide.
- *negative weights removed*, *few weights limited*: the training after the change moves all elements of the matrix, so
  its zeros or limits are no longer the only differences.
- *tiny setting and new weights*: most open cases are files of the model alone, and LoRA, in which few parameters are
  trained. New weights of a rank then look like gradients of its own.
- *clip by local norm*: each rank has a factor of its own in each step, close to gradients that were not averaged.
"""


def describe(outcomes: Sequence[Outcome]) -> str:
    """Return the tables of what was right."""
    sections = [
        "## By what is saved\n\n" + describe_total(outcomes) + "\n",
        "## By fault\n\nFindings with a question mark are only consistent with the evidence.\n\n"
        + describe_faults(outcomes)
        + "\n",
        "## By finding\n\nA finding may be right for several faults; *faults* counts those that its cause"
        " names.\n\n" + describe_rules(outcomes) + "\n",
    ]
    return "\n".join(sections)


def write_page(outcomes: Sequence[Outcome], conversions: dict[str, dict[str, int]]) -> None:
    """Write the page of the documents and the counts of likely causes. conversions: counts of two models."""
    reported = [outcome for outcome in outcomes if outcome.trajectory.part == "report"]
    likely = count_likely([outcome for outcome in outcomes if outcome.trajectory.part == "certify"]) | conversions
    certainty = (
        "## Certainty\n\nStatements in the second part, and the lower 95 % bound of their precision. SYN3xx are "
        "counted in changed copies of random models. A finding may state a cause as `likely` if the bound is at least "
        "0.98: about 150 statements without a wrong statement.\n\n"
    )
    page = "\n".join((INTRODUCTION, UNDECIDABLE, describe(reported), certainty + describe_certainty(likely) + "\n"))
    PAGE.write_text(page, encoding="utf-8")
    CERTAINTY.write_text(json.dumps(likely, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run the trials; write the page of the documents, or print tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trials", description=(__doc__ or "").partition(":")[0], allow_abbrev=False
    )
    parser.add_argument("--part", choices=PARTS, help="print the tables of this part, and write no page")
    parser.add_argument("--runs", type=int, default=280, help="simulated runs of the part (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the part (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write each comparison as a line of JSON")
    parser.add_argument("--most-false", type=float, metavar="SHARE", help="exit with 1 if more statements are false")
    parser.add_argument("--live", type=int, metavar="COUNT", help="compare live checks with files instead")
    options = parser.parse_args(arguments)
    if min(options.runs, options.jobs) < 1 or (options.live is not None and options.live < 1):
        parser.error("--runs, --jobs and --live must be at least 1")
    if options.live is not None:
        return int(compare_doors(options.live, options.seed) > 0)
    if options.part is None:
        drawn = [draw_part(part, count, SEEDS[part]) for part, count in RUNS.items()]
        trajectories = [trajectory for runs in drawn for trajectory in runs]
    else:
        trajectories = draw_part(options.part, options.runs, options.seed)
    outcomes = run_all(trajectories, options.jobs)
    if options.outcomes is not None:
        write_outcomes(options.outcomes, outcomes)
    if options.part is None:
        write_page(outcomes, count_likely_of_conversions(CONVERSIONS, options.jobs))
    else:
        print(describe(outcomes))
    share = sum(outcome.kind == "false" for outcome in outcomes) / len(outcomes)
    return int(options.most_false is not None and share > options.most_false)
