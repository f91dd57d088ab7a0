"""The JSON document: its fields from `syncheck/report/schema.json`, their meaning from the records, and an example."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from typing import Any

import sources
from marks import code, phrase, split_fields, table

import syncheck
from syncheck.report import json_document
from syncheck.tensors import kinds

ROOT = sources.ROOT
SCHEMA = json.loads((ROOT / "syncheck" / "report" / "schema.json").read_text(encoding="utf-8"))
# The example compares one tensor of two small files.
EXAMPLE = ("fixtures/desync/bn_local_stats", "bn1.running_mean")
# The record behind each object. Objects without a name in the schema get the name of their field.
RECORDS = {
    "document": "Report", "counts": "Counts", "group": "Group", "replica": "Replica", "tensor": "TensorDiff",
    "finding": "Finding", "value": "ValueDiff", "shards": "Shards", "tie": "Tie", "evidence": "Evidence",
    "histogram": "Histogram", "history": "History", "points": "HistoryPoint", "free_running": "FreeRunning",
    "not_finite": "NotFinite",
    "unreadable": "Unreadable", "aliases": "Alias", "drift": "DriftPoint", "closures": "Closure",
    "place": "Place", "message": "Message",
    "relation": "Relation",
}  # fmt: skip
# Meanings of fields that the records leave to their names and types.
WORDS = {
    "document.schema": "version of the format; 1 in documents of versions before 0.3, which have no `messages`",
    "document.tool": "always `syncheck`",
    "document.version": "version of syncheck",
    "document.command": "`compare`, also for `report` and pytest, or `diff`",
    "document.verdict": "verdict over all groups: `out_of_sync` is exit code 1, `undecided` 2",
    "document.counts": "counts over all groups",
    "document.groups": "one entry for each group of replicas and each step of a run, in that order",
    "document.unreadable": "given files that could not be compared",
    "document.drift": "the largest difference of a running statistic, by run and step",
    "document.closures": "pairs of runs that differ only in SyncBatchNorm",
    "counts.tensors": "all selected tensors; the sum of the other counts",
    "counts.identical": "equal bytes on all replicas",
    "counts.equal": "equal values with different bits, for example -0.0 and 0.0",
    "counts.close": "different, but within the given tolerance",
    "counts.different": "different beyond any tolerance",
    "counts.not_compared": "not compared; `tensors` has the reason",
    "unreadable.path": "path as given",
    "unreadable.reason": "one line: the location, the contents found, the contents expected, and the next step",
    "closures.plain": "the run without SyncBatchNorm",
    "closures.synced": "the run with it",
    "closures.sentence": "how much of the difference SyncBatchNorm removed, as a sentence",
    "closures.messages": "the message of `sentence`",
    "tensor.messages": "the message of `detail`, if there is one",
    "finding.messages": "the messages of `evidence` (a list), `cause` and `fix`",
    "group.messages": "the messages of `notes`, in the same order",
    "message.code": "code of the sentence, for example `Note.QUICK` or `SYN201.CAUSE`",
    "message.text": "the sentence",
    "message.parameters": "numbers, names, ranks and other messages in the sentence",
    "drift.run": "name of the run", "drift.step": "step of the run, null if unknown",
    "drift.max_abs": "the largest difference of any running statistic",
    "drift.tensor": "the statistic with this difference",
    "group.name": "name of the run, with the step if there are several steps",
    "group.run": "name of the run, from the metadata or the paths",
    "group.step": "step of the run, null if unknown",
    "group.verdict": "`alone` means a single replica; the overall verdict is then never `in_sync`",
    "group.replicas": "the replicas, by rank",
    "group.counts": "counts of this group",
    "group.shards": "sharded tensors, by layout",
    "group.values": "Python values that differ between replicas",
    "group.findings": "findings, in order of precedence",
    "replica.path": "path as given", "replica.format": "format: `torch-zip`, `safetensors` and so on",
    "replica.label": "for `diff`: A or B, else empty", "replica.files": "number of files of the model",
    "replica.tensors": "tensors in the checkpoint", "replica.bytes": "size of the file, or of all files in the folder",
    "tensor.name": "name without its container; optimizer state is `optimizer.<parameter>.<state>`",
    "tensor.kind": ", ".join(f"`{kind}`" for kind in kinds.KINDS),
    "tensor.dtype": "torch dtype, for example `float32`",
    "tensor.shape": "size of each dimension; if shapes differ, the shape on the first replica",
    "tensor.status": "how the tensor compares; identical tensors are counted, not listed",
    "tensor.numel": "number of elements, the product of the shape",
    "tensor.max_abs": "largest |a-b|, in the units of the tensor",
    "tensor.max_rel": "largest |a-b| / max(|a|, |b|)",
    "tensor.max_ulp": "largest difference in ULPs (representable steps of the dtype)",
    "tensor.extent": "location of the differing elements: a single element, adjacent elements, all or scattered",
    "tensor.evidence": "clues to the cause, if the tensor was examined further",
    "tensor.places": "for `diff`: the file and rank with the element at `index`, by side: 0 for A, 1 for B",
    "place.path": "path of the file", "place.rank": "rank of the file, null for a model in one file",
    "place.tensor": "name of the stored tensor, if a map renames or divides it",
    "place.index": "index of the element in the stored tensor",
    "relation.kind": "for `diff`: how the tensor of B follows from A",
    "relation.parameters": "numbers and names that describe the relation",
    "tensor.facts": "if the tensor has several problems, one tensor record for each",
    "tensor.histogram": "histogram of the differences, if an HTML report was requested",
    "shards.tensors": "number of tensors with this layout",
    "tie.names": "names of one tensor", "value.name": "dotted name, for example `optimizer.param_groups.0.lr`",
    "finding.code": "code, for example `SYN201`", "finding.slug": "name",
    "finding.severity": "severity; `info` never fails",
    "finding.allowed": "whether `--allow` accepts the finding", "finding.tensors": "names of the tensors it covers",
    "finding.evidence": "the evidence, with numbers", "finding.cause": "the cause", "finding.fix": "the fix",
    "history.points": "one entry per step", "points.step": "step of the run",
    "fixed.code": "code of the finding in the baseline",
    "free_running.misfit_free": "misfit between the differences and unsynchronized statistics",
    "free_running.misfit_lag": "misfit between the differences and a lag of one update",
    "not_finite.names": "names of these tensors",
    "histogram.equal": "number of equal elements",
}  # fmt: skip


# Objects on a page of their own: what is known about a difference.
EVIDENCE = tuple(
    "evidence histogram history points not_finite free_running unreadable aliases drift closures place relation "
    "fixed".split()
)


def fields(*, evidence: bool) -> str:
    """Return a table for each object of the document. evidence: those of json-evidence.md; others are in json.md."""
    objects = {"document": SCHEMA} | {name: found for name, found in SCHEMA["$defs"].items() if "properties" in found}
    parts = []
    ordered = sorted(_with_inner(objects).items(), key=lambda pair: [*RECORDS, pair[0]].index(pair[0]))
    for name, found in ordered:
        if (name in EVIDENCE) != evidence:
            continue
        meanings = _meanings(RECORDS.get(name, name.title().replace("_", "")))
        required = set(found.get("required", ()))
        rows = []
        for key, wanted in found["properties"].items():
            shown = code(key) if key in required else f"{code(key)} (optional)"
            meaning = WORDS.get(f"{name}.{key}") or meanings.get(key, "")
            rows.append((shown, _type(wanted, key), phrase(re.sub(r"\bNone\b", "null", meaning))))
        parts.append(f"### {name}\n\n{table(('field', 'type', 'meaning'), rows)}")
    other = "json.md" if evidence else "json-evidence.md"
    return re.sub(
        r"\]\(#(\w+)\)", lambda found: f"]({'' if (found[1] in EVIDENCE) == evidence else other}#{found[1]})",
        "\n\n".join(parts),
    )  # fmt: skip


def _with_inner(objects: dict[str, Any]) -> dict[str, Any]:
    """Add objects nested in other objects; objects without a name get the name of their field."""
    found: dict[str, Any] = {}
    for name, schema in objects.items():
        found[name] = schema
        for key, wanted in schema["properties"].items():
            inner = wanted.get("items", {})
            if "properties" in inner:
                found[key] = inner
    return found


def _meanings(record: str) -> dict[str, str]:
    """Return the documented meaning of each field of a record, from strings below fields or from its docstring."""
    try:
        _, node = sources.home("syncheck.records", record)
    except KeyError:
        return {}
    if not isinstance(node, ast.ClassDef):
        raise TypeError(record)
    inherited = [meaning for base in node.bases for meaning in _meanings(ast.unparse(base)).items()]
    listed = sources.attributes(node)
    _, in_text = split_fields(sources.docstring(node), [field.name for field in listed])
    own = {field.name: field.text or in_text[field.name] for field in listed}
    # The document has no object for the evidence of a group: its fields are those of the group.
    evidence = _meanings("GroupEvidence") if "evidence" in own else {}
    return {**evidence, **dict(inherited), **own}


def _type(wanted: dict[str, Any], key: str) -> str:
    """Describe a type of the schema, with links to other objects."""
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
            _type(each, key) for each in sorted(wanted["anyOf"], key=lambda each: each.get("type") == "null")
        )
    kinds = wanted.get("type")
    if isinstance(kinds, list):
        return " or ".join(_type(wanted | {"type": kind}, key) for kind in kinds)
    if kinds == "array":
        inner = _type(wanted["items"], key)
        return f"list of {inner}{'s' if inner.isalpha() else ''}"
    if kinds == "object" and "properties" in wanted:
        return f"[{key}](#{key})"
    if kinds == "object" and wanted["additionalProperties"] is True:
        return "object"
    if kinds == "object":
        return f"object: {_type(wanted['additionalProperties'], key)} by name"
    return str(kinds)


def example() -> str:
    """Return a command for two files of the clone, and the document that it prints."""
    os.chdir(ROOT)
    folder, name = EXAMPLE
    report = syncheck.compare(folder, options=syncheck.Options(include=(name,)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    document = json_document.render(report, project["version"])
    command = f"syncheck compare {folder} --include {name} --format json"
    return f"    {command}\n\n```json\n{document.strip()}\n```"
