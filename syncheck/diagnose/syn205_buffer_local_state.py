"""Each rank updates buffers from its own data: codebooks, observation statistics, observers, queues, centers.

Signature: model tensors that no optimizer updates differ, but all trained tensors and their optimizer state agree.
Something updates the differing tensors: their difference changes over the steps of the run. In files of one step, there
are other signs. The tensors are integers or single numbers. Or their values have a common origin on all ranks (a cosine
of 0.5 or more; independent random initializations are near 0). Or their names, or names of other buffers in the same
module, are names of running statistics (`cluster_size`, `running_mean` without `num_batches_tracked`, `min_val`,
`weight_u`, `queue_ptr`, `center`). Weights and biases without these signs are frozen parameters instead (SYN218).
Without metadata, a state dict does not separate buffers from parameters, so the finding reports "not trained" and how
this is known.

Cause: a module updates its buffer in `forward()`, or the training loop does, from the batch of the rank. DDP with
`broadcast_buffers=True` copies rank 0's buffers at the start of each forward pass, so the ranks differ by one update
and the data of all other ranks is lost. With `broadcast_buffers=False`, with FSDP, or for an update outside the forward
pass, the buffers are never synchronized. If most ranks agree and some do not, or a count of updates is zero on some
ranks, the update or a load took place on some ranks only (`if rank == 0:`). A different codebook or normalizer changes
the outputs and gradients of the model on each rank.

Fix: reduce the statistics of the batch over the ranks before the update (all-reduce sums and counts, gather the entries
of queues), as SyncBatchNorm does. Or average or broadcast the buffers before saving.

Incidents: lucidrains/vector-quantize-pytorch#17 and espnet/espnet#6284 (codebooks), Denys88/rl_games#363 and
leggedrobotics/rsl_rl#226 (observations), pytorch/pytorch#85627 (observers).
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from syncheck.diagnose.bn import is_batchnorm, running_statistics
from syncheck.diagnose.case import Case, Match, evidence_of, is_weight, largest_difference
from syncheck.diagnose.history import trend_of
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.records import TensorDiff

CODE = "SYN205"
SLUG = "buffer-local-state"
SEVERITY = "error"
CERTAINTY = "likely"
# Last parts of the names of queues and of the position in them.
_QUEUE = re.compile(r"(?:\w+_)?(?:queue|queue_ptr|memory_bank|bank_ptr)\d*")
# Cosine above which floating-point values have a common origin.
ONE_ORIGIN = 0.5


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "Each rank updates these tensors, which no optimizer trains, from its own data. Codebooks, observation "
        "statistics, quantization observers and queues are typical examples if they are not reduced over the ranks."
    )
    FIX = (
        "Reduce the batch statistics before the update: dist.all_reduce(batch_sum); dist.all_reduce(batch_count). Or "
        "keep DDP's broadcast_buffers=True and, before saving: for b in model.buffers(): dist.broadcast(b, 0)."
    )
    FIX_UNTRAINED = (
        "Reduce the batch statistics before the update: dist.all_reduce(batch_sum); dist.all_reduce(batch_count). Or "
        "copy the tensors before saving: for t in [*model.parameters(), *model.buffers()]: "
        "torch.distributed.broadcast(t.data, 0)."
    )
    CAUSE_SOME = (
        "Some ranks updated or loaded these tensors, which no optimizer trains, and the other ranks did not. Updates "
        "from each rank's own data would differ on all ranks."
    )
    FIX_SOME = (
        "Update and load the tensors on every rank, not under 'if rank == 0'. Make them equal now, from a rank with "
        "the right values: for t in [*model.parameters(), *model.buffers()]: torch.distributed.broadcast(t.data, rank)."
    )
    CAUSE_QUEUE = "Each rank enqueues the entries of its own batches only."
    FIX_QUEUE = (
        "Gather the entries of all ranks before enqueuing them: dist.all_gather(entries, own_entries). Make the queues "
        "equal now: for b in model.buffers(): dist.broadcast(b, 0)."
    )
    BUFFERS = "The ranks have different values in {count:count buffer} ({names:names}), {size}"
    UNTRAINED = (
        "The ranks have different values in {count:count tensor} that no optimizer trains ({names:names}), {size}"
    )
    TRAINED_AGREE = "all trained parameters agree ({parameters} compared)"
    TRAINED_AND_STATE_AGREE = (
        "all trained parameters ({parameters} compared) and optimizer tensors ({states} compared) agree"
    )
    OTHERS_AGREE = "all other parameters agree"
    JUDGED_BY_NAME = "judged by name, because the checkpoints do not record the trained parameters"
    ONE_STEP = "consistent with updates from each rank's own data, but one step does not show updates"


def apply(case: Case) -> Match | None:
    """Match untrained tensors with signs of updates, if all trained tensors agree."""
    differing = _find_candidates(case)
    names = {diff.name for diff in differing}
    untrained = names | case.untrained
    others = case.of_kind("parameter", "optimizer", "optimizer_step")
    if not differing or any(diff.name not in untrained for diff in others):
        return None
    trend, history = case.trend_facts(names=names)
    if not _changes_over_steps(case, names):
        differing = _select_updated(case, differing, steady=trend is not None)
    if not differing:
        return None
    are_buffers = all(diff.kind != "parameter" for diff in differing)
    sentence, listed = Text.BUFFERS if are_buffers else Text.UNTRAINED, tuple(diff.name for diff in differing)
    facts = [
        sentence(count=len(differing), names=listed, size=largest_difference(differing)),
        *_trained_facts(case, are_buffers),
        *history,
    ]
    if trend is None:
        facts.append(Text.ONE_STEP())
    match = case.make_match(differing, facts)
    cause, fix = _select_words(differing, are_buffers)
    return Match(match.tensors, match.ranks, match.facts, cause=cause, fix=fix)


def _select_words(differing: list[TensorDiff], are_buffers: bool) -> tuple[Sentence, Sentence]:
    """Return the cause and the fix: updates on some ranks, queues, or other updates from each rank's own data."""
    if _is_update_of_some_ranks(differing):
        return Text.CAUSE_SOME, Text.FIX_SOME
    if are_buffers and all(_QUEUE.fullmatch(diff.name.rpartition(".")[2]) for diff in differing):
        return Text.CAUSE_QUEUE, Text.FIX_QUEUE
    return Text.CAUSE, Text.FIX if are_buffers else Text.FIX_UNTRAINED


def _is_update_of_some_ranks(differing: list[TensorDiff]) -> bool:
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
    """Whether the values have a common origin on all ranks. Single numbers are hardly ever initialized randomly."""
    cosine = evidence_of(diff).cosine
    return diff.numel == 1 or (cosine is not None and cosine >= ONE_ORIGIN)


def _trained_facts(case: Case, are_buffers: bool) -> tuple[Message, ...]:
    """State which tensors agree, and how the trained parameters are known."""
    optimized, states = case.optimized, case.compared("optimizer")
    if optimized is None:
        return (Text.OTHERS_AGREE(),) if are_buffers else (Text.JUDGED_BY_NAME(), Text.OTHERS_AGREE())
    if states:
        return (Text.TRAINED_AND_STATE_AGREE(parameters=len(optimized), states=states),)
    return (Text.TRAINED_AGREE(parameters=len(optimized)),)
