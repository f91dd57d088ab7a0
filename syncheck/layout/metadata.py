"""Groups of replicas by the metadata blocks in the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.layout.groups import Replicas, classes, numbered, template_of, title_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.snapshots import Metadata, Snapshot


def group_by_metadata(snapshots: Iterable[Snapshot]) -> list[Replicas]:
    """Group by run and run_id, then by folder and name pattern.

    A step inside a file does not split files that share a folder and a pattern: a stale replica is found that way.
    """
    groups: list[Replicas] = []
    for (run, run_id), members in classes(snapshots, lambda s: (_meta(s).run, _meta(s).run_id)).items():
        for pattern, same in classes(members, template_of).items():
            for part in _split_repeated(same):
                steps = [step for step in (_meta(s).step for s in part) if step is not None]
                note = "grouped by the metadata in the files"
                step = max(steps, default=None)
                groups.append(Replicas(run or title_of(pattern), step, numbered(part), note, run_id))
    return groups


def _meta(snapshot: Snapshot) -> Metadata:
    assert snapshot.metadata is not None
    return snapshot.metadata


def _split_repeated(same: list[Snapshot]) -> list[list[Snapshot]]:
    """Split the files of one pattern by step if a rank appears twice, else leave them together."""
    if len({_meta(s).rank for s in same}) == len(same):
        return [same]
    return list(classes(same, lambda s: _meta(s).step).values())
