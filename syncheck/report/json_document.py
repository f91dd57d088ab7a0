"""The JSON document, schema 1, described by the JSON Schema in `schema.json`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from syncheck.messages import Message
from syncheck.records import Finding, Group, TensorDiff, ValueDiff
from syncheck.report import words
from syncheck.text import brief

if TYPE_CHECKING:
    from syncheck.records import Report

SCHEMA = 1


def render(report: Report, version: str) -> str:
    """Return the document as strict JSON, without NaN and infinity. version: the version of syncheck."""
    document = {
        "schema": SCHEMA,
        "tool": "syncheck",
        "version": version,
        "command": report.command,
        "verdict": report.verdict,
        "counts": report.counts,
        "groups": report.groups,
        "unreadable": report.unreadable,
        "skipped": report.skipped,
        "aliases": report.aliases,
        "quick": report.quick,
        "drift": report.drift,
        "closures": report.closures,
    }
    return to_json(document)


def to_json(value: Any) -> str:
    """Return JSON, with the commands of CI systems in names escaped (see `text.logged`)."""
    # In JSON `#` occurs only inside strings, where it can be escaped.
    return re.sub(r"##(?=\w*\[)", r"#\\u0023", json.dumps(value, default=_fields, indent=1, allow_nan=False)) + "\n"


def _fields(record: Any) -> Any:
    """Return the fields of a record, for `json.dumps`, which converts their values in turn; the text of a message."""
    if isinstance(record, Message):
        return str(record)
    if isinstance(record, Group):
        return _group(record)
    values = {name: getattr(record, name) for name in record.__slots__}
    if isinstance(record, TensorDiff):
        tolerance = values.pop("tolerance")
        values["reason"] = record.reason or tolerance
    elif isinstance(record, ValueDiff):
        # As Python prints them, because JSON has no NaN, bytes and complex numbers.
        values["by_rank"] = {rank: None if of is None else brief(of, 200) for rank, of in record.by_rank.items()}
    elif isinstance(record, Finding):
        shown = (("evidence", record.evidence) if name == "facts" else (name, of) for name, of in values.items())
        return dict(shown)
    return values


def _group(group: Group) -> dict[str, Any]:
    fact = words.describe_not_finite(group)
    first = [] if fact is None else [str(fact)]
    return {
        "name": group.name,
        "run": group.run,
        "step": group.step,
        "verdict": group.verdict,
        "replicas": group.replicas,
        "counts": group.counts,
        "kinds": group.kinds,
        "left_out": group.left_out,
        "tensors": group.tensors,
        "shards": group.shards,
        "ties": group.ties,
        "values": group.values,
        "findings": group.findings,
        "fixed": group.fixed,
        "not_finite": group.not_finite,
        "stale": group.evidence.stale,
        "free_running": group.evidence.free_running,
        "notes": [*first, *words.note_lines(group)],
    }
