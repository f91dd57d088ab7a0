"""The one door to a comparison, for the command line, the pytest plugin and users."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck import comparison, kinds, layout, series
from syncheck import paths as files
from syncheck.comparison import Selection
from syncheck.comparison import compare as compare_group
from syncheck.diagnose import RULES, diagnose
from syncheck.errors import CheckpointError, UsageError
from syncheck.records import Report, Unreadable
from syncheck.tolerance import Tolerance
from syncheck.values import holds_counted

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from syncheck.layout_groups import Replicas
    from syncheck.records import Group, Verdict

ONLY = {
    "params": kinds.PARAMETERS,
    "buffers": kinds.BUFFERS,
    "optimizer": kinds.OPTIMIZER,
    "rng": frozenset({"rng"}),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to compare. only: of `params`, `buffers`, `optimizer`, `rng`; empty for all but rng.

    include, exclude: globs of whole tensor names. buffers: globs of names that are buffers, where the files do not say.
    rtol and atol (both), ulp: what differs less is `close`; off by default. allow: codes of findings that do not fail.
    group_by: a regular expression over paths instead of the automatic grouping.
    Raises UsageError for values that make no sense.
    """

    only: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None
    allow: tuple[str, ...] = ()
    group_by: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        known = {rule.CODE for rule in RULES}
        for name in self.only:
            if name not in ONLY:
                raise UsageError(f"only={name!r}: needs one of {', '.join(ONLY)}")
        for code in self.allow:
            if code.upper() not in known:
                raise UsageError(f"--allow {code}: no such finding; needs one of {', '.join(sorted(known))}")
        if self.group_by is not None:
            try:
                re.compile(self.group_by)
            except re.error as error:
                raise UsageError(f"--group-by {self.group_by!r}: not a regular expression: {error}") from None
        self.selection()  # the tolerance checks itself

    def _check_types(self) -> None:
        for name in ("only", "include", "exclude", "buffers", "allow"):
            value: object = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(part, str) for part in value):
                raise UsageError(f"{name}={value!r:.80}: needs a tuple of texts")
        for name, types, wanted in (
            ("rtol", (int, float), "a number"),
            ("atol", (int, float), "a number"),
            ("ulp", int, "a whole number"),
            ("group_by", str, "a regular expression"),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, types)):
                raise UsageError(f"{name}={value!r:.80}: needs {wanted}")

    def selection(self) -> Selection:
        """Return what of this concerns the comparison of one group."""
        only = frozenset().union(*(ONLY[name] for name in self.only))
        return Selection(only, self.include, self.exclude, self.buffers, Tolerance(self.rtol, self.atol, self.ulp))


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file that `find` would take from a folder, or a folder with such a file in it."""
    return files.holds_checkpoint(str(path))


@dataclass(frozen=True, slots=True)
class Found:
    """What lies under some paths: opened and sorted into groups of replicas, no tensor compared yet."""

    groups: tuple[Replicas, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Files in the folders given that are no checkpoints."""


def find(*paths: str | os.PathLike[str], options: Options | None = None) -> Found:
    """Open the checkpoints under the paths and sort them into groups of replicas.

    paths: files, folders or globs. Raises UsageError for a glob without a match, a folder without a checkpoint, or no
    path at all. Files that cannot be read do not raise: they are listed.
    """
    options = options or Options()
    if not paths:
        raise UsageError("no path given; needs checkpoint files, folders or globs, as in: syncheck compare ckpts/*.pth")
    opened = files.open_all([str(path) for path in paths])
    spelled = files.alike([s.path for s in opened.snapshots] + list(opened.roots.values()))
    grouped = layout.group(opened.snapshots, options.group_by, opened.roots, spelled)
    return Found(grouped, tuple(opened.unreadable), opened.skipped)


def kinds_in(replicas: Replicas, options: Options | None = None) -> tuple[str, ...]:
    """Name the kinds of what would be compared in a group, from the names alone: no tensor is read.

    The last is `value` where the files hold Python values that count, such as the step.
    """
    counted = any(holds_counted(snapshot) for _, snapshot in replicas.ranks)
    return comparison.kinds_in(replicas, (options or Options()).selection()) + (("value",) if counted else ())


def judge(found: Found, options: Options | None = None) -> Report:
    """Compare the replicas in each group, and diagnose what differs.

    A file that breaks while it is read is listed as unreadable, and the verdict is then never "in sync".
    """
    options = options or Options()
    unreadable = list(found.unreadable)
    selection = options.selection()
    groups = [_compare(replicas, selection, unreadable) for replicas in found.groups]
    runs = series.by_run(groups)
    allow = frozenset(code.upper() for code in options.allow)
    judged = tuple(_judge(group, runs.get(group.run, ()), allow) for group in groups)
    return Report(
        verdict=_verdict(judged, unreadable),
        groups=judged,
        unreadable=tuple(unreadable),
        skipped=found.skipped,
        drift=series.drifts(runs),
        closures=series.closures(runs),
    )


def compare(*paths: str | os.PathLike[str], options: Options | None = None) -> Report:
    """Compare the replicas in each group of the checkpoints under the paths, and diagnose what differs.

    paths: files, folders or globs. Returns the whole answer; `report.exit_code` is the command line's.
    Raises UsageError for a glob without a match, a folder without a checkpoint, or no path at all. Files that cannot
    be read do not raise: they are listed, and the verdict is then never "in sync".
    """
    return judge(find(*paths, options=options), options)


def _compare(replicas: Replicas, selection: Selection, unreadable: list[Unreadable]) -> Group:
    """Compare a group; a file that breaks while it is read is taken out and the others are compared."""
    while True:
        try:
            return compare_group(replicas, selection)
        except CheckpointError as error:
            left = tuple((rank, s) for rank, s in replicas.ranks if s.path != error.path)
            if len(left) in (0, len(replicas.ranks)):
                raise
            unreadable.append(Unreadable(error.path, error.reason))
            replicas = replace(replicas, ranks=left)


def _judge(group: Group, run: Sequence[Group], allow: frozenset[str]) -> Group:
    """Add the findings and the verdict. What a series tells stands in the run's last step."""
    if group.verdict == "alone":
        return group
    findings = diagnose(group, tuple(run) if run and run[-1] is group else (), allow)
    verdict: Verdict = "in_sync"
    if any(finding.fails for finding in findings):
        verdict = "out_of_sync"
    elif not _compared(group):
        verdict = "undecided"
    return replace(group, findings=findings, verdict=verdict)


def _compared(group: Group) -> int:
    """How many tensors were compared that say something of a model; an optimizer's step counters do not."""
    return sum(counts.compared for kind, counts in group.kinds.items() if kind != "optimizer_step")


def _verdict(groups: Iterable[Group], unreadable: Iterable[Unreadable]) -> Verdict:
    found = {group.verdict for group in groups}
    if "out_of_sync" in found:
        return "out_of_sync"
    return "in_sync" if "in_sync" in found and not list(unreadable) else "undecided"
