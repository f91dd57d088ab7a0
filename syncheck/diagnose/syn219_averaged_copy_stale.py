"""Only an averaged copy of the weights (EMA or SWA) differs.

Signature: tensors of an averaged copy (torch's AveragedModel, ema-pytorch, torch-ema, timm, diffusers, Lightning, or a
copy of the model below a key like `ema`) differ, while the parameters and the optimizer state were compared and agree.
Ranks whose copies follow from another cause (scaled gradients) do not count: the model of the remaining ranks agrees.
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
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.conditions import state_if
from syncheck.diagnose.features import exclude_numbers, extents_of, select_numbers, with_agreeing_ranks
from syncheck.diagnose.history import difference_ratios
from syncheck.diagnose.measures import TOUCHED, is_share_below, median, values_by_rank
from syncheck.diagnose.selection import (
    ends_with_number,
    holders_of,
    last_part,
    list_names,
    out_of_sync,
    select_names,
)
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.diagnose.case import Case, Match
    from syncheck.findings import Certainty
    from syncheck.records import Comparison, TensorDiff

CODE = "SYN219"
SLUG = "averaged-copy-stale"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The averaged copy of the weights was updated or restored on some ranks only, or unequally (a missed or "
        "additional update, another decay), or was unequal when it was created; the model itself agrees."
    )
    FIX = (
        "Update the copy on every rank once after each `optimizer.step()`, with one decay and not under 'if rank == "
        "0': `ema.update_parameters(model)` with torch's AveragedModel. Load it on every rank when resuming, and "
        "create it after DDP has wrapped the model. Then copy it once from a rank with the right copy: `state = "
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
        "rank once after each `optimizer.step()`. Make the copies equal now: `state = [ema.state_dict()]`; "
        "`torch.distributed.broadcast_object_list(state, 0)`; `ema.load_state_dict(state[0])`."
    )
    CAUSE_STATISTICS = (
        "The copy took the BatchNorm statistics of each rank's own batches. Only those of the model were synchronized "
        "afterwards."
    )
    FIX_STATISTICS = "Broadcast the buffers of the copy too: `for b in ema.buffers(): dist.broadcast(b, 0)`."
    COPY_DIFFERS = "Only the averaged copy of the weights differs, in {count:count tensor} ({names:names}), {size}"
    MODEL_AGREES = "all {count:count parameter} of the model agree"
    MODEL_AGREES_ON = "all {count:count parameter} of the model agree on {ranks:ranks}"
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
    """Why copies differ."""

    facts: tuple[Message, ...]
    cause: Sentence | None = None
    """None for the general cause."""
    fix: Sentence | None = None
    """None for the general fix."""
    certainty: Certainty | None = None
    alternatives: tuple[str, ...] = ()
    has_course: bool = False
    """Whether the facts state how the differences developed over the steps."""


def apply(case: Case) -> Match | None:
    """Match an averaged copy that differs although the model agrees."""
    copies = case.differing("ema")
    weights = _exclude_statistics(copies)
    if copies and not weights:
        return _match_statistics(case, copies)
    # Other modules may be named ema too.
    weights = _select_copies(case, weights)
    if not weights or not _model_agrees(case, weights):
        return None
    # A few differing elements are damage; a missed update changes all elements.
    if _are_damage(weights):
        return None

    origin = _find_origin(case, weights)
    _, since = case.trend_facts("ema")
    facts = [
        *_describe_copies(case, weights),
        *origin.facts,
        *state_if(not origin.has_course, *since),
    ]
    return replace(
        case.make_match(weights, facts, copies),
        values=list_names(case.of_values("average")),
        cause=origin.cause,
        fix=origin.fix,
        certainty=origin.certainty,
        alternatives=origin.alternatives,
    )


def _exclude_statistics(copies: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors of a copy without BatchNorm's statistics and counts, which depend on each rank's batches."""
    return [diff for diff in copies if not diff.name.endswith(_OF_BATCHES)]


