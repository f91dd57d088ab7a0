"""The JSON document, schema 2, described by the JSON Schema in `schema.json`.

Beside each text of a message, `messages` has the code and the parameters of the message.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from syncheck.records import Closure, Finding, Group, TensorDiff, ValueDiff
from syncheck.report import words
from syncheck.sentences import Message
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncheck.records import Report

SCHEMA = 2
_MOST_VALUE = 200
# Larger integers, for example of a corrupt file, are written as text, because other programs read floats.
_MOST_INTEGER = 2**63
# JSON has no number for them, so they are text, as Python prints them.
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
# Tuples in parameters: sets of ranks, and values with the ranks that hold them.
_MOST_LEVELS = 3


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
        "skipped_paths": report.skipped_paths,
        "aliases": report.aliases,
        "quick": report.quick,
        "drift": report.drift,
        "closures": report.closures,
    }
    return to_json(document)


def to_json(value: Any) -> str:
    """Return JSON, with the commands of CI systems in names escaped (see `text.logged`)."""
    text = _write(value)
    # Only a floating-point number writes these words outside of strings.
    if re.search("NaN|Infinity", text):
        text = _write(json.loads(text, parse_constant=_NOT_FINITE.__getitem__))

    # In JSON `#` occurs only inside strings, where it can be escaped.
    return re.sub(r"##(?=\w*\[)", r"#\\u0023", text) + "\n"


def _write(value: Any) -> str:
    """Return JSON, in which NaN and infinity may be numbers."""
    return json.dumps(
        value,
        default=_fields,
        indent=1,
    )


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record, for `json.dumps`, which converts their values in turn."""
    describe = _DESCRIPTIONS.get(type(record), _slots)
    return describe(record)


def _slots(record: Any) -> dict[str, Any]:
    # `dataclasses.asdict` would convert the records inside too, before they are described.
    return {name: getattr(record, name) for name in record.__slots__}


def _tensor(diff: TensorDiff) -> dict[str, Any]:
    fields = _slots(diff)
    # A tensor that is close has no other reason.
    tolerance = fields.pop("tolerance")
    fields["reason"] = diff.reason or tolerance
    fields["messages"] = {}
    if diff.detail is not None:
        fields["detail"] = str(diff.detail)
        fields["messages"]["detail"] = _message(diff.detail)

    return fields


def _value(value: ValueDiff) -> dict[str, Any]:
    fields = _slots(value)
    fields["by_rank"] = {}
    for rank, content in value.by_rank.items():
        # As Python prints them, because JSON has no NaN, bytes and complex numbers.
        text = None if content is None else brief(content, _MOST_VALUE)
        fields["by_rank"][rank] = text
    return fields


def _finding(finding: Finding) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, content in _slots(finding).items():
        if name == "facts":
            fields["evidence"] = finding.evidence
        else:
            fields[name] = content

    fields["cause"], fields["fix"] = str(finding.cause), str(finding.fix)
    fields["messages"] = {
        "evidence": _messages(finding.facts),
        "cause": _message(finding.cause),
        "fix": _message(finding.fix),
    }
    return fields


def _closure(closure: Closure) -> dict[str, Any]:
    return {
        "plain": closure.plain,
        "synced": closure.synced,
        "sentence": closure.sentence,
        "messages": {"sentence": _message(closure.message)},
    }


def _group(group: Group) -> dict[str, Any]:
    notes = words.group_notes(group)
    fact = words.describe_not_finite(group)
    if fact is not None:
        notes = [fact, *notes]

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
        "notes": [str(note) for note in notes],
        "messages": {"notes": _messages(notes)},
    }


_DESCRIPTIONS: dict[type, Callable[[Any], dict[str, Any]]] = {
    TensorDiff: _tensor,
    ValueDiff: _value,
    Finding: _finding,
    Closure: _closure,
    Group: _group,
}


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Any]:
    parameters = {name: _parameter(content) for name, content in message.parameters.items()}
    return {"code": message.code.key, "text": str(message), "parameters": parameters}


def _parameter(content: Any, level: int = 0) -> Any:
    """Return a parameter as a JSON value: numbers and lists stay, other values become text."""
    if content is None or isinstance(content, (bool, str)):
        return content
    if isinstance(content, Message):
        return _message(content)
    if isinstance(content, float) and math.isfinite(content):
        return float(content)
    if isinstance(content, int) and abs(content) < _MOST_INTEGER:
        return int(content)
    # Values of ranks may be containers from a file, which may be nested without end.
    if isinstance(content, Mapping):
        return {str(key): _parameter(value, _MOST_LEVELS) for key, value in content.items()}
    if isinstance(content, (tuple, list)) and level < _MOST_LEVELS:
        return [_parameter(item, level + 1) for item in content]

    return brief(content, _MOST_VALUE)
