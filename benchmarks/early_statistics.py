"""Simulate the first steps of runs with BatchNorm, and count statements: python -m benchmarks.early_statistics.

Each run trains twice on simulated ranks, with synchronized buffers and without. Drawn at random are the width and depth
of the model, the optimizer, the learning rate, the numbers of ranks and samples, and the data: images of a pattern for
each class, of a brightness for each class, and with another color on each rank. Several selections of early steps are
judged.

Prints, for limits of SYN201, how often a lag of one update is stated for runs with and without synchronized buffers,
then the statements of the limits in the rules for small models and for steps apart. EXPLAINED in
syncheck/diagnose/syn201_bn_local_stats.py was chosen on even seeds; odd seeds are the test.
"""

from __future__ import annotations

import argparse
import random
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.trials.faults import Fault
from benchmarks.trials.models import CLASSES, Sizes
from benchmarks.trials.simulation import RATES, Gradients, Rank, Run, Setup
from syncheck.comparison.free_running import MOMENTUM, Moment, analyze_moments
from syncheck.diagnose.syn201_bn_local_stats import fits_one_update
from syncheck.diagnose.syn202_bn_drift_growing import fits_free_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncheck.records import FreeRunning

RUNS = 240
SELECTIONS = (
    (1, 2, 3),
    (2, 3, 4),
    (1, 3, 5),
    (2, 4, 6),
    (1, 2, 3, 4, 5, 6),
    (2, 4, 6, 8, 10),
    (3, 6, 9, 12),
    (4, 8, 12, 16),
    tuple(range(1, 13)),
)
LIMITS = (1.0, 0.5, 0.3, 0.25, 0.2, 0.15, 0.1)
# Largest width of a small model, and the least distance of steps apart.
SMALL, APART = 16, 3


class Data(NamedTuple):
    """The images of a run, each as a factor of normal noise."""

    pattern: float
    """Of a fixed pattern for each class."""
    brightness: float
    """Of the number of the class, added to all pixels."""
    color: float
    """Of a color for each rank, so that the shards differ."""
    size: int
    """Height and width."""


class EarlyRun(Run):
    """A simulated run with images of its own."""

    def __init__(self, setup: Setup, data: Data) -> None:
        super().__init__(setup, Fault())
        self.data = data

    def compute_gradients(self, rank: Rank) -> Gradients:
        """Return the gradients of a rank on a batch of its own, by name."""
        size = self.data.size
        patterns = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(2))
        color = torch.randn(3, 1, 1, generator=torch.Generator().manual_seed(self.setup.seed + rank.rank + 1))
        classes = torch.randint(CLASSES, (self.setup.samples,), generator=rank.data)
        images = torch.randn(self.setup.samples, 3, size, size, generator=rank.data)
        images += self.data.pattern * patterns[classes] + self.data.color * color
        images += self.data.brightness * classes.view(-1, 1, 1, 1)
        rank.module.train()
        loss = F.cross_entropy(rank.module(images), classes)
        parameters = rank.named_trained()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))


class Judged(NamedTuple):
    """The course of a run at some early steps."""

    seed: int
    width: int
    steps: tuple[int, ...]
    is_synced: bool
    course: FreeRunning


def draw_run(seed: int) -> tuple[Setup, Data]:
    """Draw the settings and the data of a run."""
    numbers = random.Random(seed)
    optimizer = numbers.choice(("sgd", "momentum", "adam", "adamw", "adafactor"))
    setup = Setup(
        model="conv",
        sizes=Sizes(width=numbers.choice((4, 8, 12, 16, 24, 32, 64)), depth=numbers.randint(1, 4)),
        optimizer=optimizer,
        ranks=numbers.choice((2, 2, 2, 3, 4)),
        seed=numbers.randrange(1 << 30),
        samples=numbers.choice((2, 4, 8, 16, 32)),
        lr=RATES[optimizer] * numbers.choice((0.3, 1.0, 2.0, 5.0)),
        weight_decay=0.0,
        onset=1,
        odd_rank=0,
    )
    data = Data(
        pattern=numbers.choice((0.0, 1.0)),
        brightness=numbers.choice((0.0, 0.0, 0.25, 0.5)),
        color=numbers.choice((0.0, 0.0, 0.0, 0.2, 1.0)),
        size=numbers.choice((6, 12)),
    )
    return setup, data


