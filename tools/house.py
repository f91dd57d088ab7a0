"""Measure how the modules of a package are arranged: rooms, layers, imports and circles.

    python tools/house.py syncheck train
    git worktree add /tmp/before v0.2.0 && python tools/house.py /tmp/before/syncheck    # an earlier version

A room is a module or a package directly below the measured package. An import counts wherever it stands: at the top of
a module, in a function, and below `if TYPE_CHECKING`. A circle is a set of rooms, or of modules, that import each other
directly or through others. The number of layers is the length of the longest chain of imports between rooms, and a
circle of rooms counts as one layer.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    # An edge leads from a module or room to one that it imports.
    Graph = nx.DiGraph[str]


class House(NamedTuple):
    """The measurements of one package."""

    modules: list[str]
    """The rooms that are modules."""
    packages: list[str]
    """The rooms that are packages."""
    layers: list[list[str]]
    """The rooms of each layer, the lowest layer first."""
    edges: list[tuple[str, str]]
    """Importing and imported room of each import between two rooms."""
    circles_of_rooms: list[list[str]]
    """Sets of rooms that import each other."""
    circles_of_modules: list[list[str]]
    """Sets of modules that import each other."""


def read_imports(package: Path) -> Graph:
    """Return the graph of the modules of a package by their dotted names. An edge leads to an imported module."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        # A package has the name of its folder.
        if parts[-1] == "__init__":
            parts = parts[:-1]
        paths[".".join(parts)] = path
    graph: Graph = nx.DiGraph()
    graph.add_nodes_from(paths)
    for module, path in paths.items():
        for name in find_imported_names(path):
            imported_module = _find_module(name, paths)
            if imported_module not in ("", module):
                graph.add_edge(module, imported_module)
    return graph


def find_imported_names(path: Path) -> Iterator[str]:
    """Yield the absolute names of all modules and objects that a file imports.

    Raises ValueError for a relative import.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}:{node.lineno}: a relative import; write the absolute name")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _find_module(name: str, modules: Collection[str]) -> str:
    """Return the module that defines an imported name; empty for another package."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def name_room(module: str) -> str:
    """Return the room of a module: tensors for syncheck.tensors.kinds, `__init__` for syncheck itself."""
    _, _, path = module.partition(".")
    return path.partition(".")[0] or "__init__"


def join_rooms(imports: Graph) -> Graph:
    """Return the graph of the rooms, each with the rooms that it imports."""
    rooms: Graph = nx.DiGraph()
    rooms.add_nodes_from(name_room(module) for module in imports)
    for module, imported_module in imports.edges:
        room, imported_room = name_room(module), name_room(imported_module)
        if room != imported_room:
            rooms.add_edge(room, imported_room)
    return rooms


def find_circles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach each other, sorted."""
    # A component of one node is no circle.
    return sorted(sorted(nodes) for nodes in nx.strongly_connected_components(graph) if len(nodes) > 1)


def sort_into_layers(graph: Graph) -> list[list[str]]:
    """Return the nodes of each layer, the lowest first. A node lies directly above the highest node that it imports."""
    # The condensation has one node for all nodes of a circle.
    condensation = nx.condensation(graph)
    layers = []
    # Generations begin with the nodes without a predecessor: in the reversed graph, the nodes that import nothing.
    for generation in nx.topological_generations(condensation.reverse()):
        layer: list[str] = []
        for node in generation:
            layer.extend(condensation.nodes[node]["members"])
        layers.append(sorted(layer))
    return layers


def measure(package: Path) -> House:
    """Measure a package, given by its folder."""
    imports = read_imports(package)
    rooms = join_rooms(imports)
    packages = [room for room in sorted(rooms) if (package / room).is_dir()]
    modules = [room for room in sorted(rooms) if room not in packages]
    return House(
        modules, packages, sort_into_layers(rooms), sorted(rooms.edges), find_circles(rooms), find_circles(imports)
    )


def describe(name: str, house: House) -> list[str]:
    """Return the lines of the measurements of a package."""
    lines = [
        f"{name}: {len(house.packages)} packages and {len(house.modules)} modules on the top level",
        f"  packages: {' '.join(house.packages)}",
        f"  modules: {' '.join(house.modules)}",
        f"  {len(house.edges)} imports between rooms, in {len(house.layers)} layers, the lowest first:",
    ]
    for number, rooms in enumerate(house.layers, start=1):
        lines.append(f"    {number:2} {' '.join(rooms)}")
    lines.append(f"  {len(house.circles_of_rooms)} circles of rooms, {len(house.circles_of_modules)} of modules")
    for circle in house.circles_of_rooms + house.circles_of_modules:
        lines.append(f"    {' '.join(circle)}")
    return lines


def main() -> int:
    """Print the measurements of each package."""
    parser = argparse.ArgumentParser(
        description="Measure how the modules of a package are arranged.", allow_abbrev=False
    )
    parser.add_argument("packages", nargs="+", type=Path, metavar="PACKAGE", help="folder of a package, like syncheck")
    for package in parser.parse_args().packages:
        house = measure(package)
        print(*describe(package.name, house), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
