"""Compare the ranks of a process group, with the same report on every rank.

1. Every rank sends a 16-byte hash of its structure (names, dtypes, shapes, plain values) and a 16-byte hash of the
   digests of its tensors. If both are equal on all ranks, the comparison is complete.
2. Otherwise one rank per distinct structure sends its manifest, and one rank per distinct content sends its digests.
   Tensors with equal digests within each replica group are equal, and their bytes stay on their ranks.
3. The first rank fetches the bytes of differing tensors window by window, compares them, and sends its report to all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.api import Found, Options, finish, judge
from syncheck.comparison import reference
from syncheck.comparison.equal_shards import find_equal_digests
from syncheck.comparison.replicas import list_hyperparameters
from syncheck.comparison.selection import selected_kinds
from syncheck.errors import UsageError
from syncheck.layout.groups import CheckpointGroup
from syncheck.live.channel import Channel
from syncheck.live.exchange.contents import with_digest_only
from syncheck.live.exchange.fetching import Fetcher, RemoteBytes, RemoteTensor, read_pieces
from syncheck.live.exchange.manifest import exchange_contents
from syncheck.live.local_compare import NO_OBJECTS
from syncheck.live.memory import snapshot
from syncheck.messages import Grouping
from syncheck.options import build_selection
from syncheck.records import NotFinite
from syncheck.snapshots import Metadata
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.live.exchange.contents import ContentKey, GroupContents
    from syncheck.live.exchange.fetching import Key
    from syncheck.messages import Message
    from syncheck.records import Report
    from syncheck.snapshots import Sliced, Snapshot, Tensor

# Maximum bytes of differing tensors to fetch and measure, smallest tensors first. For the remaining tensors a report
# has the ranks that differ, but not the size of the difference.
BUDGET = 4 << 30
# Bytes of an equal shard to fetch: enough to see that its values were drawn at random.
START = 1 << 16


def compare_across_ranks(
    things: Sequence[Any],
    group: Any = None,
    make_options: Callable[[], Options] = Options,
    *,
    find_mesh: Callable[[], Mapping[str, int]] = dict,
    alone: bool = False,
    budget: int = BUDGET,
    cache: dict[Any, Report] | None = None,
) -> Report:
    """Compare the objects of the ranks of a process group, and return the same report on all ranks.

    A collective call: every rank of the group must make it. It changes nothing and draws no random number.

    things: the parts of this rank's replica, as in `memory.snapshot`; they may differ between ranks.
    group: a process group of a backend with `all_gather_object`, all ranks by default.
    make_options: returns the options.
    find_mesh: returns this rank's coordinate by mesh dimension. If it or `make_options` raises, all ranks raise.
    alone: whether a group of one rank is undecided instead of an error.
    budget: maximum bytes to fetch.
    cache: the last report about ranks in sync. Between the checks of one monitor usually only tensor bytes and plain
        values change; to reuse the report then halves the time of a check of 2,400 small tensors.

    Ranks in the report are global ranks.

    Raises the same error on all ranks: UsageError for objects that cannot be compared and for options that differ
    between ranks, RankFailed for other errors on a rank.
    """
    channel = Channel(group)

    def work() -> Report:
        options = make_options()
        coordinates = find_mesh()
        if len(channel.ranks) < 2 and not alone:
            raise UsageError("the process group has a single rank, so there is no other replica to compare with")

        _check_objects(things)
        local = snapshot(*things, attributes=True)
        if coordinates:
            local = replace(local, metadata=replace(local.metadata or Metadata(), mesh=dict(coordinates)))

        report = compare_snapshots(
            channel,
            local,
            options,
            budget,
            cache=cache,
        )
        return finish(report, options)

    # Garbage collection stays enabled: pausing it would affect the whole process, and saves only about 3 % of a check
    # of 2,400 small tensors (62 instead of 64 ms for snapshot, digests and manifest).
    return channel.run_together(work)


def _check_objects(things: Sequence[Any]) -> None:
    """Raise UsageError for paths, and without objects."""
    if any(isinstance(thing, (str, os.PathLike)) for thing in things):
        raise UsageError(
            "across ranks, only objects in memory can be compared, not paths; pass only paths and no group=, or "
            "across_ranks=False to compare a file with objects of this rank"
        )

    if not things:
        raise UsageError(NO_OBJECTS)


class _Settings(NamedTuple):
    """How the replicas of a group are judged.

    name: of the group in the report.
    grouping: sentences about the kind of comparison.
    budget: maximum bytes to fetch.
    histograms: as in `api.judge`.
    """

    options: Options
    name: str
    grouping: tuple[Message, ...]
    budget: int
    histograms: bool

    def judge(self, snapshots: Mapping[int, Snapshot], step: int | None, *, histograms: bool = False) -> Report:
        """Return the report about ranks at a step."""
        replicas = CheckpointGroup(
            run=self.name,
            step=step,
            ranks=tuple(snapshots.items()),
            grouping=self.grouping,
            paired=True,
        )
        reference.check_reference(self.options.reference, (replicas,))
        return judge(Found((replicas,)), self.options, histograms=histograms)


def compare_snapshots(
    channel: Channel,
    local: Snapshot,
    options: Options,
    budget: int = BUDGET,
    name: str = "model",
    how: Message | None = None,
    *,
    histograms: bool = False,
    cache: dict[Any, Report] | None = None,
) -> Report:
    """Compare the snapshots of all ranks. To be called within `channel.run_together` on all ranks.

    local: this rank's snapshot.
    budget: as in `compare_across_ranks`.
    name: of the group in the report.
    how: a sentence about the kind of comparison, by default of objects in memory.
    histograms: as in `api.judge`.
    cache: as in `compare_across_ranks`.
    """
    contents = exchange_contents(channel, local, options)
    grouping = _describe_grouping(contents, how or Grouping.LIVE())
    settings = _Settings(
        options=options,
        name=name,
        grouping=grouping,
        budget=budget,
        histograms=histograms,
    )
    has_attributes = any(contents.attributes.values())
    # With a reference, the report also has its rank.
    if contents.are_equal and not has_attributes and options.reference is None:
        report = _report_in_sync(contents, settings, {} if cache is None else cache)
    else:
        report = _report_differences(channel, local, contents, settings)

    return _add_not_finite(report, contents)


def _describe_grouping(contents: GroupContents, how: Message) -> tuple[Message, ...]:
    """Return sentences about the kind of comparison, and about ranks without the fused kernel."""
    fallbacks = {rank: info.fallback for rank, info in contents.rank_infos.items() if info.fallback}
    if not fallbacks:
        return (how,)

    reason = next(iter(fallbacks.values()))
    return (how, Grouping.SLOW_DIGESTS(ranks=tuple(fallbacks), reason=reason))


def _add_not_finite(report: Report, contents: GroupContents) -> Report:
    """Add the equal tensors that hold NaN or infinity; the comparison has read none of them."""
    (group,) = report.groups
    differing = {diff.name for diff in group.tensors if diff.out_of_sync}
    names = [name for name in contents.not_finite if name in group.evidence.names and name not in differing]
    if group.not_finite is not None:
        names += group.not_finite.names

    not_finite = NotFinite(tuple(names), len(names)) if names else None
    return replace(report, groups=(replace(group, not_finite=not_finite),))


def _report_differences(channel: Channel, local: Snapshot, contents: GroupContents, settings: _Settings) -> Report:
    """Return the report about ranks that differ, or that hold different parts of the model."""
    to_fetch = _find_differing(contents, settings.options)
    if not to_fetch:
        return settings.judge(contents.snapshots(), contents.step)

    local_bytes = _list_local_bytes(channel, local, contents)

    def measure() -> Report:
        beyond = _find_beyond_budget(to_fetch, local_bytes, settings.budget)
        readable = _attach_bytes(
            contents,
            channel,
            local_bytes,
            to_fetch,
            beyond,
        )
        grouping = settings.grouping
        if beyond:
            grouping += (Grouping.OVER_BUDGET(tensors=len(beyond), budget=settings.budget),)

        return settings._replace(grouping=grouping).judge(
            readable,
            contents.step,
            histograms=settings.histograms,
        )

    return channel.run_on_leader(measure, lambda pieces: read_pieces(local_bytes, pieces))


def _list_local_bytes(channel: Channel, local: Snapshot, contents: GroupContents) -> dict[Key, Sliced]:
    """Return the bytes of this rank's tensors by the names under which ranks exchange them."""
    manifest = contents.of_rank(channel.rank)
    names = contents.fetched_names(manifest)
    local_bytes: dict[Key, Sliced] = {}
    for name, tensor in local.tensors.items():
        if tensor.data is not None:
            local_bytes[names[name], manifest.tensors[name].same] = tensor.data

    return local_bytes


