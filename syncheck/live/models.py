"""Compare two models in memory or in files: `syncheck.testing.assert_same_model`.

In a process group of several ranks, each rank holds a copy or a part of a model in memory:

1. The ranks send the names, shapes and layouts of their tensors. If several ranks hold a tensor of the same name, all
   ranks compare the digests of copies, as `compare_across_ranks` does. Pipeline stages have no copies, as in files.
2. The first rank joins the tensors of all ranks into whole tensors.
3. The first rank fetches bytes window by window, compares both models, and sends its report to all. A model in files is
   read by the first rank.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.api import diff, finish
from syncheck.conversion.diff import compare_copies, compare_sides
from syncheck.conversion.sides import LABELS, Side, open_side
from syncheck.errors import UsageError
from syncheck.layout.groups import CheckpointGroup
from syncheck.layout.whole_model import join
from syncheck.live.channel import Channel, world_size
from syncheck.live.exchange.across_ranks import compare_snapshots
from syncheck.live.exchange.fetching import Fetcher, RemoteBytes, RemoteTensor, read_pieces
from syncheck.live.memory import snapshot
from syncheck.live.memory.objects import class_title
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from syncheck.live.exchange.fetching import Key
    from syncheck.options import DiffOptions
    from syncheck.records import Group, Report
    from syncheck.snapshots import Snapshot, Tensor


def compare_models(a: Any, b: Any, group: Any, options: Callable[[], DiffOptions]) -> Report:
    """Compare two models; in a process group, on all ranks with the same report.

    a, b: each a path, several paths separated by commas, or an object in memory as in `memory.snapshot`.
    group: a process group, all ranks by default.
    options: a function that returns the options; if it raises, all ranks raise.

    Raises UsageError for objects without tensors, and as `api.diff` does; in a process group the same error
    on all ranks.
    """
    if _is_path(a) and _is_path(b):
        if group is not None:
            raise UsageError("each rank compares files alone; remove group=")
        return diff(a, b, options=options())

    if group is None and world_size() < 2:
        return _compare_alone((a, b), options())

    channel = Channel(group)
    return channel.run_together(lambda: _compare_on_ranks(channel, (a, b), options()))


def _compare_alone(models: tuple[Any, Any], options: DiffOptions) -> Report:
    """Compare two models without other ranks."""
    sides = []
    for label, model in zip(LABELS, models, strict=True):
        if _is_path(model):
            sides.append(open_side(label, model))
        else:
            sides.append(_make_side(label, {0: _take_snapshot(model)}, class_title(model)))

    copies = [compare_copies(side, options) for side in sides]
    return finish(compare_sides(sides, copies, options), options)


def _is_path(model: Any) -> bool:
    return isinstance(model, (str, os.PathLike))


def _take_snapshot(model: Any, rank: int | None = None) -> Snapshot:
    suffix = "" if rank is None else f" on rank {rank}"
    return snapshot(model, path=f"{class_title(model)}{suffix}", persistent=True)


def _make_side(label: str, snapshots: Mapping[int, Snapshot], path: str) -> Side:
    return Side(
        label,
        CheckpointGroup(
            run=path,
            step=None,
            ranks=tuple(snapshots.items()),
            grouping=(),
        ),
        join(snapshots, path),
    )


def _have_copies(snapshots: Iterable[Snapshot]) -> bool:
    """Whether several ranks hold a tensor of the same name; otherwise each holds its own part of a model."""
    names: set[str] = set()
    for replica in snapshots:
        names_of_rank = normalize_keys(replica.tensors).keys()
        if not names.isdisjoint(names_of_rank):
            return True
        names.update(names_of_rank)

    return False


class _Exchange(NamedTuple):
    """Two models of which each rank holds a part or a copy.

    models: as given by the caller.
    local: this rank's snapshots with their bytes, by side; None for a path.
    by_rank: the snapshots of all ranks without bytes, by rank and side.
    """

    channel: Channel
    models: tuple[Any, Any]
    local: list[Snapshot | None]
    by_rank: dict[int, list[Snapshot | None]]

    def list_local_tensors(self) -> list[Mapping[str, Tensor]]:
        """Return this rank's tensors by side and name; none for a path."""
        return [{} if replica is None else replica.tensors for replica in self.local]

    def list_snapshots(self, side: int) -> dict[int, Snapshot]:
        """Return the snapshots of one model by rank; empty for a path."""
        # Each rank has a snapshot or a path for each side.
        snapshots = {rank: snapshots_of_rank[side] for rank, snapshots_of_rank in self.by_rank.items()}
        return {rank: replica for rank, replica in snapshots.items() if replica is not None}


