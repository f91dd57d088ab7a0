"""Describe a comparison of two models by its sides: labels, locations of elements, relations, and stored tensors."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.adapted_tensors import find_adapted
from syncheck.conversion.causes import add_relations
from syncheck.conversion.exceptions import find_exceptions
from syncheck.conversion.mapped_models import apply_map
from syncheck.conversion.model_pairs import Models
from syncheck.conversion.sides import Side, list_earlier, list_stored_shards, open_side
from syncheck.diagnose.measures import relation_of
from syncheck.errors import UsageError
from syncheck.findings import RelationKind, Stored
from syncheck.layout.whole_model import locate_shards
from syncheck.messages import Note, Usage
from syncheck.records import Reason
from syncheck.tensors.kinds import find_outside_model
from syncheck.tensors.names import normalize_keys
from syncheck.text import SIDES, names_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.options import DiffOptions
    from syncheck.records import Comparison, Place, TensorDiff, ValueDiff
    from syncheck.snapshots import Snapshot, Tensor
    from syncheck.tensors.blocks import Files

    # A shard: its start and shape, None if its position is unknown, and the rank or file that holds it.
    StoredBox = tuple[tuple[int, ...] | None, tuple[int, ...] | None, str]

# Limit of the tensors with a map of their shards on a page.
_MOST_STORED = 200


def describe_sides(comparison: Comparison, sides: Sequence[Side], *, subset: bool) -> Comparison:
    """Add the labels of the sides, and the location of the worst element of each tensor.

    subset: whether B may lack tensors that do not belong to the model. Raises UsageError if the models have no name in
    common.
    """
    _require_common_names(comparison, sides)
    models = [normalize_keys(side.model.tensors) for side in sides]
    if subset:
        comparison = _accept_subset(comparison, replace(sides[0].model, tensors=models[0]))
    replicas = []
    for replica, side in zip(comparison.replicas, sides, strict=True):
        labelled = replace(
            replica,
            label=side.label,
            files=len(side.group.ranks),
        )
        replicas.append(labelled)
    return replace(
        comparison,
        replicas=tuple(replicas),
        tensors=tuple(locate_worst_element(diff, sides, models) for diff in comparison.tensors),
    )


def _accept_subset(comparison: Comparison, model_a: Snapshot) -> Comparison:
    """Accept that B lacks tensors and values that do not belong to the model, with a note."""
    optional_names = find_outside_model(model_a)
    tensors = []
    absent_names = []
    for diff in comparison.tensors:
        if _is_only_in_a(diff) and diff.name in optional_names:
            diff = replace(diff, reason=Reason.SUBSET, minority=())
            absent_names.append(diff.name)
        tensors.append(diff)
    notes = [*comparison.notes]
    if absent_names:
        notes.append(Note.SUBSET(count=len(absent_names), names=tuple(absent_names)))
    return replace(
        comparison,
        tensors=tuple(tensors),
        values=tuple(map(_accept_missing, comparison.values)),
        notes=tuple(notes),
    )


def _require_common_names(comparison: Comparison, sides: Sequence[Side]) -> None:
    """Raise UsageError if the models have no name in common."""
    missing = [diff for diff in comparison.tensors if diff.reason is Reason.MISSING]
    # Two models without any tensor have nothing to miss.
    if not missing or len(missing) != comparison.counts.tensors:
        return
    examples = []
    for side in sides:
        names = names_text([*side.model.tensors], 2) or "none"
        examples.append(f"{side.label} has {names}")
    raise UsageError(Usage.NO_COMMON_NAMES(examples=tuple(examples)))


def _is_only_in_a(diff: TensorDiff) -> bool:
    return diff.reason is Reason.MISSING and diff.clusters == ((0,),)


def locate_worst_element(diff: TensorDiff, sides: Sequence[Side], models: Sequence[Mapping[str, Tensor]]) -> TensorDiff:
    """Add the rank and file with the worst element on each side."""
    if diff.index is None:
        return diff
    places: dict[int, Place] = {}
    for label, side, tensors in zip(SIDES, sides, models, strict=True):
        places[label] = side.locate(tensors[diff.name], diff.index)
    return replace(diff, places=places)


def _accept_missing(value: ValueDiff) -> ValueDiff:
    """Accept a value that B lacks. Like tensors, values of the model must not be missing."""
    if value.kind == "model" or value.by_rank.get(1) is not None:
        return value
    return replace(value, counts=False, unknown=False)


def add_relations_of_sides(
    comparison: Comparison, sides: Sequence[Side], options: DiffOptions, files: Files
) -> Comparison:
    """Add how the tensors of B that differ follow from A, and from the model before the update."""
    names = _list_differing(comparison.tensors)
    # An unreadable base is an error, even if no tensor differs.
    stated_base = None if options.base is None else open_side("base", options.base)
    if not names:
        return comparison
    side_a, side_b = sides
    models = Models(
        a=normalize_keys(side_a.model.tensors),
        b=normalize_keys(side_b.model.tensors),
        files=files,
        stored=(side_a.stored, side_b.stored),
        map=side_a.map,
        variables=side_a.variables,
    )
    earlier_models = list_earlier(side_a) if stated_base is None else iter([stated_base])
    title = ""
    for base in earlier_models:
        title = base.model.path
        models.base = _map_base(base, side_a)
        if _has_stale_tensor(names, models):
            break
    else:
        # An earlier step without a tensor of B explains nothing.
        if stated_base is None:
            models.base = {}
    diffs = add_relations(comparison.tensors, models)
    adapted = sum(find_adapted(tensor) is not None for tensor in models.a.values())
    evidence = replace(
        comparison.evidence,
        base=title,
        updated=_count_updated(diffs, models),
        adapted=adapted,
        exceptions=find_exceptions(diffs, models),
    )
    return replace(comparison, tensors=diffs, evidence=evidence)


def _list_differing(diffs: Sequence[TensorDiff]) -> list[str]:
    """Return the names of the tensors that differ."""
    return [diff.name for diff in diffs if diff.out_of_sync]


def _has_stale_tensor(names: Sequence[str], models: Models) -> bool:
    """Whether B has a tensor of the model before the update. names: of the tensors that differ."""
    common_names = models.base.keys() & models.b.keys()
    candidates = [name for name in names if name in common_names]
    return any(models.equals(models.base[name], models.b[name]) is not None for name in candidates)


def _count_updated(diffs: Sequence[TensorDiff], models: Models) -> int:
    """Return how many tensors of B equal A but not the model before the update; 0 if no tensor is of that model."""
    if not any(relation_of(diff) is RelationKind.BASE for diff in diffs):
        return 0
    common_names = models.base.keys() & models.a.keys() & models.b.keys()
    agreeing_names = common_names.difference(_list_differing(diffs))
    return sum(models.equals(models.base[name], models.a[name]) is None for name in agreeing_names)


def _map_base(base: Side, side_a: Side) -> Mapping[str, Tensor]:
    """Return the tensors of the earlier model by the names of A."""
    tensors = normalize_keys(base.model.tensors)
    if side_a.map is None:
        return tensors
    mapped, _ = apply_map(side_a.map, [tensors, side_a.model.tensors], side_a.variables)
    return mapped[0].tensors


def describe_stored(comparison: Comparison, sides: Sequence[Side]) -> dict[str, tuple[Stored | None, Stored | None]]:
    """Return how both sides store the tensors that differ, and other tensors, up to a limit."""
    names = dict.fromkeys([*_list_differing(comparison.tensors), *comparison.evidence.names])
    first_names = list(names)[:_MOST_STORED]
    stored_a, stored_b = (_describe_side(side, first_names) for side in sides)
    return {name: (stored_a.get(name), stored_b.get(name)) for name in first_names}


def _describe_side(side: Side, names: Sequence[str]) -> dict[str, Stored]:
    """Return how the files of a side store tensors of the names."""
    tensors = normalize_keys(side.model.tensors)
    stored_tensors = {name: side.stored.get(name, tensors[name]) for name in names if name in tensors}
    boxes: dict[str, list[StoredBox]] = {tensor.name: [] for tensor in stored_tensors.values()}
    for stored_name, box in _list_stored_boxes(side):
        if stored_name in boxes:
            boxes[stored_name].append(box)
    descriptions = {}
    for name, tensor in stored_tensors.items():
        descriptions[name] = Stored(
            tensor.name,
            tensor.dtype,
            shape=tuple(tensor.full_shape),
            boxes=tuple(boxes[tensor.name]),
        )
    return descriptions


def _list_stored_boxes(side: Side) -> Iterator[tuple[str, StoredBox]]:
    """Yield the name and the box of each shard in the files of a side."""
    several_ranks = len(side.group.ranks) > 1
    for _, rank, tensor, shards in locate_shards(dict(side.group.ranks)):
        for shard in list_stored_shards(tensor, shards):
            owner = f"rank {rank}" if several_ranks else os.path.basename(shard.path)
            yield tensor.name, (shard.start, shard.shape, owner)
