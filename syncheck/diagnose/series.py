"""Group comparisons by run and step, measure the drift of running statistics, and the effect of SyncBatchNorm on it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck.diagnose.selection import find_largest, out_of_sync, select_kinds, size_of, with_step
from syncheck.messages import Sentence
from syncheck.records import Closure, Comparison, DriftPoint, NotFinite
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.records import Group, TensorDiff

Compared = TypeVar("Compared", bound=Comparison)
# Names of trainer options for the length of a run and the saving interval.
LENGTHS = ("epochs", "max_epochs", "num_epochs", "steps", "max_steps", "total_steps", "save_every")


class Gap(Sentence):
    """The effect of SyncBatchNorm on the drift of the running statistics."""

    ABSENT = "There was no gap for SyncBatchNorm to close: {drift}"
    CLOSED = "SyncBatchNorm closed the gap: {drift}"
    PARTLY_CLOSED = "SyncBatchNorm closed {share:.1%} of the gap: {drift}"
    OPEN = "SyncBatchNorm did not close the gap: {drift}"
    DRIFT = (
        "the largest drift of any running statistic was {before:.4g} in {plain:name} and is {after:words} in "
        "{synced:name}."
    )
    DRIFT_IN = (
        "the largest drift of any running statistic was {before:.4g} in {plain:name} ({tensor:name}) and is "
        "{after:words} in {synced:name}."
    )
    LENGTHS = "{plain:name} ends at {plain_step:words}, {synced:name} at {synced_step:words}"
    NO_COMMON_STEP = (
        "{lengths}, without a common step: save both runs at the same step to see the effect of SyncBatchNorm."
    )
    AT_COMMON_STEP = "{gap} Both were measured at {step:words}, the last common step; {lengths}."


def by_run(groups: Iterable[Compared]) -> dict[str, tuple[Compared, ...]]:
    """Return the groups that were compared by run, ordered by step. Keeps the first group of each step."""
    steps_of_runs: dict[str, dict[int | None, Compared]] = defaultdict(dict)
    for group in groups:
        # The program of a single process has been compared with its definition.
        is_alone = len(group.replicas) == 1 and getattr(group, "verdict", "alone") == "alone"
        if not is_alone:
            steps = steps_of_runs[group.run]
            steps.setdefault(group.step, group)
    runs = {}
    for run, steps in steps_of_runs.items():
        runs[run] = tuple(sorted(steps.values(), key=step_order))
    return runs


def step_order(group: Comparison) -> int:
    """Return a key that sorts groups by their steps. Groups without a step come first."""
    return -1 if group.step is None else group.step


def shown_steps(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the steps of a run to show: the last step, and earlier steps with findings absent from all later steps.

    An earlier step without a comparison counts as well. Findings of later shown steps are removed from it.
    """
    steps: list[Group] = []
    later_findings: set[tuple[str, bool]] = set()
    later_verdicts: set[str] = set()
    for group in reversed(groups):
        news = []
        new_keys = []
        severities = set()
        for finding in group.findings:
            # A code may be accepted at one step and fail at another.
            key = (finding.code, finding.fails)
            if key not in later_findings:
                news.append(finding)
                new_keys.append(key)
                severities.add(finding.severity)

        is_last = not steps
        has_news = not severities <= {"info"}
        new_verdicts = {group.verdict} - later_verdicts
        reasons = (is_last, has_news, "undecided" in new_verdicts)
        if any(reasons):
            step = replace(group, findings=tuple(news))
            steps.append(step)
            later_findings.update(new_keys)
            later_verdicts.add(group.verdict)
    return tuple(reversed(steps))


def follow_not_finite(groups: Sequence[Compared]) -> list[Compared]:
    """Return the groups; tensors that are not finite also have the first such step of their run, and its tensors."""
    runs = by_run(groups)
    followed = []
    for group in groups:
        if group.not_finite is not None:
            run = runs.get(group.run, ())
            not_finite = _since(group, group.not_finite, run)
            group = replace(group, not_finite=not_finite)
        followed.append(group)
    return followed


def _since(group: Comparison, not_finite: NotFinite, run: Sequence[Comparison]) -> NotFinite:
    """Return the tensors of a step that are not finite, with the first such step of the run."""
    steps = with_step(run)
    # A single step has no course.
    if len(steps) < 2:
        return not_finite
    previous: int | None = None
    for step in steps:
        # Steps after this one do not matter: a report of an earlier step never refers to the future.
        if step_order(step) > step_order(group):
            break
        if step.not_finite is not None:
            return replace(
                not_finite,
                since=step.step,
                finite=previous,
                first=step.not_finite.names,
            )
        previous = step.step
    return not_finite


def drift_of(group: Comparison) -> DriftPoint | None:
    """Return the largest difference of any running statistic, 0.0 if all agree.

    None if no statistic was compared, or a difference has no number (missing, different shapes, not finite): the
    maximum of the other differences would be misleading.
    """
    if group.compared_kinds.isdisjoint(BN_STATISTICS):
        return None
    differing = out_of_sync(group, *BN_STATISTICS)
    if any(map(_has_no_number, differing)):
        return None
    # Statistics within a tolerance count too.
    largest = find_largest(select_kinds(group.tensors, *BN_STATISTICS))
    if largest is None:
        return DriftPoint(
            group.run,
            group.step,
            max_abs=0.0,
            tensor=None,
        )
    return DriftPoint(
        group.run,
        group.step,
        max_abs=float(size_of(largest)),
        tensor=largest.name,
    )


