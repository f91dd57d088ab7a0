"""Decide once about a fault that several steps of a run show.

Each step is diagnosed alone, so the evidence of one fault may fit SYN211 at one step and SYN213 at the next step. Steps
without a gap at which the same parameters differ between the same ranks show one fault: the code with the strongest
certainty and the most steps is the finding of all of them.

Ranks that lose the state of their optimizer (SYN215) take other steps from then on. SGD counts no steps, so only the
step at which the state was missing proves the cause, and the parameters differ from the next step on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose import syn213_per_rank_gradient_scale as syn213
from syncheck.diagnose.lasting_scales import describe_scale
from syncheck.diagnose.measures import most_common
from syncheck.diagnose.selection import list_names, out_of_sync, select_names, with_step
from syncheck.diagnose.series import by_run
from syncheck.diagnose.single_events import describe_events
from syncheck.diagnose.statements import largest_difference
from syncheck.frozen import record
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.findings import Certainty
    from syncheck.messages import Message
    from syncheck.records import Finding, Group

# Causes in the gradients. Their evidence differs in degree, and one fault may show each of them.
_OF_GRADIENTS = frozenset({"SYN211", "SYN212", "SYN213"})
# Causes of differing parameters. Codes that follow from other evidence, for example counters or bits, are not merged.
_OF_PARAMETERS = _OF_GRADIENTS | {"SYN210", "SYN240", "SYN299"}
# Small or unexplained differences, which never decide about other steps.
_WITHOUT_CAUSE = frozenset({"SYN240", "SYN299"})
# The state of the optimizer is missing on some ranks.
_LOST_STATE = "SYN215"
_STRENGTH = {"proved": 2, "likely": 1, "consistent": 0}
# Least share of common parameters, among all parameters of two steps.
_MOST = 0.5


class Course(Sentence):
    """Statements about a fault at several steps."""

    DECIDED = "judged over steps {steps:list}, most clearly at step {step}: {fact}"
    TENSORS = "{count:count tensor} {count:verb differs|differ} at this step, {size}"
    DISAGREES = "at {steps:list} alone, the evidence fits {code} better"
    STEP = "step {step}"
    CARRIED = "the difference began at step {step}: {fact}"


@record
class _Sighting:
    """A finding at one step."""

    position: int
    """The position of its group in the run."""
    step: int
    finding: Finding
    names: frozenset[str]
    """The parameters that differ."""
    ranks: frozenset[tuple[int, ...]]
    """The sets of ranks between which they differ."""

    @property
    def code(self) -> str:
        """The code of the finding."""
        return self.finding.code

    def continues(self, earlier: _Sighting) -> bool:
        """Whether both are the same fault at neighbouring steps: the same parameters and ranks."""
        is_next_step = self.position == earlier.position + 1
        if not is_next_step or self.ranks != earlier.ranks:
            return False
        common = self.names & earlier.names
        all_names = self.names | earlier.names
        return len(common) >= _MOST * len(all_names)


def decide_over_steps(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups; findings of one fault at several steps of a run have the same code, cause and certainty."""
    decided: dict[int, Finding] = {}
    for run in by_run(groups).values():
        decided |= _decide_run(with_step(run))
    return tuple(_replace_findings(group, decided) for group in groups)


def _replace_findings(group: Group, decided: Mapping[int, Finding]) -> Group:
    """Return the group with its decided findings. decided: by the identity of the finding of one step."""
    findings = tuple(decided.get(id(finding), finding) for finding in group.findings)
    codes = {finding.code for finding in findings}
    # A report has one finding of each code.
    are_unique = len(codes) == len(findings)
    return replace(group, findings=findings) if are_unique else group


def _decide_run(steps: Sequence[Group]) -> dict[int, Finding]:
    """Return the findings of faults that several steps of a run show, by the identity of the finding of one step."""
    decided: dict[int, Finding] = {}
    for course in _find_courses(steps):
        findings = _decide_course(course, steps)
        for sighting, finding in zip(course, findings, strict=True):
            decided[id(sighting.finding)] = finding
    return decided


