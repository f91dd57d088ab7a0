"""Local SGD: the ranks train on their own between two averages of their parameters.

Signature: the metadata contains a period of parameter averaging. Between two averages all trained parameters differ,
and so do weights that are tied to them under another name. If some ranks hold equal parameters in between, another
cause fits better: a rank alone steps with other gradients. Right after an average they agree, and only the optimizer
state and BatchNorm's statistics differ, because these are not averaged. Not part of this finding: differences of
parameters right after an average, during the warm-up, or when an average is overdue, and frozen parameters.

Cause: by design. The files are not replicas nevertheless: which model remains depends on the rank whose file is kept.

The finding remains after an average if the optimizer state differs: a run that resumes all ranks from a single file
takes other steps than a run that continues.

Fix: save right after an averaging step, and evaluate and keep this checkpoint. Or average once more before the last
save. (`averager.average_parameters()` averages only when its own count requires it, not at every call.) To let a check
pass: `--allow SYN241`. The momentum may be averaged too, but most recipes do not.

Incidents: none known; measured with torch's PostLocalSGDOptimizer and PeriodicModelAverager: with a period of 4, ranks
are equal at steps 5, 9 and 13, and differ at 6 to 8 and 10 to 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.averaging import Averaging, find_averaging
from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.features import with_agreeing_ranks
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.selection import exclude_names, select_names
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

CODE = "SYN241"
SLUG = "periodic-averaging"
SEVERITY = "warning"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "Local SGD, as the metadata says: the ranks train on their own between two averages of the parameters."
    FIX = (
        "Save right after an averaging step: `if (averager.step - 1 - averager.warmup_steps) % averager.period == 0: "
        "torch.save(...)`. Or average before the last save: `for p in model.parameters(): "
        "dist.all_reduce(p.data.div_(dist.get_world_size()))`. To accept the finding: {allow:option=SYN241}."
    )
    CAUSE_STATE = (
        "Local SGD, as the metadata says: the parameters are averaged, and each rank keeps its own optimizer state, by "
        "design."
    )
    FIX_STATE = (
        "All files have the same parameters. Resume each rank from its own file, because the optimizer state of one "
        "file changes the next steps of the other ranks. To average it too, call `dist.all_reduce` on the tensors of "
        "`optimizer.state`. To accept the finding: {allow:option=SYN241}."
    )
    IN_A_JOB = (
        "No fix is needed; to accept the finding: {allow:option=SYN241}. Parameters are equal only right after an "
        "averaging step."
    )
    OWN_STEPS = "By the metadata, the ranks have trained on their own for {steps:count step} since they were equal"
    OWN_STATE = "By the metadata, the ranks average their parameters alone, and only other tensors differ"
    AVERAGED = "parameters are averaged every {period:count step}, last after step {last}; this is step {step}"
    NOT_YET_AVERAGED = (
        "parameters are averaged every {period:count step} after {warmup:count warm-up step}, and have not been "
        "averaged yet; this is step {step}"
    )
    PARAMETERS_AGREE = "all parameters agree"
    STATE_DIFFERS = "{count:count optimizer tensor} {count:verb differs|differ} too"
    STATISTICS_DIFFER = "{count:count running statistic} {count:verb differs|differ} too"
    SOME_EQUAL = "some ranks hold equal parameters, which ranks that train on their own do not"


def _counts_agree(case: Case) -> bool:
    """Whether the step counters agree. Other counts of steps show another cause."""
    return case.agrees("optimizer_step")


@requires(_counts_agree)
def apply(case: Case) -> Match | None:
    """Match the differences of local SGD at this step: all trained tensors, or after an average all but parameters."""
    averaging = find_averaging(case.group)
    if averaging is None:
        return None
    # A difference that remains after the average may have caused all others.
    remains_unequal = averaging.just_averaged and not case.agrees("parameter")
    if remains_unequal:
        return None
    parameters = _find_trained(case)
    state = case.of_kind("optimizer")
    if not parameters and not state:
        return None

    # Other counts show other batches, which local SGD does not explain.
    statistics = case.of_kind(*BN_STATISTICS) if case.agrees("bn_count") else ()
    have_equal = _some_equal(parameters)
    facts = [
        *_describe_averaging(averaging, has_parameters=bool(parameters)),
        *(case.parameter_facts(parameters) or [Text.PARAMETERS_AGREE()]),
        *state_if(state, Text.STATE_DIFFERS(count=len(state))),
        *state_if(statistics, Text.STATISTICS_DIFFER(count=len(statistics))),
        *state_if(have_equal, Text.SOME_EQUAL()),
    ]
    match = Match((*parameters, *state, *statistics), case.group.ranks, facts)
    saved_after_average = averaging.just_averaged and not case.in_running_job
    if saved_after_average:
        match = match.with_cause(Text.CAUSE_STATE, Text.FIX_STATE)
    return match.as_consistent("SYN211", "SYN213") if have_equal else match


def _some_equal(parameters: Sequence[TensorDiff]) -> bool:
    """Whether ranks that should have trained on their own data hold equal values of most differing parameters."""
    return 2 * len(with_agreeing_ranks(parameters)) > len(parameters)


def _find_trained(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing parameters with optimizer state, or if the names of its ids are unknown, all not frozen."""
    trained = frozenset(map(parameter_of, case.names_of("optimizer")))
    differing = case.of_kind("parameter")
    # The optimizer has ids instead of names.
    if trained.isdisjoint(case.names_of("parameter")):
        return tuple(exclude_names(differing, case.frozen))
    return tuple(select_names(differing, trained))


def _describe_averaging(averaging: Averaging, *, has_parameters: bool) -> list[Message]:
    """State since when the ranks train on their own. has_parameters: whether parameters differ."""
    summary = Text.OWN_STEPS(steps=averaging.own_steps) if has_parameters else Text.OWN_STATE()
    if averaging.last:
        average = Text.AVERAGED(
            period=averaging.period,
            last=averaging.last,
            step=averaging.step,
        )
    else:
        average = Text.NOT_YET_AVERAGED(
            period=averaging.period,
            warmup=averaging.warmup,
            step=averaging.step,
        )
    return [summary, average]
