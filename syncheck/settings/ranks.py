"""Compare the settings of replicas: equal weights beside other configurations are not in sync."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.settings.files import CONFIGURATIONS, list_folders
from syncheck.tensors.kinds import matches_any
from syncheck.tensors.names import name_model_setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.settings.configurations import Configurations
    from syncheck.snapshots import Snapshot

_ARGUMENTS = "args."


def compare_settings(
    snapshots: Mapping[int, Snapshot], exclude: Sequence[str]
) -> tuple[list[ValueDiff], list[Message]]:
    """Return the settings that differ between ranks as unknown values, and a note about them.

    snapshots: by rank.
    exclude: globs of values to skip.
    """
    diffs: list[ValueDiff] = []
    statements: list[Message] = []
    for key, by_rank in _find_differing(snapshots).items():
        diff = ValueDiff(
            name_model_setting(key),
            by_rank,
            counts=False,
            kind="model",
            unknown=True,
        )
        if not matches_any(diff.name, exclude):
            diffs.append(diff)
            statements.append(Note.ATTRIBUTE(name=key, values=by_rank))

    return diffs, note_if(statements, Note.MODEL_SETTINGS_DIFFER(settings=tuple(statements)))


def _find_differing(snapshots: Mapping[int, Snapshot]) -> dict[str, dict[int, Any]]:
    """Return the values of each setting that differs, by its key and by rank."""
    ranks = [rank for rank, snapshot in snapshots.items() if _has_settings(snapshot)]
    folders = list_folders(snapshots[rank].path for rank in ranks)
    has_arguments = any(map(_has_arguments, snapshots.values()))
    # The ranks of one folder have one configuration.
    if len(ranks) < 2 or (len(folders) < 2 and not has_arguments):
        return {}

    from syncheck.settings.differences import list_differences, to_value  # for few comparisons

    first_rank, *other_ranks = ranks
    first = _read(snapshots[first_rank])
    by_key: dict[str, dict[int, Any]] = {}
    for rank in other_ranks:
        for difference in list_differences(first, _read(snapshots[rank])):
            # Other ranks have the value of the first rank, unless they differ from it.
            default = dict.fromkeys(ranks, to_value(difference.a))
            by_rank = by_key.setdefault(difference.key, dict.fromkeys(snapshots) | default)
            by_rank[rank] = to_value(difference.b)

    return by_key


def _has_settings(snapshot: Snapshot) -> bool:
    """Whether a rank has settings in its file, or beside it. One rank may write them for all ranks."""
    if snapshot.format == "memory":
        return False

    (folder,) = list_folders([snapshot.path])
    paths = [os.path.join(folder, name) for name in CONFIGURATIONS]
    return _has_arguments(snapshot) or any(map(os.path.lexists, paths))


def _has_arguments(snapshot: Snapshot) -> bool:
    return any(_ARGUMENTS in name for name in snapshot.values)


def _read(snapshot: Snapshot) -> Configurations:
    from syncheck.settings.configurations import read_configurations  # for few comparisons

    return read_configurations([snapshot.path], snapshot.values)