def _select_copies(case: Case, weights: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Return the copies of parameters and the counts of updates."""
    model = _without_dots(case.names_of("parameter"))
    return [diff for diff in weights if _is_copy(diff, model)]


def _model_agrees(case: Case, copies: Sequence[TensorDiff]) -> bool:
    """Whether the parameters were compared, and agree with the optimizer on the ranks whose copies are unexplained."""
    ranks = holders_of(copies)
    differing = out_of_sync(case.group, "parameter", "optimizer", "optimizer_step")
    return case.compared("parameter") > 0 and all(_agree_on(diff, ranks) for diff in differing)


def _agree_on(diff: TensorDiff, ranks: Collection[int]) -> bool:
    """Whether some ranks hold the same bytes of a tensor."""
    return any(set(ranks).issubset(cluster) for cluster in diff.clusters)


def _are_damage(weights: Sequence[TensorDiff]) -> bool:
    """Whether a few adjacent elements of larger tensors differ."""
    return not select_numbers(weights) and extents_of(weights) <= {"one", "contiguous"}


def _describe_copies(case: Case, copies: Sequence[TensorDiff]) -> list[Message]:
    """State which tensors of the copy differ, and that the model agrees."""
    summary = Text.COPY_DIFFERS(
        count=len(copies),
        names=list_names(copies),
        size=largest_difference(copies),
    )
    ranks = tuple(sorted(holders_of(copies)))
    count = case.compared("parameter")
    if len(ranks) < case.number_of_ranks:
        return [summary, Text.MODEL_AGREES_ON(count=count, ranks=ranks)]
    return [summary, Text.MODEL_AGREES(count=count)]


def _match_statistics(case: Case, copies: Sequence[TensorDiff]) -> Match | None:
    """Match running statistics that differ in the copy alone."""
    has_equal_statistics = case.agrees(*BN_STATISTICS)
    if not has_equal_statistics or not case.is_in_sync("parameter"):
        return None
    match = case.make_match(copies, _describe_copies(case, copies), copies)
    # Equal statistics of the model were synchronized after the copy took its own.
    match = match.with_cause(Text.CAUSE_STATISTICS, Text.FIX_STATISTICS)
    return match.as_consistent("SYN201", "SYN205")


def _without_dots(names: Iterable[str]) -> frozenset[str]:
    """Return the names without dots, because some averages omit the dots."""
    return frozenset(name.replace(".", "") for name in names)


def _is_copy(diff: TensorDiff, model: Collection[str]) -> bool:
    """Whether a tensor is a copy of a parameter or counts updates. Other modules may be named ema too.

    model: the names of the parameters without dots.
    """
    is_count_or_item = diff.numel == 1 or ends_with_number(diff.name)
    if is_count_or_item:
        return True
    parts = diff.name.split(".")
    if _ends_with(parts, model):
        return True
    # The prefix of the model's names is not that of the copy: model.unet.conv.weight and ema.module.conv.weight.
    module_and_name = "".join(parts[-2:])
    return any(name.endswith(module_and_name) for name in model)


def _find_origin(case: Case, weights: Sequence[TensorDiff]) -> _Origin:
    """Return why the copies differ, from their counts of updates and from the course of the difference."""
    updates = _update_facts(case, weights)
    if case.of_values("average") or _select_counts(list_names(weights)):
        return _Origin(updates, Text.CAUSE_UPDATES, Text.FIX)
    part = _describe_part(case, weights)
    if part:
        return _Origin(
            facts=(*updates, *part),
            cause=Text.CAUSE_PART,
            fix=Text.FIX,
            certainty="consistent",
            alternatives=("SYN221", "SYN220"),
        )
    return _find_start(case, weights, updates)


def _find_start(case: Case, weights: Sequence[TensorDiff], updates: tuple[Message, ...]) -> _Origin:
    """Return why whole copies differ without different numbers of updates: were they unequal before?"""
    counts_agree = _has_equal_counts(case)
    all_differ = case.number_of_ranks > 2 and not with_agreeing_ranks(weights)
    facts = (
        *updates,
        *state_if(counts_agree, Text.EQUAL_UPDATES()),
        *state_if(all_differ, Text.ALL_DIFFER()),
    )
    # A copy that agreed at an earlier step was not unequal when it was created.
    if not all(map(_differing_copies, case.steps()[:-1])):
        return _Origin(facts)
    shrinks = _find_shrinking(case)
    if shrinks is not None:
        return _Origin(
            facts=(*facts, shrinks),
            cause=Text.CAUSE_START,
            fix=Text.FIX_START,
            has_course=True,
        )
    is_unclear = not counts_agree and not all_differ
    if is_unclear:
        return _Origin(facts)
    # Updates between two averages of local SGD, or before a repair of the model, have the same result.
    alternatives = ("SYN241",) if case.group.evidence.metadata.averaging else ()
    return _Origin(
        facts=facts,
        cause=Text.CAUSE_START,
        fix=Text.FIX_START,
        certainty="consistent",
        alternatives=alternatives,
    )


def _update_facts(case: Case, weights: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State the numbers of updates that differ, and other single numbers of the copy."""
    facts: list[Message] = []
    # A number beside the counts, like a decay, shows unequal updates too.
    for diff in select_numbers(weights):
        values = values_by_rank(diff)
        facts += state_if(values, Text.UPDATES(name=diff.name, values=values))
    for value in case.of_values("average"):
        facts.append(Text.UPDATES(name=value.name, values=dict(value.by_rank)))
    return tuple(facts)


def _describe_part(case: Case, weights: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State that too few copies or elements differ for an update, which changes all; empty if enough differ."""
    if is_share_below(exclude_numbers(weights), TOUCHED):
        return (Text.FEW_ELEMENTS(),)
    # Copies of frozen parameters agree after any update, and copies in a list have no names.
    trained = _without_dots(case.trained_parameters())
    copies = {name for name in case.names_of("ema") if _ends_with(name.split(".")[1:], trained)}
    differing = select_names(weights, copies)
    is_minority = 0 < 2 * len(differing) < len(copies)
    return state_if(is_minority, Text.PART(count=len(differing), total=len(copies)))


def _ends_with(parts: Sequence[str], parameters: Collection[str]) -> bool:
    """Whether the parts of a name end with one of the parameters, given without dots."""
    return any("".join(parts[begin:]) in parameters for begin in range(len(parts)))


def _select_counts(names: Iterable[str]) -> frozenset[str]:
    """Return the names of tensors that count updates."""
    return frozenset(name for name in names if last_part(name) in _COUNTS)


def _has_equal_counts(case: Case) -> bool:
    """Whether counts of updates were compared and agree."""
    counts = _select_counts(case.names_of("ema"))
    if not counts and not case.group.evidence.counts_updates:
        return False
    return counts.isdisjoint(list_names(out_of_sync(case.group)))


def _differing_copies(group: Comparison) -> dict[str, TensorDiff]:
    """Return the differing tensors of a copy at a step, without counts and running statistics."""
    copies = {}
    for diff in _exclude_statistics(exclude_numbers(out_of_sync(group, "ema"))):
        copies[diff.name] = diff
    return copies


def _find_shrinking(case: Case) -> Message | None:
    """State by how much equal updates reduced the difference; None if it did not change as by equal updates.

    An average is linear: equal updates of unequal copies multiply the difference of every element by one factor. So the
    factor of all tensors is the same, and the largest difference stays in the same element.
    """
    groups = case.steps()
    if len(groups) < 2:
        return None
    copies_by_step = list(map(_differing_copies, groups))
    if not all(_is_linear(earlier, later) for earlier, later in pairwise(copies_by_step)):
        return None
    first, last = groups[0].step, groups[-1].step
    assert first is not None, "only groups with a step have a course"
    assert last is not None
    ratio = median(difference_ratios(copies_by_step[0].values(), copies_by_step[-1].values()))
    decay = ratio ** (1 / (last - first))
    return Text.SHRINKS(
        ratio=ratio,
        step=first,
        decay=decay,
    )


def _is_linear(earlier: dict[str, TensorDiff], later: dict[str, TensorDiff]) -> bool:
    """Whether all differences of the same tensors shrank by one factor, in the same elements."""
    if earlier.keys() != later.keys():
        return False
    measured = list(filter(_is_measurable, later.values()))
    ratios = difference_ratios(earlier.values(), measured)
    # A difference that began at this step has no ratio.
    if len(ratios) < max(2, len(measured)):
        return False
    factor = median(ratios)
    if factor > 1 - _SAME:
        return False
    # Other faults change each tensor by another factor.
    have_other_factors = any(abs(ratio - factor) > _SAME * factor for ratio in ratios)
    if have_other_factors:
        return False
    return all(earlier[diff.name].index == diff.index for diff in measured)


def _is_measurable(diff: TensorDiff) -> bool:
    """Whether a difference is larger than the rounding that disturbs its factor."""
    return diff.max_abs is not None and diff.max_abs > _MEASURABLE
