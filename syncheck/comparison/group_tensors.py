"""Compare all selected tensors of a group, add evidence to the tensors that differ, and count the results."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import field, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.comparison.mismatches import skip_tensor
from syncheck.comparison.reference import describe_from_reference
from syncheck.comparison.tensors import ComparisonMethod, compare_tensor
from syncheck.frozen import mutable_record
from syncheck.layout.dtensors import assemble_copies
from syncheck.layout.optimizer_shards import find_lost_state
from syncheck.layout.replica_groups import is_mixed
from syncheck.messages import Detail
from syncheck.records import Counts, NotFinite, Reason, Shards
from syncheck.tensors.blocks import Files
from syncheck.tensors.finiteness import FiniteScan, prepare
from syncheck.tensors.kinds import KINDS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.comparison.selection import Classification, Selection
    from syncheck.findings import EqualShards, UnclearParts
    from syncheck.layout.alignment import Alignment
    from syncheck.layout.replica_groups import ReplicaGroups, Sets
    from syncheck.messages import Message
    from syncheck.records import Evidence, Histogram, Status, TensorDiff
    from syncheck.snapshots import Tensor


class _ShardLayout(NamedTuple):
    """A layout of shards. kind: as in `ReplicaGroups`, or `optimizer` for partitioned state."""

    kind: str
    layout: str


_PARTITIONED = _ShardLayout("optimizer", "partitioned over the ranks")


@mutable_record
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
    equal_shards: tuple[EqualShards, ...] = ()
    """Parameters with equal shards at different positions."""
    unclear_parts: UnclearParts | None = None
    """Tensors that may be parts or copies."""

    def add(self, diff: TensorDiff) -> None:
        """Count a tensor that differs or was not compared."""
        self._count(diff.name, diff.kind, diff.status)
        self.diffs.append(diff)

    def add_identical(self, name: str, kind: str, replica_groups: ReplicaGroups) -> None:
        """Count a tensor with identical replicas. replica_groups: the ranks that must hold equal bytes."""
        self._count(name, kind, "identical")
        self._add_ranks(kind, replica_groups)
        if replica_groups.kind:
            layout = _ShardLayout(replica_groups.kind, replica_groups.layout)
            self.shard_sets[layout].append(replica_groups.comparable)

    def add_compared(self, diff: TensorDiff, replica_groups: ReplicaGroups, *, partitioned: bool) -> None:
        """Count a tensor whose replicas were compared and differ, or whose layout did not allow the comparison.

        replica_groups: the ranks that must hold equal bytes.
        partitioned: whether it belongs to partitioned optimizer state.
        """
        self.add(diff)
        # A rank that lacks a tensor was compared with ranks that have it.
        if diff.status != "not_compared" or diff.reason is Reason.MISSING:
            self._add_ranks(diff.kind, replica_groups)

        layout = _ShardLayout(replica_groups.kind, replica_groups.layout)
        compared_sets = replica_groups.comparable
        if diff.reason is Reason.SHARDED:
            compared_sets = ()
            # Without a layout of its own, a tensor counts as sharded only if it was not compared for this reason.
            if not layout.kind:
                layout = _PARTITIONED if partitioned else _ShardLayout("DTensor", str(diff.detail or ""))

        # Parts of a sum are no shards.
        if layout.kind and diff.reason is not Reason.AMBIGUOUS:
            self.shard_sets[layout].append(compared_sets)

    def _count(self, name: str, kind: str, status: Status) -> None:
        self.by_kind[kind][status] += 1
        self.names[name] = kind

    def _add_ranks(self, kind: str, replica_groups: ReplicaGroups) -> None:
        # Equal step counters do not show that ranks hold the same model.
        if kind != "optimizer_step":
            self.compared.update(*replica_groups.comparable)

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


class GroupTensors:
    """The tensors of a group, which are compared one after the other.

    alignment: the tensors, and the ranks that must hold equal bytes.
    classification: their kinds, and the selected tensors.
    selection: how to compare.
    """

    def __init__(self, alignment: Alignment, classification: Classification, selection: Selection) -> None:
        self._alignment = alignment
        self._optimizer = alignment.optimizer
        self._kinds = classification.kinds.by_name
        self._is_selected = classification.is_selected
        self._selection = selection
        self._tally = Tally()
        # Tensors in shards on some ranks are replaced by whole tensors.
        self._tensors = dict(alignment.tensors)

    def compare(self) -> Tally:
        """Compare the selected tensors, and return the results; empty for a single replica.

        Raises CheckpointError if a file can no longer be read.
        """
        snapshots = self._alignment.snapshots
        if len(snapshots) < 2:
            return self._tally

        # Importing numpy for the search for NaN pays off only for large files.
        prepare(max(snapshot.bytes for snapshot in snapshots.values()))
        with Files(jobs=self._selection.jobs) as files:
            for name, stored_tensors in self._alignment.tensors.items():
                kind = self._kinds[name]
                if not self._is_selected(name, kind):
                    self._tally.left_out += 1
                    continue

                skipped = self._skip_tensor(name, kind, stored_tensors)
                if skipped is not None:
                    self._tally.add(skipped)
                    continue

                tensors = self._tensors[name]
                replica_groups = self._alignment.find_replica_groups(name, tensors)
                is_partitioned = self._is_partitioned(name, kind, tensors)
                method = self._choose_method(name, kind, tensors, files)
                diff = compare_tensor(
                    name,
                    kind,
                    tensors,
                    replica_groups,
                    method,
                    sharded=is_partitioned,
                )
                is_not_finite = method.scan.found if diff is None else _is_not_finite(diff)
                if is_not_finite:
                    self._tally.not_finite.append(name)

                if diff is None:
                    self._tally.add_identical(name, kind, replica_groups)
                else:
                    diff = self._describe_difference(diff, tensors, files)
                    self._tally.add_compared(diff, replica_groups, partitioned=is_partitioned)

            # Replicas without shards need no search. With quick, no tensor is read.
            if self._tally.shard_sets and not self._selection.quick:
                self._tally.equal_shards = self._find_equal_shards(files)
                self._tally.unclear_parts = self._find_unclear_parts(files)

            self._inspect_differences(files)

        for diff in find_lost_state(self._optimizer, self._tensors):
            if self._is_selected(diff.name, diff.kind):
                self._tally.add(diff)

        return self._tally

    def _skip_tensor(self, name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff | None:
        """Return the diff of a tensor whose kind or layout does not allow a comparison; None for other tensors.

        If only some ranks hold shards, whole tensors replace them.
        """
        if kind == "rng" and not self._selection.compares_rng:
            # RNG states and the errors of PowerSGD differ between ranks by design.
            is_error = ".error_dict." in f".{name}"
            detail = Detail.POWERSGD_ERROR() if is_error else Detail.RNG_STATE()
            return skip_tensor(name, kind, tensors, Reason.RNG, detail)

        if self._alignment.positions.stages and is_mixed(tensors):
            whole_tensors = assemble_copies(tensors)
            if not whole_tensors:
                layout = self._alignment.find_replica_groups(name, tensors).layout
                detail = Detail.AMBIGUOUS_LAYOUT(layout=layout)
                return skip_tensor(name, kind, tensors, Reason.AMBIGUOUS, detail)

            self._tensors[name] = whole_tensors

        return None

    def _choose_method(self, name: str, kind: str, tensors: Mapping[int, Tensor], files: Files) -> ComparisonMethod:
        """Return how to compare the bytes of a tensor."""
        first = next(iter(tensors.values()))
        return ComparisonMethod(
            files,
            tolerance=self._selection.tolerance.of(name, kind, first.dtype),
            scan=FiniteScan(first.dtype, nan_only=kind == "buffer"),
            quick=self._selection.quick,
        )

    def _may_be_partitioned(self, name: str, kind: str) -> bool:
        return self._optimizer.may_hold(name, of_optimizer=kind in OPTIMIZER)

    def _is_partitioned(self, name: str, kind: str, tensors: Mapping[int, Tensor]) -> bool:
        """Whether ranks hold different state by design, so that a missing state is no difference."""
        if self._optimizer.unclear:
            return False

        if not self._may_be_partitioned(name, kind):
            return False

        # A state that its owner lacks is lost.
        parameter = name.rpartition(".")[0]
        own_parameters = self._optimizer.own_parameters.items()
        owners = {rank for rank, parameters in own_parameters if parameter in parameters}
        return owners <= tensors.keys()

    def _describe_difference(self, diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> TensorDiff:
        """Return the difference as it counts for this group, relative to the reference if the user selected one."""
        # The state of other parameters, or state out of sync: the files do not show which.
        unclear = self._optimizer.unclear
        if unclear and self._may_be_partitioned(diff.name, diff.kind):
            diff = _skip_unclear(diff, tensors, unclear)

        rank = self._selection.reference
        if rank is None:
            return diff

        facts = [describe_from_reference(fact, rank, tensors, files) for fact in diff.facts]
        diff = describe_from_reference(diff, rank, tensors, files)
        return replace(diff, facts=tuple(facts))

    def _find_equal_shards(self, files: Files) -> tuple[EqualShards, ...]:
        """Return the parameters with equal shards at different positions."""
        from syncheck.comparison.equal_shards import find_equal_shards  # only for shards

        # The copies of a shard that differ have a finding of their own.
        parameters = dict.fromkeys(name for name, kind in self._tally.names.items() if kind == "parameter")
        for diff in filter(attrgetter("out_of_sync"), self._tally.diffs):
            parameters.pop(diff.name, None)

        return find_equal_shards(
            parameters,
            self._tensors,
            self._alignment,
            files,
        )

    def _find_unclear_parts(self, files: Files) -> UnclearParts:
        """Return the tensors that were not compared and may be parts or copies."""
        from syncheck.comparison.unclear_parts import find_unclear_parts  # only for shards

        sharded = [diff.name for diff in self._tally.diffs if diff.reason is Reason.SHARDED]
        return find_unclear_parts(
            sharded,
            self._tensors,
            self._alignment,
            files,
        )

    def _inspect_differences(self, files: Files) -> None:
        """Add evidence to the diffs, and histograms if they are selected."""
        # If a tensor has several facts, the last one is about its values.
        diffs_of_values = [diff.facts[-1] if diff.facts else diff for diff in self._tally.diffs]
        evidence: dict[str, Evidence] = {}
        if diffs_of_values:
            from syncheck.comparison.evidence import collect_evidence  # replicas in sync need no evidence

            evidence = collect_evidence(diffs_of_values, self._tensors, files)

        histograms: dict[str, Histogram] = {}
        if self._selection.histograms:
            from syncheck.comparison.histograms import compute_histograms

            histograms = compute_histograms(
                diffs_of_values,
                self._tensors,
                files,
                self._is_exact,
            )

        for position, diff in enumerate(self._tally.diffs):
            additions = {"evidence": evidence.get(diff.name), "histogram": histograms.get(diff.name)}
            if any(additions.values()):
                self._tally.diffs[position] = _add_to_values(diff, additions)

    def _is_exact(self, diff: TensorDiff) -> bool:
        # Differences from a reference do not depend on the tolerance.
        if self._selection.reference is not None:
            return True

        tolerance = self._selection.tolerance.of(diff.name, diff.kind, diff.dtype)
        return tolerance.exact


def _add_to_values(diff: TensorDiff, additions: Mapping[str, Any]) -> TensorDiff:
    """Return a diff with fields about the values of the tensor, also in its last fact. additions: fields by name."""
    facts = diff.facts
    if facts:
        facts = (*facts[:-1], replace(facts[-1], **additions))

    return replace(diff, facts=facts, **additions)


def _skip_unclear(diff: TensorDiff, tensors: Mapping[int, Tensor], unclear: Message) -> TensorDiff:
    """Return the diff of a state that may be out of sync, or belong to other parameters, as not compared."""
    if not diff.out_of_sync:
        return diff

    return skip_tensor(
        diff.name,
        diff.kind,
        tensors,
        Reason.AMBIGUOUS,
        unclear,
    )


def _is_not_finite(diff: TensorDiff) -> bool:
    """Whether a differing tensor holds NaN or infinity on all ranks."""
    # Infinity is a usual value of buffers, for example of masks, and the numbers do not separate both.
    if diff.kind == "buffer":
        return False

    # The numbers are unknown for digests.
    counts = diff.nonfinite.values()
    return len(counts) > 0 and all(counts)
