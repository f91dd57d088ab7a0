"""The entry point of comparisons, for the command line, the pytest plugin and users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck.comparison import reference
from syncheck.comparison import replicas as compared
from syncheck.comparison.replicas import compare_group
from syncheck.diagnose import series
from syncheck.diagnose.verdicts import judge_group, overall
from syncheck.errors import CheckpointError, UsageError
from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import select_last_steps
from syncheck.layout.second_weights import separate_copies
from syncheck.messages import Note
from syncheck.options import DiffOptions, build_selection
from syncheck.options import Options as Options  # users import it from here too
from syncheck.readers import find as finder
from syncheck.readers.find import find_shared_files, open_checkpoints, remove_aliases, unify_paths
from syncheck.records import Alias, Report, Unreadable
from syncheck.tensors import kinds
from syncheck.tensors.blocks import broken_files
from syncheck.tensors.names import normalize
from syncheck.tensors.value_kinds import has_counted_values

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from syncheck.conversion.sides import Source
    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import Comparison


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `find` would open the path: a checkpoint, or a folder with a checkpoint in it."""
    return finder.holds_checkpoint(str(path))


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoints under some paths, opened and grouped; no tensor has been compared."""

    groups: tuple[ReplicaGroup, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Number of other files in the given folders."""
    aliases: tuple[Alias, ...] = ()
    """Links to the file of another replica."""
    idle: tuple[str, ...] | None = None
    """Globs of tolerances that match no tensor of any group; None if they have not been matched yet."""


def find(*paths: str | os.PathLike[str], options: Options | None = None) -> Found:
    """Open the checkpoints under the paths and group the replicas.

    paths: files, folders or globs. Raises UsageError for a glob without a match, a folder without a checkpoint, no path
    at all, and an unknown reference. A checkpoint that cannot be read does not raise: it is listed in `unreadable`.
    """
    options = options or Options()
    if not paths:
        raise UsageError("no path given; pass checkpoint files, folders or globs, as in: syncheck compare ckpts/*.pth")
    opened = open_checkpoints([str(path) for path in paths])
    snapshots, linked = remove_aliases(separate_copies(opened.snapshots))
    spelled = unify_paths([s.path for s in snapshots] + list(opened.roots.values()))
    groups = group_replicas(snapshots, options.group_by, opened.roots, spelled)
    unreadable = (*opened.unreadable, *(found for replicas in groups for found in find_shared_files(replicas.ranks)))
    reference.check_reference(options.reference, groups, unreadable)
    return Found(groups, unreadable, opened.skipped, (*opened.aliases, *linked), _idle(groups, options))


def kinds_in(replicas: ReplicaGroup, options: Options | None = None) -> tuple[str, ...]:
    """Return the kinds of tensors that a comparison of the group would include, without reading any tensor.

    The last kind is `value` if the files hold Python values that are compared, such as the step.
    """
    counted = any(has_counted_values(snapshot) for _, snapshot in replicas.ranks)
    return compared.kinds_in(replicas, build_selection(options or Options())) + (("value",) if counted else ())


def judge(found: Found, options: Options | None = None, *, histograms: bool = False) -> Report:
    """Compare the replicas in each group, and diagnose the differences. `finish` then applies the baseline.

    histograms: add histograms of the tensors that differ most at the last step of each run (for HTML pages). If a file
    breaks while it is read, it is listed as unreadable, and the verdict is never "in sync".
    """
    options = options or Options()
    unreadable = list(found.unreadable)
    last = select_last_steps(found.groups) if histograms else ()
    compared = [
        _compare(replicas, options, unreadable, histograms=any(replicas is one for one in last))
        for replicas in found.groups
    ]
    groups = [group for group, _ in compared]
    if len(groups) > 1:
        from syncheck.comparison.stale import add_stale_ranks  # compares a rank with earlier steps

        groups = add_stale_ranks(compared, unreadable, options.jobs, quick=options.quick)
    if len(groups) > 1 and not options.quick:  # quick reads no tensor
        from syncheck.comparison.free_running import add_free_running

        groups = add_free_running(groups, compared, unreadable, options.jobs)
    groups = _with_note(groups, _idle(found.groups, options) if found.idle is None else found.idle)
    groups = series.follow_not_finite(groups)
    runs = series.by_run(groups)
    allow = frozenset(code.upper() for code in options.allow)
    judged = tuple(judge_group(group, runs.get(group.run, ()), allow) for group in groups)
    if len([group for group in judged if group.findings]) > 1:
        from syncheck.diagnose.course import decide_over_steps  # only needed if several steps differ

        judged = decide_over_steps(judged)
    return Report(
        verdict=overall(judged, unreadable),
        groups=judged,
        unreadable=tuple(dict.fromkeys(unreadable)),  # a file may break in more than one comparison
        skipped=found.skipped,
        aliases=found.aliases,
        quick=options.quick,
        drift=series.drifts(runs),
        closures=series.closures(runs),
    )


