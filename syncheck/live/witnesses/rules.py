"""What the witnesses of a watched run find: the codes from SYN401, with their sentences.

The docstring of the sentences is the text of `syncheck explain`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.rule import Rule
from syncheck.diagnose.rules import list_rules
from syncheck.records import Finding
from syncheck.sentences import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence


class SameBatch(Sentence, topic="SYN401"):
    """Several data-parallel ranks train on the same batch at the same step.

    Signature: the tensors that enter the model in training mode have equal bytes on several ranks of one data-parallel
    group. Tensors with equal elements only, and tensors of fewer than 8 elements, do not count. Augmented samples have
    other bytes: then equal sample indices of equal datasets show it, see SYN402.

    Cause: the data loader has no DistributedSampler, and all ranks shuffle with one seed; or the sampler was created
    with `rank=0` on every rank, for example before the process group. The gradient is the average of equal gradients,
    so the run costs as many GPUs as before and trains as one process does.

    Fix: `DataLoader(dataset, sampler=DistributedSampler(dataset), batch_size=...)`, without `shuffle=True`. For an
    iterable dataset, let each rank take its own part: `itertools.islice(stream, rank, None, world_size)`.

    If it is no problem: ranks that share a batch by design, such as tensor-parallel ranks, do not belong to one
    data-parallel group. Give the wrapper the group of the data-parallel ranks.
    """

    CAUSE = "The data loaders of these ranks return equal batches: each rank needs its own part of the data."
    FIX = (
        "Pass `sampler=DistributedSampler(dataset)` to the data loader, without `shuffle=True`, after "
        "`init_process_group()`."
    )
    FACT = "{ranks:ranks} trained on equal inputs of {elements:count element}"


class OverlappingBatches(Sentence, topic="SYN402"):
    """Several data-parallel ranks draw the same samples in one epoch.

    Signature: the data loaders of several ranks draw samples with equal indices, or equal bytes without a sampler,
    from equal datasets within one epoch; more of them than the padding of a DistributedSampler explains. Samples are
    chosen by a hash, so that the same samples are watched on all ranks: about 6 of each batch. Ranks that draw a sample
    twice in one epoch draw with replacement, and are left out.

    Cause: every rank shuffles the whole dataset with its own seed, without DistributedSampler, or the parts of the
    ranks overlap. An epoch then shows some samples several times and other samples never.

    Fix: use DistributedSampler, or give each rank a part of its own.

    If it is no problem: draws that are random by design, without epochs. Allow it: `--allow SYN402`.
    """

    CAUSE = "The ranks draw their samples from the same part of the data."
    FIX = "Pass `sampler=DistributedSampler(dataset)` to the data loader, or give each rank a part of its own."
    FACT = "{ranks:ranks} drew {count:count watched sample} that another rank drew in epoch {epoch}"


class RepeatedOrder(Sentence, topic="SYN403"):
    """An epoch shows the samples in the order of the epoch before.

    Signature: the data loader of a rank draws its samples in a random order, and draws them in the same order in the
    next epoch. An order of ascending indices is no random order.

    Cause: DistributedSampler shuffles with seed + epoch, and `sampler.set_epoch(epoch)` is not called; or each epoch
    creates its generator with the same seed.

    Fix: `sampler.set_epoch(epoch)` at the start of each epoch. With persistent workers and libraries that wrap the
    loader, call it on the sampler that the loader uses.
    """

    CAUSE = "The order of the samples does not depend on the epoch."
    FIX = "Call `sampler.set_epoch(epoch)` at the start of each epoch."
    FACT = "epoch {epoch} began with the same {count:count sample} in the same order as epoch {before}"


class EqualStreams(Sentence, topic="SYN404"):
    """Data-parallel ranks draw equal random numbers in the forward pass, for example equal dropout masks.

    Signature: before a forward pass in training mode, several ranks have the same state of torch's generator, and the
    pass draws random numbers from it.

    Cause: every rank was seeded with the same number, as `transformers.set_seed` does. The masks of one step are then
    equal on all ranks, which makes the noise of their average larger. It is no desync: the replicas stay equal.

    Fix: after the model is built, seed each rank with its own number: `torch.manual_seed(seed + rank)`.
    """

    CAUSE = "The ranks were seeded with the same number, so random layers such as dropout use equal masks."
    FIX = "After the model is built, seed each rank with its own number: `torch.manual_seed(seed + rank)`."
    FACT = "{ranks:ranks} drew equal random numbers in the forward pass"


class UnequalGradients(Sentence, topic="SYN410"):
    """After the reduction, ranks step with different gradients.

    Signature: before an optimizer step, the gradients of replicated parameters differ between ranks that had reduced
    them together. With a wrapper (DistributedDataParallel) every step is judged. Without one, ranks are judged whose
    gradients were equal at several steps before.

    Cause: something changes gradients after the reduction on one rank alone (a clip by a local norm, a scale, a hook),
    or the reduction did not include them: the forward pass went around the wrapper (`model.module(x)`), `no_sync()`
    ended too late on one rank, a parameter had no gradient on one rank, or the wrapper does not contain the parameter.

    Fix: clip after the reduction with a norm that is equal on all ranks, call the wrapper and not `model.module`, and
    leave `no_sync()` on the last micro-batch on all ranks.

    The model is still in sync when this is found: the parameters differ only after the step.
    """

    CAUSE = "The gradients were changed on these ranks alone, or some of them were not reduced."
    FIX = (
        "Look for code that depends on the rank between `backward()` and `step()`, and for a forward pass around the "
        "wrapper (`model.module(x)`)."
    )
    CAUSE_SCALED = "All gradients of the rank were multiplied by one factor: it clips or scales them alone."
    FIX_SCALED = "Clip or scale with a number that is equal on all ranks, after the reduction."
    CAUSE_MISSING = "Some ranks have no gradient for parameters that other ranks have one for."
    FIX_MISSING = (
        "Use the same parameters in each step on every rank, or `DistributedDataParallel(..., "
        "find_unused_parameters=True)`."
    )
    CAUSE_LOCAL = "The gradients are those of each rank's own batch: they were not reduced."
    FIX_LOCAL = (
        "Call the wrapper, not `model.module`, and leave `no_sync()` before the last micro-batch on every rank. A "
        "parameter that the wrapper does not contain must be added before the wrapper is created."
    )
    FACT = "{count} of {total:count gradient} {count:verb differs|differ}: {names:names}"
    DIGESTS = "the digests of the gradients differ"
    FACTOR = "the gradients of {ranks:ranks} are {factor:number} times the gradients of the other ranks"
    MISSING = "missing on some ranks: {names:names}"


class Seen(Sentence, topic="watch"):
    """What a watched run shows about findings that files show too."""

    SKIPPED = "{ranks:ranks} did not step after reduction {reduction}, as the other ranks did"
    REPEATED = "optimizer steps without a reduction before reduction {reduction}: {steps:by_rank}"
    OUTSIDE = (
        "the optimizer trains {count:count parameter} that the wrapper does not contain, and the gradients of "
        "{names:names} differ"
    )
    NO_GRADIENT = "{ranks:ranks} called the optimizer without any gradient, which changes nothing"
    SETTING = "{name:name} is {values:by_rank}"
    SETTINGS = "the digests of the settings differ"
    MORE_SETTINGS = "{count:count more setting}"
    WATCHED = "{steps:count step} watched, {checks:count check} of all replicas"
    INFINITE = (
        "the scaler of {ranks:ranks} found infinite gradients after reduction {reduction}, the other ranks did not"
    )


WITNESS_RULES = (
    Rule(code="SYN401", slug="same-batch", sentences=SameBatch),
    Rule(code="SYN402", slug="overlapping-batches", sentences=OverlappingBatches, severity="warning"),
    Rule(code="SYN403", slug="repeated-order", sentences=RepeatedOrder, severity="warning"),
    Rule(code="SYN404", slug="equal-streams", sentences=EqualStreams, severity="info"),
    Rule(code="SYN410", slug="gradients-differ", sentences=UnequalGradients),
)
# Findings about the data, which leave the replicas in sync.
DATA_CODES = frozenset({"SYN401", "SYN402", "SYN403", "SYN404"})


@cache
def find_rule(code: str) -> Rule:
    """Return the rule of a witness, or of a finding of files that a watched run sees before the parameters differ."""
    for rule in (*WITNESS_RULES, *list_rules()):
        if rule.code == code:
            return rule
    raise KeyError(code)


def make_finding(
    code: str,
    ranks: Sequence[int],
    facts: Sequence[Message],
    *,
    names: Sequence[str] = (),
    variant: str = "",
    allow: frozenset[str] = frozenset(),
) -> Finding:
    """Return a finding of a witness.

    ranks: the suspects, or all ranks without a majority.
    names: of the tensors.
    variant: the suffix of other sentences for cause and fix, such as _SCALED.
    allow: the codes that the user allows.
    """
    rule = find_rule(code)
    sentences: Any = rule.sentences
    return Finding(
        code=code,
        slug=rule.slug,
        severity=rule.severity,
        ranks=tuple(sorted(ranks)),
        tensors=tuple(names),
        facts=tuple(facts),
        cause=sentences[f"CAUSE{variant}"](),
        fix=sentences[f"FIX{variant}"](),
        allowed=code in allow,
        certainty="proved",
    )
