"""Some ranks did not update some parameters, and updated the others.

Signature: a part of the trained parameters differs, and the optimizer shows that some ranks updated them less often:
step counters are behind, or optimizer state is missing on these ranks, or the values of an earlier saved step are still
there. The counters of the other parameters agree.

The finding is likely only if a rank has no state of a parameter at all. If values of an earlier step are still there,
an old file (SYN217) or frozen tensors (SYN218) may look the same. If only counters are behind, the state of the
parameters may have been lost, or loaded from an earlier step (SYN215). If all counters of one of several optimizers are
behind, the ranks skipped steps of this optimizer, and the finding is SYN214 or SYN215. SGD has no counters, and a
missing gradient has the effect of a zero gradient.

Cause: the optimizer skips a parameter without a gradient. On some ranks the parameter was not used (an expert without
tokens, a branch that was not taken), it was frozen, or it is not in the optimizer. DistributedDataParallel with
find_unused_parameters=True gives every rank the averaged gradient; code that averages gradients itself often skips
parameters without one. The other ranks may have a gradient of zeros, as after `zero_grad(set_to_none=False)` on these
ranks only: the moments of Adam move the parameter all the same. The listed
ranks are the minority, with fewer or with more steps.

Fix: give every rank a gradient of every trained parameter before the gradients are averaged: `if p.grad is None:
p.grad = torch.zeros_like(p)`. Then all ranks take part in each all-reduce, and all optimizers take the same step. Or
leave the gradient None on every rank: clear gradients on all of them with the same `set_to_none`.

Incidents: microsoft/dion#89 (an expert without tokens on one rank has no optimizer state there).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import doubt, state_if
from syncheck.diagnose.counters import counters_of, deviating_ranks, is_whole_optimizer, steps_by_rank
from syncheck.diagnose.features import are_numbered, groups_of, owners_of_states, states_of_parameters
from syncheck.diagnose.lost_state import ranks_without_state
from syncheck.diagnose.selection import holders_of, join_ranks, list_names, ranks_outside, select_missing, select_names
from syncheck.diagnose.statements import largest_difference, limit_facts
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import TensorDiff

CODE = "SYN225"
SLUG = "not-updated-on-some-ranks"
SEVERITY = "error"
CERTAINTY = "likely"

_MOST = 3  # sets of ranks


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Some ranks had no gradient of the listed parameters and did not update them: they were not used there (an "
        "expert without tokens, a branch not taken), frozen there, or not in the optimizer there."
    )
    CAUSE_UNCOUNTED = (
        "Some ranks did not update the listed parameters: their gradients were missing or zero there (an expert "
        "without tokens, a branch not taken, a hook), or they are frozen or not in the optimizer there."
    )
    CAUSE_BEHIND = (
        "The optimizer updates only parameters with a gradient: the ranks with more steps had a gradient of the listed "
        "parameters (maybe zeros, as after `zero_grad(set_to_none=False)`), and the ranks with fewer steps had none "
        "(an expert without tokens, a branch not taken), or the optimizer state was lost or is of an earlier step."
    )
    FIX_BEHIND = (
        "Give every rank a gradient of the same parameters. Before averaging gradients: `for p in model.parameters(): "
        "p.grad = torch.zeros_like(p) if p.grad is None else p.grad`. Or leave unused parameters None on every rank: "
        "clear gradients on all ranks with the same `set_to_none`, and create zeros on none. Then restart from a "
        "checkpoint in which the ranks agree."
    )
    FIX = (
        "Before averaging gradients, give every rank a gradient of every trained parameter: `for p in "
        "model.parameters(): p.grad = torch.zeros_like(p) if p.grad is None else p.grad`. Or train through "
        "`DistributedDataParallel(model, find_unused_parameters=True)`. Then restart from a checkpoint in which the "
        "ranks agree."
    )
    NEVER = "{ranks:Ranks} never updated {names:names 4}: the optimizer has no state of {count:verb it|them} there"
    LESS_OFTEN = "{ranks:Ranks} counted fewer steps of {names:names 4}: {name:name} has the steps {steps:by_rank}"
    UNCHANGED = "{ranks:Ranks} did not update {names:names 4} after step {step}: the values are still equal"
    PARAMETERS = "{count} of {total:count trained parameter} {count:verb differs|differ}, {size}"
    MORE = "{count} {count:verb further set|further sets} of ranks counted fewer steps of other parameters"
    REST = "the optimizer counted the same steps of the other {count:count parameter}"


class _Part(NamedTuple):
    """The parameters that some ranks did not update, the ranks that deviate, and how it is known."""

    names: frozenset[str]
    ranks: tuple[int, ...]
    facts: Sequence[Message]
    cause: Sentence | None = None
    """Replaces CAUSE."""
    fix: Sentence | None = None
    """Replaces FIX."""
    alternatives: tuple[str, ...] = ()
    """The codes of other causes that fit as well."""


def apply(case: Case) -> Match | None:
    """Match a part of the parameters that some ranks did not update."""
    part = _find_without_state(case) or _find_unchanged(case) or _find_behind(case)
    if part is None:
        return None
    changed = _find_parameters(case, part.names)
    # State alone shows no parameter that was not updated.
    if not changed:
        return None
    agreeing = _counted(case) - part.names
    facts = [
        *part.facts,
        Text.PARAMETERS(
            count=len(changed),
            total=len(case.names_of("parameter") - case.untrained),
            size=largest_difference(changed),
        ),
        *state_if(agreeing, Text.REST(count=len(agreeing))),
        *case.agreement_facts(changed),
    ]
    covered = _select_covered(case, part.names.union(list_names(changed)))
    match = Match(
        tensors=covered,
        ranks=part.ranks,
        facts=facts,
        cause=part.cause,
        fix=part.fix,
    )
    return doubt(match, part.alternatives)


def _select_covered(case: Case, parameters: Collection[str]) -> tuple[TensorDiff, ...]:
    """Return the parameters, and the tensors that differ because of them."""
    states = states_of_parameters(case, list_names(case.of_kind(*OPTIMIZER)), parameters)
    # Other weights change their averages, and the statistics of later layers.
    followers = case.of_kind("ema", *BN_STATISTICS)
    names = frozenset(parameters).union(states, list_names(followers))
    return tuple(select_names(case.tensors, names))


def _find_parameters(case: Case, names: Collection[str]) -> list[TensorDiff]:
    """Return the differing parameters with these names."""
    differing = list(case.differing_parameters().values())
    # Without metadata, the optimizer has numbers instead of names. Then as many parameters must differ.
    are_as_many = len(names) == len(differing)
    if are_as_many and are_numbered(names):
        return differing
    return select_names(differing, names)


def _counted(case: Case) -> frozenset[str]:
    """Return the parameters whose steps the optimizer counts."""
    return owners_of_states(case, "optimizer_step")


def _find_without_state(case: Case) -> _Part | None:
    """Return the parameters without any optimizer state on some ranks."""
    missing = select_missing(case.tensors, *OPTIMIZER)
    ranks = ranks_outside(case.group.ranks, holders_of(missing))
    if not missing or not ranks:
        return None
    missing_names = frozenset(list_names(missing))
    states = case.names_of(*OPTIMIZER)
    # If all state is missing, the optimizer itself is.
    is_whole_state = missing_names >= states
    if is_whole_state or ranks_without_state(case):
        return None

    parameters = case.owners_of(missing)
    # A part of the state of a parameter was lost, not left out.
    if not missing_names.issuperset(states_of_parameters(case, states, parameters)):
        return None
    names = tuple(sorted(parameters))
    fact = Text.NEVER(
        ranks=ranks,
        names=names,
        count=len(names),
    )
    return _Part(parameters, ranks, (fact,))


def _find_behind(case: Case) -> _Part | None:
    """Return the parameters whose step counters are behind on some ranks, if those of other parameters agree."""
    counters = [counter for counter in counters_of(case) if counter.diff is not None]
    if not counters:
        return None
    names = case.owners_of(case.of_kind("optimizer_step"))
    # An optimizer as a whole, or all of them, took other steps.
    are_all_counters = _counted(case) <= names
    if are_all_counters or is_whole_optimizer(case, names):
        return None
    # Any lag fits lost or loaded state. The file of an earlier step would have other counters of all parameters.
    return _Part(
        names=names,
        ranks=deviating_ranks(counters),
        facts=_describe_counters(case, counters),
        cause=Text.CAUSE_BEHIND,
        fix=Text.FIX_BEHIND,
        alternatives=("SYN215",),
    )


def _describe_counters(case: Case, counters: Sequence[StepCounter]) -> list[Message]:
    """State which ranks counted fewer steps: one fact for each set of such ranks. The other ranks may deviate."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = {}
    largest_by_ranks: dict[tuple[int, ...], StepCounter] = {}
    for counter in sorted(counters, key=attrgetter("lag")):
        names_by_ranks.setdefault(counter.behind, []).append(case.owner_of(counter.name))
        largest_by_ranks[counter.behind] = counter
    facts = []
    for ranks, largest in largest_by_ranks.items():
        fact = Text.LESS_OFTEN(
            ranks=ranks,
            names=tuple(sorted(names_by_ranks[ranks])),
            name=largest.name,
            steps=steps_by_rank(largest),
        )
        facts.append(fact)
    return limit_facts(facts, _MOST, Text.MORE)


