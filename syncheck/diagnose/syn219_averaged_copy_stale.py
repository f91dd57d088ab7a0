"""Only an averaged copy of the weights (EMA or SWA) differs.

Signature: tensors of an averaged copy (torch's AveragedModel, ema-pytorch, torch-ema, timm, diffusers, Lightning, or a
copy of the model below a key like `ema`) differ, while the parameters and the optimizer state were compared and agree.
Differences in only the BatchNorm buffers of the copy do not match, because they depend on each rank's batches.

Cause: there are several. Counts of updates that differ (`n_averaged`, `num_updates`) show that the ranks updated the
copy unequally often, or restored it on some ranks only: `if rank == 0: ema.update()`, or loading it on one rank when
resuming. If the difference shrinks over the steps by the same factor in all tensors (the decay to the power of the
number of updates), all ranks update the copy alike since, but it was unequal before: it was created from each rank's
own initial weights, before DDP copied the weights of rank 0, or restored on some ranks only, or a rank missed or
repeated an update. Otherwise a rank may also use another decay. The difference is harmless until the copy is evaluated
on another rank, or copied back into the model.

An update changes all tensors of a copy. If most copies of trained parameters agree, or few elements differ, a part of
the copy was overwritten or damaged, and the finding is only consistent with this cause.

Fix: update the copy on every rank after `optimizer.step()`, and load it on every rank. Or keep it on rank 0 only, and
save it on no other rank. Create the copy after DDP has wrapped the model. Copies that already differ need one
broadcast.

Incidents: HorizonRobotics/alf#1475, lucidrains/ema-pytorch#9 (EMA on rank 0 only, then copied to the online model).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.history import difference_ratios
from syncheck.diagnose.measures import TOUCHED, evidence_of, is_share_below
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.findings import Certainty
    from syncheck.records import Comparison, TensorDiff

CODE = "SYN219"
SLUG = "averaged-copy-stale"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "The averaged copy of the weights was updated or restored on some ranks only, or unequally (a missed or "
        "additional update, another decay), or was unequal when it was created; the model itself agrees."
    )
    FIX = (
        "Update the copy on every rank once after each optimizer.step(), with one decay and not under 'if rank == 0': "
        "`ema.update_parameters(model)` with torch's AveragedModel. Load it on every rank when resuming, and create it "
        "after DDP has wrapped the model. Then copy it once from a rank with the right copy: `state = "
        "[ema.state_dict()]`; `torch.distributed.broadcast_object_list(state, rank)`; `ema.load_state_dict(state[0])`."
    )
    CAUSE_UPDATES = (
        "The ranks updated the averaged copy of the weights unequally often, or only some ranks restored it; the model "
        "itself agrees."
    )
    CAUSE_PART = (
        "A part of the averaged copy was overwritten, restored or damaged on some ranks: an update changes all tensors "
        "of a copy, and here most agree."
    )
    CAUSE_START = (
        "All ranks update the averaged copy alike, but it was unequal before: it was created from each rank's own "
        "initial weights, before DDP copied those of rank 0, or restored on some ranks only, or a rank missed or "
        "repeated an update."
    )
    FIX_START = (
        "Create the copy after DDP has wrapped the model, load it on every rank when resuming, and update it on every "
        "rank once after each optimizer.step(). Make the copies equal now: `state = [ema.state_dict()]`; "
        "`torch.distributed.broadcast_object_list(state, 0)`; `ema.load_state_dict(state[0])`."
    )
    CAUSE_STATISTICS = (
        "The copy took the BatchNorm statistics of each rank's own batches. Only those of the model were synchronized "
        "afterwards."
    )
    FIX_STATISTICS = "Broadcast the buffers of the copy too: `for b in ema.buffers(): dist.broadcast(b, 0)`."
    COPY_DIFFERS = "Only the averaged copy of the weights differs, in {count:count tensor} ({names:names}), {size}"
    MODEL_AGREES = "all {count:count parameter} of the model agree"
    UPDATES = "{name:name} is {values:by_rank}"
    EQUAL_UPDATES = "all ranks updated the copy equally often"
    SHRINKS = (
        "the difference of all tensors is {ratio:.3g} times as large as at step {step} (a decay of {decay:.4g} per "
        "step), as after equal updates of unequal copies"
    )
    PART = "{count} of {total:count copy|copies} of trained parameters {count:verb differs|differ}"
    FEW_ELEMENTS = "few elements of the copies differ"
    ALL_DIFFER = "no two ranks have the same copy"


_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")
# Last parts of the names of tensors that count updates.
_COUNTS = frozenset("n_averaged step num_updates optimization_step updates".split())
# Equal updates multiply all differences by one factor: the largest relative deviation of a tensor, due to rounding.
_SAME = 0.02
# Difference below which rounding disturbs the factor.
_MEASURABLE = 1e-5


class _Origin(NamedTuple):
    """Why copies differ. cause, fix: None for the general ones."""

    cause: Sentence | None
    fix: Sentence | None
    facts: tuple[Message, ...] = ()
    certainty: Certainty | None = None
    alternatives: tuple[str, ...] = ()


def apply(case: Case) -> Match | None:
    """Match an averaged copy that differs although the model agrees."""
    copies = case.differing("ema")
    if copies and all(diff.name.endswith(_OF_BATCHES) for diff in copies):
        return _match_statistics(case, copies)
    model = {name.replace(".", "") for name in case.names_of("parameter")}
    weights = [diff for diff in copies if not diff.name.endswith(_OF_BATCHES) and _is_copy(diff, model)]
    agree = case.compared("parameter") and case.agrees("parameter", "optimizer", "optimizer_step")
    # A few differing elements are damage; a missed update changes all elements.
    if not weights or not agree or all(diff.extent in ("one", "contiguous") and diff.numel > 1 for diff in weights):
        return None
    names = tuple(diff.name for diff in weights)
    origin = _find_origin(case, weights)
    facts = [
        Text.COPY_DIFFERS(count=len(weights), names=names, size=largest_difference(weights)),
        Text.MODEL_AGREES(count=case.compared("parameter")),
        *origin.facts,
    ]
    if not any(fact.code is Text.SHRINKS for fact in facts):
        facts += case.trend_facts("ema")[1]
    match = case.make_match(weights, facts, copies)
    values = tuple(diff.name for diff in case.of_values() if diff.kind == "average")
    return Match(
        match.tensors,
        match.ranks,
        match.facts,
        values,
        origin.cause,
        origin.fix,
        certainty=origin.certainty,
        alternatives=origin.alternatives,
    )


def _match_statistics(case: Case, copies: Sequence[TensorDiff]) -> Match | None:
    """Match running statistics that differ in the copy alone."""
    if not case.compared("parameter") or not case.agrees("parameter", *BN_STATISTICS):
        return None
    names = tuple(diff.name for diff in copies)
    facts = [
        Text.COPY_DIFFERS(count=len(copies), names=names, size=largest_difference(copies)),
        Text.MODEL_AGREES(count=case.compared("parameter")),
    ]
    match = case.make_match(copies, facts, copies)
    # Equal statistics of the model were synchronized after the copy took its own.
    return replace(
        match,
        cause=Text.CAUSE_STATISTICS,
        fix=Text.FIX_STATISTICS,
        certainty="consistent",
        alternatives=("SYN201", "SYN205"),
    )


def _is_copy(diff: TensorDiff, model: Collection[str]) -> bool:
    """Whether a tensor is a copy of a parameter or counts updates. Other modules may be named ema too.

    model: the names of the parameters without dots, because some averages omit the dots.
    """
    parts = diff.name.split(".")
    if diff.numel == 1 or parts[-1].isdecimal():
        return True
    if any("".join(parts[i:]) in model for i in range(len(parts))):
        return True
    # The prefix of the model's names is not that of the copy: model.unet.conv.weight and ema.module.conv.weight.
    last = "".join(parts[-2:])
    return any(name.endswith(last) for name in model)


def _find_origin(case: Case, weights: Sequence[TensorDiff]) -> _Origin:
    """Return why the copies differ, from their counts of updates and from the course of the difference."""
    counts = [diff for diff in weights if diff.numel == 1 and evidence_of(diff).values]
    facts = [Text.UPDATES(name=diff.name, values=dict(sorted(evidence_of(diff).values.items()))) for diff in counts]
    values = [diff for diff in case.of_values() if diff.kind == "average"]
    facts += [Text.UPDATES(name=diff.name, values=dict(diff.by_rank)) for diff in values]
    if values or any(_counts_updates(diff.name) for diff in weights):
        return _Origin(Text.CAUSE_UPDATES, Text.FIX, tuple(facts))

    if part := _describe_part(case, weights):
        return _Origin(Text.CAUSE_PART, Text.FIX, (*facts, *part), "consistent", ("SYN221", "SYN220"))

    # A copy that agreed at an earlier step was not unequal when it was created.
    earlier = case.steps()[:-1]
    differed = all(_differing_copies(group) for group in earlier)
    shrinks = _find_shrinking(case) if earlier and differed else None
    equal_counts = _has_equal_counts(case)
    apart = len(case.group.replicas) > 2 and all(max(map(len, diff.clusters)) == 1 for diff in weights)
    if equal_counts:
        facts.append(Text.EQUAL_UPDATES())
    if apart:
        facts.append(Text.ALL_DIFFER())
    if shrinks is not None:
        facts.append(shrinks)
        return _Origin(Text.CAUSE_START, Text.FIX_START, tuple(facts))
    if differed and (equal_counts or apart):
        # Updates between two averages of local SGD, or before a repair of the model, have the same result.
        others = ("SYN241",) if case.group.evidence.metadata.averaging else ()
        return _Origin(Text.CAUSE_START, Text.FIX_START, tuple(facts), "consistent", others)
    return _Origin(None, None, tuple(facts))


def _describe_part(case: Case, weights: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State that too few copies or elements differ for an update, which changes all; empty if enough differ."""
    if is_share_below([diff for diff in weights if diff.numel > 1], TOUCHED):
        return (Text.FEW_ELEMENTS(),)
    # Copies of frozen parameters agree after any update, and those of a list have no names.
    trained = {name.replace(".", "") for name in case.trained_parameters()}
    copies = {name for name in case.names_of("ema") if _ends_with(name, trained)}
    differing = copies & {diff.name for diff in weights}
    if not differing or 2 * len(differing) >= len(copies):
        return ()
    return (Text.PART(count=len(differing), total=len(copies)),)


