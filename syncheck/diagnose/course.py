"""Decide once about a fault that several steps of a run show.

Each step is diagnosed alone, so the evidence of one fault may fit SYN211 at one step and SYN213 at the next step. Steps
without a gap at which the same parameters differ between the same ranks show one fault: the code with the strongest
certainty and the most steps is the finding of all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck.diagnose.selection import list_names, out_of_sync, select_names
from syncheck.diagnose.series import by_run
from syncheck.diagnose.single_events import describe_events
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.findings import Certainty
    from syncheck.messages import Message
    from syncheck.records import Finding, Group

# Causes in the gradients. Their evidence differs in degree, and one fault may show each of them.
_OF_GRADIENTS = frozenset({"SYN211", "SYN212", "SYN213"})
# Causes of differing parameters. Codes that follow from other evidence, for example counters or bits, are not merged.
_OF_PARAMETERS = _OF_GRADIENTS | {"SYN210", "SYN240", "SYN299"}
# Small or unexplained differences, which never decide about other steps.
_WITHOUT_CAUSE = frozenset({"SYN240", "SYN299"})
_STRENGTH = {"proved": 2, "likely": 1, "consistent": 0}
# Least share of common parameters, among all parameters of two steps.
_MOST = 0.5


class Course(Sentence):
    """Statements about a fault at several steps."""

    DECIDED = "judged over steps {steps:list}, most clearly at step {step}: {fact}"
    TENSORS = "{count:count tensor} {count:verb differs|differ} at this step, {size}"
    DISAGREES = "at {steps:list} alone, the evidence fits {code} better"
    STEP = "step {step}"


@dataclass(frozen=True, slots=True)
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
        if self.position != earlier.position + 1 or self.ranks != earlier.ranks:
            return False
        common = len(self.names & earlier.names)
        return common >= _MOST * len(self.names | earlier.names)


def decide_over_steps(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups; findings of one fault at several steps of a run have the same code, cause and certainty."""
    decided = {id(group): group for group in groups}
    for run in by_run(groups).values():
        steps = [group for group in run if group.step is not None]
        # A single step has no course.
        if len(steps) < 2:
            continue
        for position, findings in _decide_run(steps).items():
            group = steps[position]
            decided[id(group)] = replace(group, findings=findings)
    return tuple(decided[id(group)] for group in groups)


def _decide_run(steps: Sequence[Group]) -> dict[int, tuple[Finding, ...]]:
    """Return the new findings of the steps that change, by position."""
    replaced: dict[int, Finding] = {}
    for course in _find_courses(steps):
        groups = [steps[sighting.position] for sighting in course]
        described = describe_events(groups, _decide(course, steps))
        for sighting, finding in zip(course, described, strict=True):
            replaced[id(sighting.finding)] = finding

    changed: dict[int, tuple[Finding, ...]] = {}
    for position, group in enumerate(steps):
        findings = tuple(replaced.get(id(finding), finding) for finding in group.findings)
        # A report has one finding of each code.
        codes = {finding.code for finding in findings}
        if findings != group.findings and len(codes) == len(findings):
            changed[position] = findings
    return changed


def _find_courses(steps: Sequence[Group]) -> list[list[_Sighting]]:
    """Return the faults that several neighbouring steps show."""
    courses: list[list[_Sighting]] = []
    for position, group in enumerate(steps):
        for finding in group.findings:
            sighting = _observe(position, group, finding)
            if sighting is not None:
                _find_course(courses, sighting).append(sighting)
    return [course for course in courses if len(course) > 1]


def _find_course(courses: list[list[_Sighting]], sighting: _Sighting) -> list[_Sighting]:
    """Return the course that a sighting continues, or a new course."""
    for course in courses:
        if sighting.continues(course[-1]):
            return course
    courses.append([])
    return courses[-1]


def _observe(position: int, group: Group, finding: Finding) -> _Sighting | None:
    """Return the parameters and ranks of a finding; None if it is not about the values of parameters."""
    if finding.code not in _OF_PARAMETERS or group.step is None:
        return None
    # A warning that does not count is no fault.
    if not finding.counts:
        return None
    parameters = select_names(out_of_sync(group, "parameter"), finding.tensors)
    if not parameters:
        return None
    sets_of_ranks = Counter(frozenset(diff.clusters) for diff in parameters)
    most_common, _ = sets_of_ranks.most_common(1)[0]
    return _Sighting(position, group.step, finding, frozenset(list_names(parameters)), most_common)


