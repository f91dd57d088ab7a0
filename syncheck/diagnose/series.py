"""Group comparisons by run and step, measure the drift of running statistics, and the effect of SyncBatchNorm on it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, TypeVar

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
    """Return the groups with at least two replicas by run, ordered by step. Keeps the first group of each step."""
    runs: dict[str, dict[int | None, Compared]] = defaultdict(dict)
    for group in groups:
        if len(group.replicas) > 1:
            runs[group.run].setdefault(group.step, group)
    return {run: tuple(sorted(steps.values(), key=step_order)) for run, steps in runs.items()}


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
        for finding in group.findings:
            # A code may be accepted at one step and fail at another.
            if (finding.code, finding.fails) not in later_findings:
                news.append(finding)

        has_news = any(finding.severity != "info" for finding in news)
        is_first_undecided = group.verdict == "undecided" and "undecided" not in later_verdicts
        # The last step is always shown.
        if has_news or is_first_undecided or not steps:
            steps.append(replace(group, findings=tuple(news)))
            later_findings.update((finding.code, finding.fails) for finding in news)
            later_verdicts.add(group.verdict)
    return tuple(reversed(steps))


def follow_not_finite(groups: Sequence[Compared]) -> list[Compared]:
    """Return the groups; tensors that are not finite also have the first such step of their run, and its tensors."""
    runs = by_run(groups)
    followed = []
    for group in groups:
        steps = [step for step in runs.get(group.run, ()) if step.step is not None]
        # Steps after this one do not matter: a report of an earlier step never refers to the future.
        until = [step for step in steps if step_order(step) <= step_order(group)]
        has_course = bool(until) and len(steps) > 1
        if has_course and group.not_finite is not None:
            group = replace(group, not_finite=_since(group.not_finite, until))
        followed.append(group)
    return followed


def _since(last: NotFinite, steps: Sequence[Comparison]) -> NotFinite:
    """Add the first step that is not finite. steps: of one run, at least one of which is not finite."""
    before: Comparison | None = None
    for step in steps:
        if step.not_finite is not None:
            finite = None if before is None else before.step
            return replace(last, since=step.step, finite=finite, first=step.not_finite.names)
        before = step
    return last


def drift_of(group: Comparison) -> DriftPoint | None:
    """Return the largest difference of any running statistic, 0.0 if all agree.

    None if no statistic was compared, or a difference has no number (missing, different shapes, not finite): the
    maximum of the other differences would be misleading.
    """
    compared_kinds = {kind for kind, counts in group.kinds.items() if counts.compared}
    if compared_kinds.isdisjoint(BN_STATISTICS):
        return None
    largest: float = 0.0
    tensor = None
    for diff in group.tensors:
        if diff.kind not in BN_STATISTICS:
            continue
        if diff.out_of_sync and _has_no_number(diff):
            return None
        if diff.max_abs is None:
            continue
        if tensor is None or diff.max_abs > largest:
            largest, tensor = float(diff.max_abs), diff.name
    return DriftPoint(group.run, group.step, largest, tensor)


def _has_no_number(diff: TensorDiff) -> bool:
    """Whether the size of a difference is unknown, or the replicas have different numbers of NaN."""
    return diff.max_abs is None or len(set(diff.nonfinite.values())) > 1


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
    found_closures = []
    for plain, synced in product(runs.values(), runs.values()):
        if _differ_in_sync_bn(plain[-1], synced[-1]):
            closure = _closure(plain, synced)
            if closure is not None:
                found_closures.append(closure)
    return tuple(found_closures)


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
    common_before, common_after = plain_points[common_steps[-1]], synced_points[common_steps[-1]]
    gap = _describe_gap(common_before, common_after)
    text = Gap.AT_COMMON_STEP(gap=gap, step=_format_step(common_before), lengths=lengths)
    return Closure(common_before, common_after, text)


def _format_step(point: DriftPoint) -> str:
    """Return the text of a step."""
    if point.step is None:
        return "an unknown step"
    return f"step {point.step}"


def _differ_in_sync_bn(plain: Comparison, synced: Comparison) -> bool:
    """Whether the recorded configurations differ only in SyncBatchNorm and lengths. Without them, the name decides."""
    plain_config = dict(plain.evidence.metadata.config)
    synced_config = dict(synced.evidence.metadata.config)
    if not plain_config and not synced_config:
        return synced.run == f"{plain.run}-syncbn"
    for name in LENGTHS:
        plain_config.pop(name, None)
        synced_config.pop(name, None)
    is_plain = plain_config.pop("sync_bn", None) is False
    is_synced = synced_config.pop("sync_bn", None) is True
    return is_plain and is_synced and plain_config == synced_config


def _describe_gap(before: DriftPoint, after: DriftPoint) -> Message:
    drift = _describe_drift(before, after)
    if before.max_abs == 0:
        return Gap.ABSENT(drift=drift)
    if after.max_abs == 0:
        return Gap.CLOSED(drift=drift)
    if after.max_abs < before.max_abs:
        return Gap.PARTLY_CLOSED(share=1 - after.max_abs / before.max_abs, drift=drift)
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