def _decide_course(course: Sequence[_Sighting], steps: Sequence[Group]) -> list[Finding]:
    """Return the findings of a fault, in the order of the steps. steps: all steps of the run."""
    loss = _find_loss(course[0], steps)
    if loss is not None:
        return [_carry(loss, sighting, steps) for sighting in course]
    # A fault at a single step has nothing to decide.
    if len(course) == 1:
        return [course[0].finding]
    groups = [steps[sighting.position] for sighting in course]
    decided = _decide(course, steps)
    scale = describe_scale(groups, decided)
    if scale is not None:
        return [_refer_to_scale(finding, scale) for finding in decided]
    return describe_events(groups, decided)


class _Loss(NamedTuple):
    """The proof that ranks lost the state of their optimizer. step: at which parameters still agreed."""

    step: int | None
    finding: Finding


def _find_loss(first: _Sighting, steps: Sequence[Group]) -> _Loss | None:
    """Return the loss of state before a fault that explains the fault; None without a loss.

    The ranks that kept their state must agree.
    """
    if first.position == 0:
        return None
    before = steps[first.position - 1]
    for finding in before.findings:
        is_loss = (finding.code, finding.certainty) == (_LOST_STATE, "proved")
        kept_state = [ranks for ranks in first.ranks if not set(ranks).issubset(finding.ranks)]
        is_of_these_ranks = len(kept_state) == 1 and set(kept_state[0]).isdisjoint(finding.ranks)
        conditions = (is_loss, is_of_these_ranks, finding.allowed == first.finding.allowed)
        if all(conditions):
            return _Loss(before.step, finding)
    return None


def _carry(loss: _Loss, sighting: _Sighting, steps: Sequence[Group]) -> Finding:
    """Return the finding of a step with the cause that an earlier step proves, and its own differences."""
    carried = _refer(sighting, loss.finding, steps[sighting.position])
    origin = Course.CARRIED(
        step=loss.step,
        fact=loss.finding.facts[0],
    )
    return replace(
        carried,
        facts=(*carried.facts, origin),
        certainty="likely",
        alternatives=(),
    )


def _refer_to_scale(finding: Finding, scale: Message) -> Finding:
    """Return the finding of a step with the cause that all steps show. scale: the statement about it."""
    # A finding that is certain, or that the user allows, remains.
    if finding.certainty != "consistent" or finding.allowed:
        return finding
    alternatives = dict.fromkeys((finding.code, *finding.alternatives))
    alternatives.pop(syn213.CODE, None)
    return replace(
        finding,
        code=syn213.CODE,
        slug=syn213.SLUG,
        facts=(scale, *finding.facts[1:]),
        cause=syn213.Text.CAUSE(),
        fix=syn213.Text.FIX(),
        # Single events do not go on.
        alternatives=tuple(code for code in alternatives if code in _OF_GRADIENTS),
    )


def _find_courses(steps: Sequence[Group]) -> list[list[_Sighting]]:
    """Return the faults that neighbouring steps show, or a single step."""
    sightings = []
    for position, group in enumerate(steps):
        for finding in group.findings:
            sighting = _observe(position, group, finding)
            if sighting is not None:
                sightings.append(sighting)
    courses: list[list[_Sighting]] = []
    for sighting in sightings:
        course = _find_course(courses, sighting)
        course.append(sighting)
    return courses


def _find_course(courses: list[list[_Sighting]], sighting: _Sighting) -> list[_Sighting]:
    """Return the course that a sighting continues, or a new course."""
    for course in courses:
        if sighting.continues(course[-1]):
            return course
    courses.append([])
    return courses[-1]


def _observe(position: int, group: Group, finding: Finding) -> _Sighting | None:
    """Return the parameters and ranks of a finding; None if it is not about the values of parameters."""
    # A warning that does not count is no fault.
    if group.step is None or not finding.counts:
        return None
    if finding.code not in _OF_PARAMETERS:
        return None
    parameters = select_names(out_of_sync(group, "parameter"), finding.tensors)
    if not parameters:
        return None
    sets_of_ranks = [frozenset(diff.clusters) for diff in parameters]
    return _Sighting(
        position=position,
        step=group.step,
        finding=finding,
        names=frozenset(list_names(parameters)),
        # Of several sets, the set of most parameters.
        ranks=most_common(sets_of_ranks),
    )


