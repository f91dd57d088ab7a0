"""Find the containers that contain themselves, and choose the one place where each of them is entered.

Objects that refer to their parent are common: nodes of OmegaConf, modules, callbacks with a trainer. Without a single
place, a graph of such objects would unfold into all paths through it.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from syncheck.frozen import mutable_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The `id` of the container that owns a part, and the position of the part in it. None for the top of a tree.
Entry = tuple[int, int] | None


class ContainsItself(Exception):
    """A container was reached from within itself."""


@mutable_record
class Owners:
    """The only entry of each container on a cycle, by its `id`, which is unique while the tree exists."""

    entries: dict[int, Entry] = field(default_factory=dict)

    def allows(self, parent: Any, position: int, part: Any) -> bool:
        """Whether this part of a container is entered here. Parts that are not on a cycle are entered everywhere."""
        if id(part) not in self.entries:
            return True
        return self.entries[id(part)] == (id(parent), position)


def find_owners(roots: Sequence[Any], list_containers: Callable[[Any], list[tuple[int, Any]]]) -> Owners:
    """Choose the owner of each container on a cycle: the container with the shortest path from the first root.

    So names are short, and equal in all files that one program writes.

    roots: never entered again. Later roots count only for what earlier roots do not reach.
    list_containers: returns the positions of the containers within a container.
    """
    graph = _Graph(list_containers)
    for root in roots:
        graph.add(root)

    # The parts of a cycle lead to it, and are reached from it.
    looped = _strip(graph.edges) & _strip(graph.backwards)
    return Owners({node: graph.entries[node] for node in looped})


class _Graph:
    """The containers of a tree by `id`: their entries, and the containers in and around each of them."""

    def __init__(self, list_containers: Callable[[Any], list[tuple[int, Any]]]) -> None:
        self.list_containers = list_containers
        self.entries: dict[int, Entry] = {}
        self.edges: dict[int, list[int]] = {}
        self.backwards: dict[int, list[int]] = {}

    def add(self, root: Any) -> None:
        """Add a root and all containers below it, breadth first, so that entries have the shortest paths."""
        if id(root) in self.entries:
            return

        self._enter(root, None)
        waiting = deque([root])
        while waiting:
            node = waiting.popleft()
            for position, part in self.list_containers(node):
                if id(part) not in self.entries:
                    self._enter(part, (id(node), position))
                    waiting.append(part)
                # Also the edges to known containers, which close the cycles.
                self.edges[id(node)].append(id(part))
                self.backwards[id(part)].append(id(node))

    def _enter(self, node: Any, entry: Entry) -> None:
        self.entries[id(node)] = entry
        self.edges[id(node)] = []
        self.backwards[id(node)] = []


def _strip(edges: dict[int, list[int]]) -> set[int]:
    """Return the nodes that lead to a cycle, by removing nodes without targets until none is left."""
    sorter = TopologicalSorter(edges)
    # A sorter with a cycle still returns all nodes that do not lead to it.
    with suppress(CycleError):
        sorter.prepare()

    remaining = set(edges)
    ready = sorter.get_ready()
    while ready:
        remaining.difference_update(ready)
        sorter.done(*ready)
        ready = sorter.get_ready()
    return remaining
