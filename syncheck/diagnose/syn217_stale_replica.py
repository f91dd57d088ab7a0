"""Some ranks hold the values of an earlier step of the other ranks.

Signature: a rank's parameters and optimizer state differ from the other ranks' values, and are bitwise equal to the
values of the other ranks at an earlier saved step. BatchNorm's statistics and counts differ with them.

Cause: the last save of the rank did not happen and an older file remained in the folder, a parameter gather overlapping
the forward pass returned values from before the step, or the rank was set back or no longer updated. If BatchNorm's
counts agree and the optimizer state is old too, the rank ran the forward pass and skipped the step. This is SYN214, or
SYN216 if its loss scale shows an overflow. Without BatchNorm, a skipped last step looks the same.

Fix: write each checkpoint to a new path, and let no rank continue before all ranks have written their files
(`dist.barrier()`), so that no older file remains in place. Compare the step in each file with the time of its last
change. Wait for the gather (the handle's `wait()`) before saving. Look for code that
loads an earlier state on some ranks.

Incidents: NVIDIA/Megatron-LM#663, #950, #7131, #4609 and #3693 (parameters of the previous step, from an overlapped
gather).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.counters import FEW, is_optimizer_behind
from syncheck.diagnose.loss_scales import scales_of
from syncheck.diagnose.measures import is_at_least
from syncheck.diagnose.rank_values import are_unequal
from syncheck.diagnose.selection import count_kinds, has_kind, holders_of, last_part, list_names, select_kinds
from syncheck.diagnose.skipped_steps import counters_of_skipped_steps
from syncheck.diagnose.stale_ranks import only_skipped, ran_forward, stale_at_first, stale_facts
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.records import Comparison, TensorDiff, ValueDiff

CODE = "SYN217"
SLUG = "stale-replica"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "A rank holds values of an earlier step: an old file remained in place, a parameter gather was not complete, "
        "or the rank was set back or not updated since."
    )
    FIX = (
        "Write each checkpoint to a new path and call `dist.barrier()` after saving, so no older file remains in "
        "place. Wait for an overlapped parameter gather (`handle.wait()`) before `state_dict()`. Look for code that "
        "loads an earlier state, or skips updates, on some ranks only."
    )
    STALE = "Rank {rank} holds the values of step {earlier} in a checkpoint of step {step}"
    STALE_STEP_UNKNOWN = "Rank {rank} holds the values of step {earlier}"
    PARAMETERS_EQUAL = (
        "{parameters:count parameter} {parameters:verb is|are} bitwise equal to other ranks at step {earlier}"
    )
    TENSORS_EQUAL = (
        "{parameters:count parameter} and {states:count optimizer tensor} are bitwise equal to other ranks at step "
        "{earlier}"
    )
    MORE_RANKS = "{count:count more rank} {count:verb is|are} stale too"
    SET_BACK = "{ranks:Ranks} held values of an earlier step, and differed from the other ranks from then on"
    BATCHNORM_DIFFERS = "{count:count BatchNorm tensor} {count:verb differs|differ} too"
    BATCHNORM_SET_BACK = "BatchNorm's counts were set back too"
    STORED_STEP_DIFFERS = "the step stored in the {ranks:verb file|files} of {ranks:ranks} differs too"


_STATE = ("parameter", "optimizer", "optimizer_step")
_MOST = 4  # described ranks


# Frozen tensors have the values of an earlier step on every healthy rank.
@requires(Case.differing_parameters)
def apply(case: Case) -> Match | None:
    """Match ranks at an earlier step of the other ranks, and cover all differences that follow."""
    if not case.group.evidence.stale:
        return _match_set_back(case)
    has_skipped = _skipped_step(case.group)
    # The other optimizers of a stale rank would be old too.
    if has_skipped or is_optimizer_behind(case) or _have_zero_rates(case):
        return None
    return _match_stale(case)


def _have_zero_rates(case: Case) -> bool:
    """Whether the files of the stale ranks state a learning rate of 0, with which no step changes a parameter."""
    ranks = case.group.evidence.stale
    for value in case.of_values():
        rates = {value.by_rank.get(rank) for rank in ranks}
        conditions = (value.kind == "setting", last_part(value.name) == "lr", rates == {0})
        if all(conditions):
            return True
    return False


def _match_set_back(case: Case) -> Match | None:
    """Match ranks that were set back at an earlier step and continued training, as the series shows."""
    first = stale_at_first(case)
    if first is None or _has_skipped_step(case, first):
        return None
    stale = first.evidence.stale
    explained = _select_explained(case, stale)
    # A healthy rank that deviates too has another cause.
    covered = tuple(diff for diff in explained if stale.keys() >= set(diff.minority))
    if not has_kind(covered, "parameter"):
        return None
    missed_batches = ran_forward(first) is False
    facts = [
        Text.SET_BACK(ranks=tuple(sorted(stale))),
        *stale_facts(first),
        *state_if(missed_batches, Text.BATCHNORM_SET_BACK()),
    ]
    match = Match(covered, tuple(stale), facts)
    return match if _is_certain(first, ()) else match.as_consistent("SYN214")


def _has_skipped_step(case: Case, first: Comparison) -> bool:
    """Whether the ranks skipped a step instead of being set back. first: the group in which they were stale."""
    has_run = ran_forward(first)
    if has_run is not None:
        return has_run
    # Without BatchNorm, the loss scales or the optimizer's counters show a skipped step.
    return bool(scales_of(first) or counters_of_skipped_steps(case))


def _is_certain(group: Comparison, values: Sequence[ValueDiff]) -> bool:
    """Whether skipped steps cannot explain the stale ranks of a group: the stored step differs, for example."""
    missed_batches = ran_forward(group) is False
    return _have_progress(values) or missed_batches or _is_far_behind(group)


def _have_progress(values: Sequence[ValueDiff]) -> bool:
    """Whether any of the values is a stored step."""
    return any(value.kind == "progress" for value in values)


def _is_far_behind(group: Comparison) -> bool:
    """Whether a rank lacks more steps than a rank skips in a row."""
    return is_at_least(group.step, max(group.evidence.stale.values()) + FEW + 1)


def _skipped_step(group: Comparison) -> bool:
    """Whether the stale ranks ran the forward pass, or found an overflow, and skipped the optimizer step."""
    if only_skipped(group):
        return True
    return bool(scales_of(group)) and ran_forward(group) is not False


def _match_stale(case: Case) -> Match | None:
    """Match ranks with the values of an earlier step at this step."""
    stale = case.group.evidence.stale
    covered = _select_explained(case, stale)
    if not has_kind(covered, "parameter"):
        return None
    values = [value for value in case.of_values() if _is_value_explained(value, stale)]
    facts: list[Message] = []
    for rank, earlier in sorted(stale.items())[:_MOST]:
        facts += _rank_facts(
            case,
            covered=covered,
            rank=rank,
            earlier=earlier,
        )
    further_ranks = len(stale) - _MOST
    facts += state_if(further_ranks > 0, Text.MORE_RANKS(count=further_ranks))
    facts += _follower_facts(covered, values, tuple(sorted(stale)))

    match = Match(
        tensors=covered,
        ranks=stale,
        facts=facts,
        values=list_names(values),
    )
    return match if _is_certain(case.group, values) else match.as_consistent("SYN214")


def _follower_facts(
    covered: Sequence[TensorDiff], values: Sequence[ValueDiff], stale_ranks: tuple[int, ...]
) -> tuple[Message, ...]:
    """State whether BatchNorm's tensors and the stored step differ too."""
    of_batchnorm = count_kinds(covered, "bn_count", *BN_STATISTICS)
    return (
        *state_if(of_batchnorm, Text.BATCHNORM_DIFFERS(count=of_batchnorm)),
        *state_if(_have_progress(values), Text.STORED_STEP_DIFFERS(ranks=stale_ranks)),
    )


