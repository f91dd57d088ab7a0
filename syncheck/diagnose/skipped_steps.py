"""Step counters that lag: by skipped steps or by lost optimizer state, and what differs because of it."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.counters import BURST, StepCounter, counters_of, farthest, is_optimizer_behind, lag_grew
from syncheck.diagnose.loss_scales import scaler_explains
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.rank_values import counts_of
from syncheck.diagnose.selection import has_kind, list_names
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

Counters = tuple[StepCounter, ...]


class _Lags(NamedTuple):
    """The differing step counters by their lag: of a few skipped steps, or of lost optimizer state."""

    few: Counters
    many: Counters


def counters_of_skipped_steps(case: Case) -> Counters:
    """Return the counters whose lag means skipped steps.

    Empty if nothing else differs (somebody set the counters), or if the loss scalers explain the lag. A lag that grew
    since an earlier step means skipped steps, however large it is.
    """
    return _exclude_other_causes(case, _split_by_lag(case).few)


def counters_of_lost_state(case: Case) -> Counters:
    """Return the counters whose lag means lost optimizer state.

    Also empty if BatchNorm's counts lag too, because the rank then missed more than the optimizer step.
    """
    counters = _split_by_lag(case).many
    # A stale rank holds the other ranks' state of an earlier step, so it has not lost its state.
    if case.group.evidence.stale or forwards_lag(case, counters):
        return ()
    return _exclude_other_causes(case, counters)


def _split_by_lag(case: Case) -> _Lags:
    """Return the differing counters by what their lag means."""
    counters = counters_of(case)
    largest = farthest(counters)
    if largest is None or lag_grew(largest, case.series):
        return _Lags(counters, ())
    # A rank skips a few steps of an optimizer, as in a GAN, more often than it loses the state of only one of them.
    if largest.lag <= BURST and is_optimizer_behind(case):
        return _Lags(counters, ())
    few = tuple(counter for counter in counters if not counter.far)
    many = tuple(counter for counter in counters if counter.far)
    return _Lags(few, many)


def _exclude_other_causes(case: Case, counters: Counters) -> Counters:
    """Return the counters, or nothing if loss scalers explain them or nothing else differs."""
    if not counters or scaler_explains(case, counters):
        return ()
    if not case.compared("parameter", "optimizer"):
        return counters
    if has_kind(followers(case, counters), "parameter", "optimizer"):
        return counters
    # Somebody set the counters.
    return ()


def followers(case: Case, counters: Sequence[StepCounter]) -> tuple[TensorDiff, ...]:
    """Return the counters and the uncovered differences caused by the same event.

    The parameters of the counters and their optimizer state differ. Activations and gradients then differ too, so
    running statistics, averaged weights and the loss scaler follow. If no counter is given, or the parameter of a
    counter is unknown, all parameters follow except frozen parameters.
    """
    step_diffs = _select_step_diffs(case, counters)
    counter_names = [counter.name for counter in counters]
    owners = frozenset(map(parameter_of, (*counter_names, *list_names(step_diffs))))
    are_known = bool(counters) and owners <= case.names_of("parameter")
    parameters = _following_parameters(case, owners, are_known=are_known)
    following_kinds = {"ema", "scaler", "buffer"}
    if case.agrees("bn_count"):
        following_kinds |= BN_STATISTICS

    result = list(step_diffs)
    for diff in case.tensors:
        if diff.kind == "parameter":
            follows = diff.name in parameters
        elif diff.kind == "optimizer":
            follows = not are_known or parameter_of(diff.name) in owners
        else:
            follows = diff.kind in following_kinds
        if follows:
            result.append(diff)
    if counters and forwards_lag(case, counters):
        result += case.of_kind("bn_count", *BN_STATISTICS)
    return tuple(result)


def _select_step_diffs(case: Case, counters: Sequence[StepCounter]) -> list[TensorDiff]:
    """Return the differing tensors of the counters; without counters, those of all counters."""
    step_diffs = case.of_kind("optimizer_step")
    if not counters:
        return list(step_diffs)
    names = {counter.name for counter in counters}
    clusters = {counter.diff.clusters for counter in counters if counter.diff is not None}
    selected = []
    for diff in step_diffs:
        # Only the first of very many counters are read, so unread counters with the same clusters count too.
        is_unread = diff.clusters in clusters and not counts_of(diff)
        if diff.name in names or is_unread:
            selected.append(diff)
    return selected


def _following_parameters(case: Case, owners: frozenset[str], *, are_known: bool) -> frozenset[str]:
    """Return the parameters that differ because of the event. owners: the parameters of the counters, if known."""
    differing = frozenset(list_names(case.of_kind("parameter")))
    # Buffers follow because their inputs differ.
    buffers = differing & case.loose
    if are_known:
        return buffers | (differing & owners)
    return buffers | (differing - case.frozen)


def forwards_lag(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether BatchNorm's counts lag on the same ranks as the step counters, so the ranks missed whole steps."""
    batch_counts = [counts_of(diff) for diff in case.of_kind("bn_count")]
    if not batch_counts or not all(batch_counts):
        return False
    step_counts = [counter.by_rank for counter in counters]
    return all(_lags_alike(steps, batches) for steps, batches in product(step_counts, batch_counts))


def _lags_alike(steps: Mapping[int, float], batches: Mapping[int, float]) -> bool:
    """Whether each rank lacks the same number of batches for every step that it lacks, and no further batch."""
    if steps.keys() != batches.keys():
        return False
    most_steps, most_batches = max(steps.values()), max(batches.values())
    batches_per_step = set()
    for rank, count in steps.items():
        missing_steps = most_steps - count
        missing_batches = most_batches - batches[rank]
        if missing_steps:
            batches_per_step.add(missing_batches / missing_steps)
        elif missing_batches:
            return False
    if len(batches_per_step) != 1:
        return False
    # With gradient accumulation, a step has several batches.
    (ratio,) = batches_per_step
    return ratio >= 1 and ratio.is_integer()
