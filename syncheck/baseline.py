"""Baselines: committed files of known findings, so that only new findings fail.

    {
     "syncheck_baseline": 1,
     "accepted": {
      "ddp": {
       "SYN201": {
        "bn_mean": [
         "bn1.running_mean"
    ...

A baseline lists tensors and values by run, code and kind. If a code covers several kinds of facts, the kind includes
the fact, as in `parameter (shape)`; entries without a fact, written by an older syncheck, accept any fact. A baseline
does not contain differences, ranks, steps or run ids, because they vary from one training to the next. It contains
folders only if two runs have the same name. The text is sorted, with one name per line, so that a diff shows new
entries.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck import atomic
from syncheck.errors import UsageError, brief
from syncheck.messages import Fact
from syncheck.records import Fixed
from syncheck.verdicts import combine_verdicts, with_findings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

SCHEMA = 1
_VERSION, _ACCEPTED = "syncheck_baseline", "accepted"
_OPTION = "{baseline}"
# Codes with several kinds of facts: accepting a different shape does not accept a different dtype.
_OF_FACTS = ("SYN102", "SYN215")


class Entry(NamedTuple):
    """An accepted name of a finding.

    kind: the kind of the tensor, with the fact for codes in `_OF_FACTS`; `value` for a Python value.
    """

    run: str
    code: str
    kind: str
    name: str


Known = frozenset[Entry]


def read(path: str, *, may_be_missing: bool = False) -> Known:
    """Read a baseline. may_be_missing: return an empty baseline if the file does not exist.

    Raises UsageError for a file that is missing, unreadable, of another version, or not a baseline.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        if may_be_missing and isinstance(error, FileNotFoundError):
            return frozenset()
        if isinstance(error, FileNotFoundError):
            raise UsageError(f"{path}: no such baseline; create it with `syncheck compare --update-baseline`") from None
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: the baseline cannot be read: {reason}") from None
    try:
        document = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a baseline: not JSON: {error}") from None
    version = document.get(_VERSION) if isinstance(document, dict) else None
    if version is None:
        raise UsageError(f"{path}: not a baseline: it has no {_VERSION}")
    if version != SCHEMA or isinstance(version, bool):
        raise UsageError(f"{path}: a baseline of version {brief(version)}; this syncheck reads version {SCHEMA}")
    if document.keys() != {_VERSION, _ACCEPTED}:
        raise UsageError(f"{path}: not a baseline: needs {_VERSION} and {_ACCEPTED}, found {brief([*document])}")
    return frozenset(_parse_entries(path, document[_ACCEPTED]))


def read_for_update(path: str) -> Known:
    """Read a baseline that will be updated; a missing file is an empty baseline.

    Raises UsageError as `read` does, and if it is clear in advance that the file cannot be written.
    """
    known = read(path, may_be_missing=True)
    with atomic.convert_write_errors(path, _OPTION):
        atomic.check_writable(path)
    return known


def _parse_entries(path: str, accepted: object) -> Iterator[Entry]:
    """Yield the entries of a file. Raises UsageError for a value of the wrong type."""
    for run, codes in _list_items(path, _ACCEPTED, accepted):
        for code, kinds in _list_items(path, brief(run), codes):
            for kind, names in _list_items(path, f"{brief(run)}, {brief(code)}", kinds):
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    location = f"{brief(run)}, {brief(code)}, {brief(kind)}"
                    raise UsageError(f"{path}: not a baseline: {location}: needs a list of names, found {brief(names)}")
                yield from (Entry(run, code, kind, name) for name in names)


