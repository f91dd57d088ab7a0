"""Classify the tensors of a group by kind, and select the tensors to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncheck.comparison.group_metadata import get_metadata, merge_metadata
from syncheck.layout.alignment import align
from syncheck.tensors.kinds import KINDS, Kinds, classify_tensors, make_selector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.comparison.selection import Selection
    from syncheck.layout.alignment import Alignment
    from syncheck.layout.groups import ReplicaGroup
    from syncheck.snapshots import Snapshot, Tensor


class Classification(NamedTuple):
    """The kinds of the tensors of a group.

    kinds: by common name.
    is_selected: whether the options select a tensor or value, by name and kind.
    """

    kinds: Kinds
    is_selected: Callable[[str, str], bool]


def classify(alignment: Alignment, selection: Selection) -> Classification:
    """Return the kinds of the aligned tensors, and the selection of the options."""
    kinds = _find_kinds(alignment.tensors, alignment.snapshots, selection)
    is_selected = make_selector(
        selection.only,
        selection.include,
        selection.exclude,
        kinds.unsure,
    )
    return Classification(kinds, is_selected)


def kinds_in(replicas: ReplicaGroup, selection: Selection) -> tuple[str, ...]:
    """Return the kinds of tensors to compare, without reading tensors."""
    alignment = align(dict(replicas.ranks))
    present = set(selected_kinds(alignment, selection).values())
    if not selection.only and not selection.rng:
        present.discard("rng")

    return tuple(kind for kind in KINDS if kind in present)


def selected_kinds(alignment: Alignment, selection: Selection) -> dict[str, str]:
    """Return the kind of each selected tensor by its common name."""
    kinds, is_selected = classify(alignment, selection)
    return {name: kind for name, kind in kinds.by_name.items() if is_selected(name, kind)}


def _find_kinds(
    aligned: Mapping[str, Mapping[int, Tensor]], snapshots: Mapping[int, Snapshot], selection: Selection
) -> Kinds:
    """Return the kinds of tensors by their names, and their shapes and dtypes on the first rank.

    aligned: tensors by common name and rank.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    parameters: list[str] = []
    for name, tensors in aligned.items():
        first = next(iter(tensors.values()))
        shapes[name] = first.shape
        dtypes[name] = first.dtype
        if any(tensor.parameter for tensor in tensors.values()):
            parameters.append(name)

    described: dict[int, Snapshot] = {}
    for rank, snapshot in snapshots.items():
        if get_metadata(snapshot).buffers is not None:
            described[rank] = snapshot

    # Metadata without a description of the model says nothing about its buffers.
    kinds = classify_tensors(
        shapes,
        merge_metadata(described),
        selection.buffers,
        dtypes=dtypes,
        parameters=parameters,
    )
    return _mark_mixed(kinds, aligned, selection)


def _mark_mixed(kinds: Kinds, aligned: Mapping[str, Mapping[int, Tensor]], selection: Selection) -> Kinds:
    """Return the kinds, unsure for tensors whose shapes or dtypes differ between ranks."""
    by_name = dict(kinds.by_name)
    mixed: set[str] = set()
    for name, kind in kinds.by_name.items():
        # Without a selection, all kinds except RNG states are compared anyway.
        if not selection.only and kind != "rng":
            continue

        types = {(tensor.shape, tensor.dtype) for tensor in aligned[name].values()}
        if len(types) < 2:
            continue

        # A state whose shape differs between ranks may be a buffer of the model with the name of a state.
        mixed.add(name)
        if kind == "rng":
            by_name[name] = "buffer"

    return kinds._replace(by_name=by_name, unsure=kinds.unsure | mixed)
