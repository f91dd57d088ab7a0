"""The events of a monitor: the lines of its JSONL file, and a report made of such files.

`SyncMonitor(events="events.jsonl")` writes the file, `syncheck report events.jsonl` reads it; docs/live.md lists the
fields.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.history import trend_of
from syncheck.diagnose.series import follow_not_finite
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
from syncheck.report.event_consistency import find_contradicted_check, find_contradiction
from syncheck.report.tables import sort_worst_first
from syncheck.snapshots import MOST_ELEMENTS, are_naturals
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from syncheck.findings import Certainty

ENDING = ".jsonl"
# Tensors of an event, and names of a finding: about 10 kB in a check that fails, nothing in one that does not.
_MOST_TENSORS, _MOST_NAMES = 40, 8
_MOST_NOTE = 1000  # characters
_MOST_LINE = 1 << 22  # characters
_MOST_PROBLEM = 80  # characters
CERTAINTIES = ("proved", "likely", "consistent")
_VERDICTS = ("in_sync", "out_of_sync", "undecided", "alone")
_TEXTS = ("name", "kind", "dtype", "status")
_NUMBERS = ("mismatched", "numel", "max_abs", "max_rel", "max_ulp")
_INTEGERS = ("shape", "index", "minority", "clusters", "replica_groups")


def describe_findings(findings: Iterable[Finding], report: Report) -> list[dict[str, Any]]:
    """Return findings as JSON values. `tensors` is their number, `names` has the first ones."""
    differences: dict[str, float | None] = {}
    for group in report.groups:
        differences.update((diff.name, diff.max_abs) for diff in group.tensors if diff.out_of_sync)
    return [_describe_finding(finding, differences) for finding in findings]


def _describe_finding(finding: Finding, differences: Mapping[str, float | None]) -> dict[str, Any]:
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
        "names": list(finding.tensors[:_MOST_NAMES]),
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
        differing += [diff for diff in group.tensors if diff.out_of_sync]
        notes += [str(note)[:_MOST_NOTE] for note in group.notes]
        if group.not_finite is not None:
            not_finite_count += group.not_finite.count
            not_finite_names += group.not_finite.names
    # The order of the model shows where a difference begins.
    worst = {diff.name for diff in sort_worst_first(differing)[:_MOST_TENSORS]}
    return {
        "kinds": {kind: asdict(counts) for kind, counts in kinds.items()},
        "worst": [_describe_diff(diff) for diff in differing if diff.name in worst],
        "notes": notes,
        "not_finite": {"count": not_finite_count, "names": not_finite_names[:_MOST_TENSORS]},
    }


def _describe_diff(diff: TensorDiff) -> dict[str, Any]:
    row = {name: getattr(diff, name) for name in (*_TEXTS, *_NUMBERS, *_INTEGERS)}
    detail = None if diff.detail is None else str(diff.detail)
    return row | {"reason": diff.reason, "detail": detail, "nonfinite": list(diff.nonfinite.items())}


def are_events(paths: Sequence[Any]) -> bool:
    """Whether all paths are event files."""
    return bool(paths) and all(str(path).endswith(ENDING) for path in paths)


def read_events(paths: Sequence[Any]) -> Report:
    """Return the checks of event files as the steps of runs, each with the name of its file.

    Files of version 0.1 have no tensors, causes and fixes. Raises UsageError for a file that cannot be read, is not an
    event file, has no check, or contradicts itself: a verdict always follows from its findings and counts.
    """
    runs: dict[str, list[Group]] = {}
    for path in paths:
        for group in _EventFile(str(path)).read():
            runs.setdefault(group.run, []).append(group)
    groups: list[Group] = []
    for steps in runs.values():
        groups += [*steps[:-1], _add_history(steps[-1], steps)]
    followed = follow_not_finite(groups)
    return Report(overall(followed, ()), tuple(followed))


class _EventFile:
    """An event file. Each of the runs that appended to it has its own name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.run = Path(path).stem
        self.ranks: tuple[int, ...] = ()
        self.checks: list[Group] = []

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
            raise UsageError(f"{self.path}: no check in it; pass the file that SyncMonitor(events=...) has written")
        return self.checks

    def _add_event(self, event: Mapping[str, Any], number: int) -> str:
        """Add the event of a line. Return how it contradicts itself or the check before it; "" if it does not."""
        kind = event["event"]
        if kind == "start":
            self._start_run(event, number)
        elif kind == "check":
            self.checks.append(_make_group(event, self.run, self.ranks, self.path))
            return find_contradiction(self.checks[-1], event)
        elif kind in ("desync", "end"):
            checks_of_run = [check for check in self.checks if check.run == self.run]
            return find_contradicted_check(event, checks_of_run[-1] if checks_of_run else None)
        return ""

    def _start_run(self, event: Mapping[str, Any], number: int) -> None:
        self.ranks = tuple(sorted(map(_read_natural, event["ranks"])))
        first = _read_natural(event["step"])
        last_step = max((check.step or 0 for check in self.checks if check.run == self.run), default=0)
        if last_step and last_step >= first:
            # Another run appended to the file.
            self.run = f"{Path(self.path).stem} from line {number}"


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
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{path}: {problem}") from None


