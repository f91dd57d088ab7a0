"""Groups of replicas by what the metadata blocks in the files say."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import Replicas, classes, numbered, title_of
from syncheck.layout.names import take_apart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.snapshots import Metadata, Snapshot


def by_metadata(snapshots: Iterable[Snapshot]) -> list[Replicas]:
    """Group by run_id, then by folder and name pattern; patterns whose ranks do not repeat may be one group.

    A step inside a file does not split files that share a folder and a pattern: a stale replica is found that way.
    Patterns are joined when their steps are equal or only a folder's number differs: one folder a node.
    """
    groups: list[Replicas] = []
    for (run, run_id), members in classes(snapshots, lambda s: (_meta(s).run, _meta(s).run_id)).items():
        joined: list[tuple[str, list[Snapshot]]] = []
        for pattern, same in classes(members, _pattern).items():
            for step, part in _unrepeated(same):
                into = next((other for key, other in joined if _joins(key, other, pattern, part, step)), None)
                if into is None:
                    joined.append((pattern, list(part)))
                else:
                    into += part
        for pattern, same in joined:
            steps = [step for step in (_meta(s).step for s in same) if step is not None]
            ranked = numbered(same)
            note = "grouped by the metadata in the files"
            groups.append(Replicas(run or title_of(pattern), max(steps, default=None), ranked, note, run_id))
    return groups


def _meta(snapshot: Snapshot) -> Metadata:
    assert snapshot.metadata is not None
    return snapshot.metadata


def _pattern(snapshot: Snapshot) -> str:
    """Return the path with the rank left open; without a rank in the name, the folder."""
    parts = take_apart(snapshot.path)
    at = parts.find("rank")
    if at is None:
        at = max(
            (i for i, n in enumerate(parts.numbers) if n == _meta(snapshot).rank and parts.roles[i] == "plain"),
            default=None,
        )
    return os.path.dirname(snapshot.path) if at is None else parts.without(at)


def _unrepeated(same: list[Snapshot]) -> list[tuple[int | None, list[Snapshot]]]:
    """Split one pattern's files by step where a rank stands twice, else leave them together."""
    if len({_meta(s).rank for s in same}) == len(same):
        steps = {_meta(s).step for s in same}
        return [(steps.pop() if len(steps) == 1 else None, same)]
    return list(classes(same, lambda s: _meta(s).step).items())


def _joins(key: str, members: list[Snapshot], other: str, part: list[Snapshot], step: int | None) -> bool:
    if {_meta(s).rank for s in members} & {_meta(s).rank for s in part}:
        return False
    same_step = step is not None and all(_meta(s).step == step for s in members)
    a, b = take_apart(key), take_apart(other)
    nodes = a.texts == b.texts and all(
        x == y or (role == "plain" and folder)
        for x, y, role, folder in zip(a.numbers, b.numbers, a.roles, a.folders, strict=True)
    )
    return same_step or nodes


def with_named(groups: list[Replicas], plain: list[Snapshot]) -> tuple[list[Replicas], list[Snapshot]]:
    """Add to a group the file without a block that by its name is the rank that it lacks; return also what is left.

    Left alone it would be a replica that nobody compared.
    """
    left = []
    for snapshot in plain:
        parts = take_apart(snapshot.path)
        at = parts.find("rank")
        fit = [] if at is None else [i for i, g in enumerate(groups) if _has_pattern(g, parts.without(at))]
        rank = None if at is None else parts.numbers[at]
        if len(fit) != 1 or rank is None or rank in {taken for taken, _ in groups[fit[0]].ranks}:
            left.append(snapshot)
            continue
        found = groups[fit[0]]
        ranks = tuple(sorted((*found.ranks, (rank, snapshot)), key=lambda pair: pair[0]))
        groups[fit[0]] = replace(found, ranks=ranks, note=f"{found.note}; rank {rank}, which has none, by its name")
    return groups, left


def _has_pattern(group: Replicas, pattern: str) -> bool:
    return any(s.metadata is not None and _pattern(s) == pattern for _, s in group.ranks)
