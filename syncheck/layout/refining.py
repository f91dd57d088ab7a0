"""Resolve the roles of numbers in paths by the other paths, and by the steps that the files store.

Then each number has a role in `path_numbers.USES`, and the key of each file follows from them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.layout.groups import are_unique, partition_by
from syncheck.layout.path_numbers import split_path
from syncheck.messages import Grouping
from syncheck.tensors.names import normalize
from syncheck.tensors.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.layout.path_numbers import PathNumbers, Role
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

# Roles of numbers that differ between replicas, or between adapters.
_OF_ONE_RANK = ("rank", "local", "mesh", "part")


class File(NamedTuple):
    """A file and the numbers in its path."""

    snapshot: Snapshot
    numbers: PathNumbers


@dataclass(frozen=True)
class Template:
    """Files whose paths differ only in numbers, so that the numbers of all files have the same roles."""

    files: Sequence[File]

    @cached_property
    def numbers(self) -> list[PathNumbers]:
        """The numbers in the path of each file."""
        return [file.numbers for file in self.files]

    @cached_property
    def rank(self) -> int | None:
        """The position of the rank among the numbers; None if no number is the rank."""
        return _find_rank(self.numbers)

    @property
    def has_replicas(self) -> bool:
        """Whether numbers distinguish replicas."""
        return self.rank is not None or "mesh" in self.numbers[0].roles


def refine_paths(snapshots: Sequence[Snapshot]) -> list[File]:
    """Return the files with the numbers in their paths.

    - A rank in the common start of all paths, as in `exp_r3/`, belongs to the name of the run: it does not distinguish
      the files. If the files have no tensor in common, they may be parts of this rank.
    - An unnamed number that equals the step in each file is the step, as in `s100_rank0.pt`.
    """
    files = [File(snapshot, split_path(snapshot.path)) for snapshot in snapshots]
    shared = _count_shared_numbers(files)
    if shared > 0 and _have_common_tensor(snapshots):
        files = [File(file.snapshot, _forget_ranks(file.numbers, shared)) for file in files]

    steps: dict[tuple[str, ...], list[int]] = {}
    for template in find_templates(files):
        steps[template.numbers[0].texts] = _find_saved_steps(template)

    return [File(snapshot, numbers.with_role("step", steps[numbers.texts])) for snapshot, numbers in files]


def find_templates(files: Iterable[File]) -> list[Template]:
    """Return the templates of all files, in the order of their first files."""
    return [Template(members) for members in partition_by(files, attrgetter("numbers.texts")).values()]


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
    if nodes and unnamed:
        is_local_rank = _counts_files_of_nodes(paths, unnamed[-1])
        if not is_local_rank:
            unnamed = []

    # The least preferred first.
    candidates = [
        *rank_positions,
        *nodes,
        *unnamed,
        *find_varying(paths, "rank"),
        *in_file_name,
    ]
    return candidates[-1] if candidates else None


def find_varying(paths: Sequence[PathNumbers], role: Role) -> list[int]:
    """Return the positions of this role at which the numbers differ between paths with equal texts."""
    positions = []
    for position in paths[0].all_of(role):
        values = set(_list_values(paths, position))
        if len(values) > 1:
            positions.append(position)

    return positions


def _list_values(paths: Iterable[PathNumbers], position: int) -> list[int]:
    """Return the number of each path at a position."""
    return [numbers.numbers[position] for numbers in paths]


def _counts_files_of_nodes(paths: Sequence[PathNumbers], position: int) -> bool:
    """Whether a number counts the files of each machine from 0."""
    node_positions = paths[0].all_of("node")
    counts_by_node: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for numbers in paths:
        counts_by_node[numbers.select(node_positions)].append(numbers.numbers[position])

    return all(set(counts) == set(range(len(counts))) for counts in counts_by_node.values())


def resolve_roles(template: Template) -> tuple[list[File], tuple[Message, ...]]:
    """Give each number of a template with replicas its final role. Return the files, and the reasons.

    Numbers of machine and mesh do not separate groups. Further varying numbers do not either, if ranks are unique
    without them; then they are the machines. Otherwise, a single further number is the step of a run.
    """
    first = template.numbers[0]
    grouping: tuple[Message, ...] = (Grouping.RANKS_IN_NAMES(),)
    if template.rank in first.all_of("plain"):
        grouping = (Grouping.ONLY_NUMBER(),)

    ranks = _find_ranks(template)
    further = sorted(set(find_varying(template.numbers, "plain")) - ranks)
    # Other ranks in the path name the run.
    first = first.with_role("plain", first.all_of("rank")).with_role("rank", ranks)

    machines = _find_machines(template.numbers, first.list_positions("replica"), further)
    first = first.with_role("node", machines)
    if machines:
        grouping += (Grouping.OTHER_NUMBER_IS_NODE(),)

    steps = sorted(set(further).difference(machines))
    has_named_step = "step" in first.roles
    if len(steps) == 1 and not has_named_step:
        (position,) = steps
        # A path segment, as in 500/rank0, but not seed3/rank0.
        if not first.is_glued(position):
            first = first.with_role("step", [position])

    files = [File(file.snapshot, replace(file.numbers, roles=first.roles)) for file in template.files]
    return files, grouping


def _find_ranks(template: Template) -> set[int]:
    """Return the positions of the rank. In rank_0/model_rank_0.pth, the second number repeats the rank."""
    if template.rank is None:
        return set()

    ranks = {template.rank}
    numbers_of_rank = _list_values(template.numbers, template.rank)
    for position in find_varying(template.numbers, "rank"):
        if _list_values(template.numbers, position) == numbers_of_rank:
            ranks.add(position)

    return ranks


def _find_machines(paths: Sequence[PathNumbers], replica_positions: Sequence[int], further: Sequence[int]) -> list[int]:
    """Return the further numbers without which the replicas of each group still have different numbers."""
    machines: list[int] = []
    for position in further:
        # A number of the step or the run separates files with equal ranks, and a machine does not.
        starred = (*replica_positions, *machines, position)
        keys = [(numbers.without(*starred), numbers.select(replica_positions)) for numbers in paths]
        if are_unique(keys):
            machines.append(position)

    return machines


def _count_shared_numbers(files: Sequence[File]) -> int:
    """Return how many numbers at the start are equal in all paths; 0 if the paths differ in numbers only."""
    # Files of one rank whose names differ in numbers are its steps.
    if len(find_templates(files)) < 2:
        return 0

    # For each path, its numbers with the text before each of them.
    starts: list[list[tuple[str, int]]] = []
    for file in files:
        pairs = zip(file.numbers.texts, file.numbers.numbers, strict=False)
        starts.append(list(pairs))

    return len(os.path.commonprefix(starts))  # noqa: RUF071 - of lists, not of strings


def _have_common_tensor(snapshots: Sequence[Snapshot]) -> bool:
    """Whether one tensor is in all files. Parts of one rank, like model and optimizer, have no common tensor."""
    names = [set(normalize(snapshot.tensors).values()) for snapshot in snapshots]
    return len(set.intersection(*names)) > 0


def _forget_ranks(numbers: PathNumbers, shared: int) -> PathNumbers:
    """Return the numbers of a path without ranks among the first numbers.

    In the name of a file, `rank` is a rank: `rank0_a.pt` and `rank0_b.pt` have no replica.

    shared: how many numbers belong to the name of the run.
    """
    forgotten: list[int] = []
    for position in range(shared):
        is_rank = numbers.roles[position] in _OF_ONE_RANK
        is_named = "rank" in numbers.texts[position].lower()
        may_be_of_run = numbers.folders[position] or not is_named
        if is_rank and may_be_of_run:
            forgotten.append(position)

    return numbers.with_role("plain", forgotten)


def _find_saved_steps(template: Template) -> list[int]:
    """Return the positions of unnamed numbers that differ between files and equal the step of each file."""
    steps: list[int] = []
    # The values of many files are searched only if the number may be a step.
    for position in find_varying(template.numbers, "plain"):
        if all(_stores_step(file.snapshot, file.numbers.numbers[position]) for file in template.files):
            steps.append(position)

    return steps


def _stores_step(snapshot: Snapshot, number: int) -> bool:
    """Whether a checkpoint stores this number as its step or epoch, at the top level."""
    candidates: list[str] = []
    for name, value in snapshot.values.items():
        # Nested values are of the optimizer, the scheduler or a loop.
        is_nested = "." in name
        # True equals 1, and is no step.
        is_number = type(value) is int
        if is_number and value == number and not is_nested:
            candidates.append(name)

    kind_of = make_value_classifier(candidates)
    return any(kind_of(name) == "progress" for name in candidates)
