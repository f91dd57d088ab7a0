"""The memory of a monitor: earlier checks, so that only new findings are printed in detail."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.report.selections import find_failing

if TYPE_CHECKING:
    from syncheck.records import Finding, Group, Report

# Earlier checks that are kept to decide about a fault.
_MOST_CHECKS = 16


class DesyncState:
    """The known findings, so that only new findings are printed in detail.

    last_good: the last step in sync.
    since: the first step out of sync, None while in sync.
    grown: the findings of the last check that an earlier check had for fewer tensors or values.
    """

    def __init__(self, last_good: int | None = None) -> None:
        self.last_good = last_good
        self.since: int | None = None
        self.grown: tuple[Finding, ...] = ()
        # The names of tensors and values, by code and ranks.
        self._reported: dict[tuple[str, tuple[int, ...]], set[str]] = {}
        self._checks: list[Group] = []  # the last checks out of sync, as diagnosed alone

    def continue_with_other_objects(self) -> DesyncState:
        """Return the memory for checks of other objects: their differences have no course of earlier checks."""
        state = DesyncState(self.last_good)
        state.since, state._reported = self.since, self._reported
        return state

    def decide(self, step: int, report: Report) -> Report:
        """Return the report; a fault that earlier checks showed keeps one code and one cause."""
        if report.verdict != "out_of_sync":
            self._checks = []
            return report

        from syncheck.diagnose.course import decide_over_steps  # only needed if the ranks differ

        (group,) = report.groups
        # Groups of memory have no step of their own.
        self._checks.append(replace(group, step=step))
        del self._checks[:-_MOST_CHECKS]
        findings = decide_over_steps(self._checks)[-1].findings
        if findings == group.findings:
            return report

        return replace(report, groups=(replace(group, findings=findings),))

    def update(self, step: int, report: Report) -> tuple[Finding, ...]:
        """Record a check; return the failing findings with a new code, new ranks or new tensors."""
        self.grown = ()
        if report.verdict == "in_sync":
            self.last_good, self.since = step, None
            self._reported.clear()

        if report.verdict != "out_of_sync":
            return ()

        if self.since is None:
            self.since = step

        new_findings = []
        grown_findings = []
        # A finding is known by its code and ranks, because its tensors may grow in number.
        for finding in find_failing(report.findings):
            key = finding.code, finding.ranks
            names = {*finding.tensors, *finding.values}
            reported_names = self._reported.get(key)
            # A finding may be about no tensor and no value.
            if reported_names is None:
                new_findings.append(finding)
            elif not names <= reported_names:
                new_findings.append(finding)
                grown_findings.append(finding)

            self._reported.setdefault(key, set()).update(names)

        self.grown = tuple(grown_findings)
        return tuple(new_findings)