def _find_unchanged(case: Case) -> _Part | None:
    """Return the parameters with the values of an earlier saved step on some ranks, if others agree."""
    stale = case.group.evidence.stale
    names = frozenset(case.differing_parameters())
    if not stale or not names:
        return None
    # A rank whose parameters are all old is a stale rank.
    is_whole_model = case.trained_parameters() <= names
    if is_whole_model or _is_divided(case):
        return None
    if is_whole_optimizer(case, names):
        return None
    ranks = tuple(sorted(stale))
    fact = Text.UNCHANGED(
        ranks=ranks,
        names=tuple(sorted(names)),
        step=max(stale.values()),
    )
    # An optimizer with counters or moments changes a parameter with a zero gradient, unlike SGD.
    cause = None if case.counts_steps() else Text.CAUSE_UNCOUNTED
    # A frozen part keeps its values on every healthy rank, and an old file has all values of an earlier step.
    return _Part(
        names=names,
        ranks=ranks,
        facts=(fact,),
        cause=cause,
        alternatives=("SYN217", "SYN218"),
    )


def _is_divided(case: Case) -> bool:
    """Whether ranks hold different parameters, as with pipeline stages. A rank may then be stale as a whole."""
    all_ranks = set(case.group.ranks)
    differing = case.differing_parameters().values()
    return any(join_ranks(groups_of(diff, all_ranks)) < all_ranks for diff in differing)
