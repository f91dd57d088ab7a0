"""Known findings: a file that people commit, so that only what is new fails.

    {
     "syncheck_baseline": 1,
     "accepted": {
      "ddp": {
       "SYN201": {
        "bn_mean": [
         "bn1.running_mean"
    ...

By run, code and kind it lists the tensors and values that a finding may cover. Under codes of several kinds of facts,
the kind says which: `parameter (shape)`; an entry without it, of an older syncheck, is of any. Neither gaps nor ranks
stand in it: gaps vary from one training to the next, and the suspects do where no majority tells them, or where there
are more ranks. Nor do steps, run_ids, or folders unless they alone tell two runs apart. The text is sorted, a name a
line, so that a change of the file shows what was accepted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck import atomic
from syncheck.errors import UsageError, brief
from syncheck.messages import Fact, Problem
from syncheck.records import Fixed
from syncheck.verdicts import overall, with_findings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

SCHEMA = 1
_VERSION, _ACCEPTED = "syncheck_baseline", "accepted"
_OPTION = "--baseline"
_MOST_NAMED = 5
# Codes that cover facts of several kinds: who accepts another shape has not accepted another dtype.
_OF_FACTS = ("SYN102", "SYN215")


class Entry(NamedTuple):
    """One name of a finding that is accepted.

    kind: of the tensor, and the fact where a code covers several; `value` of what is no tensor.
    """

    run: str
    code: str
    kind: str
    name: str


Known = frozenset[Entry]


def read(path: str, *, may_be_missing: bool = False) -> Known:
    """Read a baseline. may_be_missing: one that is not there has nothing.

    Raises UsageError for a file that is missing, cannot be read, is of another version, or is no baseline.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        if may_be_missing and isinstance(error, FileNotFoundError):
            return frozenset()
        if isinstance(error, FileNotFoundError):
            raise UsageError(Problem.NO_BASELINE(path=path)) from None
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot read the baseline: {reason}") from None
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
    return frozenset(_entries(path, document[_ACCEPTED]))


def read_for_update(path: str) -> Known:
    """Read a baseline that is to be written: one that is not there yet has nothing.

    Raises UsageError as `read` does, and where the file could not be written, as far as that shows beforehand.
    """
    known = read(path, may_be_missing=True)
    with atomic.convert_errors(path, _OPTION):
        atomic.check_writable(path)
    return known


def _entries(path: str, accepted: object) -> Iterator[Entry]:
    """Take the file's tree apart, down to the lists of names. Raises UsageError where it is another one."""
    for run, codes in _items(path, _ACCEPTED, accepted):
        for code, kinds in _items(path, brief(run), codes):
            for kind, names in _items(path, f"{brief(run)}, {brief(code)}", kinds):
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    place = f"{brief(run)}, {brief(code)}, {brief(kind)}"
                    raise UsageError(f"{path}: not a baseline: {place}: needs a list of names, found {brief(names)}")
                yield from (Entry(run, code, kind, name) for name in names)


