"""The events of a monitor: the lines of its JSONL file, and a report made of such files.

`SyncMonitor(events="events.jsonl")` writes the file, `syncheck report events.jsonl` reads it; docs/live.md lists the
fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.history import trend_of
from syncheck.diagnose.selection import list_names, select_names, select_out_of_sync
from syncheck.diagnose.series import follow_not_finite
from syncheck.diagnose.syn107_settings_differ import CODE as SETTINGS_DIFFER
from syncheck.diagnose.verdicts import overall
from syncheck.errors import UsageError
from syncheck.messages import Fact, Note
from syncheck.records import (
    Counts,
    Finding,
    Group,
    History,
    HistoryPoint,
    NotFinite,
    Reason,
    Replica,
    Report,
    TensorDiff,
)
from syncheck.report.event_consistency import find_contradicted_check, find_contradiction, find_softened
from syncheck.report.event_values import (
    read_choice,
    read_index,
    read_list,
    read_natural,
    read_naturals,
    read_sets,
    read_size,
)
from syncheck.report.selections import SEVERITIES, find_failing, list_codes
from syncheck.report.tables import sort_worst_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from syncheck.messages import Message

ENDING = ".jsonl"
# Tensors of an event, and names of a finding: about 10 kB in a check that fails, nothing in one that does not.
_MOST_TENSORS = 40
_MOST_NOTE = 1000  # characters
# A file that is no event file may have a line of gigabytes.
_MOST_LINE = 1 << 22  # characters
_MOST_PROBLEM = 80  # characters
_STATUSES = ("different", "not_compared")
_CERTAINTIES = ("proved", "likely", "consistent")
_VERDICTS = ("in_sync", "out_of_sync", "undecided", "alone")


def describe_findings(findings: Iterable[Finding], report: Report) -> list[dict[str, Any]]:
    """Return findings as JSON values. `tensors` is their number, `names` has the first ones."""
    differences: dict[str, float | None] = {}
    for group in report.groups:
        for diff in select_out_of_sync(group.tensors):
            differences[diff.name] = diff.max_abs
    return [describe_finding(finding, differences) for finding in findings]


def describe_finding(finding: Finding, differences: Mapping[str, float | None]) -> dict[str, Any]:
    """Return a finding as JSON values. differences: the largest one of each tensor, by name."""
    return {
        "code": finding.code,
        "slug": finding.slug,
        "severity": finding.severity,
        "allowed": finding.allowed,
        "counts": finding.counts,
        "certainty": finding.certainty,
        "alternatives": list(finding.alternatives),
        "ranks": list(finding.ranks),
        "tensors": len(finding.tensors),
        "names": list(finding.tensors[:_MOST_TENSORS]),
        "max_abs": _find_largest([differences.get(name) for name in finding.tensors]),
        "evidence": finding.evidence,
        "cause": str(finding.cause),
        "fix": str(finding.fix),
    }


def describe_check(report: Report) -> dict[str, Any]:
    """Return the counts of a check by kind of tensor, and its worst tensors in the order of the model."""
    kinds: dict[str, Counts] = {}
    differing: list[TensorDiff] = []
    notes: list[str] = []
    not_finite_count = 0
    not_finite_names: list[str] = []
    for group in report.groups:
        for kind, counts in group.kinds.items():
            kinds[kind] = kinds.get(kind, Counts()) + counts
        for note in group.notes:
            notes.append(str(note)[:_MOST_NOTE])
        differing += select_out_of_sync(group.tensors)
        if group.not_finite is not None:
            not_finite_count += group.not_finite.count
            not_finite_names += group.not_finite.names

    worst_names = list_names(sort_worst_first(differing)[:_MOST_TENSORS])
    # The order of the model shows where a difference begins.
    worst = select_names(differing, frozenset(worst_names))
    return {
        "kinds": {kind: asdict(counts) for kind, counts in kinds.items()},
        "worst": [_describe_diff(diff) for diff in worst],
        "notes": notes,
        "not_finite": {"count": not_finite_count, "names": not_finite_names[:_MOST_TENSORS]},
    }


def _describe_diff(diff: TensorDiff) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in _READERS:
        row[name] = getattr(diff, name)
    row["reason"] = diff.reason
    row["detail"] = None if diff.detail is None else str(diff.detail)
    row["nonfinite"] = list(diff.nonfinite.items())
    return row


def are_events(paths: Sequence[Any]) -> bool:
    """Whether all paths are event files."""
    return bool(paths) and all(str(path).endswith(ENDING) for path in paths)


def read_events(paths: Sequence[Any]) -> Report:
    """Return the checks of event files as the steps of runs, each with the name of its file.

    Files of version 0.1 have no tensors, causes and fixes. Raises UsageError for a file that cannot be read, is not an
    event file, has no check, or contradicts itself: a verdict always follows from its findings and counts.
    """
    runs: dict[str, list[Group]] = {}
    witnessed: list[tuple[str, Finding]] = []
    for path in paths:
        file = _EventFile(str(path))
        for check in file.read():
            runs.setdefault(check.run, []).append(check)
        witnessed += file.witnessed

    groups: list[Group] = []
    for run, steps in runs.items():
        last = _add_history(steps[-1], steps)
        groups += [*steps[:-1], add_witnessed(last, list_witnessed(witnessed, run))]

    followed = follow_not_finite(groups)
    return Report(overall(followed, ()), tuple(followed))


def list_witnessed(witnessed: Iterable[tuple[str, Finding]], run: str) -> list[Finding]:
    """Return the findings of a run, of pairs of a run and a finding."""
    return [finding for name, finding in witnessed if name == run]


def add_witnessed(check: Group, findings: Iterable[Finding]) -> Group:
    """Return the last check of a run with what the witnesses found, which no check compares.

    The check is out of sync if a finding fails.
    """
    compared = {(finding.code, finding.ranks) for finding in check.findings}
    # A fault that lasts has an event at each of its steps. Each kind of setting has a cause of its own.
    first: dict[tuple[str, tuple[int, ...], str], Finding] = {}
    for finding in findings:
        # The finding of a comparison has more evidence.
        if (finding.code, finding.ranks) not in compared:
            cause = str(finding.cause) if finding.code == SETTINGS_DIFFER else ""
            first.setdefault((finding.code, finding.ranks, cause), finding)
    all_findings = (*check.findings, *first.values())

    verdict = "out_of_sync" if find_failing(all_findings) else check.verdict
    return replace(check, findings=all_findings, verdict=verdict)


class _EventFile:
    """An event file. Each of the runs that appended to it has its own name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.run = Path(path).stem
        self.ranks: tuple[int, ...] = ()
        self.checks: list[Group] = []
        # What the witnesses of `syncheck watch` found, each with its run.
        self.witnessed: list[tuple[str, Finding]] = []
        # The last check of the current run, the codes of all of its checks, and their highest step.
        self.last_check: Group | None = None
        self.codes: set[str] = set()
        self.last_step = 0

    def read(self) -> list[Group]:
        """Return the checks of the file."""
        for number, event in _read_lines(self.path):
            try:
                contradiction = self._add_event(event, number)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error}"[:_MOST_PROBLEM]
                raise UsageError(f"{self.path}, line {number}: not an event of SyncMonitor ({problem})") from None
            if contradiction:
                raise UsageError(
                    f"{self.path}, line {number}: {contradiction}; the file was edited or damaged, so it has no "
                    "verdict. Pass the file as SyncMonitor wrote it"
                )

        if not self.checks:
            self._add_unchecked()
        return self.checks

    def _add_event(self, event: Mapping[str, Any], number: int) -> str:
        """Add the event of a line. Return how it contradicts itself or the check before it; "" if it does not."""
        kind = event["event"]
        if kind == "start":
            self._start_run(event, number)
        elif kind == "check":
            check = _make_group(event, self.run, self.ranks, self.path)
            self.checks.append(check)
            self.last_check = check
            self.codes.update(list_codes(check.findings))
            self.last_step = max(check.step or 0, self.last_step)
            return find_contradiction(check, event)
        elif kind == "witness":
            finding = _make_finding(event)
            codes = [*list_codes(list_witnessed(self.witnessed, self.run)), *self.codes]
            # Parameters that differ after a fault are its effect.
            if event.get("effect_of") in codes:
                return ""
            self.witnessed.append((self.run, finding))
            return find_softened([finding])
        elif kind in ("desync", "end") and self.last_check is not None:
            return find_contradicted_check(event, self.last_check)

        return ""

    def _add_unchecked(self) -> None:
        """Add the place of the findings of a run that ended before its first check. Raises UsageError without any."""
        if not self.witnessed:
            raise UsageError(f"{self.path}: no check in it; pass the file that SyncMonitor(events=...) has written")
        event = {"step": 0, "verdict": "undecided", "tensors": 0, "compared": 0, "findings": ()}
        self.checks.append(_make_group(event, self.run, self.ranks, self.path))

    def _start_run(self, event: Mapping[str, Any], number: int) -> None:
        self.ranks = tuple(sorted(read_list(event["ranks"], read_natural)))
        first_step = read_natural(event["step"])
        # A resumed run starts after the last step; any other run that appended to the file does not.
        if self.last_step and self.last_step >= first_step:
            self.run = f"{Path(self.path).stem} from line {number}"
            self.last_check, self.last_step = None, 0
            self.codes.clear()


