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

    from syncheck.records import Certainty


class SameBatch(Sentence, topic="SYN401"):
    """Several data-parallel ranks train on the same batch at the same step.

    Signature: the tensors that enter the model in training mode have equal bytes on several ranks of one data-parallel
    group. Tensors with equal elements only, and tensors of fewer than 8 elements, do not count. Augmented samples have
    other bytes: then equal sample indices of equal datasets show it, see SYN402. If the loaders drew equal samples,
    too, the cause is proved. Otherwise it is likely: targets may differ that do not enter the wrapper. Inputs with an
    object whose tensors are unknown do not count.

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
    CAUSE_INPUTS = (
        "Equal tensors entered the model on these ranks. If they are the whole batch, each rank needs its own part of "
        "the data. Not compared: targets that do not enter the wrapper, and random numbers that the model draws."
    )
    FIX_INPUTS = (
        "With a data loader, pass `sampler=DistributedSampler(dataset)` after `init_process_group()`; otherwise give "
        "each rank its own part of the data. If the inputs are equal by design, such as a grid of coordinates or the "
        "same labels in each batch: {allow:option=SYN401}."
    )
    FACT = "{ranks:ranks} trained on equal inputs of {elements:count element}"
    DRAWN = "their loaders drew equal samples"


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


class DifferentBatches(Sentence, topic="SYN406"):
    """Ranks of one model, tensor-parallel or context-parallel, train on different batches.

    Signature: a plan of `parallelize_module` declares the input of a module as `Replicate()`, so it must be equal on
    all ranks of the mesh, and torch does not check it. In training mode, a tensor without gradient entered this module,
    and its bytes differ between the ranks. Activations, and inputs that are declared `Shard`, as in sequence
    parallelism, do not count. Or the whole sequences differ that ranks pass to
    `context_parallel(mesh, buffers=...)`, which keeps a part of each on each rank.

    Cause: the data loader splits the data over all ranks, as DistributedSampler does by default, and not over the
    data-parallel dimension of the mesh; or the ranks of one model shuffle with different seeds, or augment differently.
    Each rank then computes a part of the layer for another batch, and the sums mix them: the gradient is of no batch.

    Fix: `DistributedSampler(dataset, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())`, without a
    data-parallel dimension `num_replicas=1, rank=0`, and one seed for the augmentation of the ranks of one model.
    """

    CAUSE = "The data loader gives each rank of one model another batch; the ranks of one model need the same."
    FIX = (
        "Pass `num_replicas=` and `rank=` of the data-parallel dimension of the mesh to DistributedSampler, and use "
        "one seed to augment on the ranks of one model."
    )
    FACT = (
        "the plan declares the input of {ranks:ranks} replicated, and they trained on {sets} different inputs of "
        "{elements:count element}"
    )
    FACT_CONTEXT = (
        "{ranks:ranks} passed {sets} different sets of buffers of {elements:count element} to `context_parallel`, "
        "which keeps a part of the same sequences on each rank"
    )


class UnequalGradients(Sentence, topic="SYN410"):
    """After the reduction, ranks step with different gradients.

    Signature: before an optimizer step, the gradients of replicated parameters differ between ranks that had reduced
    them together. With a wrapper (DistributedDataParallel) every step is judged. Without one, ranks are judged whose
    gradients were equal at several steps before; or ranks that began with equal parameters, and of whose gradients most
    are equal at two steps in a row, or all differ by one factor. The ranks outside of the majority are named. Two ranks
    have none: then the rank is named that alone holds NaN or infinity, or alone changed its gradients after the
    reduction, otherwise both.

    Cause: something changes gradients after the reduction on one rank alone (a clip by a local norm, a scale, a hook,
    `zero_grad(set_to_none=False)`), the loss of one rank is detached and its gradients are not reduced, the scales of
    the ranks' GradScalers differ, as a SYN107 of the same step states,
    the process group of a reduction has some ranks only,
    or the reduction did not include them: the forward pass went around the wrapper (`model.module(x)`), `no_sync()`
    ended too late on one rank, or too early, so that later micro-batches were added to the average,
    a parameter had no gradient on one rank, or the wrapper does not contain the parameter.
    Without a wrapper, a rank that skipped a step pairs with other steps: once its gradients are seen again, at a later
    step of the other ranks, the finding is SYN214.

    Fix: clip after the reduction with a norm that is equal on all ranks, call the wrapper and not `model.module`, and
    leave `no_sync()` on the last micro-batch on all ranks.

    The model is still in sync when this is found: the parameters differ only after the step.
    """

    CAUSE = "The gradients were changed on some ranks alone, or some of them were not reduced."
    FIX = (
        "Look for code that depends on the rank between `backward()` and `step()`, and for a forward pass around the "
        "wrapper (`model.module(x)`)."
    )
    CAUSE_SCALED = "All gradients of one rank were multiplied by one factor: it clips or scales them alone."
    FIX_SCALED = "Clip or scale with a number that is equal on all ranks, after the reduction."
    CAUSE_MISSING = (
        "Some ranks have no gradient for parameters with a gradient on other ranks: code on some ranks alone removed "
        "gradients (`.grad = None`), or kept or made gradients of zero for unused parameters, as "
        "`zero_grad(set_to_none=False)` does; or the ranks used different parameters."
    )
    FIX_MISSING = (
        "Call `zero_grad()` with the same arguments on all ranks, and look for code on one rank which sets `.grad`. If "
        "the ranks use different parameters: use the same in each step, or `DistributedDataParallel(..., "
        "find_unused_parameters=True)`."
    )
    CAUSE_WITHIN = (
        "The gradients are equal within groups of ranks only: each group reduced its own gradients, with the wrong "
        "process group, or code for one group changed the gradients."
    )
    FIX_WITHIN = (
        "Reduce over all data-parallel ranks: pass their group, or no `group=` for all ranks, and divide by the number "
        "of ranks in the group. If groups train apart by design: `--allow SYN410`."
    )
    CAUSE_LOCAL = "The gradients are those of each rank's own batch: they were not reduced."
    FIX_LOCAL = (
        "Call the wrapper, not `model.module`, and leave `no_sync()` before the last micro-batch on every rank. A "
        "parameter that the wrapper does not contain must be added before the wrapper is created."
    )
    CAUSE_ADDED = (
        "Backward passes in `no_sync()` came after the reduction on some ranks alone, and added gradients of their own "
        "batches, which were not reduced."
    )
    FIX_ADDED = (
        "Reduce in the last backward pass before the step on every rank: count micro-batches with the same start on "
        "all ranks, and leave `no_sync()` for the last one only."
    )
    CAUSE_UNREDUCED = (
        "A rank took a further step with gradients of its own batch that were not reduced, or it changed the gradients "
        "and stepped again."
    )
    FIX_UNREDUCED = FIX_LOCAL
    CAUSE_UNCOUNTED = (
        "The gradients were changed on some ranks alone, or some of them were not reduced; or a rank skipped a step or "
        "took one more, so that its steps no longer have the numbers of the other ranks' steps."
    )
    FIX_UNCOUNTED = (
        "Look for code that depends on the rank between `backward()` and `step()`, and for steps that a rank skips on "
        "its own."
    )
    CAUSE_NEVER = (
        "The named gradients are equal at no step, and most gradients are equal at each step: no reduction includes "
        "the named gradients, or a rank changes gradients at each step."
    )
    FIX_NEVER = (
        "Reduce all gradients between `backward()` and `step()`, also those of parameters that were added later, or "
        "use DistributedDataParallel. If each rank has parameters of its own by design: "
        "`--exclude GLOB`."
    )
    CAUSE_SAMPLED = (
        "All gradients of one rank whose elements were compared were multiplied by one factor: it clips or scales them "
        "alone, or it changed other elements before a clip of all ranks."
    )
    FIX_SAMPLED = FIX_SCALED
    CAUSE_ZERO = (
        "The gradients of some ranks alone are zero: they were set to zero after the reduction, or they were not "
        "reduced and the loss of these ranks does not depend on the parameters."
    )
    FIX_ZERO = (
        "Look for code that clears gradients between `backward()` and `step()` on one rank, such as "
        "`zero_grad(set_to_none=False)`, for a loss that is detached or multiplied by zero on one rank, and for a "
        "forward pass around the wrapper (`model.module(x)`)."
    )
    CAUSE_NOT_FINITE = (
        "Gradients became NaN or infinite on some ranks alone, after the reduction: a reduction leaves NaN on all "
        "ranks."
    )
    FIX_NOT_FINITE = (
        "Look for code between `backward()` and `step()` that divides, or takes a root or logarithm, on one rank. Skip "
        "the step on all ranks together: `bad = torch.tensor(float(skip), device=device)`; `dist.all_reduce(bad, "
        "op=dist.ReduceOp.MAX)`."
    )
    CAUSE_SCALER = (
        "Each rank divides the averaged gradients by the scale of its GradScaler, and the scales differ (SYN107). The "
        "gradients then differ by the ratio of the scales, or by rounding after a clip."
    )
    FIX_SCALER = (
        "Give the GradScaler equal settings and the same state on every rank. Gradients that differ by more than the "
        "ratio of the scales have another cause, too."
    )
    NOT_FINITE = "the gradients of {ranks:ranks} hold NaN or infinity, those of other ranks do not: {names:names}"
    FACTOR_OF_MOST = (
        "most gradients of {ranks:ranks} are {factor:number} times the gradients of the other ranks, but not those of "
        "{names:names}"
    )
    FACT = "{count} of {total:count gradient} {count:verb differs|differ}: {names:names}"
    DIGESTS = "the digests of the gradients differ"
    FACTOR = "the gradients of {ranks:ranks} are {factor:number} times the gradients of the other ranks"
    MISSING = "missing on some ranks: {names:names}"
    LOCAL_PASSES = "backward passes in `no_sync()` between the reduction and the step: {passes:by_rank}"
    CHANGED = "{ranks:ranks} changed gradients after the reduction, the other ranks did not"
    GROUPS = "the gradients agree only within {groups:sets}"
    UNDECIDED = "{ranks:ranks} have no majority, so it is unknown which of them deviates"


class UnequalParameters(Sentence, topic="SYN411"):
    """Before a step, replicas have different parameters.

    Signature: at the first or every eighth step, or at the end, the parameters differ between ranks that hold copies of
    them: all ranks of a wrapper (DistributedDataParallel), or, without a wrapper, ranks whose gradients or
    parameters were equal several times before. The first step shows whether they differed from the start.

    Cause: parameters that differed before the first step were never made equal, which only a wrapper does by itself, or
    were changed after it did. Otherwise, if the gradients of all steps were equal, something changed parameters outside
    of the optimizer: code that runs on one rank only, a checkpoint that one rank loads, a fault of the memory. If not,
    it is the effect of the finding before. The comparison of all replicas, which follows, names the cause.

    Fix: that of the finding before, or of the comparison of all replicas. Before the first step:
    `for tensor in model.state_dict().values(): dist.broadcast(tensor, 0)`.
    """

    CAUSE = "The ranks were updated differently, or something changed parameters outside of the optimizer."
    FIX = (
        "If there is no earlier finding, look for code that runs on one rank only and changes or loads parameters; "
        "the comparison of all replicas, which follows, names causes that tensors show."
    )
    CAUSE_ALONE = CAUSE
    FIX_ALONE = (
        "If there is no earlier finding, look for code that runs on one rank only and skips a step, or changes or "
        "loads parameters."
    )
    CAUSE_START = (
        "The ranks began with different parameters: nothing made them equal before the first step, or something "
        "changed them after the wrapper was created."
    )
    FIX_START = (
        "Before the first step, send the parameters and buffers of rank 0 to all ranks: `for tensor in "
        "model.state_dict().values(): dist.broadcast(tensor, 0)`. DistributedDataParallel does so when it is created; "
        "change nothing on one rank after it."
    )
    START = "different before the first step: {names:names}"
    FACT = "{count} of {total:count parameter} {count:verb differs|differ}: {names:names}"
    DIGESTS = "the digests of the parameters differ"
    SINCE = "they were equal before step {equal}, and differed before step {unequal}"
    SINCE_AT_END = "they were equal before step {equal}, and differed at the end, after step {last}"


class ChangedAtTheEnd(Sentence, topic="SYN412"):
    """After its last step, a rank has changed its parameters alone.

    Signature: at the end of the script, or when it destroys the process group, the parameters of the replicas differ,
    and operations after the last optimizer step wrote to parameters on some ranks only. What followed each step before,
    such as a clip of the weights, belongs to the step. torch counts no write through `.data`, and no fault of the
    memory: the finding is then SYN411, because the difference may be older than the end.

    Cause: code after the training that runs on one rank, such as loading the best checkpoint for a test. It is no
    desync of the training, so it does not count.

    Fix: none is needed if the training is over. Otherwise do the same on all ranks.
    """

    CAUSE = "Code after the last step wrote to the parameters on some ranks only."
    FIX = "None if the training is over, as when one rank loads the best checkpoint for a test."
    CAUSE_ALL = "Code after the last step wrote to the parameters on all ranks, and not the same values."
    FIX_ALL = "None if the training is over, as when each rank loads a checkpoint of its own for a test."
    FACT = UnequalParameters.FACT


class Seen(Sentence, topic="watch"):
    """What a watched run shows about findings that files show too."""

    SKIPPED = "{ranks:ranks} did not step after reduction {reduction}, as the other ranks did"
    REPEATED = (
        "optimizer steps with other gradients and without a reduction before reduction {reduction}: {steps:by_rank}"
    )
    AGAIN = "further optimizer steps with the same gradients before reduction {reduction}: {steps:by_rank}"
    OUTSIDE = (
        "the optimizer trains {count:count parameter} that the wrapper does not reduce, and the gradients of "
        "{names:names} differ"
    )
    SHIFTED = "{later:ranks} stepped with the gradients that {earlier:ranks} had {count:count step} earlier"
    NO_GRADIENT = "{ranks:ranks} called the optimizer without any gradient, which changes nothing"
    SETTING = "{name:name} is {values:by_rank}"
    SETTINGS = "the digests of the settings differ"
    OPTIMIZER = "the optimizer is {kind} of {names:names}"
    MORE_SETTINGS = "{count:count more setting}"
    PLACE = "at {unit} {number}"
    WATCHED = "{steps:count step} watched, {checks:count check} of all replicas"
    WATCHED_OPTIMIZERS = (
        "{steps:count step} of {optimizers:count optimizer} watched, {checks:count check} of all replicas"
    )
    WATCHED_REDUCTIONS = "{observed} of {reductions:count reduction} watched, {checks:count check} of all replicas"
    WATCHED_WITH_REDUCTIONS = (
        "{steps:count step} and {observed} of {reductions:count reduction} watched, "
        "{checks:count check} of all replicas"
    )
    WATCHED_PASSES = "{passes:count forward pass} watched, {checks:count check} of all replicas"
    AT_STEPS = "at {count:count step}"
    IN_COMPARISONS = "in {count:count comparison}"
    EQUAL_AT_END = "trained parameters equal at the end"
    EQUAL_BEFORE = "trained parameters last compared before step {step}"
    SELECTED = "limited by {options:list}"
    COMPARED_AT = "replicas last compared at step {step}"
    INFINITE = (
        "the scaler of {ranks:ranks} found infinite gradients after reduction {reduction}, the other ranks did not"
    )


SETTINGS_DIFFER = "SYN107"
PARAMETERS_DIFFER = "SYN411"
CHANGED_AT_THE_END = "SYN412"
WITNESS_RULES = (
    Rule(code="SYN401", slug="same-batch", sentences=SameBatch),
    Rule(code="SYN402", slug="overlapping-batches", sentences=OverlappingBatches, severity="warning"),
    Rule(code="SYN403", slug="repeated-order", sentences=RepeatedOrder, severity="warning"),
    Rule(code="SYN404", slug="equal-streams", sentences=EqualStreams, severity="info"),
    Rule(code="SYN406", slug="different-batches", sentences=DifferentBatches),
    Rule(code="SYN410", slug="gradients-differ", sentences=UnequalGradients),
    Rule(code=PARAMETERS_DIFFER, slug="parameters-differ", sentences=UnequalParameters),
    Rule(code=CHANGED_AT_THE_END, slug="changed-at-the-end", sentences=ChangedAtTheEnd, severity="info"),
)
# No comparison has findings with these codes.
WITNESS_CODES = frozenset(rule.code for rule in WITNESS_RULES)
# Findings about the data, which leave the replicas in sync.
DATA_CODES = frozenset({"SYN401", "SYN402", "SYN403", "SYN404"})


@cache
def find_rule(code: str) -> Rule:
    """Return the rule of a witness, or of a finding of files that a watched run sees before the parameters differ."""
    for rule in (*WITNESS_RULES, *list_rules()):
        if rule.code == code:
            return rule
    raise KeyError(code)


# The causes of these findings have alternatives, which the sentence names; others follow from the observations.
_CERTAINTIES: dict[tuple[str, str], Certainty] = {
    ("SYN410", "_UNREDUCED"): "likely",
    ("SYN410", "_SAMPLED"): "likely",
    ("SYN410", "_UNCOUNTED"): "likely",
    ("SYN410", "_NEVER"): "likely",
    ("SYN410", "_WITHIN"): "likely",
    ("SYN107", "_UNCOUNTED"): "likely",
    ("SYN214", "_UNEQUAL"): "likely",
    ("SYN214", "_TURN"): "likely",
    ("SYN410", "_NOT_FINITE"): "likely",
    ("SYN410", "_SCALER"): "likely",
    ("SYN412", "_ALL"): "likely",
    ("SYN401", "_INPUTS"): "likely",
}


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
        certainty=_CERTAINTIES.get((code, variant), "proved"),
    )
