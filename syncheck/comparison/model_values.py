"""Compare plain values of the model: scales of quantized tensors, numbers in a state dict, extra states.

Such a value is compared like a tensor: between the ranks that hold copies of the same part of the model, and a value
that one of them lacks is a difference. If the files have different formats, a missing value is unknown, because some
formats store tensors only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.snapshots import Membership, Tensor
from syncheck.tensors.names import CODE, is_adapter_setting
from syncheck.tensors.value_kinds import is_of_rank, to_comparable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.layout.replica_groups import ReplicaGroups
    from syncheck.messages import Message

_ORDER = tuple(Membership)

# The key of an extra state within a name.
_EXTRA_STATE = r"(?:^|\.)_extra_state(?:\.|$)"


class _Judgement(NamedTuple):
    """What a difference means.

    counts: the ranks are out of sync.
    unknown: they may be; the files do not show it.
    """

    counts: bool
    unknown: bool


class ModelValues:
    """The values of the model in the files of a group, by rank."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._ranks = alignment.ranks
        self._formats = set[str]()
        self._memberships = dict[str, Membership]()
        self._with_settings = set[int]()
        for rank, snapshot in alignment.snapshots.items():
            # The first rank may be the only one that writes settings.
            if any(map(is_adapter_setting, snapshot.model_values)):
                self._with_settings.add(rank)

            self._formats.add(snapshot.format)
            for name, membership in snapshot.model_values.items():
                earlier = self._memberships.get(name, membership)
                self._memberships[name] = max(earlier, membership, key=_ORDER.index)

    def includes(self, name: str, by_rank: Mapping[int, Any]) -> bool:
        """Whether a value belongs to the model, and not to the rank.

        by_rank: the values of the ranks that have it.
        """
        if name not in self._memberships:
            return False

        certain = self._memberships[name] is Membership.MODEL
        # None stands for a value that the rank does not have.
        values = [value for value in by_rank.values() if value is not None]
        return not all(is_of_rank(name, value, certain=certain) for value in values)

    def lacks(self, name: str, by_rank: Mapping[int, Any]) -> bool:
        """Whether a file in the format of all other files lacks a value of a state dict or an attribute of a module."""
        # Settings with their default are not listed.
        if is_adapter_setting(name):
            return False

        if self._memberships[name] not in (Membership.MODEL, Membership.MODULE):
            return False

        # Other formats may store tensors only.
        if len(self._formats) > 1:
            return False

        return len(by_rank) < len(self._ranks)

    def compare(self, name: str, by_rank: Mapping[int, Any], *, selected: bool) -> ValueDiff | None:
        """Return the difference of one value, None if it has none.

        by_rank: the values of the ranks that have it. selected: whether the options select it.
        """
        values = {rank: to_comparable(value) for rank, value in by_rank.items() if value is not None}
        if not values:
            return None

        # A number has no shards: it is divided between the ranks like a scalar tensor.
        scalar = Tensor(name, "uint8", (), (), "", 0)
        replica_groups = self._alignment.find_replica_groups(name, dict.fromkeys(values, scalar))
        differs = _differ(values, replica_groups)
        missing_ranks = tuple(sorted(set(replica_groups.expected) - values.keys()))
        if not differs and not missing_ranks:
            return None

        judgement = self._judge(name, missing_ranks, differs=differs)
        return ValueDiff(
            name,
            dict.fromkeys(self._ranks) | values,
            counts=judgement.counts & selected,
            kind="model",
            lost=missing_ranks,
            unknown=judgement.unknown & selected,
        )

    def _judge(self, name: str, missing_ranks: Collection[int], *, differs: bool) -> _Judgement:
        """Judge the difference of a value.

        missing_ranks: ranks without the value.
        differs: whether the ranks with the value differ.
        """
        if is_adapter_setting(name):
            # It may change the model or not. Beside other settings, a missing setting has another value than this.
            has_default = not self._with_settings.isdisjoint(missing_ranks)
            return _Judgement(counts=False, unknown=differs or has_default)

        # Equal programs may have different code.
        if name == CODE:
            return _Judgement(counts=False, unknown=differs)

        membership = self._memberships[name]
        if len(self._formats) == 1:
            # A state dict of a pickled module has none of the module's attributes.
            is_missing = bool(missing_ranks) and membership is not Membership.MODULE
            return _Judgement(counts=differs or is_missing, unknown=False)

        # Conversions to other formats omit extra states on purpose; a note counts them.
        is_expected = membership is Membership.MODEL and re.search(_EXTRA_STATE, name) is None
        return _Judgement(
            counts=differs,
            unknown=is_expected and bool(missing_ranks),
        )


def _differ(values: Mapping[int, Any], replica_groups: ReplicaGroups) -> bool:
    """Whether values differ between ranks that must have equal values."""
    for first_rank, *other_ranks in replica_groups.sets:
        for rank in other_ranks:
            if not are_equal(values[rank], values[first_rank]):
                return True

    return False


def are_equal(value: Any, reference: Any) -> bool:
    """Whether two values are equal. NaN equals NaN, as for the elements of tensors."""
    # Only NaN differs from itself.
    are_nan = (value != value) & (reference != reference)
    return bool((value == reference) | are_nan)


def note_unknown_values(diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes about values of the model that were not compared."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for diff in diffs:
        if diff.kind != "model":
            continue

        # Differences that count are in a finding, and settings have a note of their own.
        if diff.counts or _is_different_setting(diff):
            continue

        missing_ranks = tuple(rank for rank, value in diff.by_rank.items() if value is None)
        names_by_ranks[missing_ranks].append(diff.name)

    if not diffs:
        return []

    ranks_of_group = tuple(diffs[0].by_rank)
    setting_names = tuple(diff.name for diff in diffs if _is_different_setting(diff))
    # All ranks have the code, which is the only value that is unknown without being missing.
    code_names = names_by_ranks.pop((), [])
    settings_note = Note.ADAPTER_SETTINGS_DIFFER(ranks=ranks_of_group, names=setting_names)
    notes = [
        *note_if(setting_names, settings_note),
        *note_if(CODE in code_names, Note.CODE_DIFFERS(ranks=ranks_of_group)),
    ]
    for ranks, names in names_by_ranks.items():
        note = Note.MODEL_VALUES_ABSENT(
            ranks=ranks,
            count=len(names),
            names=tuple(names),
        )
        notes.append(note)

    return notes


def _is_different_setting(diff: ValueDiff) -> bool:
    return diff.unknown and is_adapter_setting(diff.name)
