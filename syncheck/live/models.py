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
from typing import TYPE_CHECKING, Any

from syncheck.api import diff, finish
from syncheck.conversion.diff import compare_copies, compare_sides
from syncheck.conversion.sides import LABELS, Side, open_side
from syncheck.errors import UsageError
from syncheck.layout.groups import ReplicaGroup
from syncheck.layout.whole_model import join
from syncheck.live.channel import Channel, world_size
from syncheck.live.exchange.across_ranks import compare_snapshots
from syncheck.live.exchange.fetching import Fetcher, RemoteBytes, RemoteTensor, read_pieces
from syncheck.live.memory import snapshot
from syncheck.live.memory.objects import class_title
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.exchange.fetching import Key
    from syncheck.options import DiffOptions
    from syncheck.records import Group, Report
    from syncheck.snapshots import Snapshot, Tensor


def compare_models(a: Any, b: Any, group: Any, options: Callable[[], DiffOptions]) -> Report:
    """Compare two models; in a process group, on all ranks with the same report.

    a, b: each a path, several paths separated by commas, or an object in memory as in `memory.snapshot`. group: a
    process group, all ranks by default. options: a function that returns the options; if it raises, all ranks raise.
    Raises UsageError for objects without tensors, and as `api.diff` does; in a process group the same error
    on all ranks.
    """
    if _is_path(a) and _is_path(b):
        if group is not None:
            raise UsageError("each rank compares files alone; remove group=")
        return diff(a, b, options=options())
    if group is None and world_size() < 2:
        chosen = options()
        sides = [
            open_side(label, thing)
            if _is_path(thing)
            else _make_side(label, {0: _take_snapshot(thing)}, class_title(thing))
            for label, thing in zip(LABELS, (a, b), strict=True)
        ]
        report = compare_sides(sides, [compare_copies(side, chosen) for side in sides], chosen)
        return finish(report, chosen)
    channel = Channel(group)
    return channel.run_together(lambda: _compare_on_ranks(channel, (a, b), options()))


def _is_path(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike))


def _take_snapshot(thing: Any, rank: int | None = None) -> Snapshot:
    place = "" if rank is None else f" on rank {rank}"
    return snapshot(thing, path=f"{class_title(thing)}{place}", persistent=True)


def _make_side(label: str, snapshots: Mapping[int, Snapshot], path: str) -> Side:
    return Side(label, ReplicaGroup(path, None, tuple(snapshots.items()), ()), join(snapshots, path))


def _have_copies(snapshots: Sequence[Snapshot]) -> bool:
    """Whether several ranks hold a tensor of the same name; otherwise each holds its own part of a model."""
    names = [name for snapshot in snapshots for name in normalize_keys(snapshot.tensors)]
    return len(set(names)) < len(names)


def _compare_on_ranks(channel: Channel, things: tuple[Any, Any], options: DiffOptions) -> Report:
    kinds = channel.gather(tuple(map(_is_path, things)), "models")
    if len(set(kinds.values())) > 1:
        raise UsageError("A or B is a path on some ranks and an object on other ranks; pass the same on every rank")
    local = [None if _is_path(thing) else _take_snapshot(thing, channel.rank) for thing in things]
    described = [own and replace(own, tensors=_without_bytes(own.tensors)) for own in local]
    by_rank = channel.gather(described, "descriptions")
    copies: list[Group | None] = [None, None]
    for side, own in enumerate(local):
        if own is not None and _have_copies([snapshots[side] for snapshots in by_rank.values()]):
            report = compare_snapshots(channel, own, options, name=f"{LABELS[side]}: model")
            copies[side] = report.groups[0]
    own_bytes: dict[Key, Any] = {
        (_make_key(side, channel.rank, name), b""): tensor.data
        for side, own in enumerate(local)
        if own is not None
        for name, tensor in own.tensors.items()
        if tensor.data is not None
    }

    def compare() -> Report:
        # This rank has the first copy of a plain tensor, unless its pipeline stage lacks the tensor.
        local_names = [set() if own is None else own.tensors.keys() for own in local]
        wanted = [
            RemoteTensor(_make_key(side, rank, name), b"", rank, tensor.numel * DTYPES[tensor.dtype].size)
            for side, own in enumerate(local)
            if own is not None
            for rank, described in by_rank.items()
            if rank != channel.rank
            for name, tensor in described[side].tensors.items()
            if (tensor.sharding is not None or name not in local_names[side]) and tensor.dtype in DTYPES
        ]
        fetcher = Fetcher(channel, own_bytes, wanted)
        sides = []
        for side, (label, thing) in enumerate(zip(LABELS, things, strict=True)):
            if _is_path(thing):
                sides.append(open_side(label, thing))
                copies[side] = compare_copies(sides[side], options)
                continue
            snapshots = {
                rank: replace(
                    described[side],
                    tensors={
                        name: replace(t, data=RemoteBytes(fetcher, (_make_key(side, rank, name), b"")))
                        for name, t in described[side].tensors.items()
                    },
                )
                for rank, described in by_rank.items()
            }
            sides.append(_make_side(label, snapshots, class_title(thing)))
        return finish(compare_sides(sides, copies, options), options)

    return channel.run_on_leader(compare, lambda pieces: read_pieces(own_bytes, pieces))


def _without_bytes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: replace(tensor, data=None) for name, tensor in tensors.items()}


def _make_key(side: int, rank: int, name: str) -> str:
    return f"{side}/{rank}/{name}"
