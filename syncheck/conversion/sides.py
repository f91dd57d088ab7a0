"""The sides of a difference: the files of one model, joined."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.earlier_steps import find_earlier
from syncheck.conversion.name_maps import find_variables
from syncheck.conversion.shared_weights import find_output_tie, is_output_tie
from syncheck.errors import SyncheckError, UsageError
from syncheck.frozen import record
from syncheck.layout import views
from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import CheckpointGroup
from syncheck.layout.second_weights import separate_copies
from syncheck.layout.whole_model import join, locate_shards, split_folder
from syncheck.messages import Grouping
from syncheck.readers import find
from syncheck.records import Alias, Place
from syncheck.settings.configurations import Configurations, read_configurations
from syncheck.settings.files import CONFIGURATIONS
from syncheck.text import names_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.conversion.adapters import Adapter
    from syncheck.conversion.name_maps import NameMap
    from syncheck.options import DiffOptions
    from syncheck.readers.opened import Opened
    from syncheck.snapshots import Shard, Snapshot, Tensor

LABELS = ("A", "B")

# One side of a difference: a path, a glob, or several of them.
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@record
class Side:
    """One side of a difference."""

    label: str
    """A or B."""
    group: CheckpointGroup
    """The files by rank."""
    model: Snapshot
    """The model, with whole tensors."""
    skipped: int = 0
    """The number of files that were not read."""
    skipped_paths: tuple[str, ...] = ()
    """The paths of the first skipped files."""
    aliases: tuple[Alias, ...] = ()
    """Files that are other names of files in the group."""
    variables: Mapping[str, int] = field(default_factory=dict)
    """The numbers of heads and their size, as far as a configuration states them."""
    output_tie: bool | None = None
    """Whether a configuration states that the output layer uses the weight of the embedding, if at all."""
    configurations: Configurations = Configurations(by_name={}, unreadable=())
    """The settings beside the files, and saved in them."""
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    """The stored tensor of each tensor of the model, after a map."""
    map: NameMap | None = None
    """The map of the names."""
    adapter: Adapter | None = None
    """The adapter beside the model."""

    @property
    def title(self) -> str:
        """The label and the name of the run; the title of a comparison of copies within the side."""
        return f"{self.label}: {self.group.run}"

    def are_separate(self, name: str, other: str) -> bool:
        """Whether two names are an output layer and its embedding, and a configuration states two weights."""
        return self.output_tie is False and is_output_tie(name, other)

    def locate(self, tensor: Tensor, index: tuple[int, ...]) -> Place:
        """Return the rank and file with an element of a tensor of the model."""
        paths = [shard.tensor.path for shard in tensor.shards if _contains(shard, index)]
        # Several ranks may hold copies of a shard.
        path = paths[0] if paths else tensor.path
        rank = self._find_rank(path)
        stored = self.stored.get(tensor.name, tensor)
        # The position in a stored tensor of the same name is the position in the model.
        if stored.name == tensor.name:
            return Place(path, rank)
        return Place(
            path,
            rank,
            tensor=stored.name,
            index=views.find_element(stored, tensor, index),
        )

    def _find_rank(self, path: str) -> int | None:
        """Return the first rank with this file; None for a side in one file."""
        ranks = [rank for rank, snapshot in self.group.ranks if snapshot.path == path]
        is_single_file = len(self.group.ranks) == 1
        return None if is_single_file else next(iter(ranks), None)


def _contains(shard: Shard, index: tuple[int, ...]) -> bool:
    """Whether a shard holds an element of the whole tensor."""
    spans = zip(index, shard.start, shard.tensor.shape, strict=True)
    return all(start <= i < start + size for i, start, size in spans)


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
    values: dict[str, Any] = {}
    values_by_file: dict[str, Any] = {}
    for number, snapshot in enumerate(opened.snapshots):
        values |= snapshot.values
        values_by_file |= {f"{number}.{name}": value for name, value in snapshot.values.items()}
    paths = [snapshot.path for snapshot in opened.snapshots]
    variables = find_variables(paths, values)
    return Side(
        label,
        group,
        model,
        skipped=opened.skipped,
        skipped_paths=tuple(opened.skipped_paths),
        aliases=tuple(opened.aliases),
        variables=variables,
        output_tie=find_output_tie(paths, values),
        configurations=read_configurations(paths, values_by_file),
    )


def _open_files(source: Source) -> tuple[str, CheckpointGroup, Opened]:
    """Return the paths as text, the files of one model by rank, and everything that was opened."""
    paths = _split(source)
    opened = find.open_checkpoints(paths)
    if opened.unreadable:
        unreadable = opened.unreadable[0]
        raise UsageError(f"{unreadable.path}: {unreadable.reason}")
    groups = group_replicas(separate_copies(opened.snapshots), roots=opened.roots)
    title = ", ".join(paths)
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
    tensors: dict[str, Tensor] = {}
    boxes: dict[str, dict[object, dict[str, Any]]] = defaultdict(dict)
    for name, rank, tensor, shards in locate_shards(dict(group.ranks)):
        tensors.setdefault(name, tensor)
        for shard in list_stored_shards(tensor, shards):
            # Without a position, all shards of a rank are one box.
            position: object = rank if shard.start is None else (shard.start, shard.shape)
            box = boxes[name].setdefault(position, shard.make_box())
            box["files"].append(shard.path)
            # A single file has no rank.
            if len(group.ranks) > 1:
                box["ranks"].append(rank)
    rows = []
    for name, tensor in tensors.items():
        row = {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.full_shape),
            "boxes": list(boxes[name].values()),
        }
        rows.append(row)
    return {"path": title, "files": len(group.ranks), "tensors": rows}


class StoredShard(NamedTuple):
    """A shard of a tensor in a file of a model."""

    start: tuple[int, ...] | None
    """The position in the whole tensor, in elements; None if it is unknown."""
    shape: tuple[int, ...] | None
    """The shape of the shard; None if its position is unknown."""
    path: str
    """The file with the shard."""

    def make_box(self) -> dict[str, Any]:
        """Return the position as JSON values, without the ranks and files that hold it."""
        start, shape = self.start, self.shape
        return {
            "start": None if start is None else list(start),
            "shape": None if shape is None else list(shape),
            "ranks": [],
            "files": [],
        }


def list_stored_shards(tensor: Tensor, shards: Sequence[Shard] | None) -> list[StoredShard]:
    """Return the shards of a tensor in one file: a single one if their positions are unknown.

    shards: see `locate_shards`.
    """
    if shards is None:
        return [StoredShard(None, None, tensor.path)]
    return [StoredShard(shard.start, shard.tensor.shape, shard.tensor.path) for shard in shards]


def list_inputs(sources: Sequence[Source], options: DiffOptions) -> list[str]:
    """Return the files, folders and globs that a comparison of two models reads, without the baseline."""
    inputs = [path for path in (options.map, options.base) if path is not None]
    for source in sources:
        for path in _split(source):
            # `find_variables` reads the settings beside a file.
            inputs += [path, *(os.path.join(os.path.dirname(path), name) for name in CONFIGURATIONS)]
    return inputs


def _split(source: Source) -> list[str]:
    if not isinstance(source, (str, os.PathLike)):
        return [os.fspath(path) for path in source]
    path = os.fspath(source)
    # The name of a file may contain commas.
    if os.path.lexists(path):
        return [path]
    # The path of a comma is an unknown file.
    parts = [part for part in path.split(",") if part]
    return parts or [path]


def _merge_parts(title: str, groups: Sequence[CheckpointGroup]) -> CheckpointGroup:
    """Return one group of files that hold different tensors. Raises UsageError if the files are several models."""
    snapshots: list[Snapshot] = []
    are_parts = True
    for group in groups:
        snapshots += list_snapshots(group)
        are_parts &= Grouping.PARTS_ALONE in [reason.code for reason in group.grouping]
    names: list[str] = []
    for snapshot in snapshots:
        names += snapshot.tensors
    # Numbered parts of one checkpoint may hold a tensor twice, and these copies are compared.
    may_be_one = are_parts or len(set(names)) == len(names)
    if may_be_one and len(groups) == len(snapshots):
        return CheckpointGroup(
            title,
            None,
            tuple(enumerate(snapshots)),
            (),
        )
    titles = names_text([_name_group(group) for group in groups])
    raise UsageError(f"{title}: {len(groups)} models ({titles}); pass the files of one step of one run")


def list_snapshots(group: CheckpointGroup) -> list[Snapshot]:
    """Return the snapshots of a group without their ranks."""
    return [snapshot for _, snapshot in group.ranks]


def _name_group(group: CheckpointGroup) -> str:
    """Return the run of a group, and its step if it is known."""
    return group.run if group.step is None else f"{group.run} step {group.step}"


def list_earlier(side: Side) -> Iterator[Side]:
    """Yield the models of earlier steps beside a model, the latest step first."""
    if side.model.format == "memory":
        return
    paths = [snapshot.path for snapshot in list_snapshots(side.group)]
    for title, group in find_earlier(paths):
        with suppress(SyncheckError):  # an incomplete earlier step is no reason to stop
            yield Side(title, group, join(dict(group.ranks), title))
