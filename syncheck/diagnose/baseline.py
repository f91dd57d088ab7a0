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

from syncheck.diagnose.verdicts import overall, with_findings
from syncheck.errors import UsageError
from syncheck.messages import Fact
from syncheck.records import Fixed
from syncheck.text import brief, system_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

SCHEMA = 1
_VERSION, _ACCEPTED = "syncheck_baseline", "accepted"
# Codes with several kinds of facts. Accepting a different shape does not accept a different dtype.
_OF_FACTS = ("SYN102", "SYN215")


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
    if content is None and may_be_missing:
        return frozenset()
    if content is None:
        raise UsageError(f"{path}: no such baseline; create it with --update-baseline")
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
    version = document.get(_VERSION) if isinstance(document, dict) else None
    if version is None:
        raise UsageError(f"{path}: not a baseline: it has no {_VERSION}")
    # True equals 1 in Python.
    if version != SCHEMA or isinstance(version, bool):
        raise UsageError(f"{path}: a baseline of version {brief(version)}; this syncheck reads version {SCHEMA}")
    if document.keys() != {_VERSION, _ACCEPTED}:
        raise UsageError(f"{path}: not a baseline: needs {_VERSION} and {_ACCEPTED}, found {brief([*document])}")


def _entries(path: str, accepted: object) -> Iterator[Entry]:
    """Yield the entries of the document. Raises UsageError if its structure is invalid."""
    for run, codes in _items(path, _ACCEPTED, accepted):
        for code, kinds in _items(path, brief(run), codes):
            for kind, names in _items(path, f"{brief(run)}, {brief(code)}", kinds):
                key = f"{brief(run)}, {brief(code)}, {brief(kind)}"
                for name in _check_names(path, key, names):
                    yield Entry(run, code, kind, name)


