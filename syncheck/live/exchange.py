"""Compare what the ranks of a process group hold in memory, so that every rank has the same report.

Each rank sends the names, dtypes, shapes and digests of its tensors. What has one digest everywhere is identical and
stays where it is; of the rest, bytes are fetched while they are measured, a window of one tensor at a time. So no
rank ever holds a second model.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck import reference
from syncheck.api import Found, Options, judge
from syncheck.errors import UsageError
from syncheck.layout_groups import Replicas
from syncheck.live.channel import Channel
from syncheck.live.held import Held
from syncheck.live.here import NOTHING
from syncheck.live.memory import FORMAT, agree_on_buffers, snapshot
from syncheck.names import normalize
from syncheck.snapshots import Metadata, Snapshot, Tensor, in_c_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.records import Report

# Bytes of one tensor that one rank sends at a time, and all ranks together: a gather keeps a place for each.
WINDOW = 16 << 20
ALL_WINDOWS = 256 << 20


def compare_across_ranks(
    things: Sequence[Any], group: Any = None, options: Options | Callable[[], Options] | None = None
) -> Report:
    """Compare what each rank of a process group holds, and return the same report on all of them.

    A collective call: every rank of the group has to make it. things: the parts of this rank's replica, as
    `memory.snapshot` takes them; ranks may hold different ones. group: a process group of torch.distributed of any
    backend with `all_gather_object`; by default all ranks. options: or what makes them, if that may fail. Ranks are
    those of the whole world. Nothing is changed, and no random number is drawn.
    Raises, on all ranks and with one text: UsageError for things that cannot be compared and for options that are not
    the same everywhere, RankFailed where something else went wrong on a rank.
    """
    channel = Channel(group)
    return channel.together(lambda: _compare(channel, things, options))


@dataclass(frozen=True)
class Catalogue:
    """What a rank holds, without the bytes. rows: name, dtype, shape, refusal, known parameter, digest of each."""

    title: str
    size: int
    rows: tuple[tuple[str, str, tuple[int, ...], str, bool, bytes], ...]
    values: Mapping[str, Any]
    stubs: tuple[str, ...]
    metadata: Metadata | None

    def digest(self) -> bytes:
        """Return the same for equal catalogues."""
        return hashlib.sha256(repr(self).encode("utf-8", "backslashreplace")).digest()

    def short(self) -> dict[str, str]:
        """Return each tensor's name without wrappers' prefixes: the one by which ranks are compared."""
        return normalize(row[0] for row in self.rows)


class _Same:
    """Stands for bytes that are known to be equal on all replicas, and so need not be looked at."""

    def __getitem__(self, part: slice) -> bytes:
        return b""


@dataclass
class _Windows:
    """Fetches the bytes that differ. All ranks ask for the same parts in the same order, so all take part.

    owners: by tensor name and digest, the rank that sends. own: this rank's bytes by name and digest.
    """

    channel: Channel
    owners: Mapping[str, Mapping[bytes, int]]
    own: Mapping[tuple[str, bytes], Held]
    _at: tuple[str, int, int] = ("", 0, 0)
    _window: dict[bytes, bytes] = field(default_factory=dict)

    def part(self, name: str, digest: bytes, start: int, stop: int) -> bytes:
        held, low, high = self._at
        if name != held or start < low or stop > high:
            low, high = start, start + max(stop - start, min(WINDOW, ALL_WINDOWS // len(self.channel.ranks)))
            self._window = self._fetch(name, low, high)
            self._at = name, low, high
        return self._window[digest][start - low : stop - low]

    def _fetch(self, name: str, start: int, stop: int) -> dict[bytes, bytes]:
        mine = [digest for digest, rank in self.owners[name].items() if rank == self.channel.rank]
        sent = self.channel.gather({digest: self.own[name, digest][start:stop] for digest in mine}, "bytes")
        return {digest: data for message in sent.values() for digest, data in message.items()}


@dataclass(frozen=True)
class _Remote:
    """The bytes that all ranks of one digest hold, fetched when they are read."""

    windows: _Windows
    name: str
    digest: bytes

    def __getitem__(self, part: slice) -> bytes:
        return self.windows.part(self.name, self.digest, part.start, part.stop)


def _compare(channel: Channel, things: Sequence[Any], options: Options | Callable[[], Options] | None) -> Report:
    chosen = options if isinstance(options, Options) else options() if options is not None else Options()
    if len(channel.ranks) < 2:
        raise UsageError("the process group has a single rank: there is no other replica to compare with")
    if any(isinstance(thing, (str, os.PathLike)) for thing in things):
        raise UsageError(
            "a path is not what a rank holds in memory; give paths alone and without group=, or across_ranks=False to "
            "compare a file with things of this rank"
        )
    if not things:
        raise UsageError(NOTHING)
    taken = snapshot(*things)
    found, hosts = _catalogues(channel, _catalogue(taken), chosen)
    short = {id(catalogue): catalogue.short() for catalogue in found.values()}
    owners: dict[str, dict[bytes, int]] = {}
    for rank, catalogue in found.items():
        for name, *_, digest in catalogue.rows:
            owners.setdefault(short[id(catalogue)][name], {}).setdefault(digest, rank)
    own = {
        (short[id(found[channel.rank])][name], row[5]): tensor.data
        for row, (name, tensor) in zip(found[channel.rank].rows, taken.tensors.items(), strict=True)
        if isinstance(tensor.data, Held)
    }
    windows = _Windows(channel, owners, own)
    # Ranks with one catalogue share its tensors: a thousand ranks of a thousand tensors are a lot of records.
    tensors = {id(catalogue): _tensors(catalogue, short[id(catalogue)], windows) for catalogue in found.values()}
    snapshots = agree_on_buffers(
        _snapshot(channel, rank, hosts[rank], catalogue, tensors[id(catalogue)]) for rank, catalogue in found.items()
    )
    note = "compared in memory: digests first, and the bytes of what differs"
    replicas = Replicas("model", None, tuple(zip(found, snapshots, strict=True)), note)
    reference.check(chosen.reference, (replicas,))
    return judge(Found((replicas,)), chosen)


def _catalogue(taken: Snapshot) -> Catalogue:
    rows = tuple(
        (t.name, t.dtype, t.shape, t.refused, t.parameter, t.data.digest() if isinstance(t.data, Held) else b"")
        for t in taken.tensors.values()
    )
    return Catalogue(taken.path, taken.bytes, rows, dict(taken.values), taken.stubs, taken.metadata)


def _catalogues(channel: Channel, mine: Catalogue, options: Options) -> tuple[dict[int, Catalogue], dict[int, str]]:
    """Return each rank's catalogue and host, by rank. Equal catalogues are sent once, and none where all are equal."""
    first = channel.gather((mine.digest(), os.uname().nodename, repr(options)), "digests")
    if len({asked for _, _, asked in first.values()}) > 1:
        raise UsageError("the options are not the same on all ranks")
    owners: dict[bytes, int] = {}
    for rank, (digest, _, _) in first.items():
        owners.setdefault(digest, rank)
    known = {mine.digest(): mine}
    if len(owners) > 1:
        sent = channel.gather(mine if channel.rank in owners.values() else None, "catalogues")
        known = {digest: sent[rank] for digest, rank in owners.items()}
    ranks = sorted(channel.ranks)
    return {rank: known[first[rank][0]] for rank in ranks}, {rank: first[rank][1] for rank in ranks}


def _tensors(catalogue: Catalogue, short: Mapping[str, str], windows: _Windows) -> dict[str, Tensor]:
    """Return the tensors of a catalogue as all ranks see them."""
    tensors = {}
    for name, dtype, shape, refused, known, digest in catalogue.rows:
        same = len(windows.owners[short[name]]) == 1
        data = _Same() if same else _Remote(windows, short[name], digest)
        tensors[name] = Tensor(
            name, dtype, shape, in_c_order(shape), catalogue.title, 0, refused=refused, data=data, parameter=known
        )
    return tensors


def _snapshot(channel: Channel, rank: int, host: str, catalogue: Catalogue, tensors: Mapping[str, Tensor]) -> Snapshot:
    """Return a rank's replica as all ranks see it."""
    metadata = replace(
        catalogue.metadata or Metadata(),
        rank=rank,
        # Ranks outside a smaller group are not missing from it.
        world_size=len(channel.ranks) if channel.whole else None,
        host=host,
    )
    path = f"{catalogue.title} on {host}"
    return Snapshot(path, FORMAT, catalogue.size, tensors, catalogue.values, catalogue.stubs, metadata)