def _rank_facts(case: Case, covered: Sequence[TensorDiff], rank: int, earlier: int) -> tuple[Message, Message]:
    """State which step a stale rank is at, and how many tensors show it."""
    equal = [diff for diff in select_kinds(covered, *_STATE) if rank in holders_of([diff])]
    parameters = count_kinds(equal, "parameter")
    states = len(equal) - parameters
    step = case.group.step
    position = {"rank": rank, "earlier": earlier}
    stale = Text.STALE_STEP_UNKNOWN(**position) if step is None else Text.STALE(**position, step=step)
    if states:
        return stale, Text.TENSORS_EQUAL(
            parameters=parameters,
            states=states,
            earlier=earlier,
        )
    return stale, Text.PARAMETERS_EQUAL(parameters=parameters, earlier=earlier)


def _select_explained(case: Case, stale: Mapping[int, int]) -> tuple[TensorDiff, ...]:
    """Return the tensors that differ only on stale ranks, and running statistics, which may differ on all ranks."""
    return tuple(diff for diff in case.tensors if _is_explained(diff, stale))


def _is_explained(diff: TensorDiff, stale: Collection[int]) -> bool:
    """Whether a tensor differs only on stale ranks. Running statistics may differ on all ranks."""
    if diff.kind in BN_STATISTICS:
        return True
    with_healthy_ranks = [ranks for ranks in diff.clusters if not set(ranks).issubset(stale)]
    return len(with_healthy_ranks) <= 1


def _is_value_explained(value: ValueDiff, stale: Collection[int]) -> bool:
    """Whether all healthy ranks have the same value."""
    texts = [str(value.by_rank[rank]) for rank in value.by_rank if rank not in stale]
    return not are_unequal(texts)