def _list_items(path: str, location: str, value: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a baseline: {location}: needs an object, found {brief(value)}")
    return list(value.items())


def format_baseline(known: Known) -> str:
    """Return the text of a baseline, which depends only on its entries. Other characters than ASCII are escaped."""
    tree: dict[str, Any] = {}
    for entry in sorted(known):
        names = tree.setdefault(entry.run, {}).setdefault(entry.code, {}).setdefault(entry.kind, [])
        names.append(entry.name)
    return json.dumps({_VERSION: SCHEMA, _ACCEPTED: tree}, indent=1) + "\n"


def write(path: str, known: Known) -> None:
    """Write a baseline atomically. Raises UsageError if it cannot be written."""
    with atomic.convert_write_errors(path, _OPTION):
        atomic.replace_file(path, format_baseline(known))


def accept_known(report: Report, known: Known) -> Report:
    """Return the report after accepting the findings of a baseline, with new names and resolved entries listed.

    A finding is accepted if the baseline lists all of its tensors and values under its run, code and kind. If some are
    missing, the finding fails and lists them as new.
    """
    last = {_get_label(group): number for number, group in enumerate(report.groups)}
    resolved = _find_resolved(report, known)
    groups = []
    for number, group in enumerate(report.groups):
        judged = group
        if group.verdict != "alone":
            judged = with_findings(group, tuple(_accept_finding(group, finding, known) for finding in group.findings))
        if last[_get_label(group)] == number:
            judged = replace(judged, fixed=_group_by_code(resolved, _get_label(group)))
        groups.append(judged)
    return replace(report, groups=tuple(groups), verdict=combine_verdicts(groups, report.unreadable))


def update(report: Report, known: Known) -> Known:
    """Return the baseline with new findings of a report, and without resolved entries.

    Entries that the report did not check are kept. Raises UsageError for an undecided report.
    """
    if report.unreadable:
        first = report.unreadable[0]
        raise UsageError(f"the baseline is not updated: {first.path} could not be read, and may contain known findings")
    if not any(group.verdict in ("in_sync", "out_of_sync") for group in report.groups):
        raise UsageError("the baseline is not updated: nothing was compared")
    failing = list_failing(report)
    return (known - _find_resolved(report, known) - {_remove_fact(entry) for entry in failing}) | failing


def list_failing(report: Report) -> Known:
    """Return entries for all findings that fail, or that fail without the baseline."""
    return frozenset(
        entry
        for group in report.groups
        for finding in group.findings
        if finding.severity != "info" and not finding.allowed
        for entry in _list_entries(group, finding)
    )


def describe_update(before: Known, after: Known) -> str:
    """Return a summary of an update: the numbers of accepted, added and removed names."""
    runs = len({entry.run for entry in after})
    return (
        f"{len(after)} name{'s' * (len(after) != 1)} in {runs} run{'s' * (runs != 1)} accepted: "
        f"{len(after - before)} added, "
        f"{len(before - after)} removed"
    )


def _get_label(group: Group) -> str:
    return group.label or group.run


def _list_entries(group: Group, finding: Finding) -> set[Entry]:
    """Return the entries that accept a finding."""
    diffs = {diff.name: diff for diff in group.tensors}
    kinds = {name: _list_kinds(diffs[name], finding.code) if name in diffs else ["other"] for name in finding.tensors}
    entries = {Entry(_get_label(group), finding.code, kind, name) for name, of in kinds.items() for kind in of}
    return entries | {Entry(_get_label(group), finding.code, "value", name) for name in finding.values}


def _list_kinds(diff: TensorDiff, code: str) -> list[str]:
    """Return the kinds that list a tensor: several if it has several facts."""
    if code not in _OF_FACTS:
        return [diff.kind]
    reasons = [
        fact.reason if fact.reason in ("missing", "shape", "dtype") else "values" for fact in diff.facts or (diff,)
    ]
    if code == "SYN102":
        reasons = [reason for reason in reasons if reason in ("shape", "dtype")]
    return [f"{diff.kind} ({reason})" for reason in reasons]


def _remove_fact(entry: Entry) -> Entry:
    """Return the entry without its fact, as written by an older syncheck."""
    return entry._replace(kind=entry.kind.partition(" (")[0])


def _accept_finding(group: Group, finding: Finding, known: Known) -> Finding:
    if not finding.fails:
        return finding
    entries = _list_entries(group, finding)
    new = tuple(sorted({entry.name for entry in entries if known.isdisjoint((entry, _remove_fact(entry)))}))
    if entries and not new:
        return replace(finding, accepted=True)
    return replace(finding, new=new, facts=(Fact.NOT_IN_BASELINE(names=new), *finding.facts))


def _find_resolved(report: Report, known: Known) -> Known:
    """Return the baseline's entries that the report checked and did not find.

    Tensors that were excluded or could not be compared count as not checked. If a file is missing or unreadable,
    nothing counts as checked, because it may be the file of the deviating rank.
    """
    if report.unreadable:
        return frozenset()
    runs: dict[str, list[Group]] = defaultdict(list)
    for group in report.groups:
        if group.verdict in ("in_sync", "out_of_sync") and not _lacks_ranks(group):
            runs[_get_label(group)].append(group)
    found = {entry for group in report.groups for finding in group.findings for entry in _list_entries(group, finding)}
    found |= {_remove_fact(entry) for entry in found}
    checked = {run: _CheckedNames(groups) for run, groups in runs.items()}
    return frozenset(entry for entry in known - found if entry.run in checked and checked[entry.run].includes(entry))


def _lacks_ranks(group: Group) -> bool:
    return group.evidence.metadata is not None and (group.evidence.metadata.world_size or 0) > len(group.replicas)


class _CheckedNames:
    """The names of a run that a report checked."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._complete = not any(group.left_out for group in groups)
        self._compared = {
            name
            for group in groups
            for name in group.evidence.names.keys() - {diff.name for diff in group.tensors if _is_skipped(diff)}
        }
        self._present = {name for group in groups for name in group.evidence.names}

    def includes(self, entry: Entry) -> bool:
        """Whether a name was compared, or no longer exists in the checkpoints."""
        if entry.kind != "value" and entry.name in self._present:
            return entry.name in self._compared
        return self._complete


def _is_skipped(diff: TensorDiff) -> bool:
    return diff.status == "not_compared" and not diff.out_of_sync


def _group_by_code(resolved: Known, run: str) -> tuple[Fixed, ...]:
    codes: dict[str, list[str]] = defaultdict(list)
    for entry in sorted(resolved):
        if entry.run == run:
            codes[entry.code].append(entry.name)
    return tuple(Fixed(code, tuple(sorted(names))) for code, names in codes.items())
