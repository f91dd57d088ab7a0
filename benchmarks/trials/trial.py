"""One trial: a simulated run with a fault, its checkpoints, and the findings that syncheck reports for them."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import syncheck
from benchmarks.trials.faults import FAULTS, Fault
from benchmarks.trials.simulation import Run, Setup, draw_setup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from syncheck import Report

    # The content of each rank's file.
    Contents = Sequence[Mapping[str, Any]]

# What is saved: the state dict of the model alone, with the optimizer, with a metadata block too, or the model and the
# optimizer at several steps.
SAVED = ("model", "optimizer", "metadata", "steps")
# Rules and thresholds are chosen on the first part, certainty is granted on the second, and the third is reported.
PARTS = ("fit", "certify", "report")
# The folder of temporary files: in memory, if the system has such a folder.
MEMORY = Path("/dev/shm")
TEMPORARY = MEMORY if MEMORY.is_dir() else None


@dataclass(frozen=True)
class Trajectory:
    """A run of the design: its part, fault and settings."""

    part: str
    fault: type[Fault]
    setup: Setup


@dataclass(frozen=True)
class Outcome:
    """The result of one comparison.

    lag: steps since the onset.
    saved: the kind of content, of SAVED.
    differs: whether the files differ.
    verdict: of the report.
    stated: codes of findings that state their cause as a fact.
    hedged: codes of findings that are only consistent with the evidence, each with its alternatives.
    likely: the stated codes whose cause does not follow from the bytes, so that it may be wrong.
    """

    trajectory: Trajectory
    lag: int
    saved: str
    differs: bool
    verdict: str
    stated: tuple[str, ...]
    hedged: tuple[tuple[str, ...], ...]
    likely: tuple[str, ...] = ()

    @property
    def accepted(self) -> frozenset[str]:
        """The codes that are right for the fault."""
        codes = set(self.trajectory.fault.codes | self.trajectory.fault.background)
        # Local batches are normal for BatchNorm, beside any fault.
        if self.trajectory.setup.model == "conv":
            codes.add("SYN201")
        if not self.decidable:
            codes |= {"SYN299"} | self.trajectory.fault.fallback
        return frozenset(codes)

    @property
    def decidable(self) -> bool:
        """Whether the saved content can show the cause at all."""
        fault = self.trajectory.fault
        has_optimizer = self.saved != "model"
        if fault.needs_steps and self.saved not in ("steps", "metadata"):
            return False
        if fault.needs_metadata and self.saved != "metadata":
            return False
        return has_optimizer or not fault.needs_optimizer

    @property
    def kind(self) -> str:
        """One of: right, false, open (neither), equal (the fault has no effect)."""
        if not self.differs:
            return "equal" if self.verdict == "in_sync" else "false"
        if self.verdict == "in_sync" or not self.accepted.issuperset(self.stated):
            return "false"
        named = set(self.stated)
        for codes in self.hedged:
            # "Unexplained" is right for a cause that no finding names, unless the finding lists other causes.
            is_unlisted = codes[0] == "SYN299" and (len(codes) == 1 or not self.decidable)
            named.update(codes if codes[0] != "SYN299" or is_unlisted else codes[1:])
        fault = self.trajectory.fault
        background = ({"SYN201"} | fault.background) - fault.codes - fault.fallback
        is_normal = fault is Fault and "SYN201" in named
        if is_normal or not named.isdisjoint(self.accepted - background):
            return "right"
        return "open"


def draw_part(part: str, count: int, seed: int) -> list[Trajectory]:
    """Draw so many runs of a part."""
    return [drawn for drawn in draw_trajectories(count * len(PARTS), seed) if drawn.part == part]


def draw_trajectories(count: int, seed: int = 1) -> list[Trajectory]:
    """Draw so many runs, all faults equally often in each part."""
    numbers = random.Random(seed)
    trajectories = []
    for number in range(count):
        part = number % len(PARTS)
        fault = FAULTS[number // len(PARTS) % len(FAULTS)]
        setup = draw_setup(numbers, part)
        while not fault().fits(setup):
            setup = draw_setup(numbers, part)
        trajectories.append(Trajectory(PARTS[part], fault, setup))
    return trajectories


@dataclass(frozen=True)
class Saved:
    """The checkpoints of one comparison. lag: steps since the onset. saved: the kind of content. steps: by step."""

    lag: int
    saved: str
    steps: Mapping[int, Contents]

    @property
    def differs(self) -> bool:
        """Whether the ranks differ at the last step."""
        return not are_equal(self.steps[max(self.steps)])


def simulate(trajectory: Trajectory, seed: int = 1) -> Iterator[Saved]:
    """Train, and save at each lag of the fault, with two kinds of content."""
    torch.set_num_threads(1)
    setup, fault = trajectory.setup, trajectory.fault()
    numbers = random.Random(setup.seed + seed)
    run = Run(setup, fault)
    earlier: dict[int, Contents] = {}
    for lag in (-1, *fault.lags):
        while run.step < setup.onset + lag:
            run.train()
        if run.step == 0:
            continue
        # Evidence over steps begins with the step before the fault.
        earlier[run.step] = [run.save(rank, with_optimizer=True, with_metadata=False) for rank in run.ranks]
        if lag < 0:
            continue
        for saved in numbers.sample(SAVED, 2):
            if saved == "steps":
                yield Saved(lag, saved, dict(earlier))
            else:
                with_optimizer, with_metadata = saved != "model", saved == "metadata"
                contents = [
                    run.save(rank, with_optimizer=with_optimizer, with_metadata=with_metadata) for rank in run.ranks
                ]
                yield Saved(lag, saved, {run.step: contents})


def run_trial(trajectory: Trajectory, seed: int = 1) -> list[Outcome]:
    """Train, save and compare at each lag of the fault, with two kinds of content."""
    outcomes = []
    for found in simulate(trajectory, seed):
        with tempfile.TemporaryDirectory(dir=TEMPORARY) as folder:
            write_checkpoints(Path(folder), found.steps)
            report = compare_files(Path(folder))
        outcomes.append(make_outcome(trajectory, found.lag, found.saved, report, differs=found.differs))
    return outcomes


def are_equal(contents: Contents) -> bool:
    """Whether all ranks hold bitwise equal tensors and equal values."""
    first, *others = contents
    return all(_is_same(first, other) for other in others)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of checkpoints are bitwise equal, apart from the metadata."""
    if isinstance(one, torch.Tensor):
        same_type = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return same_type and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one if key != "syncheck")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def write_checkpoints(folder: Path, steps: Mapping[int, Contents]) -> None:
    """Write the files of all ranks, in a folder per step if there are several steps."""
    for step, contents in steps.items():
        place = folder / f"step_{step}" if len(steps) > 1 else folder
        place.mkdir(exist_ok=True)
        for rank, content in enumerate(contents):
            torch.save(content, place / f"rank_{rank}.pth")


def compare_files(folder: Path) -> Report:
    """Compare the files as `syncheck compare` does."""
    return syncheck.compare(folder, options=syncheck.Options(jobs=1))


def make_outcome(trajectory: Trajectory, lag: int, saved: str, report: Report, *, differs: bool) -> Outcome:
    """Return the outcome of a report: the findings of its last step."""
    group = report.groups[-1]
    stated: list[str] = []
    likely: list[str] = []
    hedged: list[tuple[str, ...]] = []
    for finding in group.findings:
        if finding.severity == "info":
            continue
        if finding.certainty == "consistent":
            hedged.append((finding.code, *finding.alternatives))
            continue
        stated.append(finding.code)
        if finding.certainty == "likely":
            likely.append(finding.code)
    return Outcome(trajectory, lag, saved, differs, group.verdict, tuple(stated), tuple(hedged), tuple(likely))