def _items(path: str, place: str, value: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a baseline: {place}: needs an object, found {brief(value)}")
    return list(value.items())


def written(known: Known) -> str:
    """Return the text of a baseline, in ASCII whatever the names are: the same for the same entries."""
    tree: dict[str, Any] = {}
    for entry in sorted(known):
        names = tree.setdefault(entry.run, {}).setdefault(entry.code, {}).setdefault(entry.kind, [])
        names.append(entry.name)
    return json.dumps({_VERSION: SCHEMA, _ACCEPTED: tree}, indent=1) + "\n"


def write(path: str, known: Known) -> None:
    """Write a baseline, whole or not at all. Raises UsageError where it cannot be written."""
    with atomic.convert_errors(path, _OPTION):
        atomic.replace_file(path, written(known))


def accepted(report: Report, known: Known) -> Report:
    """Return a report in which findings that a baseline has do not fail, with what it lacks and what is gone.

    A finding is accepted when the baseline has all of its tensors and values under its run, code and kind. One that
    covers more than that fails, and names what is new.
    """
    last = {_label(group): number for number, group in enumerate(report.groups)}
    gone = _gone(report, known)
    groups = []
    for number, group in enumerate(report.groups):
        made = group
        if group.verdict != "alone":
            made = with_findings(group, tuple(_looked_up(group, finding, known) for finding in group.findings))
        if last[_label(group)] == number:
            made = replace(made, fixed=_by_code(gone, _label(group)))
        groups.append(made)
    return replace(report, groups=tuple(groups), verdict=overall(groups, report.unreadable))


def updated(report: Report, known: Known) -> Known:
    """Return a baseline that accepts what fails in a report, and has nothing that is fixed.

    What the report did not look at stays. Raises UsageError where the report could not tell: that cannot be accepted.
    """
    if report.unreadable:
        first = report.unreadable[0]
        raise UsageError(f"the baseline is not updated: {first.path} could not be read, and may hide what it has")
    if not any(group.verdict in ("in_sync", "out_of_sync") for group in report.groups):
        raise UsageError("the baseline is not updated: nothing was compared")
    found = failing(report)
    return (known - _gone(report, known) - {_older(entry) for entry in found}) | found


def failing(report: Report) -> Known:
    """Return the entries that accept all that fails in a report, or would without its baseline."""
    return frozenset(
        entry
        for group in report.groups
        for finding in group.findings
        if finding.severity != "info" and not finding.allowed
        for entry in _of(group, finding)
    )


def change(before: Known, after: Known) -> str:
    """Say in words what an update did."""
    runs = len({entry.run for entry in after})
    return (
        f"{len(after)} name{'s' * (len(after) != 1)} in {runs} run{'s' * (runs != 1)} accepted: "
        f"{len(after - before)} added, "
        f"{len(before - after)} removed"
    )


def _label(group: Group) -> str:
    return group.label or group.run


def _of(group: Group, finding: Finding) -> set[Entry]:
    """Return what an acceptance of a finding would say."""
    diffs = {diff.name: diff for diff in group.tensors}
    kinds = {name: _kinds(diffs[name], finding.code) if name in diffs else ["other"] for name in finding.tensors}
    found = {Entry(_label(group), finding.code, kind, name) for name, of in kinds.items() for kind in of}
    return found | {Entry(_label(group), finding.code, "value", name) for name in finding.values}


def _kinds(diff: TensorDiff, code: str) -> list[str]:
    """Return under which kinds a tensor is listed: more than one where several things are wrong with it."""
    if code not in _OF_FACTS:
        return [diff.kind]
    reasons = [
        fact.reason if fact.reason in ("missing", "shape", "dtype") else "values" for fact in diff.facts or (diff,)
    ]
    if code == "SYN102":
        reasons = [reason for reason in reasons if reason in ("shape", "dtype")]
    return [f"{diff.kind} ({reason})" for reason in reasons]


def _older(entry: Entry) -> Entry:
    """Return the entry as a syncheck wrote it that did not tell facts apart."""
    return entry._replace(kind=entry.kind.partition(" (")[0])


def _looked_up(group: Group, finding: Finding, known: Known) -> Finding:
    if not finding.fails:
        return finding
    covered = _of(group, finding)
    new = tuple(sorted({entry.name for entry in covered if known.isdisjoint((entry, _older(entry)))}))
    if covered and not new:
        return replace(finding, accepted=True)
    return replace(finding, new=new, facts=(Fact.NOT_IN_BASELINE(names=new), *finding.facts))


def _gone(report: Report, known: Known) -> Known:
    """Return what a baseline has and the report does not, of what it looked at.

    A tensor that the options leave out, or that could not be compared, was not looked at. Nor was anything for sure
    where a file could not be read, or is not there: it may be that of the odd rank.
    """
    if report.unreadable:
        return frozenset()
    runs: dict[str, list[Group]] = defaultdict(list)
    for group in report.groups:
        if group.verdict in ("in_sync", "out_of_sync") and not _lacks_ranks(group):
            runs[_label(group)].append(group)
    found = {entry for group in report.groups for finding in group.findings for entry in _of(group, finding)}
    found |= {_older(entry) for entry in found}
    seen = {run: _Seen(groups) for run, groups in runs.items()}
    return frozenset(entry for entry in known - found if entry.run in seen and seen[entry.run].has(entry))


def _lacks_ranks(group: Group) -> bool:
    return group.evidence.metadata is not None and (group.evidence.metadata.world_size or 0) > len(group.replicas)


class _Seen:
    """What was looked at of a run."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._whole = not any(group.left_out for group in groups)
        self._compared = {
            name
            for group in groups
            for name in group.evidence.names.keys() - {diff.name for diff in group.tensors if _is_passed_over(diff)}
        }
        self._named = {name for group in groups for name in group.evidence.names}

    def has(self, entry: Entry) -> bool:
        """Whether a name was compared, or is no more in the checkpoints."""
        if entry.kind != "value" and entry.name in self._named:
            return entry.name in self._compared
        return self._whole


def _is_passed_over(diff: TensorDiff) -> bool:
    return diff.status == "not_compared" and not diff.out_of_sync


def _by_code(gone: Known, run: str) -> tuple[Fixed, ...]:
    codes: dict[str, list[str]] = defaultdict(list)
    for entry in sorted(gone):
        if entry.run == run:
            codes[entry.code].append(entry.name)
    return tuple(Fixed(code, tuple(sorted(names))) for code, names in codes.items())