def _report_in_sync(contents: GroupContents, settings: _Settings, cache: dict[Any, Report]) -> Report:
    """Return the report about equal ranks. Judges two ranks only, so the time does not grow with their number."""
    ranks = list(contents.rank_infos)
    manifest = contents.of_rank(ranks[0])
    infos = tuple((info.path, rank, info.host, info.size) for rank, info in contents.rank_infos.items())
    key = (
        manifest.hash_layout(),
        repr(settings.options),
        infos,
        contents.is_world,
        settings.name,
        settings.grouping,
    )
    report = cache.get(key)
    if report is None:
        report = settings.judge(contents.snapshots(ranks[:2]), contents.step)
        first = report.groups[0].replicas[0]
        replicas = []
        for path, rank, host, size in infos:
            replicas.append(
                replace(
                    first,
                    path=path,
                    rank=rank,
                    host=host,
                    bytes=size,
                )
            )

        report = replace(report, groups=(replace(report.groups[0], replicas=tuple(replicas)),))
        cache.clear()
        cache[key] = report

    # Values may change between the checks of one monitor.
    (group,) = report.groups
    evidence = replace(group.evidence, hyperparameters=list_hyperparameters(manifest.snapshot.values))
    return replace(report, groups=(replace(group, evidence=evidence),))