def _read_lines(path: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of each line. An incomplete last line is skipped: the run may be writing it."""
    try:
        with open(path, encoding="utf-8") as file:
            number = 0
            while line := file.readline(_MOST_LINE):
                number += 1
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    if not line.endswith("\n") and len(line) < _MOST_LINE:
                        return
                    event = None
                if not isinstance(event, dict) or "event" not in event:
                    raise UsageError(f"{path}, line {number}: not an event; pass a file of SyncMonitor(events=...)")
                yield number, event
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _make_group(event: Mapping[str, Any], run: str, ranks: tuple[int, ...], path: str) -> Group:
    step = read_natural(event["step"])
    verdict = read_choice("verdict", event["verdict"], _VERDICTS)
    tensors = read_natural(event["tensors"])
    kinds = _read_kinds(event)
    replicas = []
    for rank in ranks:
        replica = Replica(
            path=path,
            rank=rank,
            format="memory",
            tensors=tensors,
            bytes=0,
        )
        replicas.append(replica)

    return Group(
        name=f"{run} step {step}",
        run=run,
        step=step,
        replicas=tuple(replicas),
        counts=sum(kinds.values(), Counts()),
        tensors=read_list(event.get("worst", ()), _make_diff),
        kinds=kinds,
        verdict=verdict,
        findings=read_list(event["findings"], _make_finding),
        not_finite=_make_not_finite(event.get("not_finite")),
        notes=read_list(event.get("notes", ()), _make_note),
    )


def _read_kinds(event: Mapping[str, Any]) -> dict[str, Counts]:
    """Return the counts by kind of tensor."""
    tensors, compared = read_natural(event["tensors"]), read_natural(event["compared"])
    kinds = {}
    for kind, row in event.get("kinds", {}).items():
        numbers = [read_natural(row[field.name]) for field in fields(Counts)]
        kinds[str(kind)] = Counts(*numbers)

    if kinds:
        return kinds

    # Version 0.1 wrote only how many tensors were compared.
    reported = sum(read_natural(row["tensors"]) for row in event["findings"])
    different = min(compared, reported)
    counts = Counts(
        tensors=tensors,
        identical=compared - different,
        different=different,
        not_compared=tensors - compared,
    )
    return {"all": counts}


def _make_note(text: Any) -> Message:
    return Note.STORED(text=str(text))


def _make_not_finite(row: Mapping[str, Any] | None) -> NotFinite | None:
    """Return the tensors that are not finite; None if there are none, or if an older version wrote the event."""
    if row is None or not read_natural(row["count"]):
        return None
    return NotFinite(read_list(row["names"], str), read_natural(row["count"]))


def _make_diff(row: Mapping[str, Any]) -> TensorDiff:
    values: dict[str, Any] = {}
    for name, read in _READERS.items():
        values[name] = read(row[name])

    read_choice("status", values["status"], _STATUSES)
    if row["reason"] is not None:
        values["reason"] = Reason(row["reason"])
    if row["detail"] is not None:
        values["detail"] = Fact.TEXT(text=str(row["detail"]))

    values["nonfinite"] = {}
    for rank, count in row["nonfinite"]:
        values["nonfinite"][read_natural(rank)] = read_natural(count)

    return TensorDiff(**values)


def _make_finding(row: Mapping[str, Any]) -> Finding:
    severity = read_choice("severity", row["severity"], SEVERITIES)
    code = str(row["code"])
    advice = f"see: syncheck explain {code}"
    names = read_list(row.get("names", ()), str)
    facts: list[Message] = [Fact.TEXT(text=str(row["evidence"]))]
    if 0 < len(names) < row.get("tensors", 0):
        facts.append(Fact.NAMED(count=len(names), total=read_natural(row["tensors"])))
    return Finding(
        code=code,
        slug=str(row["slug"]),
        severity=severity,
        ranks=read_list(row["ranks"], read_natural),
        tensors=names,
        facts=tuple(facts),
        cause=Fact.TEXT(text=str(row.get("cause", advice))),
        fix=_restore_fix(code, str(row.get("fix", advice))),
        allowed=bool(row["allowed"]),
        counts=bool(row.get("counts", True)),
        # Versions before 0.3 wrote no certainty.
        certainty=read_choice("certainty", row.get("certainty", "likely"), _CERTAINTIES),
        alternatives=read_list(row.get("alternatives", ()), str),
    )


def _restore_fix(code: str, text: str) -> Message:
    """Return the fix of a finding, with its code marked as code if it is a fix of this version."""
    # Nothing else needs the sentences of all rules.
    from syncheck.diagnose.rules import find_sentence

    return find_sentence(code, text) or Fact.TEXT(text=text)


def _add_history(last: Group, steps: Sequence[Group]) -> Group:
    """Add to the findings of the last check when they began."""
    if len(steps) < 2:
        return last
    findings = [replace(finding, history=_follow(finding, steps)) for finding in last.findings]
    return replace(last, findings=tuple(findings))


def _follow(finding: Finding, steps: Sequence[Group]) -> History:
    """Return the history of a finding of the last step. steps: the checks of a run."""
    names = frozenset(finding.tensors)
    points: list[HistoryPoint] = []
    diffs_of_steps: list[list[TensorDiff]] = []
    differing_positions: list[int] = []
    for position, check in enumerate(steps):
        diffs = select_out_of_sync(select_names(check.tensors, names))
        differing = _count_differing(finding, diffs, check)
        largest: float | None = 0.0
        if differing:
            largest = _find_largest([diff.max_abs for diff in diffs])
            differing_positions.append(position)
        point = HistoryPoint(
            step=check.step or 0,
            differing=differing,
            max_abs=largest,
            others_differ=check.verdict != "in_sync",
        )
        points.append(point)
        diffs_of_steps.append(diffs)

    # The finding is at the last step at least.
    first = differing_positions[0]
    return History(
        points=tuple(points),
        since=points[first].step,
        agreed=points[first - 1].step if first else None,
        tensors=(),
        ranks=_find_suspects(finding, steps[first]),
        trend=trend_of(diffs_of_steps[first:]),
    )


def _find_suspects(finding: Finding, check: Group) -> tuple[int, ...]:
    """Return the ranks of the same finding at an earlier check; without it, its own ranks."""
    return next((earlier.ranks for earlier in check.findings if earlier.code == finding.code), finding.ranks)


def _count_differing(finding: Finding, diffs: Sequence[TensorDiff], group: Group) -> int:
    """Return the number of tensors of a finding that differed at a check, as far as known.

    diffs: those among the worst tensors of the check. A check has another code for the same tensors if its evidence
    was different, and an event does not list all tensors, so only a check in sync shows that they agreed.
    """
    if diffs:
        return len(diffs)
    lists_all_tensors = group.verdict == "out_of_sync" and group.counts.different <= len(group.tensors)
    shows_others = group.verdict == "in_sync" or lists_all_tensors
    return int(finding.code in list_codes(group.findings) or not shows_others)


def _find_largest(sizes: Sequence[float | None]) -> float | None:
    """Return the largest difference; None without a difference, or if a size is unknown."""
    largest = 0.0
    for size in sizes:
        if size is None:
            return None
        largest = max(largest, float(size))
    return largest if sizes else None


# How to read the fields of a tensor that an event stores as they are.
_READERS: dict[str, Callable[[Any], Any]] = {
    "name": str,
    "kind": str,
    "dtype": str,
    "status": str,
    "mismatched": read_size,
    "numel": read_size,
    "max_abs": read_size,
    "max_rel": read_size,
    "max_ulp": read_size,
    "shape": read_naturals,
    "index": read_index,
    "minority": read_naturals,
    "clusters": read_sets,
    "replica_groups": read_sets,
}
