"""Correct the roles of numbers in paths by the other paths, and by the steps that the files store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import partition_by
from syncheck.layout.names import split_path
from syncheck.names import normalize
from syncheck.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.layout.names import PathNumbers
    from syncheck.snapshots import Snapshot


def refine_paths(snapshots: Sequence[Snapshot]) -> dict[str, PathNumbers]:
    """Return the numbers of each path, with their roles.

    - A rank in the common start of all paths, as in `exp_r3/`, belongs to the name of the run: it does not distinguish
      the files. If the files have no tensor in common, they may be parts of this rank.
    - An unnamed number that equals the step in each file is the step, as in `s100_rank0.pt`.
    """
    paths = {snapshot.path: split_path(snapshot.path) for snapshot in snapshots}
    shared = _count_shared_numbers([*paths.values()])
    if shared and _have_common_tensor(snapshots):
        paths = {path: _forget_ranks(numbers, shared) for path, numbers in paths.items()}
    for members in partition_by(snapshots, lambda snapshot: paths[snapshot.path].texts).values():
        steps = _find_saved_steps(members, [paths[snapshot.path] for snapshot in members])
        for snapshot in members if steps else ():
            numbers = paths[snapshot.path]
            roles = list(numbers.roles)
            for position in steps:
                roles[position] = "step"
            paths[snapshot.path] = replace(numbers, roles=tuple(roles))
    return paths


def _count_shared_numbers(paths: Sequence[PathNumbers]) -> int:
    """Return how many numbers at the start are equal in all paths; 0 if the paths differ in numbers only."""
    # Files of one rank whose names differ in numbers are its steps.
    if len({numbers.texts for numbers in paths}) < 2:
        return 0
    shared = 0
    for position in range(min(len(numbers.numbers) for numbers in paths)):
        starts = {(numbers.texts[position], numbers.numbers[position]) for numbers in paths}
        if len(starts) > 1:
            break
        shared = position + 1
    return shared


def _have_common_tensor(snapshots: Sequence[Snapshot]) -> bool:
    names = [set(normalize(snapshot.tensors).values()) for snapshot in snapshots]
    return bool(set.intersection(*names))


def _forget_ranks(numbers: PathNumbers, shared: int) -> PathNumbers:
    """Return the numbers of a path without ranks among the first numbers.

    In the name of a file, `rank` is a rank: `rank0_a.pt` and `rank0_b.pt` have no replica.
    """
    roles = list(numbers.roles)
    for position in range(shared):
        is_rank = roles[position] in ("rank", "local", "mesh", "part")
        is_named = "rank" in numbers.texts[position].lower()
        if is_rank and (numbers.folders[position] or not is_named):
            roles[position] = "plain"
    return replace(numbers, roles=tuple(roles))


def _find_saved_steps(members: Sequence[Snapshot], paths: Sequence[PathNumbers]) -> list[int]:
    """Return the positions of unnamed numbers that differ between files and equal the step of each file."""
    steps = []
    for position in paths[0].all_of("plain"):
        by_file = [numbers.numbers[position] for numbers in paths]
        # The values of many files are read only if the number may be a step.
        if len(set(by_file)) > 1 and all(map(_stores_step, members, by_file)):
            steps.append(position)
    return steps


def _stores_step(snapshot: Snapshot, number: int) -> bool:
    """Whether a checkpoint stores this number as its step or epoch, at the top level."""
    names = [
        name for name, value in snapshot.values.items() if type(value) is int and value == number and "." not in name
    ]
    kind_of = make_value_classifier(names)
    return "progress" in map(kind_of, names)
