"""Replicas differ, and no rule explains why.

Signature: all differences not covered by another rule. The finding still reports the available evidence: only optimizer
state or buffers differ, the gradients are equal now, or only digests were compared. It names the causes that the
evidence does not exclude, at most three, in the order of their frequency in the trials (docs/diagnosis-trials.md).

Cause: unknown. Without optimizer state, a scaled gradient, a skipped step and a gradient that was not averaged all move
the parameters of a rank in the same way. With SGD's momentum, step counters are missing.

Fix: collect the observation that the finding names: the optimizer state, or a second step. After a single event, the
first moments converge, although the difference of the parameters may grow.

Incidents: please send a report with the JSON attached. Every rule began as an unexplained difference.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match, is_adapter
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.features import agreeing_within, kinds_of, single_out_ranks, with_agreeing_ranks
from syncheck.diagnose.history import suspects
from syncheck.diagnose.measures import median_cosine
from syncheck.diagnose.moments import only_decay
from syncheck.diagnose.selection import list_names, ranks_outside
from syncheck.diagnose.statements import OtherCode, largest_difference, limit_facts
from syncheck.layout.replica_groups import PIPELINE
from syncheck.messages import Message, Sentence
from syncheck.tensors.names import is_code_constant
from syncheck.text import brief, group_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff, ValueDiff

CODE = "SYN299"
SLUG = "unexplained-difference"
SEVERITY = "error"
CERTAINTY = "consistent"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "No rule explains this difference."
    FIX = (
        "Check which ranks agree, and compare the steps before and after the first difference. If the optimizer's "
        "first moments converge, it was a single event; if they differ more and more, it happens at every step."
    )
    CAUSE_STATELESS = (
        "The parameters alone do not show the cause: without optimizer state, a scaled gradient, a skipped step and a "
        "gradient that was not averaged have the same effect."
    )
    FIX_STATELESS = (
        "Save the optimizer state of every rank too, and compare again: its moments and step counters distinguish the "
        "causes. SGD without momentum has none; then compare two neighbouring steps."
    )
    CAUSE_COUNTED = (
        "The gradients of the ranks differed in some step, or code changed the optimizer state of some ranks. The "
        "optimizer counted equal steps: no step was skipped, and the state was not lost as a whole."
    )
    FIX_COUNTED = (
        "Compare a second step: if the first moments differ more and more, gradients are not averaged; if they "
        "converge, it was a single event. Then look for code that changes gradients on some ranks only."
    )
    CAUSE_STATE = (
        "Only the optimizer state differs: it was loaded, reset or averaged on some ranks only, or each rank keeps its "
        "own."
    )
    FIX_STATE = "Load the optimizer state on every rank. If models are averaged, average or reset it on every rank too."
    CAUSE_COUNTERS = (
        "Only the step counters of the optimizer differ, and all parameters and moments agree: no step was skipped, so "
        "code or a checkpoint set the counters of some ranks."
    )
    FIX_COUNTERS = (
        "Look for code that sets or loads `step` on some ranks only. Adam corrects its moments by the counter, so that "
        "the next steps differ: load the optimizer state of one checkpoint on every rank."
    )
    FIX_VALUES = "Check which ranks agree, and look for code that sets or loads the named values on some ranks only."
    CAUSE_BUFFERS = "Only buffers differ: each rank updates them from its own data, or only some ranks loaded them."
    FIX_BUFFERS = "Call `all_reduce` on the inputs of the buffers on every rank before updating them."
    CAUSE_RNG = (
        "Only RNG states differ: each rank draws its own random numbers, as is usual under data parallelism, or some "
        "ranks drew more of them."
    )
    CAUSE_RNG_PARTLY = (
        "Some ranks have one RNG stream in common, and different streams remain: usually all streams of data-parallel "
        "ranks differ, or all are equal."
    )
    FIX_RNG_PARTLY = (
        "Ranks with equal streams draw the same numbers, for example the same dropout masks, augmentations or batches. "
        "If streams must differ, seed the ranks differently, `torch.manual_seed(seed + rank)`. If all must be "
        "equal, seed all ranks alike."
    )
    EQUAL_STREAMS = "the streams of {groups:sets} are equal"
    FIX_RNG = (
        "If the ranks must draw equal numbers, seed all of them alike: `random.seed(seed)`; `numpy.random.seed(seed)`; "
        "`torch.manual_seed(seed)`. Otherwise compare without the RNG states."
    )
    CAUSE_EVENT = (
        "The gradients are equal now: some ranks edited or loaded parameters, or updated them with another learning "
        "rate."
    )
    FIX_EVENT = (
        "Look for code that changes parameters outside `optimizer.step()` on some ranks only, and check that all ranks "
        "have the same learning rate."
    )
    CAUSE_WATCHED = (
        "Something beside gradients and settings changed parameters or the state of the optimizer on some ranks since "
        "the last comparison in sync: the run was watched, all ranks took each step since, and gradients and settings "
        "were equal."
    )
    FIX_WATCHED = (
        "Look for code that writes parameters, or the state of the optimizer, on some ranks only: in-place operations "
        "under `torch.no_grad()`, `load_state_dict`, a wrapper around the optimizer, or another optimizer. A finding "
        "of the parameters (SYN411) names the first reduction."
    )
    CAUSE_OWN_STEP = (
        "Something beside gradients and settings changed parameters or the state of the optimizer on some ranks since "
        "the last comparison in sync, or its own `step()` did: the class is not of torch.optim, so what it does within "
        "a step was not seen. All ranks took each step, and gradients before it and settings were equal."
    )
    FIX_OWN_STEP = (
        "Look in the `step()` of the optimizer for a clip, random numbers or attributes that differ between ranks, and "
        "for code that writes parameters, or the state of the optimizer, on some ranks only."
    )
    CAUSE_UNSEEN = (
        "No step of a torch optimizer was seen for parameters that differ, so steps, gradients before them and "
        "settings of their optimizer were not compared: a skipped or further step, another setting, a changed "
        "gradient, and code that writes parameters have the same effect."
    )
    FIX_UNSEEN = (
        "Compare how often each rank steps, and the settings of its optimizer. Derived from `torch.optim.Optimizer`, "
        "an optimizer is watched at each step."
    )
    CAUSE_UNCOUNTED = (
        "A rank took another step than the other ranks. The optimizer counts no steps, so a skipped step, a lost "
        "momentum and a scaled gradient have the same effect."
    )
    FIX_UNCOUNTED = (
        "Compare two neighbouring steps: after a single event, the first moments converge. Look for skipped steps (a "
        "bad batch, an overflow), for state loaded on some ranks only and for clipping on some ranks."
    )
    CAUSE_STAGES = (
        "Pipeline stages hold copies of a tied weight, and the copies differ: they started with other values, or their "
        "gradients are not added over the stages."
    )
    FIX_STAGES = (
        "Broadcast the weight between the stages that hold a copy once, before training. Before each "
        "`optimizer.step()`, add the gradients of all copies: `dist.all_reduce(p.grad, group=group_of_the_copies)`."
    )
    CAUSE_DIGESTS = (
        "Digests show differing bytes, but neither the size nor the direction of a difference, which the rules require."
    )
    FIX_DIGESTS = (
        "Compare the checkpoints instead of their fingerprints or stored checksums; in a job, use a larger budget=."
    )
    TENSORS = "No rule explains why {count:count tensor} {count:verb differs|differ} ({kinds:list}), {size}"
    KIND = "{count} {kind}"
    VALUES = "No rule explains {count:count differing value}: {values:list}"
    VALUE = "{name:name} is {values:by_rank}"
    VALUE_NAME = "{name:name}"
    MORE_VALUES = "{count} more"
    PARAMETERS_AGREE = "all parameters agree"
    MOMENTS = "the median cosine of the first moments is {cosine:.3f}"


# Share of the trained parameters from which the whole model differs.
WHOLE = 0.9
# The causes that a watched run excludes if it compared all gradients.
_SEEN_GRADIENTS = frozenset({"SYN211", "SYN213", "SYN214"})
_MOST = 3  # listed values
_MOST_SETS = 4  # sets of ranks with equal values, of one listed value


class _Remainder(NamedTuple):
    """Cause, fix and evidence by the kinds of the differing tensors."""

    cause: Sentence | None = None
    """None if it is unknown."""
    fix: Sentence | None = None
    """None if it is unknown."""
    facts: tuple[Message, ...] = ()
    alternatives: tuple[str, ...] = ()
    """The codes of causes that are not excluded."""


_KINDS_ALONE = {
    "buffer": _Remainder(Text.CAUSE_BUFFERS, Text.FIX_BUFFERS),
    "optimizer": _Remainder(Text.CAUSE_STATE, Text.FIX_STATE, (Text.PARAMETERS_AGREE(),)),
    "optimizer_step": _Remainder(Text.CAUSE_COUNTERS, Text.FIX_COUNTERS),
    "rng": _Remainder(Text.CAUSE_RNG, Text.FIX_RNG),
}


class _Gradients(NamedTuple):
    """The cause of different gradients, and the codes of causes that are not excluded."""

    cause: Sentence
    fix: Sentence
    of_model: tuple[str, ...]
    """If the whole model differs."""
    of_part: tuple[str, ...]
    """If a part of the model differs."""


_COUNTED = _Gradients(
    Text.CAUSE_COUNTED,
    Text.FIX_COUNTED,
    of_model=("SYN211",),
    of_part=("SYN212", "SYN224"),
)
# An optimizer without step counters.
_UNCOUNTED = _Gradients(
    Text.CAUSE_UNCOUNTED,
    Text.FIX_UNCOUNTED,
    of_model=("SYN214", "SYN215", "SYN213"),
    of_part=("SYN225", "SYN212", "SYN224"),
)


def _is_unexplained(case: Case) -> bool:
    """Whether any difference is left without an explanation."""
    return bool(case.tensors or case.values)


@requires(_is_unexplained)
def apply(case: Case) -> Match | None:
    """Match all remaining differences."""
    remainder = _diagnose_remainder(case)
    facts = [
        *state_if(case.tensors, _describe_tensors(case), *case.agreement_facts(case.tensors)),
        *state_if(case.values, _describe_values(case.of_values())),
        *remainder.facts,
    ]
    return Match(
        case.tensors,
        _find_suspects(case),
        facts,
        case.values,
        remainder.cause,
        remainder.fix,
        alternatives=remainder.alternatives,
    )


def _describe_tensors(case: Case) -> Message:
    """State how many tensors of each kind differ, and by how much."""
    kinds = []
    for kind, count in Counter(diff.kind for diff in case.tensors).items():
        kinds.append(Text.KIND(count=count, kind=kind))
    return Text.TENSORS(
        count=len(case.tensors),
        kinds=tuple(kinds),
        size=largest_difference(case.tensors),
    )


def _diagnose_remainder(case: Case) -> _Remainder:
    """Return what the kinds of the differing tensors show."""
    if not case.tensors:
        return _Remainder(fix=Text.FIX_VALUES)
    if all(map(is_code_constant, list_names(case.tensors))):
        return _Remainder(OtherCode.CAUSE, OtherCode.FIX)

    kinds = kinds_of(case.tensors)
    # Other tensors follow the parameters.
    followed = kinds & {"parameter"} or kinds
    _, since = case.trend_facts(*followed)
    if all(map(_is_digest, case.tensors)):
        return _Remainder(Text.CAUSE_DIGESTS, Text.FIX_DIGESTS, since)
    if len(kinds) == 1:
        remainder = _diagnose_single_kind(case, since)
        if remainder is not None:
            return remainder
    if case.differing_parameters():
        return _diagnose_parameters(case, since)
    return _Remainder(facts=since)


def _is_digest(diff: TensorDiff) -> bool:
    """Whether only digests or checksums were compared, so that the size of the difference is unknown."""
    return diff.mismatched is None and diff.reason is not None


def _diagnose_single_kind(case: Case, since: tuple[Message, ...]) -> _Remainder | None:
    """Return what is known if only optimizer state, RNG states or buffers differ; None if other tensors may."""
    kind = case.tensors[0].kind
    if kind not in _KINDS_ALONE or not _is_kind_alone(case, kind):
        return None
    remainder = _KINDS_ALONE[kind]
    common_streams = _list_common_streams(case)
    if common_streams:
        fact = Text.EQUAL_STREAMS(groups=common_streams)
        return _Remainder(Text.CAUSE_RNG_PARTLY, Text.FIX_RNG_PARTLY, (fact, *since))
    # The course of the difference says more than that the rest agrees.
    return remainder._replace(facts=since or remainder.facts)


def _list_common_streams(case: Case) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks with equal RNG states beside different RNG states; empty if other tensors differ too."""
    streams = case.of_kind("rng")
    sets: dict[tuple[int, ...], None] = {}
    if len(streams) < len(case.tensors):
        return ()
    for diff in with_agreeing_ranks(streams):
        for ranks in diff.clusters:
            # A rank alone has nothing in common.
            if len(ranks) > 1:
                sets[ranks] = None
    return tuple(sets)


