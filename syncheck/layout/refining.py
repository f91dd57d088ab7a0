"""Correct the roles of numbers in paths by the other paths, and by the steps that the files store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.layout.groups import partition_by
from syncheck.layout.path_numbers import split_path
from syncheck.tensors.names import normalize
from syncheck.tensors.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.path_numbers import PathNumbers
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

    # All files of a template have the same roles.
    templates = partition_by(snapshots, lambda snapshot: paths[snapshot.path].texts)
    for members in templates.values():
        positions = _find_saved_steps(members, paths)
        for snapshot in members:
            paths[snapshot.path] = _name_steps(paths[snapshot.path], positions)

    return paths


def _count_shared_numbers(paths: Sequence[PathNumbers]) -> int:
    """Return how many numbers at the start are equal in all paths; 0 if the paths differ in numbers only."""
    # Files of one rank whose names differ in numbers are its steps.
    templates = {numbers.texts for numbers in paths}
    if len(templates) < 2:
        return 0

    # For each path, its numbers with the text before each of them.
    starts: list[list[tuple[str, int]]] = []
    for numbers in paths:
        pairs = zip(numbers.texts, numbers.numbers, strict=False)
        starts.append(list(pairs))

    return len(os.path.commonprefix(starts))  # noqa: RUF071 - of lists, not of strings


def _have_common_tensor(snapshots: Sequence[Snapshot]) -> bool:
    """Whether one tensor is in all files. Parts of one rank, like model and optimizer, have no common tensor."""
    first, *later = snapshots
    common = set(normalize(first.tensors).values())
    for snapshot in later:
        common &= set(normalize(snapshot.tensors).values())

    return len(common) > 0


def _forget_ranks(numbers: PathNumbers, shared: int) -> PathNumbers:
    """Return the numbers of a path without ranks among the first numbers.

    In the name of a file, `rank` is a rank: `rank0_a.pt` and `rank0_b.pt` have no replica.

    shared: how many numbers belong to the name of the run.
    """
    for position in range(shared):
        is_rank = numbers.roles[position] in _OF_ONE_RANK
        is_named = "rank" in numbers.texts[position].lower()
        may_be_of_run = numbers.folders[position] or not is_named
        if is_rank and may_be_of_run:
            numbers = numbers.with_role(position, "plain")

    return numbers


def _name_steps(numbers: PathNumbers, positions: Sequence[int]) -> PathNumbers:
    """Return the numbers of a path, of which those at some positions are steps."""
    for position in positions:
        numbers = numbers.with_role(position, "step")

    return numbers


def _find_saved_steps(members: Sequence[Snapshot], paths: Mapping[str, PathNumbers]) -> list[int]:
    """Return the positions of unnamed numbers that differ between files and equal the step of each file.

    members: files whose paths differ in numbers only.
    paths: the numbers of each path.
    """
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
    candidates: list[str] = []
    for name, value in snapshot.values.items():
        is_nested = "." in name
        # True equals 1, and is no step.
        is_same_number = type(value) is int and value == number
        if is_same_number and not is_nested:
            candidates.append(name)

    kind_of = make_value_classifier(candidates)
    kinds = [kind_of(name) for name in candidates]
    return "progress" in kinds