def _make_group(event: Mapping[str, Any], run: str, ranks: tuple[int, ...], path: str) -> Group:
    step, verdict = _read_natural(event["step"]), event["verdict"]
    # The file may be of a later version, or no file of a monitor.
    if verdict not in _VERDICTS:
        raise ValueError(f"verdict {verdict!r}")
    tensors, compared = _read_natural(event["tensors"]), _read_natural(event["compared"])
    kinds = _read_kinds(event)
    if not kinds:
        # Version 0.1 wrote only how many tensors were compared.
        reported = sum(_read_natural(row["tensors"]) for row in event["findings"])
        different = min(compared, reported)
        kinds["all"] = Counts(tensors, compared - different, different=different, not_compared=tensors - compared)
    return Group(
        name=f"{run} step {step}",
        run=run,
        step=step,
        replicas=tuple(Replica(path, rank, "memory", tensors, 0) for rank in ranks),
        counts=sum(kinds.values(), Counts()),
        tensors=tuple(map(_make_diff, event.get("worst", ()))),
        kinds=kinds,
        verdict=verdict,
        findings=tuple(map(_make_finding, event["findings"])),
        not_finite=_make_not_finite(event.get("not_finite")),
        notes=tuple(Note.STORED(text=str(note)) for note in event.get("notes", ())),
    )


def _read_kinds(event: Mapping[str, Any]) -> dict[str, Counts]:
    """Return the counts by kind of tensor."""
    kinds = {}
    for kind, row in event.get("kinds", {}).items():
        numbers = {field.name: _read_natural(row[field.name]) for field in fields(Counts)}
        kinds[str(kind)] = Counts(**numbers)
    return kinds


def _make_not_finite(row: Mapping[str, Any] | None) -> NotFinite | None:
    """Return the tensors that are not finite; None if there are none, or if an older version wrote the event."""
    if row is None or not _read_natural(row["count"]):
        return None
    return NotFinite(tuple(str(name) for name in row["names"]), _read_natural(row["count"]))


def _make_diff(row: Mapping[str, Any]) -> TensorDiff:
    values: dict[str, Any] = {}
    for names, read in ((_TEXTS, str), (_INTEGERS, _read_integers), (_NUMBERS, _read_size)):
        values |= {name: read(row[name]) for name in names}
    if values["status"] not in ("different", "not_compared"):
        raise ValueError(f"status {values['status']!r}")
    if row["reason"] is not None:
        values["reason"] = Reason(row["reason"])
    if row["detail"] is not None:
        values["detail"] = Fact.TEXT(text=str(row["detail"]))
    values["nonfinite"] = {_read_natural(rank): _read_natural(n) for rank, n in row["nonfinite"]}
    return TensorDiff(**values)


def _read_integers(value: Any) -> Any:
    """Return lists of integers as tuples; None stays."""
    if isinstance(value, list):
        return tuple(map(_read_integers, value))
    return None if value is None else _read_natural(value)


