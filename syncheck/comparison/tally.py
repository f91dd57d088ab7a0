"""The running results of the comparison of a group."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from syncheck.records import Counts, NotFinite, Reason, Shards
from syncheck.tensors.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.layout.replica_groups import ReplicaSets, Sets
    from syncheck.records import Status, TensorDiff


class _ShardLayout(NamedTuple):
    """A layout of shards. kind: as in `ReplicaSets`, or `optimizer` for partitioned state."""

    kind: str
    layout: str


_PARTITIONED = _ShardLayout("optimizer", "partitioned over the ranks")


@dataclass
class Tally:
    """Running results of the comparison of a group."""

    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The number of tensors by kind and status."""
    diffs: list[TensorDiff] = field(default_factory=list)
    left_out: int = 0
    """The number of tensors that the options do not select."""
    names: dict[str, str] = field(default_factory=dict)
    """The kinds of the tensors by name."""
    compared: set[int] = field(default_factory=set)
    """Ranks with a compared tensor other than step counters."""
    not_finite: list[str] = field(default_factory=list)
    """Names of tensors that hold NaN or infinity on all ranks."""
    shard_sets: dict[_ShardLayout, list[Sets]] = field(default_factory=lambda: defaultdict(list))
    """By layout of shards: the sets of compared ranks of each tensor."""

    def add(self, diff: TensorDiff) -> None:
        """Count a tensor that differs or was not compared."""
        self._count(diff.name, diff.kind, diff.status)
        self.diffs.append(diff)

    def add_identical(self, name: str, kind: str, replica_sets: ReplicaSets) -> None:
        """Count a tensor with identical replicas. replica_sets: the ranks that must hold equal bytes."""
        self._count(name, kind, "identical")
        self._add_ranks(kind, replica_sets)
        if replica_sets.kind:
            layout = _ShardLayout(replica_sets.kind, replica_sets.layout)
            self.shard_sets[layout].append(replica_sets.comparable)

    def add_compared(self, diff: TensorDiff, replica_sets: ReplicaSets, *, partitioned: bool) -> None:
        """Count a tensor whose replicas were compared and differ, or whose layout did not allow the comparison.

        replica_sets: the ranks that must hold equal bytes.
        partitioned: whether it belongs to partitioned optimizer state.
        """
        self.add(diff)
        # A rank that lacks a tensor was compared with ranks that have it.
        if diff.status != "not_compared" or diff.reason is Reason.MISSING:
            self._add_ranks(diff.kind, replica_sets)

        layout = _ShardLayout(replica_sets.kind, replica_sets.layout)
        compared_sets = replica_sets.comparable
        if diff.reason is Reason.SHARDED:
            compared_sets = ()
            # Without a layout of its own, a tensor counts as sharded only if it was not compared for this reason.
            if not layout.kind:
                layout = _PARTITIONED if partitioned else _ShardLayout("DTensor", str(diff.detail or ""))

        if layout.kind:
            self.shard_sets[layout].append(compared_sets)

    def _count(self, name: str, kind: str, status: Status) -> None:
        self.by_kind[kind][status] += 1
        self.names[name] = kind

    def _add_ranks(self, kind: str, replica_sets: ReplicaSets) -> None:
        # Equal step counters do not show that ranks hold the same model.
        if kind != "optimizer_step":
            self.compared.update(*replica_sets.comparable)

    def summarize_shards(self) -> tuple[Shards, ...]:
        """Return a summary of the sharded tensors by kind and layout."""
        summaries = []
        for (kind, layout), sets_of_tensors in self.shard_sets.items():
            # Shards without replicas have an empty set.
            compared = [sets for sets in sets_of_tensors if sets]
            replica_groups = dict.fromkeys(chain.from_iterable(compared))
            summary = Shards(
                kind,
                layout,
                len(sets_of_tensors),
                len(compared),
                tuple(replica_groups),
            )
            summaries.append(summary)

        return tuple(summaries)

    def count_kinds(self) -> dict[str, Counts]:
        """Return the counts by kind, in the order of `KINDS`."""
        counts: dict[str, Counts] = {}
        for kind in KINDS:
            if kind in self.by_kind:
                by_status = self.by_kind[kind]
                counts[kind] = Counts(tensors=by_status.total(), **by_status)

        return counts

    def list_not_finite(self) -> NotFinite | None:
        """Return the tensors that are not finite; None if there are none."""
        if not self.not_finite:
            return None

        return NotFinite(tuple(self.not_finite), len(self.not_finite))

    def find_uncompared(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks without a compared tensor; empty if every rank has a tensor."""
        if not self.compared:
            return ()

        return tuple(rank for rank in ranks if rank not in self.compared)

    def has_only_shards(self) -> bool:
        """Whether no tensor was compared, because tensors are sharded. Step counters do not count."""
        statuses: set[str] = set()
        for kind, by_status in self.by_kind.items():
            if kind != "optimizer_step":
                statuses.update(by_status)

        return bool(self.shard_sets) and statuses <= {"not_compared"}
