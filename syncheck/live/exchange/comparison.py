"""Compare what the ranks of a process group hold, so that every rank has the same report.

Three steps, of which the later ones are taken only where they are needed:

1. Every rank sends 16 bytes for what it holds (names, dtypes, shapes, plain values) and 16 bytes over the digests of
   all its tensors. Where both are the same everywhere, that was all.
2. Where they are not, the ranks that stand for each different read_pieces send their list of names, or their digests.
   What has one digest within each replica group is identical and stays where it is.
3. Of the rest the first rank fetches bytes, a window at a time, measures and judges, and sends its report to all.
"""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.api import Found, Options, judge
from syncheck.comparison import hyperparameters, kinds_asked_for, reference
from syncheck.comparison.replica_groups import divide, positions_of
from syncheck.errors import UsageError
from syncheck.layout.groups import ReplicaGroup
from syncheck.live.channel import Channel
from syncheck.live.exchange.fetching import Fetcher, RemoteBytes, RemoteTensor, read_pieces, size_of
from syncheck.live.exchange.manifest import exchange_manifests, with_digest_only
from syncheck.live.local_compare import NO_OBJECTS
from syncheck.live.memory import snapshot
from syncheck.messages import Grouping
from syncheck.snapshots import Metadata
from syncheck.tensor_parallel import replicated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.exchange.fetching import Key
    from syncheck.live.exchange.manifest import GroupContents
    from syncheck.messages import Message
    from syncheck.records import Report
    from syncheck.snapshots import Sliced, Snapshot, Tensor

# Most bytes of differing tensors that are fetched and measured, smallest tensors first. Beyond that, a difference is
# reported with its place but without its size.
BUDGET = 4 << 30


def compare_across_ranks(
    things: Sequence[Any],
    group: Any = None,
    options: Callable[[], Options] = Options,
    *,
    mesh: Callable[[], Mapping[str, int]] = dict,
    alone: bool = False,
    budget: int = BUDGET,
) -> Report:
    """Compare what each rank of a process group holds, and return the same report on all of them.

    A collective call: every rank of the group has to make it. things: the parts of this rank's replica, as
    `memory.snapshot` takes them; ranks may hold different ones. group: a process group of torch.distributed of any
    backend with `all_gather_object`; by default all ranks. options, mesh: make the options, and where this rank stands
    in a mesh, by dimension; both may raise, and then all ranks do. alone: whether a group of one rank is undecided, and
    no error. budget: bytes that are fetched at most. Ranks are those of the whole world. Nothing is changed, and no
    random number is drawn.
    Raises, on all ranks and with one text: UsageError for things that cannot be compared and for options that are not
    the same everywhere, RankFailed where something else went wrong on a rank.
    """
    channel = Channel(group)

    def work() -> Report:
        chosen, place = options(), mesh()
        if len(channel.ranks) < 2 and not alone:
            raise UsageError("the process group has a single rank: there is no other replica to compare with")
        if any(isinstance(thing, (str, os.PathLike)) for thing in things):
            raise UsageError(
                "a path is not what a rank holds in memory; give paths alone and without group=, or across_ranks=False "
                "to compare a file with things of this rank"
            )
        if not things:
            raise UsageError(NO_OBJECTS)
        taken = snapshot(*things)
        if place:
            taken = replace(taken, metadata=replace(taken.metadata or Metadata(), mesh=dict(place)))
        return compare_snapshots(channel, taken, chosen, budget)

    # All that is made here is freed by counting; to search it for cycles over and over takes longer than to make it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return channel.run_together(work)
    finally:
        if collecting:
            gc.enable()


def compare_snapshots(
    channel: Channel,
    taken: Snapshot,
    options: Options,
    budget: int = BUDGET,
    name: str = "model",
    how: Message | None = None,
    *,
    histograms: bool = False,
) -> Report:
    """Compare the snapshots that the ranks took, each its own; to be run by `channel.run_together` on all of them.

    name: of the group in the report. how: the comparison was made, by default of objects in memory. histograms: as in
    `api.judge`.
    """
    contents = exchange_manifests(channel, taken, options)
    grouping: tuple[Message, ...] = (how or Grouping.LIVE(),)
    slow = {rank: place.fallback for rank, place in contents.rank_infos.items() if place.fallback}
    if slow:
        grouping += (Grouping.SLOW_DIGESTS(ranks=tuple(slow), reason=next(iter(slow.values()))),)
    if contents.are_equal and options.reference is None:  # which may be any of them
        return _report_in_sync(contents, options, name, grouping)
    wanted = _find_differing(contents, options)
    if not wanted:
        return _judge_replicas(contents, options, name, grouping)
    short = contents.of_rank(channel.rank).short
    tensors = contents.of_rank(channel.rank).tensors
    own: dict[Key, Sliced] = {
        (short[name], tensors[name].same): tensor.data
        for name, tensor in taken.tensors.items()
        if tensor.data is not None
    }

    def measured() -> Report:
        readable, beyond = _attach_bytes(contents, channel, own, wanted, budget)
        over = (Grouping.OVER_BUDGET(tensors=beyond, budget=budget),) if beyond else ()
        return _judge_replicas(readable, options, name, grouping + over, histograms=histograms)

    return channel.run_on_leader(measured, lambda pieces: read_pieces(own, pieces))


