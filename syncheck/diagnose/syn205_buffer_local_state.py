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
from itertools import pairwise
from typing import TYPE_CHECKING

from syncheck.diagnose.bn import changed_on_some_ranks, is_batchnorm, running_statistics, statistics_of_copies
from syncheck.diagnose.case import Case, Match, is_weight
from syncheck.diagnose.history import last_agreement, trend_of
from syncheck.diagnose.measures import TOUCHED, evidence_of, is_share_below
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
# Number of ranks from which integers equal to the ranks are no coincidence.
_RANKS = 3
# Cosine above which floating-point values have a common origin.
ONE_ORIGIN = 0.5


class Text(Sentence):
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


def apply(case: Case) -> Match | None:
    """Match untrained tensors with signs of updates, if all trained tensors agree."""
    changed = changed_on_some_ranks(case)
    differing = [*_find_candidates(case), *changed]
    names = {diff.name for diff in differing}
    untrained = names | case.untrained
    others = case.of_kind("parameter", "optimizer", "optimizer_step")
    if not differing or any(diff.name not in untrained for diff in others):
        return None
    trend, history = case.trend_facts(names=names)
    is_updated = _changes_over_steps(case, names)
    if not is_updated:
        differing = _select_updated(case, differing, steady=trend is not None)
    of_rank = [diff for diff in differing if _is_of_rank(diff)]
    of_model = [diff for diff in differing if diff not in of_rank]
    if not of_model:
        return _match_of_rank(case, of_rank) if of_rank else None

    are_buffers = all(diff.kind != "parameter" for diff in of_model)
    sentence, listed = Text.BUFFERS if are_buffers else Text.UNTRAINED, tuple(diff.name for diff in of_model)
    if len(of_model) == len(changed):
        sentence = Text.STATISTICS
    alternatives, evidence = _list_alternatives(case, of_model, trend if is_updated else None)
    facts = [
        sentence(count=len(of_model), names=listed, size=largest_difference(of_model)),
        *_trained_facts(case, are_buffers),
        *history,
        *evidence,
        *_rank_facts(of_rank),
    ]
    copies = statistics_of_copies(case) if changed else ()
    match = case.make_match(of_model, facts, (*differing, *copies))
    cause, fix = _select_words(of_model, are_buffers)
    return Match(match.tensors, match.ranks, match.facts, cause=cause, fix=fix, alternatives=alternatives)


def _list_alternatives(
    case: Case, differing: Sequence[TensorDiff], trend: Trend | None
) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    """Return the other causes, and the evidence.

    trend: of differences that change over the steps; None if no step shows a change.
    """
    if trend == "shrinking":  # averages of equal values do so too
        return ("SYN219",), ()
    if trend is not None:
        return (), ()
    agreed = last_agreement({diff.name for diff in differing}, case.steps())
    evidence = () if agreed is None else (Text.AGREED(step=agreed),)
    if agreed is not None and _is_update_of_some_ranks(differing):
        return (), evidence
    if any(diff.kind in BN_STATISTICS and is_batchnorm(case, diff.name) for diff in differing):
        alternative = "SYN202" if case.group.evidence.metadata.buffers_synced is False else "SYN201"
    elif all(diff.numel > 1 for diff in differing) and is_share_below(differing, TOUCHED):
        alternative = "SYN220" if all(diff.extent == "one" for diff in differing) else "SYN221"
    elif case.optimized is None and any(diff.kind == "parameter" for diff in differing):
        alternative = "SYN210"
    else:
        alternative = "SYN218"
    return (alternative,), evidence or (Text.ONE_STEP(),)


def _is_of_rank(diff: TensorDiff) -> bool:
    """Whether a tensor names a rank, a seed or a position in the data. A value on most ranks is no state of a rank."""
    if not diff.dtype.startswith(("int", "uint")) or diff.minority:
        return False
    last = diff.name.rpartition(".")[2]
    if _OF_RANK.fullmatch(last):
        return diff.numel == 1 or "rng" in last or "generator" in last
    return _equals_rank(diff)


def _equals_rank(diff: TensorDiff) -> bool:
    values = evidence_of(diff).values
    return len(values) >= _RANKS and all(value == rank for rank, value in values.items())


def _match_of_rank(case: Case, tensors: Sequence[TensorDiff]) -> Match:
    """Match the state of ranks alone."""
    is_certain = all(map(_equals_rank, tensors))
    match = case.make_match(tensors, [*_rank_facts(tensors), *_trained_facts(case, are_buffers=True)])
    return Match(
        match.tensors,
        match.ranks,
        match.facts,
        cause=Text.CAUSE_OF_RANK,
        fix=Text.FIX_OF_RANK,
        certainty="proved" if is_certain else None,
        alternatives=() if is_certain else ("SYN218",),
    )


