"""Ranks update buffers from different data: codebooks, observation statistics, observers, queues, centers.

Signature: model tensors that no optimizer updates differ, but all trained tensors and their optimizer state agree.
Something updates the differing tensors: their difference changes over the steps of the run. In files of one step, there
are other signs. The tensors are integers or single numbers. Or their values have a common origin on all ranks (a cosine
of 0.5 or more; independent random initializations are near 0). Or their names, or names of other buffers in the same
module, are names of running statistics (`cluster_size`, `running_mean` without `num_batches_tracked`, `min_val`,
`weight_u`, `queue_ptr`, `center`). Weights and biases without these signs are frozen parameters instead (SYN218).
Without metadata, a state dict does not separate buffers from parameters, so the finding reports "not trained" and how
this is known. BatchNorm's statistics belong to this finding if most ranks agree in all of them.

The finding is "consistent", except for integers equal to the ranks. In files of one step, different initial values
(SYN218, SYN210) or damage (SYN220, SYN221) have the same result. A difference that shrinks alike in all tensors is that
of averages (SYN219).

Cause: a module updates its buffer in `forward()`, or the training loop does, from the batch of the rank. DDP with
`broadcast_buffers=True` copies rank 0's buffers at the start of each forward pass, so the ranks differ by one update
and the data of all other ranks is lost. With `broadcast_buffers=False`, with FSDP, or for an update outside the forward
pass, the buffers are never synchronized. If most ranks agree and some do not, or a count of updates is zero on some
ranks, the update, a load or another change took place on some ranks only (`if rank == 0:`). Integers that name a rank,
a seed or a position in the data are the state of a rank, which differs by design. A different codebook or normalizer
changes the outputs and gradients of the model on each rank.

Fix: reduce the statistics of the batch over the ranks before the update (all-reduce sums and counts, gather the entries
of queues), as SyncBatchNorm does. Or average or broadcast the buffers before saving. Keep the state of a rank out of
the model's state dict.

Incidents: lucidrains/vector-quantize-pytorch#17 and espnet/espnet#6284 (codebooks), Denys88/rl_games#363 and
leggedrobotics/rsl_rl#226 (observations), pytorch/pytorch#85627 (observers).
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.bn import changed_on_some_ranks, is_batchnorm, running_statistics, statistics_of_copies
from syncheck.diagnose.case import Case, Match, is_weight
from syncheck.diagnose.conditions import requires, select_codes, state_if
from syncheck.diagnose.features import extents_of, select_numbers, with_agreeing_ranks
from syncheck.diagnose.history import last_agreement, trend_of
from syncheck.diagnose.measures import TOUCHED, evidence_of, is_at_least, is_share_below, values_by_rank
from syncheck.diagnose.selection import (
    exclude_names,
    has_kind,
    last_part,
    list_names,
    module_of,
    modules_of,
    out_of_sync,
    select_kinds,
    select_names,
)
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.records import TensorDiff, Trend

CODE = "SYN205"
SLUG = "buffer-local-state"
SEVERITY = "error"
CERTAINTY = "consistent"
# Last parts of the names of queues and of the position in them.
_QUEUE = re.compile(r"(?:\w+_)?(?:queue|queue_ptr|memory_bank|bank_ptr)\d*")
# Last parts of the names of integers that differ between ranks by design.
_OF_RANK = re.compile(
    r"_*(?:\w+_)?(?:rank|rank_id|worker|worker_id|shard_id|seeds?|rng|rng_state|generator|generator_state|cursor"
    r"|offset|position|sample_index)"
)
_GENERATOR = re.compile("rng|generator")
# Number of ranks from which integers equal to the ranks are no coincidence.
_RANKS = 3
# Cosine above which floating-point values have a common origin.
ONE_ORIGIN = 0.5


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The ranks update these tensors, which no optimizer trains, from different data, or only some ranks update "
        "them. Codebooks, observation statistics, quantization observers and queues are typical examples if they are "
        "not reduced over the ranks."
    )
    FIX = (
        "Reduce the batch statistics before the update: `dist.all_reduce(batch_sum)`; `dist.all_reduce(batch_count)`. "
        "Or keep DDP's `broadcast_buffers=True` and, before saving: `for b in model.buffers(): dist.broadcast(b, 0)`."
    )
    FIX_UNTRAINED = (
        "Reduce the batch statistics before the update: `dist.all_reduce(batch_sum)`; `dist.all_reduce(batch_count)`. "
        "Or copy the tensors before saving: `for t in [*model.parameters(), *model.buffers()]: "
        "torch.distributed.broadcast(t.data, 0)`."
    )
    CAUSE_SOME = (
        "These tensors, which no optimizer trains, were updated, loaded or overwritten on some ranks only. Updates "
        "from each rank's own data would differ on all ranks."
    )
    FIX_SOME = (
        "Update and load the tensors on every rank, not under 'if rank == 0'. Make them equal now, from a rank with "
        "the right values: `for t in [*model.parameters(), *model.buffers()]: torch.distributed.broadcast(t.data, "
        "rank)`."
    )
    CAUSE_OF_RANK = (
        "The tensors hold the state of each rank (a number, seed or position in the data), which differs by design."
    )
    FIX_OF_RANK = (
        "Keep the tensors out of the state dict: `module.register_buffer(name, tensor, persistent=False)`. Or save and "
        "load each rank's own, and skip the tensors in comparisons: {exclude:option GLOB}."
    )
    CAUSE_QUEUE = "Each rank enqueues the entries of its own batches only."
    FIX_QUEUE = (
        "Gather the entries of all ranks before enqueuing them: `dist.all_gather(entries, own_entries)`. Make the "
        "queues equal now: `for b in model.buffers(): dist.broadcast(b, 0)`."
    )
    BUFFERS = "The ranks have different values in {count:count buffer} ({names:names}), {size}"
    UNTRAINED = (
        "The ranks have different values in {count:count tensor} that no optimizer trains ({names:names}), {size}"
    )
    STATISTICS = (
        "Some ranks have different BatchNorm running statistics: {count:count tensor} ({names:names}) "
        "{count:verb differs|differ}, {size}"
    )
    OF_RANK = "{count:count tensor} {count:verb holds|hold} the state of a rank ({names:names})"
    VALUES = "{name:name} is {values:by_rank}"
    AGREED = "all ranks agreed at step {step}"
    TRAINED_AGREE = "all trained parameters agree ({parameters} compared)"
    TRAINED_AND_STATE_AGREE = (
        "all trained parameters ({parameters} compared) and optimizer tensors ({states} compared) agree"
    )
    OTHERS_AGREE = "all other parameters agree"
    JUDGED_BY_NAME = "judged by name, because the checkpoints do not record the trained parameters"
    ONE_STEP = "consistent with updates from each rank's own data, but one step does not show updates"


class _Updates(NamedTuple):
    """The candidates with signs of updates."""

    tensors: list[TensorDiff]
    trend: Trend | None
    """Of differences that change over the steps; None if no step shows a change."""
    course: tuple[Message, ...]
    """The statement about the differences over the steps."""


def _of_batchnorm(case: Case, diffs: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Return the running statistics of BatchNorm, which have rules of their own."""
    return [diff for diff in select_kinds(diffs, *BN_STATISTICS) if is_batchnorm(case, diff.name)]