def _ends_with(name: str, parameters: Collection[str]) -> bool:
    """Whether a name ends with one of the parameters, given without dots."""
    parts = name.split(".")
    return any("".join(parts[i:]) in parameters for i in range(1, len(parts)))


def _counts_updates(name: str) -> bool:
    return name.rpartition(".")[2] in _COUNTS


def _has_equal_counts(case: Case) -> bool:
    """Whether counts of updates were compared and agree."""
    differing = {diff.name for diff in case.group.tensors if diff.out_of_sync}
    counts = {name for name in case.names_of("ema") if _counts_updates(name)}
    return (bool(counts) or case.group.evidence.counts_updates) and counts.isdisjoint(differing)


def _differing_copies(group: Comparison) -> dict[str, TensorDiff]:
    """Return the differing tensors of a copy at a step, without counts and running statistics."""
    copies = {}
    for diff in group.tensors:
        if diff.kind == "ema" and diff.out_of_sync and diff.numel > 1 and not diff.name.endswith(_OF_BATCHES):
            copies[diff.name] = diff
    return copies


def _find_shrinking(case: Case) -> Message | None:
    """State by how much equal updates reduced the difference; None if it did not change as by equal updates.

    An average is linear: equal updates of unequal copies multiply the difference of every element by one factor. So the
    factor of all tensors is the same, and the largest difference stays in the same element.
    """
    groups = case.steps()
    for before, after in pairwise(groups):
        earlier, later = _differing_copies(before), _differing_copies(after)
        if earlier.keys() != later.keys() or not _is_linear(earlier, later):
            return None
    first, last = groups[0], groups[-1]
    assert first.step is not None, "only groups with a step have a course"
    assert last.step is not None
    ratio = median(difference_ratios(_differing_copies(first).values(), _differing_copies(last).values()))
    decay = ratio ** (1 / (last.step - first.step))
    return Text.SHRINKS(ratio=ratio, step=first.step, decay=decay)


def _is_linear(earlier: dict[str, TensorDiff], later: dict[str, TensorDiff]) -> bool:
    """Whether all differences shrank by one factor, in the same elements."""
    measured = [name for name, diff in later.items() if diff.max_abs is not None and diff.max_abs > _MEASURABLE]
    ratios = difference_ratios([earlier[name] for name in measured], [later[name] for name in measured])
    if len(ratios) < 2 or len(ratios) < len(measured):
        return False
    factor = median(ratios)
    if factor > 1 - _SAME or any(abs(ratio - factor) > _SAME * factor for ratio in ratios):
        return False
    return all(earlier[name].index == later[name].index for name in measured)
