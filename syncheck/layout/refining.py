"""Resolve the roles of numbers in paths by the other paths, and by the steps that the files store.

Then each number has a role in `path_numbers.USES`, and the key of each file follows from them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import are_unique, partition_by
from syncheck.layout.path_numbers import split_path
from syncheck.messages import Grouping
from syncheck.tensors.names import normalize
from syncheck.tensors.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.path_numbers import PathNumbers, Role
    from syncheck.messages import Message
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


@dataclass(frozen=True, slots=True)
class Template:
    """Files whose paths differ only in numbers."""

    members: list[Snapshot]
    numbers: list[PathNumbers]
    """The numbers in the path of each member. All members have the same roles."""
    rank: int | None
    """The position of the rank among the numbers; None if no number is the rank."""

    @property
    def has_replicas(self) -> bool:
        """Whether numbers distinguish replicas."""
        return self.rank is not None or "mesh" in self.numbers[0].roles


def find_templates(snapshots: Sequence[Snapshot], paths: Mapping[str, PathNumbers]) -> list[Template]:
    """Return the templates of all files. paths: the numbers of each path, by `refine_paths`."""
    templates = []
    for members in partition_by(snapshots, lambda snapshot: paths[snapshot.path].texts).values():
        numbers = [paths[snapshot.path] for snapshot in members]
        templates.append(Template(members, numbers, _find_rank(numbers)))

    return templates


def _find_rank(paths: Sequence[PathNumbers]) -> int | None:
    """Return the position of the rank among the numbers of paths with equal texts.

    In order of preference: a rank in the file's own name, a varying rank in a folder's name, the last varying
    unnamed number, a varying number of the machine, and a constant rank in a folder's name.
    """
    first = paths[0]
    rank_positions = first.all_of("rank")
    in_file_name = [position for position in rank_positions if not first.folders[position]]
    nodes = find_varying(paths, "node")
    unnamed = find_varying(paths, "plain")
    # Beside machines, an unnamed number may be a step.
    if nodes and unnamed and not _counts_files_of_nodes(paths, unnamed[-1]):
        unnamed = []

    for candidates in (in_file_name, find_varying(paths, "rank"), unnamed, nodes, rank_positions):
        if candidates:
            return candidates[-1]

    return None


def find_varying(paths: Sequence[PathNumbers], role: Role) -> list[int]:
    """Return the positions of this role at which the numbers differ between paths with equal texts."""
    positions = []
    for position in paths[0].all_of(role):
        if len({numbers.numbers[position] for numbers in paths}) > 1:
            positions.append(position)

    return positions


def _counts_files_of_nodes(paths: Sequence[PathNumbers], position: int) -> bool:
    """Whether a number counts the files of each machine from 0."""
    node_positions = paths[0].all_of("node")
    by_node = partition_by(paths, lambda numbers: _select_numbers(numbers, node_positions))
    for paths_of_node in by_node.values():
        counts = {numbers.numbers[position] for numbers in paths_of_node}
        if counts != set(range(len(paths_of_node))):
            return False

    return True


def _select_numbers(numbers: PathNumbers, positions: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers.numbers[position] for position in positions)


def resolve_roles(template: Template) -> tuple[list[PathNumbers], tuple[Message, ...]]:
    """Give each number of a template with replicas its final role. Return the numbers of each member, and the reasons.

    Numbers of machine and mesh do not separate groups. Further varying numbers do not either, if ranks are unique
    without them; then they are the machines. Otherwise, a single further number is the step of a run.
    """
    first = template.numbers[0]
    roles = list(first.roles)
    ranks = _find_ranks(template)
    for position in first.all_of("rank"):
        if position not in ranks:
            roles[position] = "plain"

    for position in ranks:
        roles[position] = "rank"

    grouping: tuple[Message, ...] = (Grouping.RANKS_IN_NAMES(),)
    if template.rank is not None and first.roles[template.rank] == "plain":
        grouping = (Grouping.ONLY_NUMBER(),)

    further = [position for position in find_varying(template.numbers, "plain") if position not in ranks]
    resolved = [replace(numbers, roles=tuple(roles)) for numbers in template.numbers]
    machines = _find_machines(resolved, further)
    if machines:
        grouping += (Grouping.OTHER_NUMBER_IS_NODE(),)

    for position in machines:
        roles[position] = "node"

    steps = [position for position in further if position not in machines]
    # A path segment, as in 500/rank0, but not seed3/rank0.
    if "step" not in roles and len(steps) == 1 and not first.is_glued(steps[0]):
        roles[steps[0]] = "step"

    return [replace(numbers, roles=tuple(roles)) for numbers in template.numbers], grouping


def _find_ranks(template: Template) -> set[int]:
    """Return the positions of the rank. In rank_0/model_rank_0.pth, the second number repeats the rank."""
    if template.rank is None:
        return set()

    ranks = {template.rank}
    for position in find_varying(template.numbers, "rank"):
        if all(numbers.numbers[position] == numbers.numbers[template.rank] for numbers in template.numbers):
            ranks.add(position)

    return ranks


def _find_machines(paths: Sequence[PathNumbers], further: Sequence[int]) -> list[int]:
    """Return the further numbers without which the replicas of each group still have different numbers."""
    replica_positions = paths[0].list_replica_numbers()
    machines: list[int] = []
    for position in further:
        starred = (*replica_positions, *machines, position)
        groups = partition_by(paths, lambda numbers: numbers.without(*starred))  # noqa: B023 - called at once
        replicas = [[_select_numbers(numbers, replica_positions) for numbers in group] for group in groups.values()]
        if all(map(are_unique, replicas)):
            machines.append(position)

    return machines


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