def _check_names(path: str, key: str, names: Any) -> list[str]:
    """Return a list of names. Raises UsageError for anything else."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: not a baseline: {key}: must be a list of names, found {brief(names)}")
    return names


def _items(path: str, key: str, value: object) -> list[tuple[str, Any]]:
    """Return the items of an object. Raises UsageError for anything else."""
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a baseline: {key}: must be an object, found {brief(value)}")
    return list(value.items())


def serialize(known: Known) -> str:
    """Return the text of a baseline, in ASCII. Equal entries give equal texts."""
    tree: dict[str, Any] = {}
    for entry in sorted(known):
        names = tree.setdefault(entry.run, {}).setdefault(entry.code, {}).setdefault(entry.kind, [])
        names.append(entry.name)
    return json.dumps({_VERSION: SCHEMA, _ACCEPTED: tree}, indent=1) + "\n"


def apply_baseline(report: Report, known: Known) -> Report:
    """Return the report with findings accepted by a baseline, and with new and fixed entries.

    A finding is accepted if the baseline contains all of its tensors and values under its run, code and kind. Otherwise
    it fails and lists the new tensors and values.
    """
    last_position = {_label(group): position for position, group in enumerate(report.groups)}
    fixed = _find_fixed(report, known)
    groups = []
    for position, group in enumerate(report.groups):
        judged = group
        if group.verdict != "alone":
            findings = [_check_finding(group, finding, known) for finding in group.findings]
            judged = with_findings(group, tuple(findings))
        # The last step of a run lists what is fixed.
        if last_position[_label(group)] == position:
            judged = replace(judged, fixed=_group_by_code(fixed, _label(group)))
        groups.append(judged)
    return replace(report, groups=tuple(groups), verdict=overall(groups, report.unreadable))


def update_baseline(report: Report, known: Known) -> Known:
    """Return a baseline that accepts all failing findings of a report, without fixed entries.

    Entries outside the report stay. Raises UsageError if files could not be read or nothing was compared.
    """
    # An unreadable file may hold the rank that differs.
    if report.unreadable:
        first = report.unreadable[0]
        raise UsageError(f"the baseline is not updated: {first.path} could not be read, so findings may be missing")
    if not any(map(_is_compared, report.groups)):
        raise UsageError("the baseline is not updated: nothing was compared")
    failing = find_failing(report)
    # The entries of older versions have no fact, and are replaced.
    replaced = frozenset(map(_without_fact, failing))
    return (known - _find_fixed(report, known) - replaced) | failing


def find_failing(report: Report) -> Known:
    """Return the entries for all findings of a report that fail, or would fail without a baseline."""
    entries: set[Entry] = set()
    for group in report.groups:
        for finding in group.findings:
            if finding.severity != "info" and not finding.allowed:
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


def _is_compared(group: Group) -> bool:
    """Whether the replicas of a group were compared."""
    return group.verdict in ("in_sync", "out_of_sync")


def _entries_of(group: Group, finding: Finding) -> set[Entry]:
    """Return the entries of a finding."""
    run, code = _label(group), finding.code
    diffs = {diff.name: diff for diff in group.tensors}
    entries = {Entry(run, code, "value", name) for name in finding.values}
    for name in finding.tensors:
        kinds = _find_kinds(diffs[name], code) if name in diffs else ["other"]
        entries.update(Entry(run, code, kind, name) for kind in kinds)
    return entries


def _find_kinds(diff: TensorDiff, code: str) -> list[str]:
    """Return the kinds under which a tensor is listed, one per fact."""
    if code not in _OF_FACTS:
        return [diff.kind]
    kinds = []
    for fact in diff.facts or (diff,):
        reason = fact.reason if fact.reason in ("missing", "shape", "dtype") else "values"
        # SYN102 covers no other facts.
        if code != "SYN102" or reason in ("shape", "dtype"):
            kinds.append(f"{diff.kind} ({reason})")
    return kinds


def _without_fact(entry: Entry) -> Entry:
    """Return the entry in the format of older versions, without the fact."""
    return entry._replace(kind=entry.kind.partition(" (")[0])


def _check_finding(group: Group, finding: Finding, known: Known) -> Finding:
    """Return the finding as accepted, or with its names that the baseline does not contain."""
    if not finding.fails:
        return finding
    entries = _entries_of(group, finding)
    new_entries = [entry for entry in entries if known.isdisjoint((entry, _without_fact(entry)))]
    if entries and not new_entries:
        return replace(finding, accepted=True)
    new_names = tuple(sorted({entry.name for entry in new_entries}))
    return replace(finding, new=new_names, facts=(Fact.NOT_IN_BASELINE(names=new_names), *finding.facts))


def _find_fixed(report: Report, known: Known) -> Known:
    """Return the compared entries of a baseline without a finding in the report.

    Excluded and incomparable tensors do not count as compared. If a file is unreadable or
    missing, nothing counts as fixed, because the differing rank may have written it.
    """
    if report.unreadable:
        return frozenset()
    present: set[Entry] = set()
    compared_groups: dict[str, list[Group]] = defaultdict(list)
    for group in report.groups:
        for finding in group.findings:
            present |= _entries_of(group, finding)
        if _is_compared(group) and not _lacks_ranks(group):
            compared_groups[_label(group)].append(group)

    coverage = {run: _Coverage(groups) for run, groups in compared_groups.items()}
    absent = known - present - frozenset(map(_without_fact, present))
    return frozenset(entry for entry in absent if entry.run in coverage and coverage[entry.run].includes(entry))


def _lacks_ranks(group: Group) -> bool:
    """Whether the metadata records more ranks than were compared."""
    return (group.evidence.metadata.world_size or 0) > len(group.replicas)


class _Coverage:
    """The compared tensors of a run."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """Collect the tensors of all steps."""
        self._complete = not any(group.left_out for group in groups)
        self._present: set[str] = set()
        self._compared: set[str] = set()
        for group in groups:
            names = group.evidence.names.keys()
            self._present |= names
            self._compared |= names - {diff.name for diff in group.tensors if _is_skipped(diff)}

    def includes(self, entry: Entry) -> bool:
        """Whether an entry was compared, or is no longer in the checkpoints."""
        if entry.kind != "value" and entry.name in self._present:
            return entry.name in self._compared
        return self._complete


def _is_skipped(diff: TensorDiff) -> bool:
    return diff.status == "not_compared" and not diff.out_of_sync


def _group_by_code(fixed: Known, run: str) -> tuple[Fixed, ...]:
    """Return the fixed entries of a run, sorted by code and name."""
    names_of_codes: dict[str, list[str]] = defaultdict(list)
    for entry in sorted(fixed):
        if entry.run == run:
            names_of_codes[entry.code].append(entry.name)
    return tuple(Fixed(code, tuple(sorted(names))) for code, names in names_of_codes.items())
