"""What a monitor knows to be wrong, from one check to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.records import Finding, Report


class Trouble:
    """What is known to be wrong, so that only what is new is told at length.

    good: the last step that was in sync. since: the step at which ranks were first seen apart, None in sync.
    """

    def __init__(self, good: int | None = None) -> None:
        self.good = good
        self.since: int | None = None
        self._known: dict[tuple[str, tuple[int, ...]], set[str]] = {}

    def seen(self, step: int, report: Report) -> tuple[Finding, ...]:
        """Take note of a check; returns the findings that fail and are new in code, ranks or tensors."""
        if report.verdict == "in_sync":
            self.good, self.since = step, None
            self._known.clear()
        if report.verdict != "out_of_sync":
            return ()
        self.since = step if self.since is None else self.since
        new = []
        for finding in (finding for group in report.groups for finding in group.findings if finding.fails):
            named = {*finding.tensors, *finding.values}
            known = self._known.get((finding.code, finding.ranks))
            if known is None or not named <= known:
                new.append(finding)
            self._known[finding.code, finding.ranks] = named | (known or set())
        return tuple(new)
