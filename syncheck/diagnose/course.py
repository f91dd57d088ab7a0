"""Decide once about a fault that several steps of a run show.

Each step is diagnosed alone, so the evidence of one fault may fit SYN211 at one step and SYN213 at the next step. Steps
without a gap at which the same parameters differ between the same ranks show one fault: the code with the strongest
certainty and the most steps is the finding of all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck.diagnose.series import by_run
from syncheck.diagnose.single_events import describe_events
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.messages import Message
    from syncheck.records import Finding, Group, TensorDiff

# Causes in the gradients. Their evidence differs in degree, and one fault may show each of them.
_OF_GRADIENTS = frozenset({"SYN211", "SYN212", "SYN213"})
# Causes of differing parameters. Codes that follow from other evidence, such as counters or bits, are not merged.
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
    """A finding at one step. position: of its group in the run. names, ranks: what differs, and between which ranks."""

    position: int
    step: int
    finding: Finding
    names: frozenset[str]
    ranks: frozenset[tuple[int, ...]]

    def continues(self, earlier: _Sighting) -> bool:
        """Whether both are the same fault at neighbouring steps: the same parameters and ranks."""
        common = len(self.names & earlier.names)
        return (
            self.position == earlier.position + 1
            and self.ranks == earlier.ranks
            and common >= _MOST * len(self.names | earlier.names)
        )


def decide_over_steps(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups; findings of one fault at several steps of a run have the same code, cause and certainty."""
    decided = {id(group): group for group in groups}
    for run in by_run(groups).values():
        steps = [group for group in run if group.step is not None]
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
        described = describe_events([steps[s.position] for s in course], _decide(course, steps))
        for sighting, finding in zip(course, described, strict=True):
            replaced[id(sighting.finding)] = finding
    changed: dict[int, tuple[Finding, ...]] = {}
    for position, group in enumerate(steps):
        findings = tuple(replaced.get(id(finding), finding) for finding in group.findings)
        codes = [finding.code for finding in findings]
        if findings != group.findings and len(set(codes)) == len(codes):
            changed[position] = findings
    return changed


def _find_courses(steps: Sequence[Group]) -> list[list[_Sighting]]:
    """Return the faults that several neighbouring steps show."""
    courses: list[list[_Sighting]] = []
    for position, group in enumerate(steps):
        for finding in group.findings:
            sighting = _observe(position, group, finding)
            if sighting is None:
                continue
            course = next((course for course in courses if sighting.continues(course[-1])), None)
            if course is None:
                courses.append([sighting])
            else:
                course.append(sighting)
    return [course for course in courses if len(course) > 1]


def _observe(position: int, group: Group, finding: Finding) -> _Sighting | None:
    """Return the parameters and ranks of a finding; None if it is not about the values of parameters."""
    if finding.code not in _OF_PARAMETERS or not finding.counts or group.step is None:
        return None
    parameters = _parameters(group, finding)
    sets = Counter(frozenset(diff.clusters) for diff in parameters)
    if not sets:
        return None
    names = frozenset(diff.name for diff in parameters)
    return _Sighting(position, group.step, finding, names, sets.most_common(1)[0][0])


def _parameters(group: Group, finding: Finding) -> list[TensorDiff]:
    names = frozenset(finding.tensors)
    return [diff for diff in group.tensors if diff.name in names and diff.kind == "parameter" and diff.out_of_sync]


def _decide(course: Sequence[_Sighting], steps: Sequence[Group]) -> list[Finding]:
    """Return the findings of a fault, with the code of the clearest step where the evidence allows it."""
    best = _find_clearest(course)
    if best is None:
        return [sighting.finding for sighting in course]
    merged = [sighting for sighting in course if _may_refer(sighting, best)]
    rivals = dict.fromkeys(
        s.finding.code for s in merged if s.finding.code not in _WITHOUT_CAUSE and s.finding.certainty != "consistent"
    )
    rivals.pop(best.finding.code, None)
    # Two causes that both seemed certain: a cause at least is wrong.
    certainty, alternatives = best.finding.certainty, best.finding.alternatives
    if rivals and certainty != "proved":
        certainty, alternatives = "consistent", tuple(dict.fromkeys((*alternatives, *rivals)))
    decided = []
    for sighting in course:
        finding = sighting.finding
        if sighting in merged and finding.code == best.finding.code:
            finding = replace(finding, facts=(*finding.facts, *_disagreements(merged, rivals)))
        elif sighting in merged:
            finding = _refer(sighting, best, steps[sighting.position], merged)
        if sighting in merged:
            finding = replace(finding, certainty=certainty, alternatives=alternatives)
        decided.append(finding)
    return decided


def _find_clearest(course: Sequence[_Sighting]) -> _Sighting | None:
    """Return the clearest sighting of the code that decides; None if the steps agree, or no step shows a cause."""
    counts = Counter(sighting.finding.code for sighting in course)
    causes = [sighting for sighting in course if sighting.finding.code not in _WITHOUT_CAUSE]
    if len(counts) < 2 or not causes:
        return None
    # The first of equally clear steps.
    return max(causes, key=lambda s: (_STRENGTH[s.finding.certainty], counts[s.finding.code]))


def _may_refer(sighting: _Sighting, best: _Sighting) -> bool:
    """Whether the evidence of a step leaves room for the cause of the clearest step."""
    own, other = sighting.finding, best.finding
    if own.code == other.code:
        return True
    if own.allowed != other.allowed:
        return False
    if own.code == "SYN240":  # the first differences of a fault are small
        return other.code in _OF_GRADIENTS and sighting.step < best.step
    return own.certainty == "consistent" or {own.code, other.code} <= _OF_GRADIENTS


def _refer(sighting: _Sighting, best: _Sighting, group: Group, merged: Sequence[_Sighting]) -> Finding:
    """Return the finding of a step that refers to the clearest step."""
    own, other = sighting.finding, best.finding
    differing = [diff for diff in group.tensors if diff.name in own.tensors and diff.out_of_sync]
    facts = (
        Course.DECIDED(steps=tuple(s.step for s in merged), step=best.step, fact=other.facts[0]),
        Course.TENSORS(count=len(differing), size=largest_difference(differing)),
    )
    return replace(
        own,
        code=other.code,
        slug=other.slug,
        severity=other.severity,
        ranks=other.ranks,
        facts=facts,
        cause=other.cause,
        fix=other.fix,
    )


def _disagreements(merged: Sequence[_Sighting], rivals: Iterable[str]) -> tuple[Message, ...]:
    """State at which steps the evidence fits another cause better."""
    facts = []
    for code in rivals:
        steps = tuple(Course.STEP(step=s.step) for s in merged if s.finding.code == code)
        facts.append(Course.DISAGREES(steps=steps, code=code))
    return tuple(facts)