def _is_kind_alone(case: Case, kind: str) -> bool:
    """Whether the tensors of the kind have the contents of their kind, and differ alone."""
    if kind == "optimizer":
        return case.is_in_sync("parameter")
    if kind == "optimizer_step":
        return case.is_in_sync("parameter") and case.is_in_sync("optimizer")
    # The error feedback of PowerSGD is listed with the RNG states, but is none.
    has_error_feedback = any(".error_dict." in f".{diff.name}" for diff in case.tensors)
    return kind != "rng" or not has_error_feedback


def _are_copies_in_stages(case: Case) -> bool:
    """Whether parameters differ only between pipeline stages, which have no other parameter in common."""
    stages = case.coordinates(PIPELINE)
    differing = case.differing_parameters().values()
    has_stages = len(set(stages.values())) > 1
    return has_stages and len(agreeing_within(differing, stages)) == len(differing)


def _diagnose_parameters(case: Case, since: tuple[Message, ...]) -> _Remainder:
    """Return the causes of differing parameters that are not excluded."""
    if _are_copies_in_stages(case):
        return _Remainder(
            cause=Text.CAUSE_STAGES,
            fix=Text.FIX_STAGES,
            facts=since,
            alternatives=("SYN210", "SYN212"),
        )
    # A watched run excludes the causes that the optimizer state would show.
    if case.impossible >= _SEEN_GRADIENTS:
        return _Remainder(Text.CAUSE_WATCHED, Text.FIX_WATCHED, since)
    # With equal gradients, something else changed the parameters.
    if case.is_in_sync("optimizer") or only_decay(case):
        return _Remainder(Text.CAUSE_EVENT, Text.FIX_EVENT, since)
    if not case.compared("optimizer"):
        alternatives = _list_stateless_alternatives(case)
        return _Remainder(
            cause=Text.CAUSE_STATELESS,
            fix=Text.FIX_STATELESS,
            facts=since,
            alternatives=alternatives,
        )
    if not case.in_step():
        return _Remainder(facts=since)
    return _diagnose_gradients(case, since)