def _compare_on_ranks(channel: Channel, models: tuple[Any, Any], options: DiffOptions) -> Report:
    """Compare two models on all ranks. To be called within `channel.run_together`."""
    # A path on some ranks only would leave the other ranks waiting for tensors.
    are_paths = channel.gather(tuple(_is_path(model) for model in models), "models")
    if len(set(are_paths.values())) > 1:
        raise UsageError("A or B is a path on some ranks and an object on other ranks; pass the same on every rank")

    local = []
    for model in models:
        local.append(None if _is_path(model) else _take_snapshot(model, channel.rank))

    by_rank = channel.gather(_without_bytes(local), "descriptions")
    exchange = _Exchange(
        channel=channel,
        models=models,
        local=local,
        by_rank=by_rank,
    )
    copies = [_compare_copies(exchange, side, options) for side in range(len(models))]
    local_bytes = _list_local_bytes(exchange)

    def compare() -> Report:
        fetcher = Fetcher(channel, local_bytes, _list_remote_tensors(exchange))
        sides = []
        for side, (label, model) in enumerate(zip(LABELS, models, strict=True)):
            if _is_path(model):
                # Files are read by this rank alone, so their copies are compared here, too.
                sides.append(open_side(label, model))
                copies[side] = compare_copies(sides[side], options)
            else:
                snapshots = _attach_bytes(exchange.list_snapshots(side), side, fetcher)
                sides.append(_make_side(label, snapshots, class_title(model)))

        return finish(compare_sides(sides, copies, options), options)

    return channel.run_on_leader(compare, lambda pieces: read_pieces(local_bytes, pieces))


def _compare_copies(exchange: _Exchange, side: int, options: DiffOptions) -> Group | None:
    """Compare the copies of one model on all ranks; None for a path, and without copies."""
    local = exchange.local[side]
    if local is None or not _have_copies(exchange.list_snapshots(side).values()):
        return None

    # Digests are sufficient for copies, so this comparison fetches the bytes of differing tensors only.
    report = compare_snapshots(
        exchange.channel,
        local,
        options,
        name=f"{LABELS[side]}: model",
    )
    return report.groups[0]


def _list_local_bytes(exchange: _Exchange) -> dict[Key, Any]:
    """Return the bytes of this rank's tensors."""
    local_bytes: dict[Key, Any] = {}
    for side, tensors in enumerate(exchange.list_local_tensors()):
        for name, tensor in tensors.items():
            # Refused tensors have no bytes.
            if tensor.data is not None:
                local_bytes[_make_key(side, exchange.channel.rank, name)] = tensor.data

    return local_bytes


def _list_remote_tensors(exchange: _Exchange) -> list[RemoteTensor]:
    """Return the tensors of other ranks that this rank compares."""
    remote_tensors = []
    for side, local_tensors in enumerate(exchange.list_local_tensors()):
        other_ranks = exchange.list_snapshots(side)
        other_ranks.pop(exchange.channel.rank, None)
        for rank, replica in other_ranks.items():
            for name, tensor in replica.tensors.items():
                # This rank has the first copy of a plain tensor, unless its pipeline stage lacks the tensor.
                is_needed = tensor.sharding is not None or name not in local_tensors
                if is_needed and tensor.dtype in DTYPES:
                    key, digest = _make_key(side, rank, name)
                    size = tensor.numel * DTYPES[tensor.dtype].size
                    remote_tensors.append(
                        RemoteTensor(
                            name=key,
                            digest=digest,
                            rank=rank,
                            size=size,
                        )
                    )

    return remote_tensors


def _attach_bytes(snapshots: Mapping[int, Snapshot], side: int, fetcher: Fetcher) -> dict[int, Snapshot]:
    """Return snapshots whose tensors are fetched when they are read."""
    readable = {}
    for rank, replica in snapshots.items():
        tensors = {}
        for name, tensor in replica.tensors.items():
            tensors[name] = replace(tensor, data=RemoteBytes(fetcher, _make_key(side, rank, name)))

        readable[rank] = replace(replica, tensors=tensors)

    return readable


def _without_bytes(snapshots: Iterable[Snapshot | None]) -> list[Snapshot | None]:
    """Return snapshots that can be sent to other ranks."""
    descriptions: list[Snapshot | None] = []
    for replica in snapshots:
        if replica is None:
            descriptions.append(None)
        else:
            tensors = {name: replace(tensor, data=None) for name, tensor in replica.tensors.items()}
            descriptions.append(replace(replica, tensors=tensors))

    return descriptions


def _make_key(side: int, rank: int, name: str) -> Key:
    """Return the key under which ranks exchange a tensor. Tensors of different ranks need no digest."""
    return f"{side}/{rank}/{name}", b""
