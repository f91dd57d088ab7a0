"""Runs over several steps: drift of the running statistics, and the effect of SyncBatchNorm between two runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from syncheck.kinds import BN_STATISTICS
from syncheck.records import Closure, Comparison, DriftPoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import Group, TensorDiff

Compared = TypeVar("Compared", bound=Comparison)
# Keys under which trainers record the length of a run and the interval between checkpoints.
LENGTHS = ("epochs", "max_epochs", "num_epochs", "steps", "max_steps", "total_steps", "save_every")


def by_run(groups: Iterable[Compared]) -> dict[str, tuple[Compared, ...]]:
    """Return the groups with several replicas by run, sorted by step; the first group of each step is kept."""
    runs: dict[str, dict[int | None, Compared]] = defaultdict(dict)
    for group in groups:
        if len(group.replicas) > 1:
            runs[group.run].setdefault(group.step, group)
    return {run: tuple(sorted(steps.values(), key=step_order)) for run, steps in runs.items()}


def step_order(group: Comparison) -> int:
    """Return a key that sorts groups by step; groups without a step come first."""
    return -1 if group.step is None else group.step


def shown_steps(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the steps of a run to show: the last one, and each earlier step with a finding that no later step has.

    An earlier step without a comparison counts as well. Findings that a later step shows are removed from it.
    """
    shown: list[Group] = []
    seen: set[tuple[str, bool]] = set()  # a code that a baseline accepts at one step may fail at another
    undecided_shown = False
    for group in reversed(groups):
        own = tuple(finding for finding in group.findings if (finding.code, finding.fails) not in seen)
        undecided = group.verdict == "undecided"
        if not shown or any(finding.severity != "info" for finding in own) or (undecided and not undecided_shown):
            shown.append(replace(group, findings=own))
            seen |= {(finding.code, finding.fails) for finding in own}
            undecided_shown = undecided_shown or undecided
    return tuple(reversed(shown))


def measure_drift(group: Comparison) -> DriftPoint | None:
    """Return the largest difference in any running statistic, 0.0 if all are equal.

    Return None if no running statistic was compared, or if a difference is not a number because a statistic is missing,
    has several shapes, or is not finite: the largest of the remaining differences would be too small.
    """
    if not any(counts.compared for kind, counts in group.kinds.items() if kind in BN_STATISTICS):
        return None
    diffs = [diff for diff in group.tensors if diff.kind in BN_STATISTICS]
    if any(diff.out_of_sync and (diff.max_abs is None or _differs_in_nonfinite(diff)) for diff in diffs):
        return None
    measured = [diff for diff in diffs if diff.max_abs is not None]
    worst = max(measured, key=lambda diff: diff.max_abs or 0, default=None)
    if worst is None or worst.max_abs is None:
        return DriftPoint(group.run, group.step, 0.0, None)
    return DriftPoint(group.run, group.step, float(worst.max_abs), worst.name)


def _differs_in_nonfinite(diff: TensorDiff) -> bool:
    return len(set(diff.nonfinite.values())) > 1


def measure_drifts(runs: Mapping[str, Sequence[Comparison]]) -> tuple[DriftPoint, ...]:
    """Return the drift of every run at every step, in order."""
    return tuple(point for groups in runs.values() for group in groups if (point := measure_drift(group)) is not None)


def compare_runs(runs: Mapping[str, Sequence[Comparison]]) -> tuple[Closure, ...]:
    """Compare the drift of runs that differ only in SyncBatchNorm, at their last common step if there is one."""
    return tuple(
        closure
        for plain in runs.values()
        for synced in runs.values()
        if _differ_in_sync_bn(plain[-1], synced[-1]) and (closure := _closure(plain, synced)) is not None
    )


def _closure(plain: Sequence[Comparison], synced: Sequence[Comparison]) -> Closure | None:
    """Return the drift without and with SyncBatchNorm, or None if a run has no measured drift at its last step."""
    before, after = measure_drift(plain[-1]), measure_drift(synced[-1])
    if before is None or after is None:
        return None
    if before.step == after.step:
        return Closure(before, after, _format_sentence(before, after))
    # Drift changes over a run, so only drifts at the same step show the effect of SyncBatchNorm.
    by_step = {group.step: point for group in synced if (point := measure_drift(group)) is not None}
    common = [(b, by_step[b.step]) for g in plain if (b := measure_drift(g)) is not None and b.step in by_step]
    lengths = f"{before.run} ends at {_format_step(before)}, {after.run} at {_format_step(after)}"
    if not common:
        text = (
            f"{lengths}, and they have no common step: save both at the same step to see the effect of SyncBatchNorm."
        )
        return Closure(before, after, text)
    last = f"Compared at {_format_step(common[-1][0])}, their last common step; {lengths}."
    return Closure(*common[-1], f"{_format_sentence(*common[-1])} {last}")


def _format_step(point: DriftPoint) -> str:
    return "no known step" if point.step is None else f"step {point.step}"


def _differ_in_sync_bn(plain: Comparison, synced: Comparison) -> bool:
    """Whether two runs differ only in SyncBatchNorm and length.

    The recorded configuration decides. If neither run recorded its configuration, the name `<run>-syncbn` decides.
    """
    a = dict(plain.evidence.metadata.config) if plain.evidence.metadata is not None else {}
    b = dict(synced.evidence.metadata.config) if synced.evidence.metadata is not None else {}
    if not a and not b:
        return synced.run == f"{plain.run}-syncbn"
    for name in LENGTHS:
        a.pop(name, None)
        b.pop(name, None)
    return a.pop("sync_bn", None) is False and b.pop("sync_bn", None) is True and a == b


def _format_sentence(before: DriftPoint, after: DriftPoint) -> str:
    """Describe the effect of SyncBatchNorm. A drift of exactly 0.0 is printed as 0.0: the statistics are equal."""
    was = f"{before.max_abs:.4g} in {before.run}" + (f" ({before.tensor})" if before.tensor else "")
    now = f"{after.max_abs!r}" if after.max_abs == 0 else f"{after.max_abs:.4g}"
    if before.max_abs == 0:
        verdict = "There was no gap for SyncBatchNorm to close"
    elif after.max_abs == 0:
        verdict = "SyncBatchNorm closed the gap"
    elif after.max_abs < before.max_abs:
        verdict = f"SyncBatchNorm closed {1 - after.max_abs / before.max_abs:.1%} of the gap"
    else:
        verdict = "SyncBatchNorm did not close the gap"
    return f"{verdict}: the largest drift of any running statistic was {was} and is {now} in {after.run}."
