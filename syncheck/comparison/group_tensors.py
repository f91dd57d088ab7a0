"""Compare all selected tensors of a group, and add evidence to the tensors that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.comparison.mismatches import skip_tensor
from syncheck.comparison.reference import describe_from_reference
from syncheck.comparison.tensors import compare_tensor
from syncheck.layout.dtensors import assemble_copies
from syncheck.layout.optimizer_shards import find_lost_state
from syncheck.layout.replica_groups import is_mixed
from syncheck.messages import Detail
from syncheck.records import Reason
from syncheck.tensors.finiteness import FiniteScan
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.comparison.classification import Classification
    from syncheck.comparison.selection import Selection
    from syncheck.comparison.tally import Tally
    from syncheck.layout.alignment import Alignment
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files


class GroupTensors:
    """The tensors of a group, which are compared one after the other.

    alignment: the tensors, and the ranks that must hold equal bytes.
    classification: their kinds, and the selected tensors.
    selection: how to compare.
    files: open files.
    tally: receives the results.
    """

    def __init__(
        self, alignment: Alignment, classification: Classification, selection: Selection, files: Files, tally: Tally
    ) -> None:
        self._alignment = alignment
        self._optimizer = alignment.optimizer
        self._kinds = classification.kinds.by_name
        self._is_selected = classification.is_selected
        self._compares_rng = bool(selection.only) or selection.rng
        self._selection = selection
        self._files = files
        self._tally = tally
        # Tensors in shards on some ranks are replaced by whole tensors.
        self._tensors = dict(alignment.tensors)

    def compare(self) -> None:
        """Compare the selected tensors. Raises CheckpointError if a file can no longer be read."""
        for name, tensors in self._alignment.tensors.items():
            kind = self._kinds[name]
            if self._is_selected(name, kind):
                self._compare_tensor(name, kind, tensors)
            else:
                self._tally.left_out += 1

        if self._tally.diffs:
            self._add_evidence()

        if self._selection.histograms:
            self._add_histograms()

        for diff in find_lost_state(self._optimizer, self._tensors):
            if self._is_selected(diff.name, diff.kind):
                self._tally.add(diff)

    def _compare_tensor(self, name: str, kind: str, tensors: Mapping[int, Tensor]) -> None:
        """Compare the replicas of one tensor, unless its kind or its layout does not allow it."""
        if kind == "rng" and not self._compares_rng:
            # RNG states and the errors of PowerSGD differ between ranks by design.
            is_error = ".error_dict." in f".{name}"
            detail = Detail.POWERSGD_ERROR() if is_error else Detail.RNG_STATE()
            self._tally.add(skip_tensor(name, kind, tensors, Reason.RNG, detail))
            return

        if self._alignment.positions.stages and is_mixed(tensors):
            whole_tensors = assemble_copies(tensors)
            if not whole_tensors:
                layout = self._alignment.find_replica_sets(name, tensors).layout
                detail = Detail.AMBIGUOUS_LAYOUT(layout=layout)
                self._tally.add(skip_tensor(name, kind, tensors, Reason.AMBIGUOUS, detail))
                return

            tensors = self._tensors[name] = whole_tensors

        self._compare_replicas(name, kind, tensors)

    def _compare_replicas(self, name: str, kind: str, tensors: Mapping[int, Tensor]) -> None:
        first = next(iter(tensors.values()))
        tolerance = self._selection.tolerance.of(name, kind, first.dtype)
        may_be_partitioned = self._optimizer.may_hold(name, of_optimizer=kind in OPTIMIZER)
        # If ranks hold different state by design, a missing state is no difference.
        is_known = may_be_partitioned and not self._optimizer.unclear
        is_partitioned = is_known and not self._is_lost(name, tensors)
        replica_sets = self._alignment.find_replica_sets(name, tensors)
        scan = FiniteScan(first.dtype, nan_only=kind == "buffer")
        diff = compare_tensor(
            name,
            kind,
            tensors,
            replica_sets,
            self._files,
            tolerance,
            sharded=is_partitioned,
            quick=self._selection.quick,
            scan=scan,
        )
        is_not_finite = scan.found if diff is None else _is_not_finite(diff)
        if is_not_finite:
            self._tally.not_finite.append(name)

        if diff is None:
            self._tally.add_identical(name, kind, replica_sets)
            return

        # The state of other parameters, or state out of sync: the files do not show which.
        if may_be_partitioned and self._optimizer.unclear and diff.out_of_sync:
            diff = skip_tensor(
                name,
                kind,
                tensors,
                Reason.AMBIGUOUS,
                self._optimizer.unclear,
            )

        diff = self._describe_from_reference(diff, tensors)
        self._tally.add_compared(diff, replica_sets, partitioned=is_partitioned)

    def _is_lost(self, name: str, tensors: Mapping[int, Tensor]) -> bool:
        """Whether the owner of a parameter does not hold its state, so that the state is lost."""
        parameter = name.rpartition(".")[0]
        own_parameters = self._optimizer.own_parameters.items()
        owners = {rank for rank, parameters in own_parameters if parameter in parameters}
        return not owners <= tensors.keys()

    def _describe_from_reference(self, diff: TensorDiff, tensors: Mapping[int, Tensor]) -> TensorDiff:
        """Return the difference relative to the reference, if the user selected one."""
        rank = self._selection.reference
        if rank is None:
            return diff

        facts = [describe_from_reference(fact, rank, tensors, self._files) for fact in diff.facts]
        diff = describe_from_reference(diff, rank, tensors, self._files)
        return replace(diff, facts=tuple(facts))

    def _inspect(self, inspect: Callable[[list[TensorDiff]], Sequence[TensorDiff]]) -> None:
        """Add evidence or histograms to the diffs. If a tensor has several facts, the last one is about its values."""
        diffs = self._tally.diffs
        diffs_of_values = [diff.facts[-1] if diff.facts else diff for diff in diffs]
        inspected = inspect(diffs_of_values)
        for position, (diff, new_diff) in enumerate(zip(diffs, inspected, strict=True)):
            if diff.facts:
                new_diff = replace(
                    diff,
                    facts=(*diff.facts[:-1], new_diff),
                    evidence=new_diff.evidence,
                    histogram=new_diff.histogram,
                )

            diffs[position] = new_diff

    def _add_evidence(self) -> None:
        from syncheck.comparison.evidence import add_evidence  # replicas in sync need no evidence

        def inspect(diffs: Sequence[TensorDiff]) -> Sequence[TensorDiff]:
            return add_evidence(diffs, self._tensors, self._files)

        self._inspect(inspect)

    def _add_histograms(self) -> None:
        from syncheck.comparison.histograms import add_histograms

        def is_exact(diff: TensorDiff) -> bool:
            # Differences from a reference do not depend on the tolerance.
            if self._selection.reference is not None:
                return True

            tolerance = self._selection.tolerance.of(diff.name, diff.kind, diff.dtype)
            return tolerance.exact

        def inspect(diffs: Sequence[TensorDiff]) -> Sequence[TensorDiff]:
            return add_histograms(
                diffs,
                self._tensors,
                self._files,
                is_exact,
            )

        self._inspect(inspect)


def _is_not_finite(diff: TensorDiff) -> bool:
    """Whether a differing tensor holds NaN or infinity on all ranks."""
    # Infinity is a usual value of buffers, for example of masks, and the numbers do not separate both.
    if diff.kind == "buffer":
        return False

    # The numbers are unknown for digests.
    counts = diff.nonfinite.values()
    return len(counts) > 0 and all(counts)
