"""Tensors without a partner of their name, beside a model in parts of unknown position, which may hold their data."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.conversion.sides import list_snapshots
from syncheck.messages import Detail
from syncheck.records import Reason
from syncheck.tensors.kinds import OPTIMIZER
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.sides import Side
    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Tensor


@dataclass(slots=True)
class _Unpaired:
    """The tensors of one model whose names the other model lacks: bounds of their number of elements."""

    label: str
    """A or B."""
    files: Sequence[str]
    """The names of the files of the model."""
    tensors: Mapping[str, Tensor]
    """All tensors of the model."""
    least: int = 0
    most: int = 0
    is_split: bool = False
    """Whether a tensor is in parts of unknown position."""

    def add(self, name: str) -> None:
        """Count the elements of a tensor."""
        tensor = self.tensors[name]
        sizes = tensor.unplaced or (tensor.numel,)
        # Either every rank has the whole tensor, or no two ranks have the same part.
        self.least += max(sizes)
        self.most += sum(sizes)
        self.is_split |= len(sizes) > 1


def explain_unpaired(comparison: Comparison, sides: Sequence[Side]) -> Comparison:
    """Return the comparison with refused tensors in the place of missing tensors whose data parts may hold.

    Libraries that divide tensors also fuse and rename them, and no map applies to parts of unknown position. If both
    models lack names, the elements of the parts show whether they can hold the tensors. If not, the detail of the
    tensors that are missing states it.
    """
    # The state of the optimizer is no tensor of the model under another name.
    pairs = _start_counts(sides), _start_counts(sides)
    for diff in comparison.tensors:
        if _is_missing(diff):
            holder = diff.clusters[0][0]
            pairs[diff.kind in OPTIMIZER][holder].add(diff.name)
    explained = []
    for diff in comparison.tensors:
        explained.append(_explain(diff, pairs[diff.kind in OPTIMIZER]))
    return replace(comparison, tensors=tuple(explained))


def _is_missing(diff: TensorDiff) -> bool:
    """Whether one model lacks a tensor."""
    return diff.reason is Reason.MISSING


def _start_counts(sides: Sequence[Side]) -> tuple[_Unpaired, _Unpaired]:
    """Return the counts of the tensors of both sides."""
    side_a, side_b = sides
    return _start_count(side_a), _start_count(side_b)


def _start_count(side: Side) -> _Unpaired:
    """Return the count of the tensors of a side."""
    files = [os.path.basename(snapshot.path) for snapshot in list_snapshots(side.group)]
    return _Unpaired(side.label, files, normalize_keys(side.model.tensors))


def _explain(diff: TensorDiff, pair: Sequence[_Unpaired]) -> TensorDiff:
    """Return a tensor, refused if it is missing and the parts of a model may hold it. pair: counts of both models."""
    split = list(filter(attrgetter("is_split"), pair))
    fewer, more = sorted(pair, key=attrgetter("most"))
    # Where one model has all names, the other model lacks the tensor.
    if not (_is_missing(diff) and split and fewer.most):
        return diff
    files: list[str] = []
    for unpaired in split:
        files += unpaired.files
    if fewer.most < more.least:
        unheld = Detail.UNHELD(
            side=more.label,
            least=more.least,
            other=fewer.label,
            most=fewer.most,
            files=tuple(files),
        )
        return replace(diff, detail=unheld)
    detail = Detail.UNPAIRED(files=tuple(files))
    return replace(diff, reason=Reason.REFUSED, detail=detail, minority=())
