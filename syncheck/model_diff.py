"""Compare two models in any layout: `syncheck diff A B`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck import api, paths
from syncheck.comparison.group import compare_group
from syncheck.errors import SyncheckError, UsageError
from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import ReplicaGroup
from syncheck.logical.model import join
from syncheck.messages import Note, names_text, relabel
from syncheck.names import normalize_keys
from syncheck.options import DiffOptions
from syncheck.records import Alias, Place, Reason, Report, Unreadable
from syncheck.verdicts import judge_difference, judge_group, overall

if TYPE_CHECKING:
    from syncheck.records import Comparison, Group
    from syncheck.snapshots import Shard, Snapshot

LABELS = ("A", "B")

# One side of a difference: a path, a glob, or several of them.
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference. label: A or B. group: its files by rank. model: its whole tensors."""

    label: str
    group: ReplicaGroup
    model: Snapshot
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    aliases: tuple[Alias, ...] = ()

    def locate(self, name: str, index: tuple[int, ...]) -> Place | None:
        """Return the rank and file with an element of a tensor; None for an unknown tensor."""
        tensor = normalize_keys(self.model.tensors).get(name)
        if tensor is None:
            return None
        holders = [shard.tensor for shard in tensor.shards if _contains(shard, index)]
        path = (holders[0] if holders else tensor).path
        ranks = (rank for rank, s in self.group.ranks if len(self.group.ranks) > 1 and s.path == path)
        return Place(path, next(ranks, None))


def _contains(shard: Shard, index: tuple[int, ...]) -> bool:
    return all(
        start <= at < start + size for at, start, size in zip(index, shard.start, shard.tensor.shape, strict=True)
    )


def open_side(label: str, source: Source) -> Side:
    """Open the files of one model, and join their tensors.

    label: A or B. Raises UsageError for files of several models, and CheckpointError for files that do not
    form a whole model.
    """
    given = _split(source)
    try:
        opened = paths.open_checkpoints(given)
        unreadable = tuple(opened.unreadable)
        if not opened.snapshots:
            raise UsageError(f"{unreadable[0].path}: {unreadable[0].reason}" if unreadable else "no checkpoint")
        groups = group_replicas(opened.snapshots, roots=opened.roots)
        title = ", ".join(given)
        group = groups[0] if len(groups) == 1 else _merge_parts(title, groups)
        model = join(dict(group.ranks), title)
    except SyncheckError as error:
        error.args = (f"{label}: {error}",)
        raise
    return Side(label, group, model, unreadable, opened.skipped, tuple(opened.aliases))


def _split(source: Source) -> list[str]:
    if not isinstance(source, (str, os.PathLike)):
        return [os.fspath(path) for path in source]
    path = os.fspath(source)
    return [path] if os.path.lexists(path) else [part for part in path.split(",") if part] or [path]


def _merge_parts(title: str, groups: Sequence[ReplicaGroup]) -> ReplicaGroup:
    """Return one group of files that hold different tensors. Raises UsageError if the files are several models."""
    snapshots = [snapshot for group in groups for _, snapshot in group.ranks]
    names = [name for snapshot in snapshots for name in snapshot.tensors]
    if len(groups) == len(snapshots) and len(set(names)) == len(names):
        return ReplicaGroup(title, None, tuple(enumerate(snapshots)), ())
    found = names_text([group.run if group.step is None else f"{group.run} step {group.step}" for group in groups])
    raise UsageError(f"{title}: {len(groups)} models ({found}); pass the files of one step of one run")


def diff(a: Source, b: Source, *, options: DiffOptions | None = None) -> Report:
    """Compare two models in any layout, and diagnose the differences.

    a: the source. b: the copy. Each is a file, folder or glob, several of them joined by commas, or a sequence of
    paths: the files of all ranks that hold parts or copies of one model. options: how to compare; bitwise by default.

        report = diff("ckpts/fsdp_rank*.pth", "hf_export/")
        print(report.verdict, report.counts.different)

    Copies within a side are compared first. Returns the report, whose last group compares A (rank 0) with B (rank 1).
    Memory does not grow with the size of tensors. Raises UsageError if a side is not one model or the models have no
    tensor in common, and CheckpointError if parts are missing or a file cannot be read.
    """
    options = options or DiffOptions()
    sides = tuple(open_side(label, source) for label, source in zip(LABELS, (a, b), strict=True))
    selection = api.build_selection(options)
    groups: list[Group] = []
    notes = []
    for side in sides:
        if len(side.group.ranks) > 1:
            name = f"{side.label}: {side.group.run}"
            own = replace(compare_group(side.group, selection), name=name, run=name)
            judged = judge_group(own, (), frozenset(code.upper() for code in options.allow))
            if judged.verdict == "out_of_sync":
                groups.append(judged)
            sentence = Note.COPIES if own.counts.compared else Note.NO_COPIES
            notes.append(sentence(side=side.label, files=len(side.group.ranks), tensors=own.counts.compared))
    pair = ReplicaGroup(
        " and ".join(side.model.path for side in sides), None, tuple(enumerate(side.model for side in sides)), ()
    )
    comparison = _describe_sides(compare_group(pair, selection), sides, subset=options.subset)
    comparison = replace(comparison, notes=(*notes, *comparison.notes))
    groups.append(judge_difference(comparison, frozenset(code.upper() for code in options.allow)))
    unreadable = tuple(broken for side in sides for broken in side.unreadable)
    report = Report(
        verdict=overall(groups, unreadable),
        groups=tuple(groups),
        unreadable=unreadable,
        skipped=sum(side.skipped for side in sides),
        aliases=tuple(alias for side in sides for alias in side.aliases),
        command="diff",
    )
    if options.baseline is None:
        return report
    from syncheck import baseline

    return baseline.apply_baseline(report, baseline.read(options.baseline))


def _describe_sides(comparison: Comparison, sides: Sequence[Side], *, subset: bool) -> Comparison:
    """Name the sides instead of ranks, and add the location of the worst element of each tensor.

    subset: whether B may lack tensors. Raises UsageError if the models have no name in common.
    """
    missing = [diff for diff in comparison.tensors if diff.reason is Reason.MISSING]
    if missing and len(missing) == comparison.counts.tensors:
        examples = "; ".join(f"{side.label} has {names_text([*side.model.tensors], 2) or 'none'}" for side in sides)
        raise UsageError(f"A and B have no tensor in common: {examples}; pass two copies of one model")
    tensors = []
    for diff in comparison.tensors:
        if subset and diff.reason is Reason.MISSING and diff.clusters == ((0,),):
            diff = replace(diff, reason=Reason.SUBSET, minority=())
        if diff.index is not None:
            places = {i: side.locate(diff.name, diff.index) for i, side in enumerate(sides)}
            diff = replace(diff, places={i: place for i, place in places.items() if place is not None})
        if diff.detail is not None:
            diff = replace(diff, detail=relabel(diff.detail, LABELS))
        tensors.append(diff)
    values = tuple(replace(v, counts=v.counts and not (subset and v.by_rank.get(1) is None)) for v in comparison.values)
    notes = [relabel(note, LABELS) for note in comparison.notes]
    if absent := tuple(diff.name for diff in tensors if diff.reason is Reason.SUBSET):
        notes.append(Note.SUBSET(count=len(absent), names=absent))
    replicas = tuple(
        replace(replica, label=side.label, files=len(side.group.ranks))
        for replica, side in zip(comparison.replicas, sides, strict=True)
    )
    return replace(comparison, replicas=replicas, tensors=tuple(tensors), values=values, notes=tuple(notes))