def _diagnose_gradients(case: Case, since: tuple[Message, ...]) -> _Remainder:
    """Return the causes of different gradients that are not excluded."""
    cosine = median_cosine(case.differing_moments().values())
    causes = _COUNTED if case.counts_steps() else _UNCOUNTED
    # A whole model that differs has other causes than a part of it.
    alternatives = causes.of_model if _is_whole_model(case) else causes.of_part
    return _Remainder(
        causes.cause,
        causes.fix,
        facts=(*state_if(cosine is not None, Text.MOMENTS(cosine=cosine)), *since),
        alternatives=alternatives,
    )


def _list_stateless_alternatives(case: Case) -> tuple[str, ...]:
    """Return the causes that parameters alone do not exclude."""
    differing = case.differing_parameters().values()
    if not _is_whole_model(case):
        # Ranks that agree had averaged gradients, unlike a part outside of the wrapper.
        own_gradients = "SYN211" if single_out_ranks(case, differing) else "SYN212"
        return (own_gradients, "SYN225", "SYN210")
    # A skipped step leaves all other ranks equal.
    all_differ = case.number_of_ranks > 2 and case.ranks_differ(differing)
    return ("SYN211", "SYN213") if all_differ else ("SYN213", "SYN214", "SYN211")


def _is_whole_model(case: Case) -> bool:
    """Whether nearly all trained parameters differ, or all adapters."""
    trained, differing = case.trained_parameters(), frozenset(case.differing_parameters())
    if len(differing & trained) >= WHOLE * len(trained):
        return True
    # The optimizer shows whether other parameters are trained too.
    if case.optimized is not None:
        return False
    adapters = frozenset(filter(is_adapter, case.names_of("parameter")))
    return bool(adapters) and adapters <= differing