def _find_differing(contents: GroupContents, options: Options) -> dict[str, dict[bytes, RemoteTensor]]:
    """Return one rank per digest of each tensor that differs within a replica group, by name and digest.

    Also of equal shards at different positions, because their first bytes show whether they were drawn at random.
    """
    alignment = contents.alignment
    selected = _list_selected(alignment, options)
    remote_tensors = _find_equal_shards(alignment)
    for name, tensors in alignment.tensors.items():
        digests = {tensor.same for tensor in tensors.values()}
        if len(digests) < 2 or name not in selected:
            continue

        source = alignment.find_source(name)
        for ranks in alignment.find_replica_groups(name, tensors).comparable:
            members = {rank: tensors[rank] for rank in ranks}
            for by_digest in _find_distinct_bytes(source, members):
                remote_tensors[source].update(by_digest)

    return remote_tensors


def _find_equal_shards(alignment: Alignment) -> dict[str, dict[bytes, RemoteTensor]]:
    """Return the start of one of several equal shards at different positions, by name and digest."""
    remote_tensors: dict[str, dict[bytes, RemoteTensor]] = defaultdict(dict)
    for name, ranks in find_equal_digests(alignment).items():
        source = alignment.find_source(name)
        for rank in ranks:
            tensor = alignment.tensors[name][rank]
            remote = _make_remote(source, rank, tensor)
            remote_tensors[source][tensor.same] = remote._replace(size=min(remote.size, START))

    return remote_tensors


def _make_remote(source: str, rank: int, tensor: Tensor) -> RemoteTensor:
    """Return the bytes of a rank's tensor. source: the name under which ranks exchange them."""
    return RemoteTensor(
        name=source,
        digest=tensor.same,
        rank=rank,
        size=tensor.numel * DTYPES[tensor.dtype].size,
    )


def _list_selected(alignment: Alignment, options: Options) -> Container[str]:
    """Return the names of the tensors that the options select."""
    selection = build_selection(options)
    # By default all tensors are selected, and classifying every name takes long.
    if selection.only or selection.include or selection.exclude:
        return selected_kinds(alignment, selection)

    return alignment.tensors.keys()


def _find_distinct_bytes(source: str, members: dict[int, Tensor]) -> list[dict[bytes, RemoteTensor]]:
    """Return the first rank of each digest, for each dtype and shape of which several digests exist.

    source: the name under which ranks exchange the bytes.
    members: a replica group, by rank.
    """
    # Only ranks with equal dtype and shape can be compared with each other.
    by_form: dict[Any, dict[bytes, RemoteTensor]] = defaultdict(dict)
    # The first of several equal ranks remains.
    for rank in reversed(members):
        tensor = members[rank]
        if tensor.same:
            by_form[tensor.dtype, tensor.shape][tensor.same] = _make_remote(source, rank, tensor)

    return [by_digest for by_digest in by_form.values() if len(by_digest) > 1]


def _find_beyond_budget(
    to_fetch: Mapping[str, Mapping[bytes, RemoteTensor]], local_bytes: Container[Key], budget: int
) -> set[str]:
    """Return the names of the tensors beyond the budget, which have digests only. The smallest tensors come first."""

    def get_size(name: str) -> int:
        return sum(tensor.size for tensor in to_fetch[name].values())

    beyond: set[str] = set()
    for name in sorted(to_fetch, key=get_size):
        for tensor in to_fetch[name].values():
            if tensor.key not in local_bytes:
                budget -= tensor.size

        if budget < 0:
            beyond.add(name)

    return beyond


def _attach_bytes(
    contents: GroupContents,
    channel: Channel,
    local_bytes: Mapping[Key, Sliced],
    to_fetch: Mapping[str, Mapping[bytes, RemoteTensor]],
    beyond: Container[str],
) -> dict[int, Snapshot]:
    """Return the snapshots of all ranks with readable bytes for differing tensors.

    beyond: names of tensors that are not fetched.
    """
    # In the order of the comparison, so that one message fetches neighboring tensors.
    remote_tensors: list[RemoteTensor] = []
    for name, by_digest in to_fetch.items():
        if name not in beyond:
            remote_tensors += [tensor for tensor in by_digest.values() if tensor.key not in local_bytes]

    fetcher = Fetcher(channel, local_bytes, remote_tensors)
    # Ranks with equal contents share tensors.
    readable: dict[ContentKey, dict[str, Tensor]] = {}
    for content_key, manifest in contents.by_key.items():
        tensors: dict[str, Tensor] = {}
        for name, fetched_name in contents.fetched_names(manifest).items():
            tensor = manifest.tensors[name]
            if fetched_name in beyond:
                tensor = with_digest_only(tensor)
            elif tensor.same in to_fetch.get(fetched_name, ()):
                tensor = replace(tensor, data=RemoteBytes(fetcher, (fetched_name, tensor.same)))

            tensors[name] = tensor

        readable[content_key] = tensors

    snapshots = contents.snapshots()
    return {rank: replace(snapshots[rank], tensors=readable[info.key]) for rank, info in contents.rank_infos.items()}
