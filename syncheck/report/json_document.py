"""The JSON document, schema 1, described by the JSON Schema in `schema.json`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from syncheck.errors import brief
from syncheck.messages import Message
from syncheck.records import Evidence, Histogram, TensorDiff
from syncheck.report import words

if TYPE_CHECKING:
    from syncheck.records import Finding, Group, Report, ValueDiff

SCHEMA = 1


def document(report: Report, version: str) -> dict[str, Any]:
    """Return the report as JSON values. version: the version of syncheck."""
    return {
        "schema": SCHEMA,
        "tool": "syncheck",
        "version": version,
        "verdict": report.verdict,
        "counts": asdict(report.counts),
        "groups": [_group(group) for group in report.groups],
        "unreadable": [asdict(file) for file in report.unreadable],
        "skipped": report.skipped,
        "aliases": [asdict(alias) for alias in report.aliases],
        "quick": report.quick,
        "drift": [asdict(point) for point in report.drift],
        "closures": [asdict(closure) for closure in report.closures],
    }


def render(report: Report, version: str) -> str:
    """Return the document as strict JSON, without NaN and infinity."""
    return to_json(document(report, version))


def to_json(value: Any) -> str:
    """Return JSON, with the commands of CI systems in names escaped (see `errors.logged`)."""
    # In JSON `#` occurs only inside strings, where it can be escaped.
    return re.sub(r"##(?=\w*\[)", r"#\\u0023", json.dumps(value, indent=1, allow_nan=False)) + "\n"


def _group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "run": group.run,
        "step": group.step,
        "verdict": group.verdict,
        "replicas": [asdict(replica) for replica in group.replicas],
        "counts": asdict(group.counts),
        "kinds": {kind: asdict(counts) for kind, counts in group.kinds.items()},
        "left_out": group.left_out,
        "tensors": [_tensor(diff) for diff in group.tensors],
        "shards": [asdict(shards) for shards in group.shards],
        "ties": [asdict(tie) for tie in group.ties],
        "values": [_value(diff) for diff in group.values],
        "findings": [_finding(finding) for finding in group.findings],
        "fixed": [asdict(fixed) for fixed in group.fixed],
        "stale": {str(rank): step for rank, step in group.evidence.stale.items()},
        "free_running": None if group.evidence.free_running is None else asdict(group.evidence.free_running),
        "notes": words.note_lines(group),
    }


def _tensor(diff: TensorDiff) -> dict[str, Any]:
    # dataclasses.asdict would copy the clusters of 1,024 ranks element by element.
    tensor = {name: _plain(getattr(diff, name)) for name in diff.__slots__ if name != "tolerance"}
    return tensor | {"reason": diff.reason or diff.tolerance}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], TensorDiff):
        return [_tensor(diff) for diff in value]
    if isinstance(value, Message):
        return str(value)
    if isinstance(value, (Evidence, Histogram)):
        return {name: _plain(getattr(value, name)) for name in value.__slots__}
    return {str(rank): count for rank, count in value.items()} if isinstance(value, dict) else value


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "slug": finding.slug,
        "severity": finding.severity,
        "ranks": finding.ranks,
        "tensors": finding.tensors,
        "evidence": finding.evidence,
        "cause": str(finding.cause),
        "fix": str(finding.fix),
        "values": finding.values,
        "allowed": finding.allowed,
        "history": None if finding.history is None else asdict(finding.history),
        "accepted": finding.accepted,
        "new": finding.new,
    }


def _value(diff: ValueDiff) -> dict[str, Any]:
    """Return values as Python prints them, because JSON has no NaN, bytes and complex numbers."""
    by_rank = {str(rank): None if value is None else brief(value, 200) for rank, value in diff.by_rank.items()}
    return {**asdict(diff), "by_rank": by_rank}
