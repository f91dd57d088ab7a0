"""The JSON document: its fields from `syncheck/report/schema.json`, what they mean from the records, and an example."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from typing import Any

import sources
from marks import code, phrase, table, told

import syncheck
from syncheck import kinds
from syncheck.report import json_document

ROOT = sources.ROOT
SCHEMA = json.loads((ROOT / "syncheck" / "report" / "schema.json").read_text(encoding="utf-8"))
# What the example compares: two small files, and of their tensors one.
EXAMPLE = ("fixtures/desync/bn_local_stats", "bn1.running_mean")
# The record that each object is written from. Objects without a name in the schema are named by where they stand.
RECORDS = {
    "document": "Report", "counts": "Counts", "group": "Group", "replica": "Replica", "tensor": "TensorDiff",
    "finding": "Finding", "value": "ValueDiff", "shards": "Shards", "tie": "Tie", "evidence": "Evidence",
    "histogram": "Histogram", "history": "History", "points": "HistoryPoint", "free_running": "FreeRunning",
    "unreadable": "Unreadable", "aliases": "Alias", "drift": "DriftPoint", "closures": "Closure",
}  # fmt: skip
# What the records do not say, because in Python a name or a type says it.
WORDS = {
    "document.schema": "version of this document; it rises when a field is removed or renamed, not when one is added",
    "document.tool": "always `syncheck`",
    "document.version": "of syncheck",
    "document.verdict": "of all groups: `out_of_sync` is exit code 1, `undecided` 2",
    "document.counts": "over all groups",
    "document.groups": "one for each group of replicas, and for each step of a run, in that order",
    "document.unreadable": "files that were given and could not be compared",
    "document.drift": "the largest gap of a running statistic, by run and step",
    "document.closures": "pairs of runs that differ in SyncBatchNorm only",
    "counts.tensors": "all that were asked for; the others add up to it",
    "counts.identical": "the same bytes on all replicas",
    "counts.equal": "other bits and the same values, such as -0.0 and 0.0",
    "counts.close": "within a tolerance that was given",
    "counts.different": "neither of these",
    "counts.not_compared": "with the reason in `tensors`",
    "unreadable.path": "as it was given",
    "unreadable.reason": "in one line: place, what was found, what was needed, the next step",
    "closures.plain": "the run without SyncBatchNorm",
    "closures.synced": "the run with it",
    "closures.sentence": "by how much the gap closed, in words",
    "drift.run": "name of the run", "drift.step": "of the run, null where it is not known",
    "drift.max_abs": "the largest gap of any running statistic", "drift.tensor": "the statistic that has it",
    "group.name": "of the run, with the step where there are several",
    "group.run": "name of the run, from the metadata or the paths",
    "group.step": "of the run, null where it is not known",
    "group.verdict": "`alone` where there is one replica only, which decides nothing beside other groups",
    "group.replicas": "by rank",
    "group.counts": "of this group",
    "group.shards": "tensors that the ranks hold in parts, by layout",
    "group.values": "Python values that are not equal on all replicas",
    "group.findings": "in the order of precedence",
    "replica.path": "as it was given", "replica.format": "such as `torch-zip`, `safetensors`",
    "replica.tensors": "in the file", "replica.bytes": "of the file, or of the folder's files",
    "tensor.name": "without its container; optimizer state is `optimizer.<parameter>.<state>`",
    "tensor.kind": ", ".join(f"`{kind}`" for kind in kinds.KINDS),
    "tensor.dtype": "torch's name, such as `float32`",
    "tensor.shape": "sizes by dimension; of the first replica where they differ",
    "tensor.status": "identical tensors are counted, not listed",
    "tensor.numel": "elements of the tensor, the product of its shape",
    "tensor.max_abs": "largest |a-b|, in the tensor's own units",
    "tensor.max_rel": "largest |a-b| / max(|a|, |b|)",
    "tensor.max_ulp": "largest gap in steps of the dtype",
    "tensor.extent": "where the elements that differ lie: one, a run of neighbours, all, or scattered",
    "tensor.evidence": "a second look at what differs, where one was taken",
    "tensor.facts": "where several things are wrong with it, each by itself, as tensors",
    "tensor.histogram": "of the gaps, where an HTML page was asked for",
    "shards.tensors": "of this layout",
    "tie.names": "of one tensor", "value.name": "dotted, such as `optimizer.param_groups.0.lr`",
    "finding.code": "such as `SYN201`", "finding.slug": "its name", "finding.severity": "`info` never fails",
    "finding.allowed": "whether `--allow` excuses it", "finding.tensors": "those it covers, by name",
    "finding.evidence": "what was seen, with numbers", "finding.cause": "why", "finding.fix": "what to change",
    "history.points": "by step", "points.step": "of the run",
    "fixed.code": "the finding that the baseline accepts it under",
    "free_running.misfit_free": "how badly the gaps fit statistics that run freely",
    "free_running.misfit_lag": "how badly they fit a lag of one update",
    "histogram.equal": "elements that are equal",
}  # fmt: skip


def fields() -> str:
    """Return a table for each object of the document."""
    objects = {"document": SCHEMA} | {name: found for name, found in SCHEMA["$defs"].items() if "properties" in found}
    parts = []
    ordered = sorted(_with_inner(objects).items(), key=lambda pair: [*RECORDS, pair[0]].index(pair[0]))
    for name, found in ordered:
        said = _said(RECORDS.get(name, name.title().replace("_", "")))
        required = set(found.get("required", ()))
        rows = []
        for key, wanted in found["properties"].items():
            shown = code(key) if key in required else f"{code(key)} (may be absent)"
            means = WORDS.get(f"{name}.{key}") or said.get(key, "")
            rows.append((shown, _type(wanted, key), phrase(re.sub(r"\bNone\b", "null", means))))
        parts.append(f"### {name}\n\n{table(('field', 'type', 'means'), rows)}")
    return "\n\n".join(parts)


def _with_inner(objects: dict[str, Any]) -> dict[str, Any]:
    """Add objects that stand inside another one without a name: they get that of their field."""
    found: dict[str, Any] = {}
    for name, what in objects.items():
        found[name] = what
        for key, wanted in what["properties"].items():
            inner = wanted.get("items", {})
            if "properties" in inner:
                found[key] = inner
    return found


def _said(record: str) -> dict[str, str]:
    """Return what a record says of its fields, in strings below them or in its docstring."""
    try:
        _, node = sources.home("syncheck.records", record)
    except KeyError:
        return {}
    if not isinstance(node, ast.ClassDef):
        raise TypeError(record)
    listed = sources.attributes(node)
    _, in_text = told(sources.docstring(node), [field.name for field in listed])
    return {field.name: field.says or in_text[field.name] for field in listed}


def _type(wanted: dict[str, Any], key: str) -> str:
    """Write a type of the schema in words, with links to other objects."""
    if "$ref" in wanted:
        name = wanted["$ref"].rpartition("/")[2]
        if "properties" in SCHEMA["$defs"][name]:
            return f"[{name}](#{name})"
        return _type(SCHEMA["$defs"][name], key)
    if "const" in wanted:
        return code(json.dumps(wanted["const"]))
    if "enum" in wanted:
        return ", ".join(code(json.dumps(value)) for value in wanted["enum"])
    if "anyOf" in wanted:
        return " or ".join(
            _type(one, key) for one in sorted(wanted["anyOf"], key=lambda one: one.get("type") == "null")
        )
    kinds = wanted.get("type")
    if isinstance(kinds, list):
        return " or ".join(_type(wanted | {"type": kind}, key) for kind in kinds)
    if kinds == "array":
        inner = _type(wanted["items"], key)
        return f"list of {inner}{'s' if inner.isalpha() else ''}"
    if kinds == "object" and "properties" in wanted:
        return f"[{key}](#{key})"
    if kinds == "object":
        return f"object: {_type(wanted['additionalProperties'], key)} by name"
    return str(kinds)


def example() -> str:
    """Return a comparison of two files of the clone, and the document that it prints."""
    os.chdir(ROOT)
    folder, name = EXAMPLE
    report = syncheck.compare(folder, options=syncheck.Options(include=(name,)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    document = json_document.render(report, project["version"])
    command = f"syncheck compare {folder} --include {name} --format json"
    return f"    {command}\n\n```json\n{document.strip()}\n```"