def copy_statistics(run: Run) -> Moment:
    """Return the running statistics of all ranks after a step."""
    values = {}
    for rank in run.ranks:
        statistics = {}
        for name, buffer in rank.module.named_buffers():
            if buffer.is_floating_point():
                statistics[name] = buffer.double().numpy().copy()
        values[rank.rank] = statistics
    return Moment(run.step, run.step, values)


def judge_run(seed: int) -> list[Judged]:
    """Train a run with synchronized buffers and without, and return its courses for all selections of steps."""
    setup, data = draw_run(seed)
    judged = []
    for is_synced in (True, False):
        run = EarlyRun(setup, data)
        run.buffers_synced = is_synced
        moments = {}
        for step in range(1, max(map(max, SELECTIONS)) + 1):
            run.train()
            moments[step] = copy_statistics(run)
        for steps in SELECTIONS:
            course = analyze_moments([moments[step] for step in steps], MOMENTUM)
            # Dead channels have no difference.
            if course is not None:
                judged.append(Judged(seed, setup.sizes.width, steps, is_synced, course))
    return judged


def is_stated(course: FreeRunning, limit: float) -> bool:
    """Whether a lag of one update would be stated with this limit."""
    assert course.misfit_free is not None, "the selections are early steps"
    assert course.misfit_lag is not None, "the selections are early steps"
    return course.misfit_lag <= limit * course.misfit_free and not fits_free_running(course)


def choose_statement(course: FreeRunning) -> str:
    """Return the code of the statement by the limits in the rules."""
    if fits_free_running(course):
        return "SYN202"
    return "SYN201" if fits_one_update(course) else "open"


def print_limits(title: str, judged: Iterable[Judged]) -> None:
    """Print how often a lag is stated with each limit."""
    courses: dict[bool, list[FreeRunning]] = {True: [], False: []}
    for row in judged:
        courses[row.is_synced].append(row.course)
    for limit in LIMITS:
        counts = []
        for is_synced, rows in courses.items():
            stated = sum(is_stated(course, limit) for course in rows)
            counts.append(f"{'right' if is_synced else 'wrong'} {stated:4} of {len(rows)} ({stated / len(rows):.1%})")
        print(f"{title:12} limit {limit:4}  {'   '.join(counts)}")


def print_statements(title: str, judged: Iterable[Judged]) -> None:
    """Print the statements by the limits in the rules."""
    for is_synced in (True, False):
        counts = dict.fromkeys(("SYN201", "SYN202", "open"), 0)
        for row in judged:
            if row.is_synced is is_synced:
                counts[choose_statement(row.course)] += 1
        print(f"{title:22} {'synchronized' if is_synced else 'unsynchronized':14} {counts}")


def main() -> None:
    """Choose on even seeds, and test on odd seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=RUNS)
    torch.set_num_threads(1)
    halves: dict[str, list[Judged]] = {"choose": [], "test": []}
    for seed in range(parser.parse_args().runs):
        halves["test" if seed % 2 else "choose"] += judge_run(seed)
    for title, judged in halves.items():
        print_limits(title, judged)
    groups: dict[str, Callable[[Judged], bool]] = {
        "all": lambda _row: True,
        "small models": lambda row: row.width <= SMALL,
        "steps apart": lambda row: min(b - a for a, b in pairwise(row.steps)) >= APART,
        "first three steps": lambda row: row.steps == SELECTIONS[0],
    }
    for title, belongs in groups.items():
        print_statements(f"test: {title}", [row for row in halves["test"] if belongs(row)])


if __name__ == "__main__":
    main()
