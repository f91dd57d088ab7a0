"""Compare plain values of the model: scales of quantized tensors, numbers in a state dict, extra states.

Such a value is compared like a tensor: between the ranks that hold copies of the same part of the model, and a value
that one of them lacks is a difference. If the files have different formats, a missing value is unknown, because some
formats store tensors only.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from syncheck.comparison.replica_groups import divide, find_positions
from syncheck.messages import Note
from syncheck.names import CODE, is_extra_state
from syncheck.records import ValueDiff
from syncheck.snapshots import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.comparison.replica_groups import Positions
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

_DIGEST = 16  # bytes
# Prefix of the text of bytes, which fingerprints store.
_BYTES = "bytes, blake2b-128 "


class ModelValues:
    """The values of the model in the files of a group, by rank."""

    def __init__(self, snapshots: Mapping[int, Snapshot]) -> None:
        self._snapshots = snapshots
        self._positions: Positions | None = None
        self._certain: dict[str, bool] = {}
        for snapshot in snapshots.values():
            for name, certain in snapshot.model_values.items():
                self._certain[name] = certain or self._certain.get(name, False)
        self._one_format = len({snapshot.format for snapshot in snapshots.values()}) == 1

    def __contains__(self, name: str) -> bool:
        return name in self._certain

    def compare(self, name: str, by_rank: Mapping[int, Any], *, selected: bool) -> ValueDiff | None:
        """Return the difference of one value, None if it has none.

        by_rank: the values of the ranks that have it. selected: whether the options select it.
        """
        held = {rank: to_comparable(value) for rank, value in by_rank.items() if value is not None}
        if not held:
            return None
        if self._positions is None:
            self._positions = find_positions(self._snapshots)
        # A number has no shards: it is divided like a plain tensor with one element.
        tensors = {rank: Tensor(name, "uint8", (), (), "", 0) for rank in held}
        division = divide(tensors, tuple(self._snapshots), self._positions)
        differs = any(not are_equal(held[ranks[0]], held[rank]) for ranks in division.sets for rank in ranks)
        absent = tuple(rank for rank in division.expected if rank not in held)
        if not differs and not absent:
            return None
        if name == CODE:  # the same code may have another text
            return ValueDiff(name, {r: held.get(r) for r in self._snapshots}, False, "model", (), selected and differs)
        missing = bool(absent) and self._certain[name]
        shown = {rank: held.get(rank) for rank in self._snapshots}
        return ValueDiff(
            name,
            shown,
            counts=selected and (differs or (missing and self._one_format)),
            kind="model",
            lost=absent if missing and self._one_format else (),
            unknown=selected and missing and not self._one_format and not _is_of_extra_state(name),
        )


def _is_of_extra_state(name: str) -> bool:
    """Whether a value is part of an extra state, which conversions to other formats omit."""
    parts = name.split(".")
    return any(map(is_extra_state, parts))


def to_comparable(value: Any) -> Any:
    """Return a value as fingerprints store it: the length and the digest of bytes."""
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} {_BYTES}{blake2b(value, digest_size=_DIGEST).hexdigest()}"
    return value


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal. NaN equals NaN, as for the elements of tensors."""
    return bool(one == other or (one != one and other != other))


def note_unknown_values(diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes about values of the model that some ranks lack and that were not compared."""
    names: dict[tuple[int, ...], list[str]] = {}
    notes: list[Message] = []
    for diff in diffs:
        if diff.name == CODE and diff.unknown:
            notes.append(Note.CODE_DIFFERS(ranks=tuple(diff.by_rank)))
        elif diff.kind == "model" and not diff.counts:
            absent = tuple(rank for rank, value in diff.by_rank.items() if value is None)
            names.setdefault(absent, []).append(diff.name)
    for ranks, found in names.items():
        if ranks:
            notes.append(Note.MODEL_VALUES_ABSENT(ranks=ranks, count=len(found), names=tuple(found)))
    return notes