# Reports on ranks that were equal, the last ones: while names, ranks and options stay, only some values change.
_KNOWN: OrderedDict[Any, Report] = OrderedDict()


def _report_in_sync(contents: GroupContents, options: Options, name: str, grouping: tuple[Message, ...]) -> Report:
    """Return the report on ranks of which none can differ from another. Two stand for all, to be as fast as two."""
    ranks = list(contents.rank_infos)
    content = contents.of_rank(ranks[0])
    shown = tuple((place.path, rank, place.host, place.size) for rank, place in contents.rank_infos.items())
    key = content.manifest.layout(), repr(options), shown, contents.whole, name, grouping
    report = _KNOWN.get(key)
    if report is None:
        report = _judge_replicas(contents, options, name, grouping, ranks[:2])
        first = report.groups[0].replicas[0]
        replicas = tuple(
            replace(first, path=path, rank=rank, host=host, bytes=size) for path, rank, host, size in shown
        )
        report = replace(report, groups=(replace(report.groups[0], replicas=replicas),))
        _KNOWN[key] = report
        while len(_KNOWN) > 8:
            _KNOWN.popitem(last=False)
    now = hyperparameters(content.manifest.values)
    (group,) = report.groups
    return replace(report, groups=(replace(group, evidence=replace(group.evidence, hyperparameters=now)),))


def _judge_replicas(
    contents: GroupContents,
    options: Options,
    name: str,
    grouping: tuple[Message, ...],
    ranks: Sequence[int] = (),
    *,
    histograms: bool = False,
) -> Report:
    replicas = ReplicaGroup(name, contents.step, tuple(contents.snapshots(ranks).items()), grouping)
    reference.check(options.reference, (replicas,))
    return judge(Found((replicas,)), options, histograms=histograms)


def _find_differing(contents: GroupContents, options: Options) -> dict[str, dict[bytes, RemoteTensor]]:
    """Return, of each tensor that differs within a replica group, one rank for each digest there."""
    digests: dict[str, set[bytes]] = {}
    for content in contents.by_key.values():
        for name, tensor in content.tensors.items():
            digests.setdefault(content.normalized_names[name], set()).add(tensor.same)
    selection = options.selection()
    # Most ask for all, and to sort out what is asked for takes a look at every name of every rank.
    some = selection.only or selection.include or selection.exclude
    asked = kinds_asked_for(contents.snapshots(), selection) if some else digests
    apart = [name for name, several in digests.items() if len(several) > 1 and name in asked]
    found: dict[str, dict[int, Tensor]] = {name: {} for name in apart}
    for rank in contents.rank_infos:
        content = contents.of_rank(rank)
        for name, tensor in content.tensors.items():
            if content.normalized_names[name] in found:
                found[content.normalized_names[name]][rank] = tensor
    places = positions_of(contents.snapshots())
    whole = replicated(found) if places.plain else frozenset()
    wanted: dict[str, dict[bytes, RemoteTensor]] = {}
    for name, tensors in found.items():
        for members in divide(tensors, tuple(contents.rank_infos), places, replicated=name in whole).comparable:
            # Ranks with another shape or dtype cannot be compared with these, but those of one form can.
            by_form: dict[Any, dict[bytes, RemoteTensor]] = {}
            for rank in reversed(members):  # of equal ones the first stays
                tensor = tensors[rank]
                if tensor.same:
                    one = RemoteTensor(name, tensor.same, rank, size_of(tensor))
                    by_form.setdefault((tensor.dtype, tensor.shape), {})[tensor.same] = one
            for several in by_form.values():
                if len(several) > 1:
                    wanted.setdefault(name, {}).update(several)
    return wanted


def _attach_bytes(
    contents: GroupContents,
    channel: Channel,
    own: Mapping[Key, Sliced],
    wanted: Mapping[str, Mapping[bytes, RemoteTensor]],
    budget: int,
) -> tuple[GroupContents, int]:
    """Return the contents with bytes to read of what differs, or with nothing but digests where it is too much.

    With it, of how many tensors it is too much.
    """
    ahead: list[RemoteTensor] = []
    beyond: set[str] = set()
    for name in sorted(wanted, key=lambda name: sum(one.size for one in wanted[name].values())):
        remote = [one for key, one in wanted[name].items() if (name, key) not in own]
        budget -= sum(one.size for one in remote)
        if budget < 0:
            beyond.add(name)
        else:
            ahead += remote
    # In the order in which they are compared, so that neighbours are fetched together.
    order = {name: i for i, name in enumerate(wanted)}
    fetcher = Fetcher(channel, own, sorted(ahead, key=lambda one: order[one.name]))

    def readable(name: str, tensor: Tensor) -> Tensor:
        if name in beyond:
            return with_digest_only(tensor)
        key = (name, tensor.same)
        return replace(tensor, data=RemoteBytes(fetcher, key)) if tensor.same in wanted.get(name, ()) else tensor

    by_key = {
        key: content.with_tensors(
            {name: readable(content.normalized_names[name], t) for name, t in content.tensors.items()}
        )
        for key, content in contents.by_key.items()
    }
    return replace(contents, by_key=by_key), len(beyond)
