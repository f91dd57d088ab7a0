"""The events of a monitor: the lines of its JSONL file, and a report made of such files.

`SyncMonitor(events="events.jsonl")` writes the file, `syncheck report events.jsonl` reads it; docs/live.md lists the
fields.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
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
CERTAINTIES = ("proved", "likely", "consistent")
_VERDICTS = ("in_sync", "out_of_sync", "undecided", "alone")
_TEXTS = ("name", "kind", "dtype", "status")
_NUMBERS = ("mismatched", "numel", "max_abs", "max_rel", "max_ulp")
_INTEGERS = ("shape", "index", "minority", "clusters", "replica_groups")


def describe_findings(findings: Iterable[Finding], report: Report) -> list[dict[str, Any]]:
    """Return findings as JSON values. `tensors` is their number, `names` has the first ones."""
    differences = {diff.name: diff.max_abs for group in report.groups for diff in group.tensors if diff.out_of_sync}
    rows = []
    for finding in findings:
        sizes = [differences.get(name) for name in finding.tensors]
        known = [float(size) for size in sizes if size is not None]
        rows.append(
            {
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
                "max_abs": max(known) if known and len(known) == len(sizes) else None,
                "evidence": finding.evidence,
                "cause": str(finding.cause),
                "fix": str(finding.fix),
            }
        )
    return rows


def describe_check(report: Report) -> dict[str, Any]:
    """Return the counts of a check by kind of tensor, and its worst tensors in the order of the model."""
    kinds: dict[str, Counts] = {}
    for group in report.groups:
        for kind, counts in group.kinds.items():
            kinds[kind] = kinds.get(kind, Counts()) + counts
    diffs = [diff for group in report.groups for diff in group.tensors if diff.out_of_sync]
    worst = {diff.name for diff in sort_worst_first(diffs)[:_MOST_TENSORS]}
    rows = []
    for diff in diffs:
        if diff.name in worst:
            row = {name: getattr(diff, name) for name in (*_TEXTS, *_NUMBERS, *_INTEGERS)}
            detail = None if diff.detail is None else str(diff.detail)
            rows.append(row | {"reason": diff.reason, "detail": detail, "nonfinite": list(diff.nonfinite.items())})
    found = [group.not_finite for group in report.groups if group.not_finite is not None]
    return {
        "kinds": {kind: _list_counts(counts) for kind, counts in kinds.items()},
        "worst": rows,
        "notes": [str(note)[:_MOST_NOTE] for group in report.groups for note in group.notes],
        "not_finite": {
            "count": sum(own.count for own in found),
            "names": [name for own in found for name in own.names][:_MOST_TENSORS],
        },
    }


def _list_counts(counts: Counts) -> dict[str, int]:
    return {field.name: getattr(counts, field.name) for field in fields(Counts)}


def are_events(paths: Sequence[Any]) -> bool:
    """Whether all paths are event files."""
    return bool(paths) and all(str(path).endswith(ENDING) for path in paths)


def read_events(paths: Sequence[Any]) -> Report:
    """Return the checks of event files as the steps of runs, each with the name of its file.

    Files of version 0.1 have no tensors, causes and fixes. Raises UsageError for a file that cannot be read, is not an
    event file, has no check, or contradicts itself: a verdict always follows from its findings and counts.
    """
    groups = [group for path in paths for group in _read_file(path)]
    runs: dict[str, list[Group]] = {}
    for group in groups:
        runs.setdefault(group.run, []).append(group)
    groups = [_add_history(group, steps) if group is steps[-1] else group for steps in runs.values() for group in steps]
    followed = follow_not_finite(groups)
    return Report(overall(followed, ()), tuple(followed))


def _read_file(path: Any) -> list[Group]:
    """Return the checks of one event file."""
    checks: list[Group] = []
    name = Path(path).stem
    ranks: tuple[int, ...] = ()
    for number, event in _read_lines(path):
        contradiction = ""
        try:
            if event["event"] == "start":
                ranks = tuple(sorted(map(_read_natural, event["ranks"])))
                first = _read_natural(event["step"])
                if any(group.step >= first for group in checks if group.run == name and group.step):
                    name = f"{Path(path).stem} from line {number}"  # another run appended to the file
            elif event["event"] == "check":
                checks.append(_make_group(event, name, ranks, str(path)))
                contradiction = find_contradiction(checks[-1], event)
            elif event["event"] in ("desync", "end"):
                own = [group for group in checks if group.run == name]
                contradiction = find_contradicted_check(event, own[-1] if own else None)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"[:80]
            raise UsageError(f"{path}, line {number}: not an event of SyncMonitor ({problem})") from None
        if contradiction:
            raise UsageError(
                f"{path}, line {number}: {contradiction}; the file was edited or damaged, so it has no verdict. Pass "
                "the file as SyncMonitor wrote it"
            )
    if not checks:
        raise UsageError(f"{path}: no check in it; pass the file that SyncMonitor(events=...) has written")
    return checks


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
    if verdict not in _VERDICTS:
        raise ValueError(f"verdict {verdict!r}")
    tensors, compared = _read_natural(event["tensors"]), _read_natural(event["compared"])
    kinds = {
        str(kind): Counts(**{field.name: _read_natural(counts[field.name]) for field in fields(Counts)})
        for kind, counts in event.get("kinds", {}).items()
    }
    if not kinds:  # version 0.1 wrote only how many tensors were compared
        different = min(compared, sum(_read_natural(row["tensors"]) for row in event["findings"]))
        absent = tensors - compared
        kinds["all"] = Counts(tensors, compared - different, different=different, not_compared=absent)
    diffs = tuple(_make_diff(row) for row in event.get("worst", ()))
    findings = tuple(_make_finding(row) for row in event["findings"])
    return Group(
        name=f"{run} step {step}",
        run=run,
        step=step,
        replicas=tuple(Replica(path, rank, "memory", tensors, 0) for rank in ranks),
        counts=sum(kinds.values(), Counts()),
        tensors=diffs,
        kinds=kinds,
        verdict=verdict,
        findings=findings,
        not_finite=_make_not_finite(event.get("not_finite")),
        notes=tuple(Note.STORED(text=str(note)) for note in event.get("notes", ())),
    )


def _make_not_finite(row: Mapping[str, Any] | None) -> NotFinite | None:
    """Return the tensors that are not finite; None if there are none, or if an older version wrote the event."""
    if row is None or not _read_natural(row["count"]):
        return None
    return NotFinite(tuple(str(name) for name in row["names"]), _read_natural(row["count"]))


def _make_diff(row: Mapping[str, Any]) -> TensorDiff:
    values: dict[str, Any] = {name: str(row[name]) for name in _TEXTS}
    values |= {name: _read_integers(row[name]) for name in _INTEGERS}
    for name in _NUMBERS:
        values[name] = _read_size(row[name])
    if values["status"] not in ("different", "not_compared"):
        raise ValueError(f"status {values['status']!r}")
    values["reason"] = None if row["reason"] is None else Reason(row["reason"])
    values["detail"] = None if row["detail"] is None else Fact.TEXT(text=str(row["detail"]))
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
    points, diffs = [], []
    for group in steps:
        listed = [diff for diff in group.tensors if diff.name in names and diff.out_of_sync]
        differing = _count_differing(finding, listed, group)
        largest = _find_largest(listed) if differing else 0.0
        points.append(HistoryPoint(group.step or 0, differing, largest, group.verdict != "in_sync"))
        diffs.append(listed)
    first = next(i for i, point in enumerate(points) if point.differing)
    agreed = points[first - 1].step if first else None
    ranks = [other.ranks for other in steps[first].findings if other.code == finding.code]
    suspects = ranks[0] if ranks else finding.ranks
    return History(tuple(points), points[first].step, agreed, (), suspects, trend_of(diffs[first:]))


def _count_differing(finding: Finding, listed: Sequence[TensorDiff], group: Group) -> int:
    """Return the number of tensors of a finding that differed at a check, as far as known.

    listed: those among the worst tensors of the check. A check has another code for the same tensors if its evidence
    was different, and an event does not list all tensors, so only a check in sync shows that they agreed.
    """
    if listed or finding.code in [other.code for other in group.findings]:
        return max(1, len(listed))
    if group.verdict == "in_sync":
        return 0
    complete = group.verdict == "out_of_sync" and group.counts.different <= len(group.tensors)
    return 0 if complete else 1


def _find_largest(diffs: Sequence[TensorDiff]) -> float | None:
    sizes = [diff.max_abs for diff in diffs]
    known = [float(size) for size in sizes if size is not None]
    return max(known) if known and len(known) == len(sizes) else None