def _read_natural(value: Any) -> int:
    """Return a step, rank or count. Raises ValueError for numbers that are infinite, negative, or above any run."""
    if not are_naturals([value]):
        raise ValueError(f"{brief(value)} is not a number from 0 to {MOST_ELEMENTS}")
    return int(value)


def _read_size(value: Any) -> Any:
    """Return the size of a difference, None if it is unknown. Raises ValueError unless it is a finite number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{brief(value)} is not a finite number")
    return value


def _read_certainty(value: Any) -> Certainty:
    """Return the certainty of a finding. Raises ValueError for another text."""
    if value not in CERTAINTIES:
        raise ValueError(f"certainty {brief(value)}")
    certainty: Certainty = value
    return certainty


def _make_finding(row: Mapping[str, Any]) -> Finding:
    if row["severity"] not in ("info", "warning", "error"):
        raise ValueError(f"severity {row['severity']!r}")
    code = str(row["code"])
    return Finding(
        code=code,
        slug=str(row["slug"]),
        severity=row["severity"],
        ranks=tuple(map(_read_natural, row["ranks"])),
        tensors=tuple(str(name) for name in row.get("names", ())),
        facts=(Fact.TEXT(text=str(row["evidence"])),),
        cause=Fact.TEXT(text=str(row.get("cause", f"see: syncheck explain {code}"))),
        fix=Fact.TEXT(text=str(row.get("fix", f"see: syncheck explain {code}"))),
        allowed=bool(row["allowed"]),
        counts=bool(row.get("counts", True)),
        # Versions before 0.3 wrote no certainty.
        certainty=_read_certainty(row.get("certainty", "likely")),
        alternatives=tuple(str(code) for code in row.get("alternatives", ())),
    )


def _add_history(last: Group, steps: Sequence[Group]) -> Group:
    """Add to the findings of the last check when they began."""
    if len(steps) < 2:
        return last
    findings = [replace(finding, history=_follow(finding, steps)) for finding in last.findings]
    return replace(last, findings=tuple(findings))


def _follow(finding: Finding, steps: Sequence[Group]) -> History:
    """Return the history of a finding of the last step. steps: the checks of a run."""
    names = set(finding.tensors)
    points: list[HistoryPoint] = []
    diffs_of_steps = []
    for check in steps:
        diffs = [diff for diff in check.tensors if diff.name in names and diff.out_of_sync]
        differing = _count_differing(finding, diffs, check)
        largest = _find_largest([diff.max_abs for diff in diffs]) if differing else 0.0
        points.append(HistoryPoint(check.step or 0, differing, largest, check.verdict != "in_sync"))
        diffs_of_steps.append(diffs)
    # The finding is at the last step at least.
    first = next(position for position, point in enumerate(points) if point.differing)
    agreed = points[first - 1].step if first else None
    same_code = [other.ranks for other in steps[first].findings if other.code == finding.code]
    suspects = same_code[0] if same_code else finding.ranks
    trend = trend_of(diffs_of_steps[first:])
    return History(tuple(points), points[first].step, agreed, (), suspects, trend)


def _count_differing(finding: Finding, diffs: Sequence[TensorDiff], group: Group) -> int:
    """Return the number of tensors of a finding that differed at a check, as far as known.

    diffs: those among the worst tensors of the check. A check has another code for the same tensors if its evidence
    was different, and an event does not list all tensors, so only a check in sync shows that they agreed.
    """
    if diffs or finding.code in [other.code for other in group.findings]:
        return max(1, len(diffs))
    if group.verdict == "in_sync":
        return 0
    complete = group.verdict == "out_of_sync" and group.counts.different <= len(group.tensors)
    return 0 if complete else 1


def _find_largest(sizes: Sequence[float | None]) -> float | None:
    """Return the largest difference; None if there is none, or if one is unknown."""
    measured = [float(size) for size in sizes if size is not None]
    return max(measured) if measured and len(measured) == len(sizes) else None
