"""The result of a run, and its summary for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.methods import METHODS

if TYPE_CHECKING:
    from pathlib import Path

    from train.metrics import Score


@dataclass(frozen=True)
class Result:
    """The result of a run.

    seconds: from the first step to the last evaluation. trained: score over the last epoch. saved: files of all ranks.
    replaced: number of removed files of an earlier run. diverged: the epoch since which the loss is not finite; None if
    the loss is finite at the end. failed: failed periodic saves as a sentence, or empty. replicas: of the model, over
    all ranks.
    """

    run: str
    epochs: int
    steps: int
    seconds: float
    trained: Score
    test: Score
    saved: tuple[Path, ...]
    replaced: int
    diverged: int | None = None
    failed: str = ""
    replicas: int = 1


def summary(result: Result, method: str) -> str:
    """Format the result in one line, the saved files in a second, and in a third a hint if a group has one replica."""
    score = result.test.format()
    score = f"{score} test accuracy" if "%" in score else f"test {score}"
    steps = f"{format_count(result.epochs, 'epoch')}, {format_count(result.steps, 'step')}"
    lines = [f"{result.run}: {score}, {steps}, {result.seconds:.1f} s"]
    if not result.saved:
        lines.append("saved nothing; --save-per-rank writes one checkpoint per rank")
        return "\n".join(lines) + "\n"
    paths = str(result.saved[0])
    if result.saved[-1] != result.saved[0]:
        paths += f" to {result.saved[-1]}"
    files = f"saved {format_count(len(result.saved), 'file')}: {paths}"
    if result.replaced:
        files += f" (replaced {result.replaced} of an earlier run of this name)"
    lines.append(files)
    if result.replicas == 1 and METHODS[method].grouped:
        lines.append("one rank has no replica to compare: start two with --spawn 2, or torchrun --nproc-per-node 2")
    return "\n".join(lines) + "\n"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: "1 file", "2 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
