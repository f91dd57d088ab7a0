"""Correct the roles of numbers in paths by the other paths, and by the steps that the files store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.layout.groups import partition_by
from syncheck.layout.names import split_path
from syncheck.names import normalize
from syncheck.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.names import PathNumbers
    from syncheck.snapshots import Snapshot

# Roles of numbers that differ between replicas, or between adapters.
_OF_ONE_RANK = ("rank", "local", "mesh", "part")


def refine_paths(snapshots: Sequence[Snapshot]) -> dict[str, PathNumbers]:
    """Return the numbers of each path, with their roles.

    - A rank in the common start of all paths, as in `exp_r3/`, belongs to the name of the run: it does not distinguish
      the files. If the files have no tensor in common, they may be parts of this rank.
    - An unnamed number that equals the step in each file is the step, as in `s100_rank0.pt`.
    """
    paths: dict[str, PathNumbers] = {}
    for snapshot in snapshots:
        paths[snapshot.path] = split_path(snapshot.path)

    shared = _count_shared_numbers([*paths.values()])
    if shared > 0 and _have_common_tensor(snapshots):
        for path, numbers in paths.items():
            paths[path] = _forget_ranks(numbers, shared)

    templates = partition_by(snapshots, lambda snapshot: paths[snapshot.path].texts)
    for members in templates.values():
        for position in _find_saved_steps(members, paths):
            # All files of a template have the same roles.
            for snapshot in members:
                numbers = paths[snapshot.path]
                paths[snapshot.path] = numbers.with_role(position, "step")

    return paths


def _count_shared_numbers(paths: Sequence[PathNumbers]) -> int:
    """Return how many numbers at the start are equal in all paths; 0 if the paths differ in numbers only."""
    # Files of one rank whose names differ in numbers are its steps.
    templates = {numbers.texts for numbers in paths}
    if len(templates) < 2:
        return 0

    shared = 0
    columns = zip(*map(_list_starts, paths), strict=False)
    for starts in columns:
        if len(set(starts)) > 1:
            break
        shared += 1

    return shared


def _list_starts(numbers: PathNumbers) -> list[tuple[str, int]]:
    """Return each number of a path with the text before it."""
    return list(zip(numbers.texts, numbers.numbers, strict=False))


def _have_common_tensor(snapshots: Sequence[Snapshot]) -> bool:
    """Whether one tensor is in all files. Parts of one rank, such as model and optimizer, have no common tensor."""
    first, *later = snapshots
    common = set(normalize(first.tensors).values())
    for snapshot in later:
        common &= set(normalize(snapshot.tensors).values())

    return len(common) > 0


def _forget_ranks(numbers: PathNumbers, shared: int) -> PathNumbers:
    """Return the numbers of a path without ranks among the first numbers.

    In the name of a file, `rank` is a rank: `rank0_a.pt` and `rank0_b.pt` have no replica.
    """
    for position in range(shared):
        is_rank = numbers.roles[position] in _OF_ONE_RANK
        is_named = "rank" in numbers.texts[position].lower()
        if is_rank and (numbers.folders[position] or not is_named):
            numbers = numbers.with_role(position, "plain")

    return numbers


def _find_saved_steps(members: Sequence[Snapshot], paths: Mapping[str, PathNumbers]) -> list[int]:
    """Return the positions of unnamed numbers that differ between files and equal the step of each file."""
    steps: list[int] = []
    for position in paths[members[0].path].all_of("plain"):
        by_file = [paths[snapshot.path].numbers[position] for snapshot in members]
        is_varying = len(set(by_file)) > 1
        # The values of many files are searched only if the number may be a step.
        if is_varying and all(map(_stores_step, members, by_file)):
            steps.append(position)

    return steps


def _stores_step(snapshot: Snapshot, number: int) -> bool:
    """Whether a checkpoint stores this number as its step or epoch, at the top level."""
    names: list[str] = []
    for name, value in snapshot.values.items():
        is_nested = "." in name
        # True equals 1, and is no step.
        if type(value) is int and value == number and not is_nested:
            names.append(name)

    kind_of = make_value_classifier(names)
    return "progress" in map(kind_of, names)
