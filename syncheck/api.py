"""The entry point of comparisons, for the command line, the pytest plugin and users."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck import kinds, layout, series
from syncheck import paths as files
from syncheck.comparison import group as comparison
from syncheck.comparison import reference
from syncheck.comparison.group import Selection, compare_group
from syncheck.comparison.values import has_counted_values
from syncheck.errors import CheckpointError, OptionError, UsageError
from syncheck.evidence.stale import add_stale_ranks
from syncheck.kernel.blocks import broken_files
from syncheck.layout.groups import last_steps
from syncheck.messages import Note
from syncheck.names import normalize
from syncheck.omissions import shared_files, without_aliases
from syncheck.records import Alias, Report, Unreadable
from syncheck.tolerance import tolerances
from syncheck.verdicts import judge_group, overall

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Any

    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import Comparison

ONLY = {
    "params": kinds.PARAMETERS,
    "buffers": kinds.BUFFERS,
    "optimizer": kinds.OPTIMIZER,
    "rng": frozenset({"rng"}),
}


# Options that are overridden together: giving any of them resets the others to their defaults.
TOLERANCE = ("rtol", "atol", "ulp", "close", "tolerance")


@dataclass(frozen=True, slots=True)
class Options:
    """How to compare. only: of `params`, `buffers`, `optimizer`, `rng`; empty for all but rng.

    include, exclude: globs of whole tensor names. buffers: globs of names that are buffers, where the files do not say.
    rtol and atol (both), ulp: what differs less is `close`; off by default. close: the tolerance of torch.testing for
    each dtype instead. tolerance: by kind or glob of names `"close"`, `"bitwise"` or a dict of rtol, atol, ulp; names
    come before kinds, the first glob that matches counts, and the options before are for the rest.
    allow: codes of findings that do not fail. baseline: a file that `syncheck compare --update-baseline` wrote; what it
    has does not fail either. It is for checkpoints: what is in memory is compared without it.
    group_by: a regular expression over paths instead of the automatic grouping. reference: the path or rank of the
    replica that differences are described against, in place of the majority. jobs: threads for large tensors; by
    default as many as there are processors, at most 4. quick: by stored checksums only. rng: compare random number
    states too, beside all the rest.
    Raises OptionError, a UsageError, for values that make no sense.
    """

    only: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None
    close: bool = False
    tolerance: Mapping[str, object] = field(default_factory=dict, hash=False)
    allow: tuple[str, ...] = ()
    baseline: str | None = None
    group_by: str | None = None
    reference: str | int | None = None
    jobs: int | None = None
    quick: bool = False
    rng: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name in self.only:
            if name not in ONLY:
                raise OptionError(f"needs one of {', '.join(ONLY)}", only=name)
        if self.allow:
            from syncheck.diagnose import RULES

            known = {rule.CODE for rule in RULES}
            for code in self.allow:
                if code.upper() not in known:
                    meant = [f"; its code is {rule.CODE}" for rule in RULES if code.lower() == rule.SLUG]
                    raise OptionError(f"no such code{''.join(meant) or '; syncheck explain lists all'}", allow=code)
        if self.group_by is not None:
            try:
                re.compile(self.group_by)
            except re.error as error:
                raise OptionError(f"not a regular expression: {error}", group_by=self.group_by) from None
        if self.jobs is not None and self.jobs < 1:
            raise OptionError("needs a number of at least 1", jobs=self.jobs)
        self.selection()  # the tolerances check themselves

    def _check_types(self) -> None:
        for name in ("only", "include", "exclude", "buffers", "allow"):
            value: object = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(part, str) for part in value):
                raise OptionError("needs a tuple of texts", **{name: value})
        numbers: tuple[tuple[str, Any, str], ...] = (
            ("rtol", (int, float), "a number"),
            ("atol", (int, float), "a number"),
            ("ulp", int, "a whole number"),
            ("baseline", str, "a path"),
            ("group_by", str, "a regular expression"),
            ("reference", (str, int), "a path or a rank"),
            ("jobs", int, "a whole number"),
        )
        for name, types, wanted in numbers:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, types)):
                raise OptionError(f"needs {wanted}", **{name: value})
        for name in ("close", "quick", "rng"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError("needs True or False", **{name: getattr(self, name)})
        if not isinstance(self.tolerance, Mapping) or not all(isinstance(key, str) for key in self.tolerance):
            raise OptionError("needs a dict by kind or glob of names", tolerance=self.tolerance)

    def selection(self, rank: int | None = None) -> Selection:
        """Return what of this concerns the comparison of one group. rank: the reference's in that group."""
        only = frozenset().union(*(ONLY[name] for name in self.only))
        excused = tolerances(
            rtol=self.rtol,
            atol=self.atol,
            ulp=self.ulp,
            close=self.close,
            table=self.tolerance,
            kinds=kinds.KINDS,
        )
        return Selection(
            only,
            self.include,
            self.exclude,
            self.buffers,
            excused,
            reference=rank,
            jobs=self.jobs,
            quick=self.quick,
            rng=self.rng,
        )


