"""The entry point of comparisons, for the command line, the pytest plugin and users."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.comparison import reference
from syncheck.comparison.replicas import compare_group
from syncheck.comparison.selection import list_kinds
from syncheck.comparison.stale import add_stale_ranks
from syncheck.diagnose import series
from syncheck.diagnose.verdicts import judge_group, overall
from syncheck.errors import CheckpointError, UsageError
from syncheck.frozen import record
from syncheck.layout.absent_ranks import note_absent_ranks
from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import select_last_steps
from syncheck.layout.named_steps import note_contradicting_steps
from syncheck.layout.second_weights import separate_copies
from syncheck.messages import Note
from syncheck.options import DiffOptions, build_selection
from syncheck.options import Options as Options  # users import it from here too
from syncheck.readers import find as finder
from syncheck.readers.find import open_checkpoints, unify_paths
from syncheck.readers.links import find_shared_files, remove_aliases
from syncheck.records import Alias, Report, Unreadable
from syncheck.tensors import kinds
from syncheck.tensors.blocks import broken_files
from syncheck.tensors.names import normalize
from syncheck.tensors.traffic import TRAFFIC
from syncheck.tensors.value_kinds import has_counted_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.comparison.selection import Selection
    from syncheck.conversion.sides import Source
    from syncheck.layout.groups import CheckpointGroup
    from syncheck.messages import Message
    from syncheck.records import Comparison
    from syncheck.snapshots import Snapshot


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `find` would open the path: a checkpoint, or a folder with a checkpoint in it."""
    return finder.holds_checkpoint(str(path))