def _decide(course: Sequence[_Sighting], steps: Sequence[Group]) -> list[Finding]:
    """Return the findings of a fault, with the code of the clearest step where the evidence allows it."""
    clearest = _find_clearest(course)
    if clearest is None:
        return [sighting.finding for sighting in course]
    merged = [sighting for sighting in course if _may_refer(sighting, clearest)]
    rivals = _find_rivals(merged, clearest)
    certainty, alternatives = _limit_certainty(clearest.finding, rivals)

    decided = []
    for sighting in course:
        finding = sighting.finding
        if sighting in merged:
            if finding.code == clearest.code:
                finding = replace(finding, facts=(*finding.facts, *_disagreements(merged, rivals)))
            else:
                finding = _refer(sighting, clearest, steps[sighting.position], merged)
            finding = replace(finding, certainty=certainty, alternatives=alternatives)
        decided.append(finding)
    return decided


def _find_rivals(merged: Sequence[_Sighting], clearest: _Sighting) -> tuple[str, ...]:
    """Return the codes of other causes that seemed certain at some step."""
    rivals = []
    for sighting in merged:
        has_cause = sighting.code not in {*_WITHOUT_CAUSE, clearest.code}
        if has_cause and sighting.finding.certainty != "consistent":
            rivals.append(sighting.code)
    return tuple(dict.fromkeys(rivals))


def _limit_certainty(finding: Finding, rivals: Sequence[str]) -> tuple[Certainty, tuple[str, ...]]:
    """Return the certainty and the alternatives of the clearest finding. rivals: codes of other causes."""
    if not rivals or finding.certainty == "proved":
        return finding.certainty, finding.alternatives
    # Two causes that both seemed certain: a cause at least is wrong.
    return "consistent", tuple(dict.fromkeys((*finding.alternatives, *rivals)))


def _find_clearest(course: Sequence[_Sighting]) -> _Sighting | None:
    """Return the clearest sighting of the code that decides; None if the steps agree, or no step shows a cause."""
    counts = Counter(sighting.code for sighting in course)
    causes = [sighting for sighting in course if sighting.code not in _WITHOUT_CAUSE]
    if len(counts) < 2 or not causes:
        return None
    # The first of equally clear steps.
    return max(causes, key=lambda sighting: (_STRENGTH[sighting.finding.certainty], counts[sighting.code]))


def _may_refer(sighting: _Sighting, clearest: _Sighting) -> bool:
    """Whether the evidence of a step leaves room for the cause of the clearest step."""
    if sighting.code == clearest.code:
        return True
    # An allowed finding does not fail, so it must not replace one that fails.
    if sighting.finding.allowed != clearest.finding.allowed:
        return False
    if sighting.code == "SYN240":  # the first differences of a fault are small
        return clearest.code in _OF_GRADIENTS and sighting.step < clearest.step
    return sighting.finding.certainty == "consistent" or {sighting.code, clearest.code} <= _OF_GRADIENTS


def _refer(sighting: _Sighting, clearest: _Sighting, group: Group, merged: Sequence[_Sighting]) -> Finding:
    """Return the finding of a step that refers to the clearest step."""
    cause = clearest.finding
    differing = select_names(out_of_sync(group), sighting.finding.tensors)
    steps = tuple(merged_sighting.step for merged_sighting in merged)
    facts = (
        Course.DECIDED(steps=steps, step=clearest.step, fact=cause.facts[0]),
        Course.TENSORS(count=len(differing), size=largest_difference(differing)),
    )
    return replace(
        sighting.finding,
        code=cause.code,
        slug=cause.slug,
        severity=cause.severity,
        ranks=cause.ranks,
        facts=facts,
        cause=cause.cause,
        fix=cause.fix,
    )


def _disagreements(merged: Sequence[_Sighting], rivals: Iterable[str]) -> tuple[Message, ...]:
    """State at which steps the evidence fits another cause better."""
    facts = []
    for code in rivals:
        steps = [Course.STEP(step=sighting.step) for sighting in merged if sighting.code == code]
        facts.append(Course.DISAGREES(steps=tuple(steps), code=code))
    return tuple(facts)
