"""Compare two models in any layout: `syncheck diff A B`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck import api, paths
from syncheck.comparison.group import compare_group
from syncheck.conversion.adapters import Merged, compare_merge, merge_adapters
from syncheck.conversion.casts import convert
from syncheck.conversion.causes import Models, add_relations
from syncheck.conversion.inference import describe_inferred, extend_map, infer_map, mark_ambiguous, write_map
from syncheck.conversion.name_maps import apply_map, find_variables, read_map
from syncheck.conversion.quantized import dequantize
from syncheck.conversion.recognition import complete_variables, get_computed, is_readable, recognize_map
from syncheck.diagnose.case import relation_of
from syncheck.errors import SyncheckError, UsageError
from syncheck.kernel.blocks import Files
from syncheck.kernel.clustering import cluster_replicas
from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import ReplicaGroup
from syncheck.logical import views
from syncheck.logical.model import add_tied_names, join, list_boxes, split_folder
from syncheck.messages import Note, names_text, relabel
from syncheck.names import normalize_keys
from syncheck.options import DiffOptions
from syncheck.records import Alias, Counts, Place, Reason, Report
from syncheck.relations import RelationKind, Stored
from syncheck.verdicts import judge_difference, judge_group, overall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.conversion.name_maps import NameMap
    from syncheck.messages import Message
    from syncheck.records import Comparison, Group
    from syncheck.snapshots import Shard, Snapshot, Tensor

LABELS = ("A", "B")
# Limit of earlier steps that are opened to find the model before the update.
_MOST_EARLIER = 8
# Limit of the files of all steps that are opened to find them.
_MOST_BESIDE = 4096
# Limit of the tensors with a map of their shards on a page.
_MOST_STORED = 200
_NUMBER = re.compile(r"\d+")

# One side of a difference: a path, a glob, or several of them.
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference.

    label: A or B. group: its files by rank. model: its whole tensors. variables: its numbers of heads, as far as known.
    map, stored: the map of its names, and the stored tensor of each tensor of the model.
    """

    label: str
    group: ReplicaGroup
    model: Snapshot
    skipped: int = 0
    aliases: tuple[Alias, ...] = ()
    variables: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    map: NameMap | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the files."""
        paths = [snapshot.path for _, snapshot in self.group.ranks]
        return tuple(dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) for path in paths))

    @property
    def title(self) -> str:
        """The label and the name of the run; the title of a comparison of copies within the side."""
        return f"{self.label}: {self.group.run}"

    def locate(self, tensor: Tensor, index: tuple[int, ...]) -> Place:
        """Return the rank and file with an element of a tensor of the model."""
        holders = [shard.tensor for shard in tensor.shards if _contains(shard, index)]
        path = (holders[0] if holders else tensor).path
        ranks = (rank for rank, s in self.group.ranks if len(self.group.ranks) > 1 and s.path == path)
        stored = self.stored.get(tensor.name)
        if stored is None or stored.name == tensor.name:
            return Place(path, next(ranks, None))
        return Place(path, next(ranks, None), stored.name, views.find_element(stored, tensor, index))


def _contains(shard: Shard, index: tuple[int, ...]) -> bool:
    return all(
        start <= at < start + size for at, start, size in zip(index, shard.start, shard.tensor.shape, strict=True)
    )


def open_side(label: str, source: Source) -> Side:
    """Open the files of one model, and join their tensors.

    label: A or B. Raises UsageError for files of several models, and CheckpointError for files that cannot be read or
    do not form a whole model.
    """
    try:
        title, group, opened = _open_files(source)
        model = join(dict(group.ranks), title)
    except SyncheckError as error:
        error.args = (f"{label}: {error}",)
        raise
    values = {name: value for snapshot in opened.snapshots for name, value in snapshot.values.items()}
    variables = find_variables([snapshot.path for snapshot in opened.snapshots], values)
    return Side(label, group, model, opened.skipped, tuple(opened.aliases), variables)


def _open_files(source: Source) -> tuple[str, ReplicaGroup, paths.Opened]:
    """Return the paths as text, the files of one model by rank, and everything that was opened."""
    given = _split(source)
    opened = paths.open_checkpoints(given)
    if broken := opened.unreadable:
        raise UsageError(f"{broken[0].path}: {broken[0].reason}")
    groups = group_replicas(opened.snapshots, roots=opened.roots)
    title = ", ".join(given)
    group = groups[0] if len(groups) == 1 else _merge_parts(title, groups)
    if len(group.ranks) == 1:
        group = replace(group, ranks=tuple(split_folder(group.ranks[0][1]).items()))
    return title, group, opened


def list_shards(source: Source) -> dict[str, Any]:
    """Return which rank and file hold which box of each tensor of a model, as JSON values (`syncheck show --shards`).

    A box has a start and a shape, in elements; both are None if the files do not show its position. Boxes that several
    ranks hold are listed once. Raises UsageError for unreadable files, and for files of several models.
    """
    title, group, _ = _open_files(source)
    rows: dict[str, dict[str, Any]] = {}
    boxes: dict[tuple[str, Any], dict[str, Any]] = {}
    for name, rank, tensor, shards in list_boxes(dict(group.ranks)):
        empty = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.full_shape), "boxes": []}
        row = rows.setdefault(name, empty)
        for shard in [None] if shards is None else shards:
            start, shape = (None, None) if shard is None else (list(shard.start), list(shard.tensor.shape))
            key = name, (rank if shard is None else (shard.start, shard.tensor.shape))
            if key not in boxes:
                boxes[key] = {"start": start, "shape": shape, "ranks": [], "files": []}
                row["boxes"].append(boxes[key])
            boxes[key]["ranks"] += [rank] if len(group.ranks) > 1 else []
            boxes[key]["files"].append(tensor.path if shard is None else shard.tensor.path)
    return {"path": title, "files": len(group.ranks), "tensors": list(rows.values())}


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
    options = options or DiffOptions()
    sides = tuple(open_side(label, source) for label, source in zip(LABELS, (a, b), strict=True))
    return compare_sides(sides, [compare_copies(side, options) for side in sides], options, histograms=histograms)


def compare_copies(side: Side, options: DiffOptions) -> Group | None:
    """Compare the copies of tensors in the files of a side; None if each tensor is in one file."""
    names = [name for _, snapshot in side.group.ranks for name in normalize_keys(snapshot.tensors)]
    if len(set(names)) == len(names):
        return None
    own = replace(compare_group(side.group, api.build_selection(options)), name=side.title, run=side.title)
    return judge_group(own, (), _allowed(options))


def compare_sides(
    sides: Sequence[Side], copies: Sequence[Group | None], options: DiffOptions, *, histograms: bool = False
) -> Report:
    """Compare two models whose copies have been compared.

    copies: the results by side; None for a side in one file. histograms: see `diff`. Raises as `diff` does.
    """
    notes = []
    for side, own in zip(sides, copies, strict=True):
        if len(side.group.ranks) > 1:
            compared = own.counts.compared if own is not None else 0
            sentence = Note.COPIES if compared else Note.NO_COPIES
            unit = "ranks" if side.model.format == "memory" else "files"
            notes.append(sentence(side=side.label, files=len(side.group.ranks), unit=unit, tensors=compared))
    completed = add_tied_names([side.model for side in sides])
    sides = tuple(replace(side, model=model) for side, (model, _) in zip(sides, completed, strict=True))
    notes += [Note.TIED(side=s.label, names=names) for s, (_, names) in zip(sides, completed, strict=True) if names]
    with Files(jobs=options.jobs) as files:
        sides, mapping = _map_sides(sides, options, files)
        pair = ReplicaGroup(
            " and ".join(side.model.path for side in sides), None, tuple(enumerate(side.model for side in sides)), ()
        )
        found = compare_group(pair, replace(api.build_selection(options), histograms=histograms))
        comparison = _describe_sides(found, sides, subset=options.subset)
        comparison = _accept_conversions(comparison, sides, options.cast, files)
        comparison = _add_relations(comparison, sides, options, files)
    if histograms:
        evidence = replace(comparison.evidence, stored=_describe_stored(comparison, sides))
        comparison = replace(comparison, evidence=evidence)
    notes += mapping
    comparison = replace(comparison, notes=(*notes, *comparison.notes))
    # Shards of a side are no reason for doubt, but copies that could not be compared are.
    doubtful = [
        own
        for own in copies
        if own is not None and (own.verdict == "out_of_sync" or any(diff.unknown for diff in own.tensors))
    ]
    groups = (*doubtful, judge_difference(comparison, _allowed(options)))
    report = Report(
        verdict=overall(groups, ()),
        groups=groups,
        skipped=sum(side.skipped for side in sides),
        aliases=tuple(alias for side in sides for alias in side.aliases),
        command="diff",
    )
    if options.baseline is None:
        return report
    from syncheck import baseline

    return baseline.apply_baseline(report, baseline.read(options.baseline))


def _map_sides(sides: Sequence[Side], options: DiffOptions, files: Files) -> tuple[tuple[Side, ...], list[Message]]:
    """Return two sides with merged adapters and, if a map is given or found, equal names; and notes about the map."""
    stored = [normalize_keys(side.model.tensors) for side in sides]
    models = [dequantize(own, other, files) for own, other in (stored, stored[::-1])]
    models = [
        merge_adapters(own, other, side.folders, files)
        for own, other, side in zip(models, models[::-1], sides, strict=True)
    ]
    variables = {**sides[1].variables, **sides[0].variables}
    names = recognize_map(models, variables) if options.map is None else read_map(options.map)
    if names is not None:
        variables = complete_variables(names, models, variables, files)
    notes: list[Message] = []
    written = names
    if options.map is None:
        known = models if names is None else [own.tensors for own in apply_map(names, models, variables)[0]]
        inferred = infer_map(known, files)
        if inferred is not None:
            notes, written = describe_inferred(inferred), extend_map(names, inferred)
        if inferred is not None and inferred.applies:
            names, variables = written, {**variables, **inferred.variables}
            models = mark_ambiguous(models, inferred)
    if options.write_map is not None and written is not None:
        write_map(options.write_map, written)
    elif options.write_map is not None:
        notes.append(Note.NO_MAP(file=options.write_map))
    if names is None:  # without a change, the names keep their prefixes, which are reported
        rows = zip(sides, models, stored, strict=True)
        return tuple(
            side if own is old else replace(side, model=replace(side.model, tensors=own)) for side, own, old in rows
        ), notes
    mapped, more = apply_map(names, models, variables)
    counts = [len(model.keys() - own.tensors.keys()) for model, own in zip(models, mapped, strict=True)]
    notes = [Note.MAP(map=names.title, count=counts[0], others=counts[1]), *notes, *more]
    return tuple(
        replace(side, model=replace(side.model, tensors=own.tensors), stored=own.stored, map=names, variables=variables)
        for side, own in zip(sides, mapped, strict=True)
    ), notes


def _allowed(options: DiffOptions) -> frozenset[str]:
    return frozenset(code.upper() for code in options.allow)


def _describe_sides(comparison: Comparison, sides: Sequence[Side], *, subset: bool) -> Comparison:
    """Name the sides instead of ranks, and add the location of the worst element of each tensor.

    subset: whether B may lack tensors. Raises UsageError if the models have no name in common.
    """
    missing = [diff for diff in comparison.tensors if diff.reason is Reason.MISSING]
    if missing and len(missing) == comparison.counts.tensors:
        examples = "; ".join(f"{side.label} has {names_text([*side.model.tensors], 2) or 'none'}" for side in sides)
        raise UsageError(f"A and B have no tensor in common: {examples}; pass two copies of one model")
    models = [normalize_keys(side.model.tensors) for side in sides]
    tensors = []
    for diff in comparison.tensors:
        if subset and diff.reason is Reason.MISSING and diff.clusters == ((0,),):
            diff = replace(diff, reason=Reason.SUBSET, minority=())
        if diff.index is not None:
            places = {i: side.locate(models[i][diff.name], diff.index) for i, side in enumerate(sides)}
            diff = replace(diff, places=places)
        if diff.detail is not None:
            diff = replace(diff, detail=relabel(diff.detail, LABELS))
        tensors.append(diff)
    values = []
    for value in comparison.values:
        accepted = subset and value.by_rank.get(1) is None
        values.append(replace(value, counts=False, unknown=False) if accepted else value)
    notes = [relabel(note, LABELS) for note in comparison.notes]
    if absent := tuple(diff.name for diff in tensors if diff.reason is Reason.SUBSET):
        notes.append(Note.SUBSET(count=len(absent), names=absent))
    replicas = tuple(
        replace(replica, label=side.label, files=len(side.group.ranks))
        for replica, side in zip(comparison.replicas, sides, strict=True)
    )
    return replace(comparison, replicas=replicas, tensors=tuple(tensors), values=tuple(values), notes=tuple(notes))


def _describe_stored(comparison: Comparison, sides: Sequence[Side]) -> dict[str, tuple[Stored | None, Stored | None]]:
    """Return how both sides store the tensors that differ, and others, up to a limit."""
    names = [diff.name for diff in comparison.tensors if diff.out_of_sync]
    wanted = list(dict.fromkeys((*names, *comparison.evidence.names)))[:_MOST_STORED]
    found: list[dict[str, Stored | None]] = []
    for side in sides:
        tensors = normalize_keys(side.model.tensors)
        held = {name: side.stored.get(name, tensor) for name, tensor in tensors.items() if name in wanted}
        boxes: dict[str, list[tuple[Any, Any, str]]] = {tensor.name: [] for tensor in held.values()}
        for _, rank, tensor, shards in list_boxes(dict(side.group.ranks)):
            for shard in [None] if shards is None else shards:
                part = tensor if shard is None else shard.tensor
                owner = f"rank {rank}" if len(side.group.ranks) > 1 else os.path.basename(part.path)
                if tensor.name in boxes:
                    placed = (None, None) if shard is None else (shard.start, part.shape)
                    boxes[tensor.name].append((*placed, owner))
        own = {
            name: Stored(tensor.name, tensor.dtype, tuple(tensor.full_shape), tuple(boxes[tensor.name]))
            for name, tensor in held.items()
        }
        found.append(dict(own))
    return {name: (found[0].get(name), found[1].get(name)) for name in wanted}


def _add_relations(comparison: Comparison, sides: Sequence[Side], options: DiffOptions, files: Files) -> Comparison:
    """Add how the tensors of B that differ follow from A, and from the model before the update."""
    names = [diff.name for diff in comparison.tensors if diff.out_of_sync]
    given = [] if options.base is None else [open_side("base", options.base)]
    if not names:
        return comparison
    one, other = sides
    a, b = (normalize_keys(side.model.tensors) for side in sides)
    models = Models(a, b, files, (one.stored, other.stored), one.map, one.variables)
    title = ""
    for base in given or list_earlier(one):
        models.base, title = _map_base(base, one), base.model.path
        if any(n in models.base and n in b and models.equals(models.base[n], b[n]) is not None for n in names):
            break
    else:
        models.base = {} if options.base is None else models.base
    diffs = add_relations(comparison.tensors, models)
    differing = {diff.name for diff in diffs}
    stale = any(relation_of(diff) is RelationKind.BASE for diff in diffs)
    kept = [n for n in models.base if stale and n not in differing and n in a and n in b]
    updated = sum(models.equals(models.base[n], a[n]) is None for n in kept)
    adapted = sum(isinstance(tensor.data, Merged) for tensor in a.values())
    evidence = replace(comparison.evidence, base=title, updated=updated, adapted=adapted)
    return replace(comparison, tensors=diffs, evidence=evidence)


def _map_base(base: Side, one: Side) -> Mapping[str, Tensor]:
    """Return the tensors of the earlier model by the names of A."""
    tensors = normalize_keys(base.model.tensors)
    if one.map is None:
        return tensors
    mapped, _ = apply_map(one.map, [tensors, one.model.tensors], one.variables)
    return mapped[0].tensors


def list_earlier(side: Side) -> Iterator[Side]:
    """Yield the models of earlier steps beside a model, the latest step first.

    Other steps have the same path with other numbers, in the name of the file and of its folder.
    """
    held = [snapshot.path for _, snapshot in side.group.ranks if side.model.format != "memory"]
    patterns = {_NUMBER.sub("*", glob.escape(path[len(_find_home(path)) :])): _find_home(path) for path in held}
    found = [path for pattern, home in patterns.items() for path in glob.iglob(glob.escape(home) + pattern)]
    if not 1 < len(found) <= _MOST_BESIDE:
        return
    opened = paths.open_checkpoints(found)
    groups = group_replicas(opened.snapshots, roots=opened.roots)
    own = next((group for group in groups if held[0] in [snapshot.path for _, snapshot in group.ranks]), None)
    if own is None or own.step is None:
        return
    earlier = [group for group in groups if group.run == own.run and group.step is not None and group.step < own.step]
    for group in sorted(earlier, key=lambda group: -(group.step or 0))[:_MOST_EARLIER]:
        title = f"{group.run} step {group.step}"
        try:
            yield Side(title, group, join(dict(group.ranks), title))
        except SyncheckError:
            continue  # an incomplete earlier step is no reason to stop


def _find_home(path: str) -> str:
    """Return a path without the names of the file and of its folder."""
    return os.path.dirname(os.path.dirname(path))


def _accept_conversions(comparison: Comparison, sides: Sequence[Side], dtype: str | None, files: Files) -> Comparison:
    """Count tensors as close if they are merges of an adapter, or converted to `dtype` and to the dtype of B."""
    models = [normalize_keys(side.model.tensors) for side in sides]
    kinds, tensors = dict(comparison.kinds), []
    for diff in comparison.tensors:
        a, b = (model.get(diff.name) for model in models)
        tolerance = None
        if diff.out_of_sync and a is not None and b is not None:
            tolerance = _find_tolerance(a, b, dtype, files)
        if tolerance is None:
            tensors.append(diff)
            continue
        old = kinds[diff.kind]
        kinds[diff.kind] = replace(old, close=old.close + 1, **{diff.status: getattr(old, diff.status) - 1})
        accepted = replace(diff, status="close", tolerance=tolerance, detail=None, facts=(), minority=())
        measured = diff.mismatched if diff.reason is None else None  # unknown if the dtypes differ
        tensors.append(replace(accepted, reason=None, mismatched=measured))
    counts = sum(kinds.values(), Counts())
    return replace(comparison, tensors=tuple(tensors), kinds=kinds, counts=counts)


def _find_tolerance(a: Tensor, b: Tensor, dtype: str | None, files: Files) -> str | None:
    """Return the conversion that explains a difference; None for a difference that is not accepted."""
    merged = [data for tensor in (a, b) if (data := get_computed(tensor, Merged)) is not None]
    if len(merged) == 1 and a.dtype == b.dtype and a.shape == b.shape and is_readable(a) and is_readable(b):
        return "rounding of a merge" if compare_merge(merged[0], b if a.data is merged[0] else a, files)[0] else None
    return f"cast {dtype}" if dtype is not None and _is_cast(a, b, dtype, files) else None


def _is_cast(a: Tensor, b: Tensor, dtype: str, files: Files) -> bool:
    if not (is_readable(a) and is_readable(b)) or a.shape != b.shape:
        return False
    return len(cluster_replicas([convert(a, (dtype, b.dtype), files), b], files)) == 1
