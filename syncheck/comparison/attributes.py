"""Compare what modules in memory hold beside tensors: plain attributes, their mode, `requires_grad`, and the order.

Rules: the order of registration and `requires_grad` count, because DistributedDataParallel pairs parameters and buffers
by position. Modes and plain attributes do not count: metrics, caches and counters differ between ranks by design. They
are named with their values.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.layout.replica_groups import MODEL_PARALLEL, coordinates_in
from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.snapshots import get_metadata
from syncheck.tensors.names import normalize
from syncheck.tensors.value_kinds import METRIC, ORDERS, REQUIRES_GRAD, TRAINING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

    Snapshots = Mapping[int, Snapshot]
    IsSelected = Callable[[str, str], bool]
    """Whether the options select a name and kind."""

_MOST_NAMED = 8


def compare_attributes(snapshots: Snapshots, is_selected: IsSelected) -> list[ValueDiff]:
    """Return the attributes that differ between ranks with the same part of the model."""
    diffs: list[ValueDiff] = []
    for replicas in _group_by_position(snapshots):
        for name, by_rank in _collect_attributes(replicas).items():
            # repr, because NaN equals NaN here, and True is not 1.
            texts = set(map(repr, by_rank.values()))
            if len(texts) < 2:
                continue

            # Users know an attribute by its name, without the mark.
            if not is_selected(name.removeprefix(METRIC), "value"):
                continue

            # A mode changes what the module computes, like a setting.
            is_mode = name.rpartition(".")[2] == TRAINING
            diff = ValueDiff(
                name,
                by_rank,
                counts=False,
                kind="setting" if is_mode else "attribute",
            )
            diffs.append(diff)

    return diffs


def compare_registration(snapshots: Snapshots, is_selected: IsSelected) -> list[ValueDiff]:
    """Return the differences in `requires_grad` and in the order of parameters and buffers.

    snapshots: of ranks that pair tensors by position.
    """
    diffs: list[ValueDiff] = []
    for replicas in _group_by_position(snapshots):
        parameters: dict[int, list[str]] = {}
        buffers: dict[int, list[str]] = {}
        for rank, snapshot in replicas.items():
            parameters[rank] = _list_parameters(snapshot)
            buffers[rank] = _list_buffers(snapshot)

        names_by_kind = {"parameter": parameters, "buffer": buffers}
        for name, (kind, names_by_rank) in zip(ORDERS, names_by_kind.items(), strict=True):
            moved = _find_moved(names_by_rank)
            is_order_different = any(moved.values())
            if is_order_different and is_selected(name, kind):
                diffs.append(_make_setting(name, moved))

        for name, requires_grad in _find_partly_frozen(replicas, parameters).items():
            if is_selected(name, "parameter"):
                diffs.append(_make_setting(f"{name}.{REQUIRES_GRAD}", requires_grad))

    return diffs


def _make_setting(name: str, by_rank: Mapping[int, Any]) -> ValueDiff:
    """Return the diff of a setting of modules that DistributedDataParallel relies on."""
    return ValueDiff(
        name,
        by_rank,
        counts=True,
        kind="setting",
    )


def note_attributes(diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes that name the attributes that differ, and the states of metrics."""
    facts: list[Message] = []
    metrics: list[str] = []
    for diff in diffs:
        if diff.kind != "attribute":
            continue

        if diff.name.startswith(METRIC):
            metrics.append(diff.name.removeprefix(METRIC))
        else:
            facts.append(Note.ATTRIBUTE(name=diff.name, values=dict(diff.by_rank)))

    # A list, a cache or a counter in each layer would fill the report.
    unnamed = len(facts) - _MOST_NAMED
    if unnamed > 0:
        facts = [*facts[:_MOST_NAMED], Note.MORE_ATTRIBUTES(count=unnamed)]

    return [
        *note_if(facts, Note.ATTRIBUTES(facts=tuple(facts))),
        *note_if(metrics, Note.METRICS(names=tuple(metrics))),
    ]


def _group_by_position(snapshots: Snapshots) -> list[Snapshots]:
    """Return the sets of at least two ranks with modules that hold the same part of the model."""
    by_position: dict[Hashable, dict[int, Snapshot]] = defaultdict(dict)
    for rank, snapshot in snapshots.items():
        # Files have no attributes, and neither has a rank whose replica is no module.
        if snapshot.attributes is not None:
            position = coordinates_in(snapshot, MODEL_PARALLEL)
            by_position[position][rank] = snapshot

    return [replicas for replicas in by_position.values() if len(replicas) > 1]


def _collect_attributes(replicas: Snapshots) -> dict[str, dict[int, Any]]:
    """Return the attributes of ranks: name to rank to value, in the order of the model."""
    by_name: dict[str, dict[int, Any]] = {}
    for rank, snapshot in replicas.items():
        assert snapshot.attributes is not None, "only ranks with modules have a position"
        for name, value in snapshot.attributes.items():
            # None stands for an attribute that a rank does not have.
            by_rank = by_name.setdefault(name, dict.fromkeys(replicas))
            by_rank[rank] = value

    return by_name


def _list_parameters(snapshot: Snapshot) -> list[str]:
    """Return the names of parameters in the order of registration."""
    normalized = normalize(snapshot.tensors)
    return [normalized[name] for name, tensor in snapshot.tensors.items() if tensor.parameter]


def _list_buffers(snapshot: Snapshot) -> list[str]:
    """Return the names of buffers in the order of registration."""
    metadata = get_metadata(snapshot)
    # The metadata lists buffers by name, and the tensors are in the order of the state dict.
    buffers = frozenset(metadata.buffers or ())
    return [name for name in normalize(snapshot.tensors).values() if name in buffers]


def _find_moved(orders: Mapping[int, Sequence[str]]) -> dict[int, tuple[str, ...]]:
    """Return the names that are not at the same position on all ranks, for each rank in its order.

    orders: all names of each rank. If ranks have different names, this is a finding of its own, and nothing is moved.
    """
    reference = next(iter(orders.values()))
    positions = set(enumerate(reference))
    displaced: set[tuple[int, str]] = set()
    for names in orders.values():
        if sorted(names) != sorted(reference):
            return {}

        displaced |= positions.difference(enumerate(names))

    moved = frozenset(name for _, name in displaced)
    by_rank: dict[int, tuple[str, ...]] = {}
    for rank, names in orders.items():
        by_rank[rank] = tuple(name for name in names if name in moved)

    return by_rank


def _find_partly_frozen(replicas: Snapshots, parameters: Mapping[int, Sequence[str]]) -> dict[str, dict[int, bool]]:
    """Return whether each rank requires the gradient of a parameter, for parameters with different answers.

    parameters: the names of the parameters of each rank.
    """
    frozen: dict[int, frozenset[str]] = {}
    for rank, snapshot in replicas.items():
        frozen[rank] = frozenset(get_metadata(snapshot).frozen)

    frozen_anywhere = frozenset.union(*frozen.values())
    frozen_everywhere = frozenset.intersection(*frozen.values())
    partly_frozen = frozen_anywhere - frozen_everywhere
    # A parameter that some ranks do not have is a finding of its own.
    on_all_ranks = partly_frozen.intersection(*parameters.values())
    by_name: dict[str, dict[int, bool]] = {}
    for name in sorted(on_all_ranks):
        by_name[name] = {rank: name not in names for rank, names in frozen.items()}

    return by_name
