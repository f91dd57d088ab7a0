"""Step counters that lag: by skipped steps or by lost optimizer state, and what differs because of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.counters import BURST, StepCounter, counters_of, farthest, is_optimizer_behind, lag_grew
from syncheck.diagnose.loss_scales import scaler_explains
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.rank_values import counts_of, spread
from syncheck.diagnose.selection import has_kind, list_names, select_names
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

Counters = tuple[StepCounter, ...]
# The code of skipped steps.
_SKIPPED = "SYN214"


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
    if _SKIPPED in case.impossible:
        return _Lags(few=(), many=counters)
    if _are_steps_skipped(case, counters):
        return _Lags(few=counters, many=())
    counters_by_distance: dict[bool, list[StepCounter]] = defaultdict(list)
    for counter in counters:
        counters_by_distance[counter.far].append(counter)
    return _Lags(
        few=tuple(counters_by_distance[False]),
        many=tuple(counters_by_distance[True]),
    )


def _are_steps_skipped(case: Case, counters: Counters) -> bool:
    """Whether all lags mean skipped steps, however large they are."""
    largest = farthest(counters)
    if largest is None or lag_grew(largest, case.series):
        return True
    # A rank skips a few steps of an optimizer, as in a GAN, more often than it loses the state of only one of them.
    return largest.lag <= BURST and is_optimizer_behind(case)


def _exclude_other_causes(case: Case, counters: Counters) -> Counters:
    """Return the counters, or nothing if loss scalers explain them or nothing else differs."""
    if scaler_explains(case, counters):
        return ()
    is_model_compared = case.compared("parameter", "optimizer") > 0
    covered = followers(case, counters)
    # Somebody set the counters if the model and its optimizer agree.
    if is_model_compared and not has_kind(covered, "parameter", "optimizer"):
        return ()
    return counters


def followers(case: Case, counters: Sequence[StepCounter]) -> tuple[TensorDiff, ...]:
    """Return the counters and the uncovered differences caused by the same event.

    The parameters of the counters and their optimizer state differ. Activations and gradients then differ too, so
    running statistics, averaged weights and the loss scaler follow. If no counter is given, or the parameter of a
    counter is unknown, all parameters follow except frozen parameters.
    """
    step_diffs = _select_step_diffs(case, counters)
    owners = _find_owners(case, counters, step_diffs)
    # The loss scaler and averaged weights follow the step, and buffers the inputs.
    following_diffs = list(case.of_kind("ema", "scaler", "buffer"))
    if case.agrees("bn_count"):
        following_diffs += case.of_kind(*BN_STATISTICS)
    following_diffs += _following_states(case, owners)
    names = _following_parameters(case, owners).union(list_names(following_diffs))

    covered = [*step_diffs, *select_names(case.tensors, names)]
    if counters and forwards_lag(case, counters):
        covered += case.of_kind("bn_count", *BN_STATISTICS)
    return tuple(covered)


def _find_owners(
    case: Case, counters: Sequence[StepCounter], step_diffs: Sequence[TensorDiff]
) -> frozenset[str] | None:
    """Return the parameters of the counters; None if the parameter of a counter is unknown, or without counters."""
    names = list_names((*counters, *step_diffs))
    owners = frozenset(map(parameter_of, names))
    are_known = owners <= case.names_of("parameter")
    return owners if counters and are_known else None


def _following_states(case: Case, owners: frozenset[str] | None) -> list[TensorDiff]:
    """Return the differing optimizer state of these parameters; of all parameters if they are unknown."""
    states = case.of_kind("optimizer")
    if owners is None:
        return list(states)
    return [diff for diff in states if parameter_of(diff.name) in owners]


def _select_step_diffs(case: Case, counters: Sequence[StepCounter]) -> list[TensorDiff]:
    """Return the differing tensors of the counters; without counters, those of all counters."""
    step_diffs = list(case.of_kind("optimizer_step"))
    if not counters:
        return step_diffs
    names = frozenset(list_names(counters))
    read_diffs = select_names(step_diffs, names)
    clusters = {diff.clusters for diff in read_diffs}
    selected = []
    for diff in step_diffs:
        is_read = diff.name in names
        has_same_clusters = diff.clusters in clusters
        # Only the first of very many counters are read, so unread counters with the same clusters count too.
        is_unread = has_same_clusters and not counts_of(diff)
        if is_read or is_unread:
            selected.append(diff)
    return selected


def _following_parameters(case: Case, owners: frozenset[str] | None) -> frozenset[str]:
    """Return the parameters that differ because of the event. owners: the parameters of the counters, if known."""
    differing = frozenset(list_names(case.of_kind("parameter")))
    # Buffers follow because their inputs differ.
    buffers = differing & case.loose
    if owners is None:
        return buffers | (differing - case.frozen)
    return buffers | (differing & owners)


def forwards_lag(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether BatchNorm's counts lag on the same ranks as the step counters, so the ranks missed whole steps."""
    batch_counts = case.of_kind("bn_count")
    if not batch_counts:
        return False
    for diff in batch_counts:
        batches = counts_of(diff)
        for counter in counters:
            if not _lags_alike(counter.by_rank, batches):
                return False
    return True


def _lags_alike(steps: Mapping[int, float], batches: Mapping[int, float]) -> bool:
    """Whether each rank lacks the same number of batches for every step that it lacks, and no further batch.

    steps: at least two different counts. batches: empty if a count is unknown.
    """
    if not batches:
        return False
    # With gradient accumulation, a step has several batches.
    batches_per_step = spread(batches) / spread(steps)
    if batches_per_step < 1 or not batches_per_step.is_integer():
        return False
    most_steps, most_batches = max(steps.values()), max(batches.values())
    expected_batches = {}
    for rank, count in steps.items():
        missing_steps = most_steps - count
        expected_batches[rank] = most_batches - batches_per_step * missing_steps
    return batches == expected_batches