def _has_no_number(diff: TensorDiff) -> bool:
    """Whether the size of a difference is unknown, or the replicas have different numbers of NaN."""
    is_unknown = diff.max_abs is None
    numbers_of_nan = set(diff.nonfinite.values())
    return is_unknown or len(numbers_of_nan) > 1


def drifts(runs: Mapping[str, Sequence[Comparison]]) -> tuple[DriftPoint, ...]:
    """Return the drift at every step of every run."""
    points: list[DriftPoint] = []
    for groups in runs.values():
        points += _drift_by_step(groups).values()
    return tuple(points)


def _drift_by_step(groups: Sequence[Comparison]) -> dict[int | None, DriftPoint]:
    """Return the drift at each step of a run with a known drift."""
    points = {}
    for group in groups:
        point = drift_of(group)
        if point is not None:
            points[group.step] = point
    return points


def closures(runs: Mapping[str, Sequence[Comparison]]) -> tuple[Closure, ...]:
    """Return the effect of SyncBatchNorm for each pair of runs without other differences, at their last common step."""
    measured_closures = []
    pairs = product(runs.values(), runs.values())
    for plain, synced in pairs:
        # The last steps have the configuration of the whole run.
        if _differ_in_sync_bn(plain[-1], synced[-1]):
            closure = _closure(plain, synced)
            # Without the drift of a run, there is nothing to compare.
            if closure is not None:
                measured_closures.append(closure)
    return tuple(measured_closures)


def _closure(plain: Sequence[Comparison], synced: Sequence[Comparison]) -> Closure | None:
    """Return the effect of SyncBatchNorm; None if the drift of a run at its last step is unknown."""
    before, after = drift_of(plain[-1]), drift_of(synced[-1])
    if before is None or after is None:
        return None
    if before.step == after.step:
        return Closure(before, after, _describe_gap(before, after))

    # Drift changes over a run, so only equal steps are comparable.
    plain_points, synced_points = _drift_by_step(plain), _drift_by_step(synced)
    common_steps = [step for step in plain_points if step in synced_points]
    lengths = Gap.LENGTHS(
        plain=before.run,
        plain_step=_format_step(before),
        synced=after.run,
        synced_step=_format_step(after),
    )
    if not common_steps:
        return Closure(before, after, Gap.NO_COMMON_STEP(lengths=lengths))
    last_step = common_steps[-1]
    common_before, common_after = plain_points[last_step], synced_points[last_step]
    text = Gap.AT_COMMON_STEP(
        gap=_describe_gap(common_before, common_after),
        step=_format_step(common_before),
        lengths=lengths,
    )
    return Closure(common_before, common_after, text)


def _format_step(point: DriftPoint) -> str:
    """Return the text of a step."""
    return "an unknown step" if point.step is None else f"step {point.step}"


def _differ_in_sync_bn(plain: Comparison, synced: Comparison) -> bool:
    """Whether the recorded configurations differ only in SyncBatchNorm and lengths. Without them, the name decides."""
    plain_config = plain.evidence.metadata.config
    synced_config = synced.evidence.metadata.config
    if not plain_config and not synced_config:
        return synced.run == f"{plain.run}-syncbn"
    plain_settings = _without_lengths(plain_config)
    synced_settings = _without_lengths(synced_config)
    is_plain = plain_settings.pop("sync_bn", None) is False
    is_synced = synced_settings.pop("sync_bn", None) is True
    are_other_settings_equal = plain_settings == synced_settings
    conditions = (is_plain, is_synced, are_other_settings_equal)
    return all(conditions)


def _without_lengths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the length of the run and the saving interval."""
    remaining = dict(config)
    for name in LENGTHS:
        remaining.pop(name, None)
    return remaining


def _describe_gap(before: DriftPoint, after: DriftPoint) -> Message:
    """State how much of the drift SyncBatchNorm removed."""
    drift = _describe_drift(before, after)
    if before.max_abs == 0:
        return Gap.ABSENT(drift=drift)
    if after.max_abs == 0:
        return Gap.CLOSED(drift=drift)
    remaining_share = after.max_abs / before.max_abs
    if remaining_share < 1:
        return Gap.PARTLY_CLOSED(share=1 - remaining_share, drift=drift)
    return Gap.OPEN(drift=drift)


def _describe_drift(before: DriftPoint, after: DriftPoint) -> Message:
    # 0.0 means bitwise equal, so small differences are never rounded to it.
    smaller = "0.0" if after.max_abs == 0 else f"{after.max_abs:.4g}"
    sentence = Gap.DRIFT_IN if before.tensor else Gap.DRIFT
    return sentence(
        before=before.max_abs,
        plain=before.run,
        tensor=before.tensor,
        after=smaller,
        synced=after.run,
    )
