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
    sources = {rank: _find_source(snapshot) for rank, snapshot in snapshots.items()}
    # One rank may write the settings for all ranks.
    ranks = [rank for rank, source in sources.items() if source]
    if len({sources[rank] for rank in ranks}) < 2:
        return {}

    from syncheck.settings.differences import list_differences  # for few comparisons

    first_rank, *other_ranks = ranks
    first = _read(snapshots[first_rank])
    by_key: dict[str, dict[int, Any]] = {}
    for rank in other_ranks:
        for difference in list_differences(first, _read(snapshots[rank])):
            # Other ranks have the value of the first rank, unless they differ from it.
            default = dict.fromkeys(ranks, difference.a)
            by_rank = by_key.setdefault(difference.key, dict.fromkeys(snapshots) | default)
            by_rank[rank] = difference.b

    return by_key


def _find_source(snapshot: Snapshot) -> str:
    """Return the file or the folder with the settings of a rank, empty without settings."""
    if snapshot.format == "memory":
        return ""
    if any(_ARGUMENTS in name for name in snapshot.values):
        return snapshot.path

    (folder,) = list_folders([snapshot.path])
    paths = [os.path.join(folder, name) for name in CONFIGURATIONS]
    has_configuration = any(map(os.path.lexists, paths))
    return os.path.abspath(folder) if has_configuration else ""


def _read(snapshot: Snapshot) -> Configurations:
    from syncheck.settings.configurations import read_configurations  # for few comparisons

    return read_configurations([snapshot.path], snapshot.values)