@record
class Found:
    """The checkpoints under some paths, opened and grouped; no tensor has been compared."""

    groups: tuple[CheckpointGroup, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Number of other files in the given folders."""
    skipped_paths: tuple[str, ...] = ()
    """The paths of the first skipped files."""
    aliases: tuple[Alias, ...] = ()
    """Links to the file of another replica."""
    idle: tuple[str, ...] | None = None
    """Globs of tolerances that match no tensor of any group; None if they have not been matched yet."""


def find(*paths: Source, options: Options | None = None) -> Found:
    """Open the checkpoints under the paths and group the replicas.

    paths: files, folders or globs, or lists of them. Raises UsageError for a glob without a match, a folder without a
    checkpoint, no path at all, and an unknown reference. A checkpoint that cannot be read does not raise: it is listed
    in `unreadable`.
    """
    options = options or Options()
    path_texts = _list_paths(paths)
    if not path_texts:
        raise UsageError("no path given; pass checkpoint files, folders or globs, as in: syncheck compare ckpts/*.pth")
    opened = open_checkpoints(path_texts)
    snapshots, linked = remove_aliases(separate_copies(opened.snapshots))
    paths_to_group = [snapshot.path for snapshot in snapshots] + list(opened.roots.values())
    groups = group_replicas(snapshots, options.group_by, opened.roots, unify_paths(paths_to_group))
    unreadable = list(opened.unreadable)
    # A shard that several replicas share would be compared with itself.
    for replicas in groups:
        unreadable += find_shared_files(replicas.ranks)
    reference.check_reference(options.reference, groups, unreadable)
    aliases = (*opened.aliases, *linked)
    return Found(
        groups,
        tuple(unreadable),
        skipped=opened.skipped,
        skipped_paths=tuple(opened.skipped_paths),
        aliases=aliases,
        idle=_find_idle(groups, options),
    )


def _list_paths(paths: Iterable[Source]) -> list[str]:
    """Return all paths as texts, including those in lists."""
    path_texts = []
    for path in paths:
        if isinstance(path, (str, os.PathLike)):
            path_texts.append(str(path))
        else:
            path_texts += [str(item) for item in path]
    return path_texts


def kinds_in(replicas: CheckpointGroup, options: Options) -> tuple[str, ...]:
    """Return the kinds of tensors that a comparison of the group would include, without reading any tensor.

    The last kind is `value` if the files hold Python values that are compared, for example the step.
    """
    kinds_of_tensors = list_kinds(replicas, build_selection(options))
    if any(has_counted_values(snapshot) for _, snapshot in replicas.ranks):
        return (*kinds_of_tensors, "value")
    return kinds_of_tensors


def judge(found: Found, options: Options | None = None, *, histograms: bool = False) -> Report:
    """Compare the replicas in each group, and diagnose the differences. `finish` then applies the baseline.

    histograms: add histograms of the tensors that differ most at the last step of each run (for HTML pages). If a file
    breaks while it is read, it is listed as unreadable, and the verdict is never "in sync".
    """
    options = options or Options()
    unreadable = list(found.unreadable)
    last_groups = select_last_steps(found.groups) if histograms else ()
    snapshots: list[Snapshot] = []
    for replicas in found.groups:
        snapshots += [snapshot for _, snapshot in replicas.ranks]
    if not options.quick:
        TRAFFIC.expect(snapshots)
    compared = []
    for replicas in found.groups:
        is_last = any(replicas is group for group in last_groups)
        compared.append(_compare(replicas, options, unreadable, histograms=is_last))
    groups = _add_evidence_of_steps(compared, unreadable, options)
    idle = _find_idle(found.groups, options) if found.idle is None else found.idle
    notes = note_absent_ranks(found.groups, [file.path for file in unreadable])
    notes += note_contradicting_steps(snapshots)
    # Most runs have no tolerances.
    if idle:
        notes.append(Note.UNUSED_TOLERANCES(names=tuple(idle), kinds=tuple(kinds.KINDS)))
    groups = _add_notes(groups, notes)
    groups = series.follow_not_finite(groups)
    runs = series.by_run(groups)
    allow = frozenset(code.upper() for code in options.allow)
    judged = []
    differing_groups = 0
    for group in groups:
        judged.append(judge_group(group, runs.get(group.run, ()), allow))
        if judged[-1].findings:
            differing_groups += 1
    if differing_groups > 1:
        # Only needed if several steps differ.
        from syncheck.diagnose.course import decide_over_steps

        judged = list(decide_over_steps(judged))
    return Report(
        verdict=overall(judged, unreadable),
        groups=tuple(judged),
        # A file may break in more than one comparison.
        unreadable=tuple(dict.fromkeys(unreadable)),
        skipped=found.skipped,
        skipped_paths=found.skipped_paths,
        aliases=found.aliases,
        quick=options.quick,
        drift=series.drifts(runs),
        closures=series.closures(runs),
    )


def _add_evidence_of_steps(
    compared: Sequence[tuple[Comparison, CheckpointGroup]], unreadable: list[Unreadable], options: Options
) -> list[Comparison]:
    """Add what follows from other steps of the run. Files that break meanwhile are added to `unreadable`."""
    groups = [group for group, _ in compared]
    if len(groups) < 2:
        return groups

    groups = add_stale_ranks(compared, unreadable, options.jobs, quick=options.quick)
    # With quick, no tensor is read.
    if options.quick:
        return groups
    from syncheck.comparison.free_running import add_free_running

    return add_free_running(groups, compared, unreadable, options.jobs)


def compare(*paths: Source, options: Options | None = None, histograms: bool = False) -> Report:
    """Compare the replicas in each group of the checkpoints under the paths, and diagnose the differences.

    paths: files, folders or globs, or lists of them. options: how to compare; bitwise by default. histograms: add
    histograms of the tensors that differ most at the last step of each run (for HTML pages).

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
    # Most runs have none.
    from syncheck.diagnose import baseline
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
        return baseline.apply_baseline(report, baseline.find_failing(report))
    return baseline.apply_baseline(report, baseline.read(options.baseline, may_be_missing=may_be_missing))


def update_baseline(report: Report, path: str) -> str:
    """Add the failing findings of a report to a baseline, remove fixed ones, and return a description of the change.

    The file is replaced atomically. Raises UsageError if it cannot be written, and for an undecided report.
    """
    from syncheck.diagnose import baseline
    from syncheck.readers import outputs

    # Read again, because another process may have changed it during the comparison.
    before = baseline.read(path, may_be_missing=True)
    after = baseline.update_baseline(report, before)
    outputs.write(path, baseline.serialize(after), "baseline")
    return f"{path}: {baseline.describe_change(before, after)}"


def _compare(
    replicas: CheckpointGroup, options: Options, unreadable: list[Unreadable], *, histograms: bool
) -> tuple[Comparison, CheckpointGroup]:
    """Compare a group without the files that break while they are read.

    Also returns the group without these files.
    """
    while True:
        try:
            rank = reference.find_reference_rank(options.reference, replicas)
            selection = replace(build_selection(options, rank), histograms=histograms)
            return _compare_as_replicas_or_shards(replicas, selection)
        except CheckpointError as error:
            errors = broken_files([snapshot.tensors.values() for _, snapshot in replicas.ranks], error)
            broken = [Unreadable(error.path, error.reason) for error in errors]
            ranks = _drop_broken(broken, replicas)
            # No file of the group has caused the error, or none is readable.
            if len(ranks) in (0, len(replicas.ranks)):
                raise
            unreadable += broken
            replicas = replace(replicas, ranks=ranks)


def _compare_as_replicas_or_shards(
    replicas: CheckpointGroup, selection: Selection
) -> tuple[Comparison, CheckpointGroup]:
    """Compare a group of replicas. Shards that no file marks get positions, and are compared again as shards."""
    comparison = compare_group(replicas, selection)
    differing = [diff.name for diff in comparison.tensors if diff.out_of_sync]
    if not differing:
        return comparison, replicas
    from syncheck.layout.distinct_shards import is_attention_output

    # Tensor parallelism divides the last layer of an attention.
    if not any(map(is_attention_output, differing)):
        return comparison, replicas
    from syncheck.conversion.unmarked_shards import compare_unmarked_shards

    return compare_unmarked_shards(comparison, replicas, selection)


def _drop_broken(broken: Sequence[Unreadable], replicas: CheckpointGroup) -> tuple[tuple[int, Snapshot], ...]:
    """Return the ranks whose checkpoints have no broken file."""
    ranks = []
    for rank, snapshot in replicas.ranks:
        # The broken file may lie in the folder of a checkpoint.
        if not any(f"{file.path}/".startswith(f"{snapshot.path}/") for file in broken):
            ranks.append((rank, snapshot))
    return tuple(ranks)


def _find_idle(groups: Sequence[CheckpointGroup], options: Options) -> tuple[str, ...]:
    """Return the globs of tolerances that match no tensor of any group, because they are probably misspelled."""
    table = build_selection(options).tolerance
    # Most runs have none, and reading all names takes time.
    if not table.names:
        return ()
    names: set[str] = set()
    for replicas in groups:
        for _, snapshot in replicas.ranks:
            names.update(normalize(snapshot.tensors).values())
    return table.idle(names)


def _add_notes(groups: list[Comparison], notes: Sequence[Message]) -> list[Comparison]:
    """Add notes on all groups to the first group."""
    if not notes or not groups:
        return groups
    return [replace(groups[0], notes=(*groups[0].notes, *notes)), *groups[1:]]
