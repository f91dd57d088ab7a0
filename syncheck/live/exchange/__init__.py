"""Compare what the ranks of a process group hold, so that every rank has the same report.

Three steps, of which the later ones are taken only where they are needed:

1. Every rank sends 16 bytes for what it holds (names, dtypes, shapes, plain values) and 16 bytes over the digests of
   all its tensors. Where both are the same everywhere, that was all.
2. Where they are not, the ranks that stand for each different answer send their list of names, or their digests.
   What has one digest within each replica group is identical and stays where it is.
3. Of the rest the first rank fetches bytes, a window at a time, measures and judges, and sends its report to all.
"""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.api import GroupedCheckpoints, Options, build_selection, judge
from syncheck.comparison import hyperparameters, kinds_asked_for, reference
from syncheck.comparison.replica_groups import divide, positions_of
from syncheck.errors import UsageError
from syncheck.layout.groups import ReplicaGroup
from syncheck.live.channel import Channel
from syncheck.live.exchange.catalogue import untold
from syncheck.live.exchange.fetching import Fetcher, Remote, Wanted, answer, size_of
from syncheck.live.exchange.holdings import exchange
from syncheck.live.here import NOTHING
from syncheck.live.memory import snapshot
from syncheck.messages import Grouping
from syncheck.snapshots import Metadata
from syncheck.tensor_parallel import find_replicated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.exchange.fetching import Key
    from syncheck.live.exchange.holdings import Holdings
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
            raise UsageError(NOTHING)
        taken = snapshot(*things)
        if place:
            taken = replace(taken, metadata=replace(taken.metadata or Metadata(), mesh=dict(place)))
        return compare_snapshots(channel, taken, chosen, budget)

    # All that is made here is freed by counting; to search it for cycles over and over takes longer than to make it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return channel.together(work)
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
    """Compare the snapshots that the ranks took, each its own; to be run by `channel.together` on all of them.

    name: of the group in the report. how: the comparison was made, by default of objects in memory. histograms: as in
    `api.judge`.
    """
    holdings = exchange(channel, taken, options)
    grouping: tuple[Message, ...] = (how or Grouping.LIVE(),)
    slow = {rank: place.fallback for rank, place in holdings.places.items() if place.fallback}
    if slow:
        grouping += (Grouping.SLOW_DIGESTS(ranks=tuple(slow), reason=next(iter(slow.values()))),)
    if holdings.are_equal and options.reference is None:  # which may be any of them
        return _in_sync(holdings, options, name, grouping)
    wanted = _differing(holdings, options)
    if not wanted:
        return _judged(holdings, options, name, grouping)
    short = holdings.of(channel.rank).short
    tensors = holdings.of(channel.rank).tensors
    own: dict[Key, Sliced] = {
        (short[name], tensors[name].same): tensor.data
        for name, tensor in taken.tensors.items()
        if tensor.data is not None
    }

    def measured() -> Report:
        readable, beyond = _readable(holdings, channel, own, wanted, budget)
        over = (Grouping.OVER_BUDGET(tensors=beyond, budget=budget),) if beyond else ()
        return _judged(readable, options, name, grouping + over, histograms=histograms)

    return channel.led(measured, lambda pieces: answer(own, pieces))


# Reports on ranks that were equal, the last ones: while names, ranks and options stay, only some values change.
_KNOWN: OrderedDict[Any, Report] = OrderedDict()


def _in_sync(holdings: Holdings, options: Options, name: str, grouping: tuple[Message, ...]) -> Report:
    """Return the report on ranks of which none can differ from another. Two stand for all, to be as fast as two."""
    ranks = list(holdings.places)
    held = holdings.of(ranks[0])
    shown = tuple((place.path, rank, place.host, place.size) for rank, place in holdings.places.items())
    key = held.catalogue.layout(), repr(options), shown, holdings.whole, name, grouping
    report = _KNOWN.get(key)
    if report is None:
        report = _judged(holdings, options, name, grouping, ranks[:2])
        first = report.groups[0].replicas[0]
        replicas = tuple(
            replace(first, path=path, rank=rank, host=host, bytes=size) for path, rank, host, size in shown
        )
        report = replace(report, groups=(replace(report.groups[0], replicas=replicas),))
        _KNOWN[key] = report
        while len(_KNOWN) > 8:
            _KNOWN.popitem(last=False)
    now = hyperparameters(held.catalogue.values)
    (group,) = report.groups
    return replace(report, groups=(replace(group, evidence=replace(group.evidence, hyperparameters=now)),))


def _judged(
    holdings: Holdings,
    options: Options,
    name: str,
    grouping: tuple[Message, ...],
    ranks: Sequence[int] = (),
    *,
    histograms: bool = False,
) -> Report:
    replicas = ReplicaGroup(name, holdings.step, tuple(holdings.snapshots(ranks).items()), grouping)
    reference.check(options.reference, (replicas,))
    return judge(GroupedCheckpoints((replicas,)), options, histograms=histograms)


def _differing(holdings: Holdings, options: Options) -> dict[str, dict[bytes, Wanted]]:
    """Return, of each tensor that differs within a replica group, one rank for each digest there."""
    digests: dict[str, set[bytes]] = {}
    for held in holdings.by_key.values():
        for name, tensor in held.tensors.items():
            digests.setdefault(held.short[name], set()).add(tensor.same)
    selection = build_selection(options)
    # Most ask for all, and to sort out what is asked for takes a look at every name of every rank.
    some = selection.only or selection.include or selection.exclude
    asked = kinds_asked_for(holdings.snapshots(), selection) if some else digests
    apart = [name for name, several in digests.items() if len(several) > 1 and name in asked]
    found: dict[str, dict[int, Tensor]] = {name: {} for name in apart}
    for rank in holdings.places:
        held = holdings.of(rank)
        for name, tensor in held.tensors.items():
            if held.short[name] in found:
                found[held.short[name]][rank] = tensor
    places = positions_of(holdings.snapshots())
    whole = find_replicated(found) if places.plain else frozenset()
    wanted: dict[str, dict[bytes, Wanted]] = {}
    for name, tensors in found.items():
        for members in divide(tensors, tuple(holdings.places), places, replicated=name in whole).comparable:
            # Ranks with another shape or dtype cannot be compared with these, but those of one form can.
            by_form: dict[Any, dict[bytes, Wanted]] = {}
            for rank in reversed(members):  # of equal ones the first stays
                tensor = tensors[rank]
                if tensor.same:
                    one = Wanted(name, tensor.same, rank, size_of(tensor))
                    by_form.setdefault((tensor.dtype, tensor.shape), {})[tensor.same] = one
            for several in by_form.values():
                if len(several) > 1:
                    wanted.setdefault(name, {}).update(several)
    return wanted


def _readable(
    holdings: Holdings,
    channel: Channel,
    own: Mapping[Key, Sliced],
    wanted: Mapping[str, Mapping[bytes, Wanted]],
    budget: int,
) -> tuple[Holdings, int]:
    """Return the holdings with bytes to read of what differs, or with nothing but digests where it is too much.

    With it, of how many tensors it is too much.
    """
    ahead: list[Wanted] = []
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
            return untold(tensor)
        key = (name, tensor.same)
        return replace(tensor, data=Remote(fetcher, key)) if tensor.same in wanted.get(name, ()) else tensor

    by_key = {
        key: held.with_tensors({name: readable(held.short[name], t) for name, t in held.tensors.items()})
        for key, held in holdings.by_key.items()
    }
    return replace(holdings, by_key=by_key), len(beyond)
