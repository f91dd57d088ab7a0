"""Compare plain values of the model: scales of quantized tensors, numbers in a state dict, extra states.

Such a value is compared like a tensor: between the ranks that hold copies of the same part of the model, and a value
that one of them lacks is a difference. If the files have different formats, a missing value is unknown, because some
formats store tensors only.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from syncheck.comparison.replica_groups import divide, find_positions
from syncheck.messages import Note
from syncheck.names import CODE, is_extra_state
from syncheck.records import ValueDiff
from syncheck.snapshots import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.comparison.replica_groups import Division
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

_DIGEST = 16  # bytes


class ModelValues:
    """The values of the model in the files of a group, by rank."""

    def __init__(self, snapshots: Mapping[int, Snapshot]) -> None:
        self._ranks = tuple(snapshots)
        self._formats = {snapshot.format for snapshot in snapshots.values()}
        self._certain: dict[str, bool] = {}
        for snapshot in snapshots.values():
            for name, certain in snapshot.model_values.items():
                self._certain[name] = certain | self._certain.get(name, False)
        # Positions of ranks are expensive to find, and most files have no such values.
        self._positions = find_positions(snapshots) if self._certain else None

    def __contains__(self, name: str) -> bool:
        return name in self._certain

    def compare(self, name: str, by_rank: Mapping[int, Any], *, selected: bool) -> ValueDiff | None:
        """Return the difference of one value, None if it has none.

        by_rank: the values of the ranks that have it. selected: whether the options select it.
        """
        values = {rank: to_comparable(value) for rank, value in by_rank.items() if value is not None}
        if not values:
            return None
        division = self._divide(name, values)
        differs = _differ(values, division)
        missing_ranks = tuple(rank for rank in division.expected if rank not in values)
        if not differs and not missing_ranks:
            return None
        counts, unknown = self._judge(name, differs=differs, missing=bool(missing_ranks))
        shown = {rank: values.get(rank) for rank in self._ranks}
        lost = missing_ranks if counts else ()
        return ValueDiff(name, shown, counts & selected, "model", lost, unknown & selected)

    def _divide(self, name: str, values: Mapping[int, Any]) -> Division:
        """Return the ranks that must have equal values. A number has no shards: it is divided like a scalar tensor."""
        assert self._positions is not None
        tensors = {rank: Tensor(name, "uint8", (), (), "", 0) for rank in values}
        return divide(tensors, self._ranks, self._positions)

    def _judge(self, name: str, *, differs: bool, missing: bool) -> tuple[bool, bool]:
        """Return whether a difference counts, and whether it is unknown."""
        if name == CODE:  # equal programs may have different code
            return False, differs
        # A value that describes the run as well may be missing in a file of the same model.
        missing &= self._certain[name]
        if len(self._formats) == 1:
            return differs | missing, False
        # Conversions to other formats omit extra states on purpose; a note counts them.
        return differs, missing and not _is_of_extra_state(name)


def _differ(values: Mapping[int, Any], division: Division) -> bool:
    """Whether values differ between ranks that must have equal values."""
    for ranks in division.sets:
        for rank in ranks:
            if not are_equal(values[ranks[0]], values[rank]):
                return True
    return False


def _is_of_extra_state(name: str) -> bool:
    """Whether a value is part of an extra state."""
    return any(map(is_extra_state, name.split(".")))


def to_comparable(value: Any) -> Any:
    """Return a value as fingerprints store it: the length and the digest of bytes."""
    if isinstance(value, (bytes, bytearray)):
        digest = blake2b(value, digest_size=_DIGEST).hexdigest()
        return f"{len(value)} bytes, blake2b-128 {digest}"
    return value


def are_equal(value: Any, reference: Any) -> bool:
    """Whether two values are equal. NaN equals NaN, as for the elements of tensors."""
    if value == reference:
        return True
    # Only NaN differs from itself.
    return bool(value != value and reference != reference)


def note_unknown_values(diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes about values of the model that were not compared."""
    missing_names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    notes: list[Message] = []
    for diff in diffs:
        if diff.kind != "model" or diff.counts:
            continue
        missing_ranks = tuple(rank for rank, value in diff.by_rank.items() if value is None)
        if missing_ranks:
            missing_names[missing_ranks].append(diff.name)
        elif diff.unknown:
            notes.append(Note.CODE_DIFFERS(ranks=tuple(diff.by_rank)))
    for ranks, names in missing_names.items():
        notes.append(Note.MODEL_VALUES_ABSENT(ranks=ranks, count=len(names), names=tuple(names)))
    return notes