def _find_candidates(case: Case) -> list[TensorDiff]:
    """Return the differing tensors that are or may be buffers, and statistics of BatchNorm changed on some ranks."""
    untrained = select_names(case.differing("parameter"), _find_possible_buffers(case))
    buffers = case.differing("buffer", *BN_STATISTICS)
    names = {*list_names(untrained), *list_names(buffers)}
    names.difference_update(list_names(_of_batchnorm(case, buffers)))
    candidates = select_names(case.tensors, names)
    return [
        *candidates,
        *_find_frozen_codebooks(case, candidates),
        *changed_on_some_ranks(case),
    ]


def _find_possible_buffers(case: Case) -> frozenset[str]:
    """Return the names of tensors that may be buffers, although a state dict does not show it."""
    # The metadata lists the buffers.
    if case.group.evidence.metadata.buffers is not None:
        return frozenset()
    untrained = case.untrained - case.frozen
    if case.optimized is not None:
        return untrained
    return untrained.union(list_names(running_statistics(case, case.tensors)))


def _find_frozen_codebooks(case: Case, buffers: list[TensorDiff]) -> list[TensorDiff]:
    """Return the frozen parameters beside differing running statistics: a module without gradients may update them."""
    frozen = select_names(case.differing("parameter"), case.frozen)
    statistics = running_statistics(case, buffers)
    return _select_beside(exclude_names(frozen, list_names(buffers)), statistics)


