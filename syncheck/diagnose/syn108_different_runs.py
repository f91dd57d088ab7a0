"""The files are of different runs.

Signature: the files record different settings of the run, and their tensors or values differ. The settings are `run`,
`run_id`, `world_size` and `config` of the metadata, seeds, and saved values in containers like `args` and `config`.
Ranks, hosts, devices, paths, and seeds that follow from the rank (`seed + rank`) differ within a run and do not count.

Another `run` or `run_id` proves another run. The other settings are evidence only: most trained parameters must differ,
and the first moments must not have the same direction, because equal gradients show a common run. The finding is then
"consistent", unless two files are of the same rank, which one run does not save. Differences between the files of the
same run, a single damaged element, rounding, and the values of an earlier step of the run have other findings.

Cause: the folder, the glob or `--group-by` joins the files of several runs: another launch, another seed, another
configuration. Their tensors differ because they are different models, and no fault within a run is visible.

Fix: compare the files of one run, or two models of different runs with `syncheck diff A B`. If two runs were compared
on purpose, because they should be bitwise equal, remove the listed differences first: equal seeds, settings, number of
ranks and versions.

Incidents: none known; measured with runs of the trainer that differ in the seed, the learning rate or the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose import syn240_rounding_only
from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.features import with_reason
from syncheck.diagnose.localized import localized_damage
from syncheck.diagnose.measures import evidence_of, is_at_least, median_cosine
from syncheck.diagnose.rank_values import find_minority
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Message, Sentence
from syncheck.tensors.value_kinds import is_seed
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.findings import Certainty
    from syncheck.records import TensorDiff

CODE = "SYN108"
SLUG = "different-runs"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "The files come from different runs, or from different launches of a run, so they are not replicas."
    FIX = (
        "Compare the files of one run: pass its folder, or group the files by the run with {group_by:option REGEX}. "
        "Compare two models of different runs with `syncheck diff A B`. Two runs are bitwise equal only with equal "
        "seeds, settings, numbers of ranks and versions."
    )
    PROVED = "The files are of different runs: {setting}"
    CONSISTENT = "Consistent with files of different runs: {setting}"
    SETTING = "{name:name} is {values:by_rank}"
    MORE = "{count:count more setting} {count:verb differs|differ}"
    REPEATED = "several files are of rank {ranks:list}"


# Settings of the metadata that prove another run.
IDENTITIES = ("run", "run_id")
# Least share of the trained parameters that differ. Different runs have few equal parameters.
MOST = 0.5
# Median cosine of first moments from which gradients count as averaged, as in SYN211.
ALIKE = 0.9
_MOST_SETTINGS = 4


def _record_other_runs(case: Case) -> bool:
    """Whether the files record different settings of the run, and no values of an earlier step of the same run."""
    return bool(case.group.evidence.runs) and not case.group.evidence.stale


def _have_differences(case: Case) -> bool:
    """Whether values or undamaged tensors differ."""
    return bool(case.values or _select_undamaged(case))


def _differ_at_large(case: Case) -> bool:
    """Whether more than one element or rounding differs. Two runs that should be equal may still differ in rounding."""
    return not localized_damage(case) and syn240_rounding_only.apply(case) is None


@requires(_record_other_runs, _have_differences, _differ_at_large)
def apply(case: Case) -> Match | None:
    """Match differences between files of different runs."""
    evidence = case.group.evidence
    identities = [name for name in evidence.runs if name in IDENTITIES]
    if not identities and not _is_plausible(case):
        return None

    run_of = _identify_runs(case, identities or list(evidence.runs))
    certainty = _choose_certainty(case, identities)
    tensors = _select_undamaged(case)
    match = Match(
        tensors,
        find_minority(run_of) or case.group.ranks,
        _list_facts(case, tensors, certainty),
        case.values,
        # A difference within one run has another cause.
        agree=list(group_ranks(run_of).values()),
        certainty=certainty,
    )
    if certainty == "consistent":
        return match.as_consistent(*_list_alternatives(case))
    return match


def _select_undamaged(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing tensors, without those that changed on disk (SYN223)."""
    return tuple(diff for diff in case.tensors if not evidence_of(diff).damaged)


def _identify_runs(case: Case, names: Sequence[str]) -> dict[int, str]:
    """Return a key of the run of each rank. names: of the settings that distinguish the runs."""
    keys: dict[int, str] = {}
    for rank in case.group.ranks:
        values = [case.group.evidence.runs[name].get(rank) for name in names]
        # As text, because values like lists have no hash.
        keys[rank] = str(values)
    return keys


def _choose_certainty(case: Case, identities: Sequence[str]) -> Certainty:
    """Return how certain it is that the files are of different runs."""
    if identities:
        return "proved"
    # One run saves one file of each rank.
    return "likely" if case.group.evidence.repeated_ranks else "consistent"


def _is_plausible(case: Case) -> bool:
    """Whether the tensors look like those of different runs: most parameters differ, and so do the gradients."""
    trained = case.trained_parameters()
    differing = trained & case.differing_parameters().keys()
    if len(differing) < max(1, MOST * len(trained)):
        return False
    # Equal averages of gradients show a common run.
    have_equal_gradients = bool(case.with_moment()) and case.agrees("optimizer")
    if have_equal_gradients:
        return False
    return not is_at_least(median_cosine(case.differing_moments().values()), ALIKE)


def _list_alternatives(case: Case) -> tuple[str, ...]:
    """Return the causes within one run that fit as well: other settings on a host, or a seed of each rank."""
    if with_reason(case.tensors, "shape"):
        return ("SYN102",)
    have_seeds = all(map(is_seed, case.group.evidence.runs))
    return ("SYN210", "SYN211") if have_seeds else ("SYN107", "SYN211")


def _list_facts(case: Case, tensors: Sequence[TensorDiff], certainty: Certainty) -> tuple[Message, ...]:
    """State the settings that differ, and how many parameters."""
    evidence = case.group.evidence
    settings: list[Message] = []
    for name, values in evidence.runs.items():
        settings.append(Text.SETTING(name=name, values=dict(values)))
    first, *further = limit_facts(settings, _MOST_SETTINGS, Text.MORE)
    sentence = Text.CONSISTENT if certainty == "consistent" else Text.PROVED
    return (
        sentence(setting=first),
        *further,
        *state_if(evidence.repeated_ranks, Text.REPEATED(ranks=evidence.repeated_ranks)),
        *case.parameter_facts(tensors),
    )
