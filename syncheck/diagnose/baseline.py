"""Baselines: files with known findings, which do not fail again.

    {
     "syncheck_baseline": 1,
     "accepted": {
      "ddp": {
       "SYN201": {
        "bn_mean": [
         "bn1.running_mean"
    ...

A baseline lists the accepted tensors and values by run, code and kind. If a code covers several kinds of facts, the
kind includes the fact: `parameter (shape)`. Entries of older versions without a fact accept every fact.

A baseline contains no differences, ranks, steps and run_ids, because these change between training runs. Folders are
only included if they are needed to distinguish runs. Names are sorted, one per line, so that diffs of the file show the
changes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.diagnose.selection import index_by_name, list_names, out_of_sync, problems_of, with_status
from syncheck.diagnose.verdicts import overall, with_findings
from syncheck.errors import UsageError
from syncheck.messages import Fact, Usage
from syncheck.records import Fixed, Reason
from syncheck.suggestions import suggest_path
from syncheck.text import brief, system_reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from syncheck.records import Finding, Group, Report, TensorDiff

SCHEMA = 1
_VERSION, _ACCEPTED = "syncheck_baseline", "accepted"
# The facts of codes with several kinds of facts. Accepting a different shape does not accept a different dtype.
_FACTS = {
    "SYN102": frozenset({"shape", "dtype"}),
    "SYN215": frozenset({"missing", "shape", "dtype", "values"}),
}
# The fact of each reason. All other reasons are differences of values.
_REASONS: Mapping[Reason | None, str] = {
    Reason.MISSING: "missing",
    Reason.SHAPE: "shape",
    Reason.DTYPE: "dtype",
}
# The verdicts of groups whose replicas were compared.
_OF_COMPARED = ("in_sync", "out_of_sync")


class Entry(NamedTuple):
    """One accepted tensor or value of a finding.

    kind: the kind of the tensor, with the fact if the code covers several; `value` for Python values.
    """

    run: str
    code: str
    kind: str
    name: str


Known = frozenset[Entry]


def read(path: str, *, may_be_missing: bool = False) -> Known:
    """Read a baseline. may_be_missing: return an empty baseline if the file does not exist.

    Raises UsageError if the file is missing, unreadable, not a baseline, or of another version.
    """
    content = _read_content(path)
    if content is None:
        if may_be_missing:
            return frozenset()
        raise UsageError(Usage.NO_BASELINE(path=path, suggestion=suggest_path(path)))
    try:
        document = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a baseline: not JSON: {error}") from None
    _check_version(path, document)
    return frozenset(_entries(path, document[_ACCEPTED]))


def _read_content(path: str) -> bytes | None:
    """Return the bytes of a file; None if it does not exist. Raises UsageError if it is unreadable."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = system_reason(error)
        raise UsageError(f"{path}: cannot read the baseline: {reason}") from None


def _check_version(path: str, document: Any) -> None:
    """Raise UsageError if a document is no baseline, or of another version."""
    if not isinstance(document, dict) or document.get(_VERSION) is None:
        raise UsageError(f"{path}: not a baseline: it has no {_VERSION}")
    version = document[_VERSION]
    # True equals 1 in Python.
    is_number = not isinstance(version, bool)
    if version != SCHEMA or not is_number:
        problem = f"a baseline of version {brief(version)}"
        raise UsageError(f"{path}: {problem}; this syncheck reads version {SCHEMA}")
    if document.keys() != {_VERSION, _ACCEPTED}:
        present_keys = brief([*document])
        problem = f"needs {_VERSION} and {_ACCEPTED}, found {present_keys}"
        raise UsageError(f"{path}: not a baseline: {problem}")


def _entries(path: str, accepted: object) -> Iterator[Entry]:
    """Yield the entries of the document. Raises UsageError if its structure is invalid."""
    for run, codes in _items(path, _ACCEPTED, accepted):
        for code, kinds in _items(path, brief(run), codes):
            for kind, names in _items(path, f"{brief(run)}, {brief(code)}", kinds):
                key = f"{brief(run)}, {brief(code)}, {brief(kind)}"
                for name in _check_names(path, key, names):
                    yield Entry(
                        run,
                        code,
                        kind,
                        name,
                    )