def compare(*paths: str | os.PathLike[str], options: Options | None = None, histograms: bool = False) -> Report:
    """Compare the replicas in each group of the checkpoints under the paths, and diagnose the differences.

    paths: files, folders or globs. options: how to compare; bitwise by default. histograms: add histograms of the
    tensors that differ most at the last step of each run (for HTML pages).

        report = compare("ckpts/*.pth", options=Options(allow=("SYN201",)))
        print(report.verdict, report.counts.different)

    Returns the report; `report.exit_code` is the exit code of the command line. Memory does not grow with the size of
    tensors. Raises UsageError for a glob without a match, a folder without a checkpoint, no path at all, and a baseline
    that cannot be read. A checkpoint that cannot be read does not raise: it is listed, and the verdict is never "in
    sync".
    """
    options = options or Options()
    check_baseline(options)
    return finish(judge(find(*paths, options=options), options, histograms=histograms), options)


def diff(a: Source, b: Source, *, options: DiffOptions | None = None, histograms: bool = False) -> Report:
    """Compare two models in any layout, and diagnose the differences.

    a: the source. b: the copy. Each is a file, folder or glob, several of them joined by commas, or a sequence of
    paths: the files of all ranks that hold parts or copies of one model. options: how to compare; bitwise by default.
    histograms: add what only an HTML page shows: histograms, and how each side stores its tensors.

        report = diff("ckpts/fsdp_rank*.pth", "hf_export/")
        print(report.verdict, report.counts.different)

    Copies within a side are compared first. Returns the report, whose last group compares A (rank 0) with B (rank 1).
    Memory does not grow with the size of tensors. Raises UsageError if a side is not one model or the models have no
    tensor in common, and CheckpointError if parts are missing or a file cannot be read.
    """
    from syncheck.conversion.diff import diff as compare_models

    options = options or DiffOptions()
    check_baseline(options)
    return finish(compare_models(a, b, options=options, histograms=histograms), options)


def check_baseline(options: Options, *, update: bool = False) -> None:
    """Check the baseline of the options, if any, before the comparison.

    update: the file will be updated, so it may be missing, and must be writable. Raises UsageError if the file cannot
    be used.
    """
    if options.baseline is None:
        return
    from syncheck.diagnose import baseline  # most runs have none
    from syncheck.readers import outputs

    baseline.read(options.baseline, may_be_missing=update)
    if update:
        outputs.check(options.baseline, "baseline")


def finish(report: Report, options: Options, *, may_be_missing: bool = False, accept_all: bool = False) -> Report:
    """Return a report with the findings in the baseline of the options accepted. Every comparison ends here.

    may_be_missing: whether a missing file is an empty baseline. accept_all: accept all findings, because they become
    the content of the file. Raises UsageError if the file cannot be read.
    """
    if options.baseline is None:
        return report
    from syncheck.diagnose import baseline

    if accept_all:
        accepted = baseline.find_failing(report)
    else:
        accepted = baseline.read(options.baseline, may_be_missing=may_be_missing)
    return baseline.apply_baseline(report, accepted)


def update_baseline(report: Report, path: str) -> str:
    """Add the failing findings of a report to a baseline, remove fixed ones, and return a description of the change.

    The file is replaced atomically. Raises UsageError if it cannot be written, and for an undecided report.
    """
    from syncheck.diagnose import baseline
    from syncheck.readers import outputs

    before = baseline.read(path, may_be_missing=True)
    after = baseline.update_baseline(report, before)
    outputs.write(path, baseline.serialize(after), "baseline")
    return f"{path}: {baseline.describe_change(before, after)}"


def _compare(
    replicas: ReplicaGroup, options: Options, unreadable: list[Unreadable], *, histograms: bool
) -> tuple[Comparison, ReplicaGroup]:
    """Compare a group without the files that break while they are read.

    Also returns the group without these files.
    """
    while True:
        try:
            rank = reference.find_reference_rank(options.reference, replicas)
            return compare_group(replicas, replace(build_selection(options, rank), histograms=histograms)), replicas
        except CheckpointError as error:
            errors = broken_files([snapshot.tensors.values() for _, snapshot in replicas.ranks], error)
            # The broken file may lie in the folder of a checkpoint.
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
    """Return the globs of tolerances that match no tensor of any group, because they are probably misspelled."""
    table = build_selection(options).tolerance
    if not table.names or not groups:
        return ()
    names = (normalize(snapshot.tensors).values() for replicas in groups for _, snapshot in replicas.ranks)
    return table.idle(frozenset().union(*names))


def _with_note(groups: list[Comparison], idle: Sequence[str]) -> list[Comparison]:
    """Add a note on all groups to the first group."""
    if not idle or not groups:
        return groups
    note = Note.UNUSED_TOLERANCES(names=tuple(idle), kinds=tuple(kinds.KINDS))
    return [replace(groups[0], notes=(*groups[0].notes, note)), *groups[1:]]