def _rank_facts(tensors: Sequence[TensorDiff]) -> list[Message]:
    """State which tensors hold the state of a rank, and the values of the first of them."""
    if not tensors:
        return []
    facts: list[Message] = [Text.OF_RANK(count=len(tensors), names=tuple(diff.name for diff in tensors))]
    values = evidence_of(tensors[0]).values
    return [*facts, Text.VALUES(name=tensors[0].name, values=dict(sorted(values.items())))] if values else facts


def _select_words(differing: Sequence[TensorDiff], are_buffers: bool) -> tuple[Sentence, Sentence]:
    """Return the cause and the fix: updates on some ranks, queues, or other updates from each rank's own data."""
    if _is_update_of_some_ranks(differing):
        return Text.CAUSE_SOME, Text.FIX_SOME
    if are_buffers and all(_QUEUE.fullmatch(diff.name.rpartition(".")[2]) for diff in differing):
        return Text.CAUSE_QUEUE, Text.FIX_QUEUE
    return Text.CAUSE, Text.FIX if are_buffers else Text.FIX_UNTRAINED


def _is_update_of_some_ranks(differing: Sequence[TensorDiff]) -> bool:
    """Whether most ranks agree in all tensors, or a count of updates is zero on some ranks only."""
    odd = {diff.minority for diff in differing}
    if len(odd) == 1 and all(odd) and all(len(diff.clusters[0]) > 1 for diff in differing):
        return True
    counts = [evidence_of(diff).values for diff in differing if diff.numel == 1 and diff.dtype.startswith("int")]
    return any(0 in set(values.values()) for values in counts)


def _find_candidates(case: Case) -> list[TensorDiff]:
    """Return the differing buffers, and differing tensors that may be buffers."""
    candidates = []
    described = case.group.evidence.metadata.buffers is not None
    untrained = case.untrained - case.frozen
    statistics = {diff.name for diff in running_statistics(case, case.tensors)} if case.optimized is None else set()
    for diff in case.tensors:
        buffer = diff.kind == "buffer" or (diff.kind in BN_STATISTICS and not is_batchnorm(case, diff.name))
        if diff.kind == "parameter" and not described:
            buffer = diff.name in untrained or diff.name in statistics
        if buffer and diff.status == "different":
            candidates.append(diff)
    return candidates + _find_frozen_codebooks(case, candidates)


def _find_frozen_codebooks(case: Case, buffers: list[TensorDiff]) -> list[TensorDiff]:
    """Return the frozen parameters beside differing running statistics: a module without gradients may update them."""
    modules = {diff.name.rpartition(".")[0] for diff in running_statistics(case, buffers)}
    listed = {diff.name for diff in buffers}
    codebooks = []
    for diff in case.differing("parameter"):
        beside = diff.name.rpartition(".")[0] in modules and diff.name not in listed
        if beside and diff.name in case.frozen and not is_weight(diff.name):
            codebooks.append(diff)
    return codebooks


def _changes_over_steps(case: Case, names: Collection[str]) -> bool:
    """Whether the differences of these tensors change between any two neighbouring steps."""
    steps = [[diff for diff in group.tensors if diff.out_of_sync and diff.name in names] for group in case.steps()]
    return any(trend_of(pair) not in (None, "constant") for pair in pairwise(steps))


def _select_updated(case: Case, differing: list[TensorDiff], *, steady: bool) -> list[TensorDiff]:
    """Select the tensors with signs of updates in their names, dtypes and values.

    steady: whether their difference stayed the same over the steps.
    """
    updated = running_statistics(case, differing)
    modules = {diff.name.rpartition(".")[0] for diff in updated}
    for diff in differing:
        in_module = diff.name.rpartition(".")[0] in modules
        if not is_weight(diff.name) and (in_module or (not steady and _has_one_origin(diff))):
            updated.append(diff)
    names = {diff.name for diff in updated}
    return [diff for diff in differing if diff.name in names]


def _has_one_origin(diff: TensorDiff) -> bool:
    """Whether the values have a common origin on all ranks. Single numbers are hardly ever initialized randomly.

    A few differing elements are damage, unless their names are those of running statistics.
    """
    cosine = evidence_of(diff).cosine
    is_near = cosine is not None and cosine >= ONE_ORIGIN and not is_share_below([diff], TOUCHED)
    return diff.numel == 1 or is_near


def _trained_facts(case: Case, are_buffers: bool) -> tuple[Message, ...]:
    """State which tensors agree, and how the trained parameters are known."""
    optimized, states = case.optimized, case.compared("optimizer")
    if optimized is None:
        return (Text.OTHERS_AGREE(),) if are_buffers else (Text.JUDGED_BY_NAME(), Text.OTHERS_AGREE())
    if states:
        return (Text.TRAINED_AND_STATE_AGREE(parameters=len(optimized), states=states),)
    return (Text.TRAINED_AGREE(parameters=len(optimized)),)