def _select_beside(diffs: Sequence[TensorDiff], statistics: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors in the modules of running statistics, without weights."""
    modules = modules_of(statistics)
    return [diff for diff in diffs if module_of(diff.name) in modules and not is_weight(diff.name)]


def _are_others_in_sync(case: Case) -> bool:
    """Whether no trained parameter and no optimizer state differs beside the candidates."""
    candidates = _find_candidates(case)
    untrained = case.untrained.union(list_names(candidates))
    trained = case.of_kind("parameter", "optimizer", "optimizer_step")
    return not exclude_names(trained, untrained)


@requires(_find_candidates, _are_others_in_sync)
def apply(case: Case) -> Match | None:
    """Match untrained tensors with signs of updates, if all trained tensors agree."""
    updates = _observe_updates(case)
    of_model = [diff for diff in updates.tensors if not _is_of_rank(diff)]
    if of_model:
        return _match_of_model(case, updates, of_model)
    if updates.tensors:
        return _match_of_rank(case, updates.tensors)
    return None


def _observe_updates(case: Case) -> _Updates:
    """Return the candidates that something updates, by the steps of the run or by signs at one step."""
    candidates = _find_candidates(case)
    names = list_names(candidates)
    trend, course = case.trend_facts(names=names)
    if _changes_over_steps(case, names):
        return _Updates(candidates, trend, course)
    updated = _select_updated(case, candidates, is_steady=trend is not None)
    return _Updates(updated, None, course)


def _match_of_model(case: Case, updates: _Updates, of_model: list[TensorDiff]) -> Match:
    """Match tensors of the model."""
    # The statistics of BatchNorm that were changed on some ranks.
    changed = changed_on_some_ranks(case)
    are_buffers = not has_kind(of_model, "parameter")
    sentence = Text.BUFFERS if are_buffers else Text.UNTRAINED
    if len(of_model) == len(changed):
        sentence = Text.STATISTICS
    summary = sentence(
        count=len(of_model),
        names=list_names(of_model),
        size=largest_difference(of_model),
    )

    agreed = last_agreement(list_names(of_model), case.steps())
    facts = [
        summary,
        *_trained_facts(case, are_buffers),
        *updates.course,
        *_agreement_facts(updates, agreed),
        *_rank_facts(exclude_names(updates.tensors, list_names(of_model))),
    ]
    covered = [*updates.tensors]
    if changed:
        # A copy of the model has its statistics too.
        covered += statistics_of_copies(case)
    match = case.make_match(of_model, facts, covered)
    cause, fix = _select_words(of_model, are_buffers)
    alternatives = _list_alternatives(
        case,
        updates=updates,
        of_model=of_model,
        agreed=agreed,
    )
    return replace(
        match,
        cause=cause,
        fix=fix,
        alternatives=alternatives,
    )


def _agreement_facts(updates: _Updates, agreed: int | None) -> tuple[Message, ...]:
    """State the last step in sync if the differences do not change. agreed: this step, if there is one."""
    if updates.trend is not None:
        return ()
    if agreed is None:
        return (Text.ONE_STEP(),)
    return (Text.AGREED(step=agreed),)


def _list_alternatives(
    case: Case, updates: _Updates, of_model: Sequence[TensorDiff], agreed: int | None
) -> tuple[str, ...]:
    """Return the codes of other causes. agreed: the last step in sync, if there is one."""
    if updates.trend is not None:
        # Averages of equal values shrink too.
        return select_codes({"SYN219": updates.trend == "shrinking"})
    # After a step in sync, a change on some ranks alone has no other cause.
    if agreed is not None and _is_update_of_some_ranks(of_model):
        return ()
    return (_find_alternative(case, of_model),)


def _find_alternative(case: Case, differing: Sequence[TensorDiff]) -> str:
    """Return the code of the most likely other cause at a single step."""
    if _of_batchnorm(case, differing):
        are_unsynchronized = case.group.evidence.metadata.buffers_synced is False
        return "SYN202" if are_unsynchronized else "SYN201"
    if _are_damaged(differing):
        return "SYN220" if extents_of(differing) == {"one"} else "SYN221"
    # Without the optimizer's parameters, a parameter may be a trained one.
    may_be_trained = case.optimized is None and has_kind(differing, "parameter")
    return "SYN210" if may_be_trained else "SYN218"


def _are_damaged(differing: Sequence[TensorDiff]) -> bool:
    """Whether few elements of larger tensors differ, as after damage."""
    return not select_numbers(differing) and is_share_below(differing, TOUCHED)


def _is_of_rank(diff: TensorDiff) -> bool:
    """Whether a tensor names a rank, a seed or a position in the data."""
    is_integer = diff.dtype.startswith(("int", "uint"))
    # A value on most ranks is no state of a rank.
    if diff.minority or not is_integer:
        return False
    name = last_part(diff.name)
    if not _OF_RANK.fullmatch(name):
        return _equals_rank(diff)
    # The states of generators have many elements.
    return diff.numel == 1 or _GENERATOR.search(name) is not None


def _equals_rank(diff: TensorDiff) -> bool:
    """Whether the tensor is the number of its rank on enough ranks."""
    values = evidence_of(diff).values
    are_ranks = list(values.values()) == list(values)
    return are_ranks and len(values) >= _RANKS


def _match_of_rank(case: Case, tensors: Sequence[TensorDiff]) -> Match:
    """Match the state of ranks alone."""
    facts = [*_rank_facts(tensors), *_trained_facts(case, are_buffers=True)]
    match = case.make_match(tensors, facts).with_cause(Text.CAUSE_OF_RANK, Text.FIX_OF_RANK)
    if all(map(_equals_rank, tensors)):
        return replace(match, certainty="proved")
    return replace(match, alternatives=("SYN218",))


def _rank_facts(tensors: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State which tensors hold the state of a rank, and the values of the first of them."""
    if not tensors:
        return ()
    first = tensors[0]
    values = values_by_rank(first)
    return (
        Text.OF_RANK(count=len(tensors), names=list_names(tensors)),
        *state_if(values, Text.VALUES(name=first.name, values=values)),
    )


def _select_words(differing: Sequence[TensorDiff], are_buffers: bool) -> tuple[Sentence, Sentence]:
    """Return the cause and the fix: updates on some ranks, queues, or other updates from each rank's own data."""
    if _is_update_of_some_ranks(differing):
        return Text.CAUSE_SOME, Text.FIX_SOME
    if not are_buffers:
        return Text.CAUSE, Text.FIX_UNTRAINED
    if all(_QUEUE.fullmatch(last_part(diff.name)) for diff in differing):
        return Text.CAUSE_QUEUE, Text.FIX_QUEUE
    return Text.CAUSE, Text.FIX


def _is_update_of_some_ranks(differing: Sequence[TensorDiff]) -> bool:
    """Whether most ranks agree in all tensors, or a count of updates is zero on some ranks only."""
    minorities = {diff.minority for diff in differing}
    have_majority = len(with_agreeing_ranks(differing)) == len(differing)
    # One set of ranks deviates in all tensors.
    is_one_set = len(minorities) == 1 and () not in minorities
    if have_majority and is_one_set:
        return True
    return any(map(_is_zero_on_some_ranks, select_numbers(differing)))


def _is_zero_on_some_ranks(diff: TensorDiff) -> bool:
    """Whether a number is a count that is zero on some ranks."""
    is_count = diff.dtype.startswith("int")
    return is_count and 0 in evidence_of(diff).values.values()


def _changes_over_steps(case: Case, names: Collection[str]) -> bool:
    """Whether the differences of these tensors change between any two neighbouring steps."""
    for earlier, later in pairwise(case.steps()):
        before = select_names(out_of_sync(earlier), names)
        after = select_names(out_of_sync(later), names)
        if trend_of((before, after)) not in (None, "constant"):
            return True
    return False


def _select_updated(case: Case, differing: list[TensorDiff], *, is_steady: bool) -> list[TensorDiff]:
    """Select the tensors with signs of updates in their names, dtypes and values.

    is_steady: whether their difference stayed the same over the steps.
    """
    statistics = running_statistics(case, differing)
    updated = [*statistics, *_select_beside(differing, statistics)]
    # Values that only started unequal keep their difference.
    if not is_steady:
        updated += filter(_has_moved, differing)
    return select_names(differing, list_names(updated))


def _has_moved(diff: TensorDiff) -> bool:
    """Whether something moved the values of a buffer from a common origin on all ranks."""
    if is_weight(diff.name):
        return False
    # Single numbers are hardly ever initialized randomly.
    if diff.numel == 1:
        return True
    # A few differing elements are damage, unless their names are those of running statistics.
    have_one_origin = is_at_least(evidence_of(diff).cosine, ONE_ORIGIN)
    return have_one_origin and not is_share_below([diff], TOUCHED)


def _trained_facts(case: Case, are_buffers: bool) -> tuple[Message, ...]:
    """State which tensors agree, and how the trained parameters are known."""
    optimized, states = case.optimized, case.compared("optimizer")
    if optimized is None:
        return (*state_if(not are_buffers, Text.JUDGED_BY_NAME()), Text.OTHERS_AGREE())
    if states:
        return (Text.TRAINED_AND_STATE_AGREE(parameters=len(optimized), states=states),)
    return (Text.TRAINED_AGREE(parameters=len(optimized)),)
