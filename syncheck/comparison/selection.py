"""What a comparison selects: the options of a user, the kinds of the tensors of a group, and which of them count."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.frozen import record
from syncheck.layout.alignment import align
from syncheck.layout.replica_groups import DIFFERENT_PARAMETERS, coordinates_in
from syncheck.snapshots import Metadata, get_metadata
from syncheck.tensors.kinds import BUFFERS, KINDS, OPTIMIZER, PARAMETERS, Kinds, classify_tensors, make_selector
from syncheck.tensors.tolerance import Tolerances

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.layout.groups import CheckpointGroup
    from syncheck.snapshots import NoSync, Snapshot, Tensor

# The kinds of tensors that each value of `Options.only` selects.
ONLY = {
    "params": PARAMETERS,
    "buffers": BUFFERS,
    "optimizer": OPTIMIZER,
    "rng": frozenset({"rng"}),
}


@record
class Selection:
    """The tensors to compare, and how.

    only: kinds; empty for all kinds except RNG states. include, exclude: globs of whole tensor names. buffers: globs of
    names that are buffers. tolerance: for floats. reference: the rank to measure differences against, instead of the
    majority. jobs: number of threads, None for the default. quick: compare stored checksums only. histograms: add them
    to the tensors that differ most. rng: also compare RNG states.
    """

    only: frozenset[str] = frozenset()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    tolerance: Tolerances = field(default_factory=Tolerances)
    reference: int | None = None
    jobs: int | None = None
    quick: bool = False
    histograms: bool = False
    rng: bool = False

    @property
    def compares_rng(self) -> bool:
        """Whether RNG states are compared, if `only` selects their kind or no kind."""
        return self.rng or bool(self.only)


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


def list_kinds(replicas: CheckpointGroup, selection: Selection) -> tuple[str, ...]:
    """Return the kinds of tensors to compare, without reading tensors."""
    alignment = align(dict(replicas.ranks))
    present = set(selected_kinds(alignment, selection).values())
    if not selection.compares_rng:
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


def merge_metadata(snapshots: Mapping[int, Snapshot]) -> Metadata:
    """Return the metadata of the first rank with any; for stages and experts, with the names of all ranks."""
    blocks = [snapshot.metadata for snapshot in snapshots.values() if snapshot.metadata is not None]
    if not blocks:
        return Metadata()

    # "active" on any rank is the strongest evidence.
    no_sync: NoSync = min((block.no_sync for block in blocks if block.no_sync), default="")
    first = replace(blocks[0], no_sync=no_sync)
    positions = {coordinates_in(snapshot, DIFFERENT_PARAMETERS) for snapshot in snapshots.values()}
    if len(positions) < 2:
        return first

    # Dictionaries without values are sets that keep the order.
    optimizer_parameters: dict[str, None] = {}
    frozen: dict[str, None] = {}
    for block in blocks:
        optimizer_parameters |= dict.fromkeys(block.optimizer_parameters)
        frozen |= dict.fromkeys(block.frozen)

    return replace(
        first,
        optimizer_parameters=tuple(optimizer_parameters),
        buffers=_join_buffers(blocks),
        frozen=tuple(frozen),
    )


def _join_buffers(blocks: Sequence[Metadata]) -> tuple[str, ...] | None:
    """Return the buffers of all ranks; None if the model of a rank was not described."""
    buffers: dict[str, None] = {}
    for block in blocks:
        if block.buffers is None:
            return None

        buffers |= dict.fromkeys(block.buffers)

    return tuple(buffers)