def changed(options: Options, **given: Any) -> Options:
    """Return options with other values; None is the default of a field. A given tolerance replaces all tolerances."""
    fresh = Options()
    found = fresh if any(given.get(name) is not None for name in TOLERANCE) else options
    filled = {name: getattr(fresh, name) if value is None else value for name, value in given.items()}
    return replace(options, **{name: getattr(found, name) for name in TOLERANCE} | filled)


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint, or a folder with a checkpoint."""
    return files.holds_checkpoint(str(path))


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoints under some paths, opened and grouped into replicas, before the comparison."""

    groups: tuple[ReplicaGroup, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Number of other files in the given folders."""
    aliases: tuple[Alias, ...] = ()
    """Links to other replicas."""
    idle: tuple[str, ...] | None = None
    """Globs of tolerances without a matching tensor; None if unknown."""


def find(*paths: str | os.PathLike[str], options: Options | None = None) -> Found:
    """Open the checkpoints under the paths and group them into replicas.

    paths: files, folders or globs. Unreadable files are listed in `unreadable`. Raises UsageError if there is
    no path, a glob has no match, a folder has no checkpoint, no replica is the reference, or the baseline cannot be
    read.
    """
    options = options or Options()
    if options.baseline is not None:
        from syncheck import baseline

        baseline.read(options.baseline)  # report errors of the baseline before the comparison
    if not paths:
        raise UsageError("no path given; pass checkpoint files, folders or globs, as in: syncheck compare ckpts/*.pth")
    opened = files.open_all([str(path) for path in paths])
    snapshots, linked = without_aliases(opened.snapshots)
    spelled = files.alike([s.path for s in snapshots] + list(opened.roots.values()))
    groups = layout.group(snapshots, options.group_by, opened.roots, spelled)
    unreadable = (*opened.unreadable, *(found for replicas in groups for found in shared_files(replicas.ranks)))
    reference.check_reference(options.reference, groups, unreadable)
    return Found(groups, unreadable, opened.skipped, (*opened.aliases, *linked), _idle(groups, options))


def kinds_in(replicas: ReplicaGroup, options: Options | None = None) -> tuple[str, ...]:
    """Return the kinds of tensors to compare in a group, without reading tensors.

    The last kind is `value` if the files have Python values whose differences count, such as the step.
    """
    counted = any(has_counted_values(snapshot) for _, snapshot in replicas.ranks)
    return comparison.kinds_in(replicas, (options or Options()).selection()) + (("value",) if counted else ())


def judge(found: Found, options: Options | None = None, *, histograms: bool = False) -> Report:
    """Compare the replicas of each group, and diagnose differences.

    histograms: add histograms to the tensors that differ most at the last step of each run. Files with read
    errors are listed as unreadable, and the verdict is then never "in sync".
    """
    options = options or Options()
    unreadable = list(found.unreadable)
    last = last_steps(found.groups) if histograms else ()
    compared = [
        _compare(replicas, options, unreadable, histograms=any(replicas is one for one in last))
        for replicas in found.groups
    ]
    groups = add_stale_ranks(compared, unreadable, options.jobs, quick=options.quick)
    if len(groups) > 1 and not options.quick:  # quick comparisons never read tensors
        from syncheck.evidence.free_running import add_free_running

        groups = add_free_running(groups, compared, unreadable, options.jobs)
    groups = _with_note(groups, _idle(found.groups, options) if found.idle is None else found.idle)
    runs = series.by_run(groups)
    allow = frozenset(code.upper() for code in options.allow)
    judged = tuple(judge_group(group, runs.get(group.run, ()), allow) for group in groups)
    report = Report(
        verdict=overall(judged, unreadable),
        groups=judged,
        unreadable=tuple(dict.fromkeys(unreadable)),  # a file may fail in several comparisons
        skipped=found.skipped,
        aliases=found.aliases,
        quick=options.quick,
        drift=series.drifts(runs),
        closures=series.closures(runs),
    )
    if options.baseline is None:
        return report
    from syncheck import baseline

    return baseline.apply_baseline(report, baseline.read(options.baseline))


def compare(*paths: str | os.PathLike[str], options: Options | None = None, histograms: bool = False) -> Report:
    """Compare the replicas in each group of the checkpoints under the paths, and diagnose differences.

    paths: files, folders or globs. options: options of the comparison; bitwise by default. histograms: add histograms
    to the tensors that differ most at the last step of each run, for HTML reports.

        report = compare("ckpts/*.pth", options=Options(allow=("SYN201",)))
        print(report.verdict, report.counts.different)

    `report.exit_code` is the exit code of the command line. Memory does not grow with the size of tensors. Unreadable
    files are listed in `report.unreadable`, and the verdict is then never "in sync". Raises UsageError if there is no
    path, a glob has no match, or a folder has no checkpoint.
    """
    return judge(find(*paths, options=options), options, histograms=histograms)


def _compare(
    replicas: ReplicaGroup, options: Options, unreadable: list[Unreadable], *, histograms: bool
) -> tuple[Comparison, ReplicaGroup]:
    """Compare a group, without files with read errors. Also return the compared replicas."""
    while True:
        try:
            rank = reference.find_reference_rank(options.reference, replicas)
            return compare_group(replicas, replace(options.selection(rank), histograms=histograms)), replicas
        except CheckpointError as error:
            errors = broken_files([snapshot.tensors.values() for _, snapshot in replicas.ranks], error)
            # The file may be part of a folder that is one checkpoint.
            left = tuple(
                (rank, s)
                for rank, s in replicas.ranks
                if not any(f"{e.path}/".startswith(f"{s.path}/") for e in errors)
            )
            if len(left) in (0, len(replicas.ranks)):
                raise
            unreadable += [Unreadable(broken.path, broken.reason) for broken in errors]
            replicas = replace(replicas, ranks=left)


def _idle(groups: Sequence[ReplicaGroup], options: Options) -> tuple[str, ...]:
    """Return the globs of tolerances without a matching tensor, which are probably misspelled."""
    table = options.selection().tolerance
    if not table.names or not groups:
        return ()
    names = (normalize(snapshot.tensors).values() for replicas in groups for _, snapshot in replicas.ranks)
    return table.idle(frozenset().union(*names))


def _with_note(groups: list[Comparison], idle: Sequence[str]) -> list[Comparison]:
    """Add a note about unused tolerances, which concerns all groups, to the first group."""
    if not idle or not groups:
        return groups
    note = Note.UNUSED_TOLERANCES(names=tuple(idle), kinds=tuple(kinds.KINDS))
    return [replace(groups[0], notes=(*groups[0].notes, note)), *groups[1:]]
