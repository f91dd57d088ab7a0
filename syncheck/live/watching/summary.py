"""What a watched run has shown on the rank that judges: the findings as they come, and the summary at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.live.witnesses.rules import DATA_CODES, Seen, make_finding
from syncheck.report.selections import find_failing
from syncheck.text import ranks_text

if TYPE_CHECKING:
    from collections import Counter

    from syncheck.live.reporter import Reporter
    from syncheck.live.watching.judge import Judgement
    from syncheck.live.watching.settings import WatchSettings
    from syncheck.records import Finding, Report

_MOST_NAMES = 8


class Summary:
    """The findings of one rank.

    reports: of the comparisons of all replicas so far.
    """

    def __init__(self, reporter: Reporter, settings: WatchSettings) -> None:
        self._reporter, self._settings = reporter, settings
        self._allow = frozenset(settings.allow)
        self.reports: list[Report] = []
        self.findings: dict[tuple[str, tuple[int, ...]], Finding] = {}
        """By code and ranks."""

    def add(self, judgement: Judgement) -> Finding | None:
        """Write a finding as an event, and print it unless the same ranks had it before; return a new one."""
        suspicion = judgement.suspicion
        finding = make_finding(
            suspicion.code,
            suspicion.ranks,
            suspicion.facts,
            names=suspicion.names,
            variant=suspicion.variant,
            allow=self._allow,
        )
        self._write_event(finding, judgement.number)
        key = (finding.code, finding.ranks)
        if key in self.findings:
            return None
        self.findings[key] = finding
        unit = "reduction" if judgement.reduces else "step"
        self._reporter.print_finding(finding, f"{unit} {judgement.number}")
        return finding

    def _write_event(self, finding: Finding, number: int) -> None:
        self._reporter.write_event(
            "witness",
            step=number,
            code=finding.code,
            slug=finding.slug,
            severity=finding.severity,
            allowed=finding.allowed,
            ranks=list(finding.ranks),
            tensors=len(finding.tensors),
            names=list(finding.tensors[:_MOST_NAMES]),
            evidence=finding.evidence,
            cause=str(finding.cause),
            fix=str(finding.fix),
        )

    @property
    def has_failed(self) -> bool:
        """Whether a witness or a comparison has a finding that counts."""
        if any(report.verdict == "out_of_sync" for report in self.reports):
            return True
        return bool(find_failing(self.findings.values()))

    def print_end(self, judged: Counter[str], *, is_complete: bool) -> None:
        """Print the last line.

        judged: numbers of steps, as the judge counts them.
        is_complete: watching went on to the end of the script; what came after its end is unknown.
        """
        watched = Seen.WATCHED(steps=judged["steps"], checks=len(self.reports))
        if not self.has_failed:
            if is_complete and judged["steps"]:
                self._reporter.print_text(f"in sync: {watched}", "green")
            else:
                self._reporter.print_text(f"could not tell: {watched}, not the whole run", "yellow")
            return
        failing = [*find_failing(self.findings.values())]
        for report in self.reports[-1:]:
            failing += find_failing(report.findings)
        # Replicas that train on equal data are still replicas.
        verdict = "OUT OF SYNC"
        if all(finding.code in DATA_CODES for finding in failing):
            verdict = "in sync, with findings"
        texts: dict[str, None] = {}
        for finding in failing:
            texts[f"{finding.code} {finding.slug} on {ranks_text(finding.ranks)}"] = None
        text = f"{verdict} at {judged['out of sync']} of {watched}: {'; '.join(texts)}"
        self._reporter.print_text(text, "bold red")

    def write_outputs(self) -> None:
        """Write the files of `--output`: the last comparison, with the findings of the witnesses."""
        if not self.reports:
            return
        from syncheck.report.formats import write_file  # most runs only print

        report = self.reports[-1]
        (group,) = report.groups
        compared = {(finding.code, finding.ranks) for finding in group.findings}
        witnessed = [finding for key, finding in self.findings.items() if key not in compared]
        merged = replace(report, groups=(replace(group, findings=(*group.findings, *witnessed)),))
        if self.has_failed:
            merged = replace(merged, verdict="out_of_sync")
        for path in self._settings.outputs:
            try:
                write_file(path, merged)
            except UsageError as error:
                # The exit code stays that of the script.
                self._reporter.print_text(f"error: {error}", "bold red")