def _check_names(path: str, key: str, names: Any) -> list[str]:
    """Return a list of names. Raises UsageError for anything else."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"{key}: must be a list of names, found {brief(names)}"
        raise UsageError(f"{path}: not a baseline: {problem}")
    return names


def _items(path: str, key: str, value: object) -> list[tuple[str, Any]]:
    """Return the items of an object. Raises UsageError for anything else."""
    if not isinstance(value, dict):
        problem = f"{key}: must be an object, found {brief(value)}"
        raise UsageError(f"{path}: not a baseline: {problem}")
    return list(value.items())


def serialize(accepted: Known) -> str:
    """Return the text of a baseline, in ASCII. Equal entries give equal texts."""
    tree: dict[str, Any] = {}
    for entry in sorted(accepted):
        codes = tree.setdefault(entry.run, {})
        kinds = codes.setdefault(entry.code, {})
        names = kinds.setdefault(entry.kind, [])
        names.append(entry.name)
    document = {_VERSION: SCHEMA, _ACCEPTED: tree}
    return json.dumps(document, indent=1) + "\n"


def apply_baseline(report: Report, accepted: Known) -> Report:
    """Return the report with findings accepted by a baseline, and with new and fixed entries.

    A finding is accepted if the baseline contains all of its tensors and values under its run, code and kind. Otherwise
    it fails and lists the new tensors and values.
    """
    last_groups = {_label(group): group for group in report.groups}
    fixed = _find_fixed(report, accepted)
    groups = []
    for group in report.groups:
        judged = _check_group(group, accepted)
        run = _label(group)
        # The last step of a run lists what is fixed.
        if last_groups[run] is group:
            judged = replace(judged, fixed=_group_by_code(fixed, run))
        groups.append(judged)
    verdict = overall(groups, report.unreadable)
    return replace(report, groups=tuple(groups), verdict=verdict)


def update_baseline(report: Report, accepted: Known) -> Known:
    """Return a baseline that accepts all failing findings of a report, without fixed entries.

    Entries outside the report stay. Raises UsageError if files could not be read or nothing was compared.
    """
    # An unreadable file may hold the rank that differs.
    if report.unreadable:
        first = report.unreadable[0]
        raise UsageError(f"the baseline is not updated: {first.path} could not be read, so findings may be missing")
    verdicts = {group.verdict for group in report.groups}
    if verdicts.isdisjoint(_OF_COMPARED):
        raise UsageError("the baseline is not updated: nothing was compared")

    failing = find_failing(report)
    outdated = _find_fixed(report, accepted) | _without_facts(failing)
    return (accepted - outdated) | failing


def find_failing(report: Report) -> Known:
    """Return the entries for all findings of a report that fail, or would fail without a baseline."""
    entries: set[Entry] = set()
    for group in report.groups:
        for finding in group.findings:
            # Information is no fault, and `--allow` accepts a finding without a baseline.
            may_fail = finding.severity != "info" and not finding.allowed
            if may_fail:
                entries |= _entries_of(group, finding)
    return frozenset(entries)


def describe_change(before: Known, after: Known) -> str:
    """Return a summary of an update."""
    runs = len({entry.run for entry in after})
    return (
        f"{len(after)} name{'s' * (len(after) != 1)} in {runs} run{'s' * (runs != 1)} accepted: "
        f"{len(after - before)} added, "
        f"{len(before - after)} removed"
    )


def _label(group: Group) -> str:
    """Return the name of a run in a baseline."""
    return group.label or group.run


def _entries_of(group: Group, finding: Finding) -> set[Entry]:
    """Return the entries of a finding."""
    run, code = _label(group), finding.code
    diffs = index_by_name(group.tensors)
    entries = {
        Entry(
            run,
            code,
            kind="value",
            name=name,
        )
        for name in finding.values
    }
    for name in finding.tensors:
        kinds = ["other"]
        # Only differing tensors have a record.
        if name in diffs:
            kinds = _find_kinds(diffs[name], code)
        for kind in kinds:
            entry = Entry(
                run,
                code,
                kind,
                name,
            )
            entries.add(entry)
    return entries


def _find_kinds(diff: TensorDiff, code: str) -> list[str]:
    """Return the kinds under which a tensor is listed, one per fact."""
    facts_of_code = _FACTS.get(code)
    if facts_of_code is None:
        return [diff.kind]
    kinds = []
    for problem in problems_of(diff):
        fact = _REASONS.get(problem.reason, "values")
        if fact in facts_of_code:
            kinds.append(f"{diff.kind} ({fact})")
    return kinds


def _without_facts(entries: Iterable[Entry]) -> Known:
    """Return the entries in the format of older versions, whose kinds have no fact."""
    older_entries = set()
    for entry in entries:
        kind, _, _ = entry.kind.partition(" (")
        older_entries.add(entry._replace(kind=kind))
    return frozenset(older_entries)


def _check_group(group: Group, accepted: Known) -> Group:
    """Return a group whose findings are checked against a baseline, and its new verdict."""
    # A checkpoint that is alone has no findings, and keeps its verdict.
    if group.verdict == "alone":
        return group
    findings = []
    for finding in group.findings:
        findings.append(_check_finding(group, finding, accepted))
    return with_findings(group, tuple(findings))


def _without_fact(entry: Entry) -> Entry:
    """Return the entry in the format of older versions, without the fact."""
    return entry._replace(kind=entry.kind.partition(" (")[0])


def _check_finding(group: Group, finding: Finding, accepted: Known) -> Finding:
    """Return the finding as accepted, or with its names that the baseline does not contain."""
    if not finding.fails:
        return finding
    new_names = set()
    entries = _entries_of(group, finding)
    for entry in entries:
        possible_entries = _without_facts([entry]) | {entry}
        if accepted.isdisjoint(possible_entries):
            new_names.add(entry.name)
    # A finding without any name is never accepted.
    if entries and not new_names:
        return replace(finding, accepted=True)
    sorted_names = tuple(sorted(new_names))
    fact = Fact.NOT_IN_BASELINE(names=sorted_names)
    return replace(finding, new=sorted_names, facts=(fact, *finding.facts))


def _find_fixed(report: Report, accepted: Known) -> Known:
    """Return the compared entries of a baseline without a finding in the report.

    Excluded and incomparable tensors do not count as compared. If a file is unreadable or
    missing, nothing counts as fixed, because the differing rank may have written it.
    """
    if report.unreadable:
        return frozenset()
    present: set[Entry] = set()
    coverage: dict[str, _Coverage] = defaultdict(_Coverage)
    for group in report.groups:
        run = _label(group)
        coverage[run].add(group)
        for finding in group.findings:
            present |= _entries_of(group, finding)

    absent = accepted - present - _without_facts(present)
    fixed = set()
    for entry in absent:
        # A run outside the report covers nothing.
        if coverage[entry.run].includes(entry):
            fixed.add(entry)
    return frozenset(fixed)


def _lacks_ranks(group: Group) -> bool:
    """Whether the metadata records more ranks than were compared."""
    world_size = group.evidence.metadata.world_size or 0
    return world_size > len(group.replicas)


class _Coverage:
    """The compared tensors of a run. Without any compared group, it includes no entry."""

    def __init__(self) -> None:
        """Begin without any group."""
        self._groups = 0
        self._incomplete_groups = 0
        self._present: set[str] = set()
        self._compared: set[str] = set()

    def add(self, group: Group) -> None:
        """Add the tensors of a step, if all of its ranks were compared."""
        if group.verdict not in _OF_COMPARED or _lacks_ranks(group):
            return
        self._groups += 1
        # Excluded tensors may be those of the entry.
        self._incomplete_groups += bool(group.left_out)
        uncompared = with_status(group.tensors, "not_compared")
        # Missing tensors and other shapes are compared: they differ.
        skipped = set(list_names(uncompared)).difference(list_names(out_of_sync(group)))
        names = group.evidence.names.keys()
        self._present |= names
        self._compared |= names - skipped

    def includes(self, entry: Entry) -> bool:
        """Whether an entry was compared, or is no longer in the checkpoints."""
        is_present = entry.name in self._present
        if is_present and entry.kind != "value":
            return entry.name in self._compared
        # Without any group, nothing was compared.
        return self._groups > self._incomplete_groups == 0


def _group_by_code(fixed: Known, run: str) -> tuple[Fixed, ...]:
    """Return the fixed entries of a run, sorted by code and name."""
    names_of_codes: dict[str, list[str]] = defaultdict(list)
    for entry in sorted(fixed):
        if entry.run == run:
            names_of_codes[entry.code].append(entry.name)
    records = []
    for code, names in names_of_codes.items():
        # The entries are sorted by kind before their names.
        names.sort()
        records.append(Fixed(code, tuple(names)))
    return tuple(records)