def _decide(course: Sequence[_Sighting], steps: Sequence[Group]) -> list[Finding]:
    """Return the findings of a fault, with the code of the clearest step where the evidence allows it."""
    clearest = _find_clearest(course)
    if clearest is None:
        return [sighting.finding for sighting in course]
    merged = [sighting for sighting in course if _may_refer(sighting, clearest)]
    rivals = _find_rivals(merged, clearest)
    disagreements = _disagreements(merged, rivals)
    certainty, alternatives = _limit_certainty(clearest.finding, rivals)

    decided = []
    for sighting in course:
        finding = sighting.finding
        if sighting in merged:
            facts = (*finding.facts, *disagreements)
            # The step keeps its own evidence only if it fits the cause.
            if finding.code != clearest.code:
                finding = _refer(sighting, clearest.finding, steps[sighting.position])
                facts = (_state_decision(merged, clearest), *finding.facts)
            finding = replace(
                finding,
                facts=facts,
                certainty=certainty,
                alternatives=alternatives,
            )
        decided.append(finding)
    return decided


def _find_rivals(merged: Sequence[_Sighting], clearest: _Sighting) -> tuple[str, ...]:
    """Return the codes of other causes that seemed certain at some step."""
    no_rivals = {*_WITHOUT_CAUSE, clearest.code}
    rivals = []
    for sighting in merged:
        is_certain = sighting.finding.certainty != "consistent"
        if is_certain and sighting.code not in no_rivals:
            rivals.append(sighting.code)
    # Each code once, in the order of the steps.
    return tuple(dict.fromkeys(rivals))


def _limit_certainty(finding: Finding, rivals: Sequence[str]) -> tuple[Certainty, tuple[str, ...]]:
    """Return the certainty and the alternatives of the clearest finding. rivals: codes of other causes."""
    if not rivals or finding.certainty == "proved":
        return finding.certainty, finding.alternatives
    # Two causes that both seemed certain: a cause at least is wrong.
    alternatives = dict.fromkeys((*finding.alternatives, *rivals))
    return "consistent", tuple(alternatives)


def _find_clearest(course: Sequence[_Sighting]) -> _Sighting | None:
    """Return the clearest sighting of the code that decides; None if the steps agree, or no step shows a cause."""
    counts = Counter(sighting.code for sighting in course)
    # The steps agree.
    if len(counts) == 1:
        return None
    clearest: _Sighting | None = None
    most_clarity = (-1, 0)
    for sighting in course:
        if sighting.code in _WITHOUT_CAUSE:
            continue
        strength = _STRENGTH[sighting.finding.certainty]
        clarity = (strength, counts[sighting.code])
        # The first of equally clear steps decides.
        if clarity > most_clarity:
            clearest, most_clarity = sighting, clarity
    return clearest


def _may_refer(sighting: _Sighting, clearest: _Sighting) -> bool:
    """Whether the evidence of a step leaves room for the cause of the clearest step."""
    if sighting.code == clearest.code:
        return True
    # An allowed finding does not fail, so it must not replace one that fails.
    if sighting.finding.allowed != clearest.finding.allowed:
        return False
    # The first differences of a fault are small.
    if sighting.code == "SYN240":
        is_earlier = sighting.step < clearest.step
        return is_earlier and clearest.code in _OF_GRADIENTS
    is_uncertain = sighting.finding.certainty == "consistent"
    are_both_of_gradients = {sighting.code, clearest.code} <= _OF_GRADIENTS
    return is_uncertain or are_both_of_gradients


def _refer(sighting: _Sighting, cause: Finding, group: Group) -> Finding:
    """Return the finding of a step with the code and the cause of another step, and its own differences."""
    differing = select_names(out_of_sync(group), sighting.finding.tensors)
    fact = Course.TENSORS(count=len(differing), size=largest_difference(differing))
    return replace(
        sighting.finding,
        code=cause.code,
        slug=cause.slug,
        severity=cause.severity,
        ranks=cause.ranks,
        facts=(fact,),
        cause=cause.cause,
        fix=cause.fix,
    )


def _state_decision(merged: Sequence[_Sighting], clearest: _Sighting) -> Message:
    """State which steps decide, and what the clearest of them shows."""
    return Course.DECIDED(
        steps=tuple(sighting.step for sighting in merged),
        step=clearest.step,
        fact=clearest.finding.facts[0],
    )


def _disagreements(merged: Sequence[_Sighting], rivals: Iterable[str]) -> tuple[Message, ...]:
    """State at which steps the evidence fits another cause better."""
    facts = []
    for code in rivals:
        steps = [Course.STEP(step=sighting.step) for sighting in merged if sighting.code == code]
        facts.append(Course.DISAGREES(steps=tuple(steps), code=code))
    return tuple(facts)
