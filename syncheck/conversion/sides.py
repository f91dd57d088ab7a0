"""The sides of a difference: the files of one model, joined."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.earlier_steps import find_earlier
from syncheck.conversion.name_maps import find_variables
from syncheck.errors import SyncheckError, UsageError
from syncheck.layout import views
from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import ReplicaGroup
from syncheck.layout.second_weights import separate_copies
from syncheck.layout.whole_model import join, locate_shards, split_folder
from syncheck.messages import Grouping
from syncheck.readers import find
from syncheck.records import Alias, Place
from syncheck.text import names_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.conversion.adapters import Adapter
    from syncheck.conversion.name_maps import NameMap
    from syncheck.options import DiffOptions
    from syncheck.snapshots import Shard, Snapshot, Tensor

LABELS = ("A", "B")

# One side of a difference: a path, a glob, or several of them.
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference.

    label: A or B. group: its files by rank. model: its whole tensors. variables: its numbers of heads, as far as known.
    map, stored: the map of its names, and the stored tensor of each tensor of the model. adapter: beside the model.
    """

    label: str
    group: ReplicaGroup
    model: Snapshot
    skipped: int = 0
    aliases: tuple[Alias, ...] = ()
    variables: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    map: NameMap | None = None
    adapter: Adapter | None = None

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


def _open_files(source: Source) -> tuple[str, ReplicaGroup, find.Opened]:
    """Return the paths as text, the files of one model by rank, and everything that was opened."""
    given = _split(source)
    opened = find.open_checkpoints(given)
    if broken := opened.unreadable:
        raise UsageError(f"{broken[0].path}: {broken[0].reason}")
    groups = group_replicas(separate_copies(opened.snapshots), roots=opened.roots)
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
    for name, rank, tensor, shards in locate_shards(dict(group.ranks)):
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


def list_inputs(sources: Sequence[Source], options: DiffOptions) -> list[str]:
    """Return the files, folders and globs that a comparison of two models reads, without the baseline."""
    inputs = [path for path in (options.map, options.base) if path is not None]
    for source in sources:
        for path in _split(source):
            # `find_variables` reads the settings beside a file.
            inputs += [path, os.path.join(os.path.dirname(path), "config.json")]
    return inputs


def _split(source: Source) -> list[str]:
    if not isinstance(source, (str, os.PathLike)):
        return [os.fspath(path) for path in source]
    path = os.fspath(source)
    return [path] if os.path.lexists(path) else [part for part in path.split(",") if part] or [path]


def _merge_parts(title: str, groups: Sequence[ReplicaGroup]) -> ReplicaGroup:
    """Return one group of files that hold different tensors. Raises UsageError if the files are several models."""
    snapshots = [snapshot for group in groups for _, snapshot in group.ranks]
    names = [name for snapshot in snapshots for name in snapshot.tensors]
    # Numbered parts of one checkpoint may hold a tensor twice, and these copies are compared.
    are_parts = all(Grouping.PARTS_ALONE in [reason.code for reason in group.grouping] for group in groups)
    if len(groups) == len(snapshots) and (are_parts or len(set(names)) == len(names)):
        return ReplicaGroup(title, None, tuple(enumerate(snapshots)), ())
    found = names_text([group.run if group.step is None else f"{group.run} step {group.step}" for group in groups])
    raise UsageError(f"{title}: {len(groups)} models ({found}); pass the files of one step of one run")


def list_earlier(side: Side) -> Iterator[Side]:
    """Yield the models of earlier steps beside a model, the latest step first."""
    if side.model.format == "memory":
        return
    for title, group in find_earlier([snapshot.path for _, snapshot in side.group.ranks]):
        with suppress(SyncheckError):  # an incomplete earlier step is no reason to stop
            yield Side(title, group, join(dict(group.ranks), title))