def _describe_values(differing: Sequence[ValueDiff]) -> Message:
    """State the first differing values by rank."""
    values = []
    for diff in differing:
        values.append(_describe_value(diff))
    return Text.VALUES(
        count=len(differing),
        values=tuple(limit_facts(values, _MOST, Text.MORE_VALUES)),
    )


def _describe_value(diff: ValueDiff) -> Message:
    """State the value of each rank, unless there are many."""
    if len(_ranks_by_value(diff)) > _MOST_SETS:
        return Text.VALUE_NAME(name=diff.name)
    return Text.VALUE(name=diff.name, values=dict(diff.by_rank))


def _find_suspects(case: Case) -> tuple[int, ...]:
    """Return the suspects of the tensors. If only values differ, return the ranks outside their majority."""
    if _list_common_streams(case):
        # The majority of RNG streams is not right: nothing shows if they must be equal.
        return case.group.ranks
    if case.tensors:
        return suspects(case.tensors, case.group)
    deviating_ranks: set[int] = set()
    for value in case.of_values():
        largest_set = max(_ranks_by_value(value).values(), key=len)
        has_majority = 2 * len(largest_set) > len(value.by_rank)
        if has_majority:
            deviating_ranks.update(ranks_outside(value.by_rank, largest_set))
        else:
            # Without a majority, all ranks are suspects.
            deviating_ranks.update(value.by_rank)
    return tuple(sorted(deviating_ranks)) or case.group.ranks


def _ranks_by_value(diff: ValueDiff) -> dict[str, list[int]]:
    return group_ranks({rank: brief(value) for rank, value in diff.by_rank.items()})
