"""Compare what modules in memory hold beside tensors: plain attributes, their mode, `requires_grad`, and the order.

Rules: the order of registration and `requires_grad` count, because DistributedDataParallel pairs parameters and buffers
by position. Modes and plain attributes do not count: metrics, caches and counters differ between ranks by design. They
are named with their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.comparison.replica_groups import MODEL_PARALLEL, coordinates_in
from syncheck.messages import Note
from syncheck.names import normalize
from syncheck.records import ValueDiff
from syncheck.value_kinds import METRIC, ORDERS, REQUIRES_GRAD, TRAINING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

    Snapshots = Mapping[int, Snapshot]

_MOST_NAMED = 8


def compare_attributes(snapshots: Snapshots, wanted: Callable[[str, str], bool]) -> list[ValueDiff]:
    """Return the attributes that differ between ranks with the same part of the model.

    wanted: whether the options select a name and kind.
    """
    diffs = []
    for members in _group_by_position(snapshots):
        names: dict[str, None] = {}  # in the order of the model
        for rank in members:
            names |= dict.fromkeys(snapshots[rank].attributes or ())
        for name in names:
            by_rank = {rank: (snapshots[rank].attributes or {}).get(name) for rank in members}
            # repr, because NaN equals NaN here, and True is not 1.
            if len({repr(value) for value in by_rank.values()}) > 1 and wanted(name.removeprefix(METRIC), "value"):
                kind = "setting" if name.rpartition(".")[2] == TRAINING else "attribute"
                diffs.append(ValueDiff(name, by_rank, counts=False, kind=kind))  # type: ignore[arg-type]
    return diffs


def compare_registration(snapshots: Snapshots, wanted: Callable[[str, str], bool]) -> list[ValueDiff]:
    """Return the differences in `requires_grad` and in the order of parameters and buffers.

    snapshots: of ranks that pair tensors by position. wanted: whether the options select a name and kind.
    """
    diffs = []
    for members in _group_by_position(snapshots):
        modules = {rank: _list_registered(snapshots[rank]) for rank in members}
        for number, name in enumerate(ORDERS):
            orders = {rank: registered[number] for rank, registered in modules.items()}
            moved = _find_moved(orders)
            if moved and wanted(name, ("parameter", "buffer")[number]):
                by_rank = {rank: tuple(filter(moved.__contains__, order)) for rank, order in orders.items()}
                diffs.append(ValueDiff(name, by_rank, counts=True, kind="setting"))
        diffs += _compare_gradients(snapshots, modules, wanted)
    return diffs


def note_attributes(diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes that name the attributes that differ, and the states of metrics."""
    attributes = [diff for diff in diffs if diff.kind == "attribute"]
    metrics = [diff.name.removeprefix(METRIC) for diff in attributes if diff.name.startswith(METRIC)]
    plain = [diff for diff in attributes if not diff.name.startswith(METRIC)]
    notes: list[Message] = []
    if plain:
        facts = [Note.ATTRIBUTE(name=diff.name, values=dict(diff.by_rank)) for diff in plain[:_MOST_NAMED]]
        if len(plain) > _MOST_NAMED:
            facts.append(Note.MORE_ATTRIBUTES(count=len(plain) - _MOST_NAMED))
        notes.append(Note.ATTRIBUTES(facts=tuple(facts)))
    if metrics:
        notes.append(Note.METRICS(names=tuple(metrics)))
    return notes


def _group_by_position(snapshots: Snapshots) -> list[list[int]]:
    """Return the sets of at least two ranks with modules that hold the same part of the model."""
    members: dict[Hashable, list[int]] = {}
    for rank, snapshot in snapshots.items():
        if snapshot.attributes is not None:
            members.setdefault(coordinates_in(snapshot, MODEL_PARALLEL), []).append(rank)
    return [ranks for ranks in members.values() if len(ranks) > 1]


def _list_registered(snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """Return the names of parameters and of buffers in the order of registration."""
    normalized = normalize(snapshot.tensors)
    buffers = set(() if snapshot.metadata is None else snapshot.metadata.buffers or ())
    parameters = [normalized[name] for name, tensor in snapshot.tensors.items() if tensor.parameter]
    return parameters, [short for short in normalized.values() if short in buffers]


def _find_moved(orders: Mapping[int, list[str]]) -> frozenset[str]:
    """Return the names at other positions on some rank; none if ranks have different names, a finding of its own."""
    first, *further = orders.values()
    moved: set[str] = set()
    for order in further:
        if sorted(order) != sorted(first):
            return frozenset()
        for name, name_here in zip(first, order, strict=True):
            if name != name_here:
                moved.add(name)
    return frozenset(moved)


def _compare_gradients(
    snapshots: Snapshots, modules: Mapping[int, tuple[list[str], list[str]]], wanted: Callable[[str, str], bool]
) -> list[ValueDiff]:
    """Return the parameters on all ranks that require a gradient on some ranks only."""
    frozen: dict[int, frozenset[str]] = {}
    for rank in modules:
        metadata = snapshots[rank].metadata
        frozen[rank] = frozenset(() if metadata is None else metadata.frozen)
    common = frozenset.intersection(*(frozenset(parameters) for parameters, _ in modules.values()))
    diffs = []
    for name in sorted(frozenset.union(*frozen.values()) - frozenset.intersection(*frozen.values())):
        if name in common and wanted(name, "parameter"):
            by_rank: dict[int, Any] = {rank: name not in own for rank, own in frozen.items()}
            diffs.append(ValueDiff(f"{name}.{REQUIRES_GRAD}", by_rank, counts=True, kind="setting"))
    return diffs
