"""From the nested object that a checkpoint holds to flat names: tensors on one side, plain values on the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, brief
from syncheck.metadata_block import KEY, parse
from syncheck.names import MODEL_CONTAINERS
from syncheck.readers.pickles.inert import Inert
from syncheck.readers.pickles.optimizer_names import parameter_names
from syncheck.readers.pickles.stand_ins import Storage, TensorPlace

if TYPE_CHECKING:
    from syncheck.snapshots import Metadata

# Containers that a pickle may hold. Shared references can unfold to far more places than the file has bytes.
# A file that shares nothing has a byte of its pickle for each.
MAX_NODES = 1_000_000
NODES_PER_BYTE = 4
MAX_DEPTH = 200
# Characters of all names. A key of 200,000 above a list of 20,000 takes 300 kB of a pickle, and would take 4 GB here.
MAX_LETTERS = 100_000_000
LETTERS_PER_BYTE = 32
_MOST_LABEL = 200  # characters of a key that is no text
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class Flat:
    """What a checkpoint holds, by dotted name."""

    tensors: dict[str, TensorPlace] = field(default_factory=dict)
    """In the order of the containers, which is the order of the parameters."""
    values: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None
    nodes: int = 0
    most: int = MAX_NODES
    letters: int = MAX_LETTERS
    """Characters that names may still have."""

    taken: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often a name was given out: of 100,000 of one name, none looks at all those before it."""

    def free(self, name: str, among: dict[str, Any]) -> str:
        """Keep both of two that end at one name, as in {'model': sd, 'state_dict': sd}: `name`, `name#2`, `name#3`."""
        name = name or "tensor"
        if name not in among:
            return name
        key = ("tensor" if among is self.tensors else "value", name)
        i = self.taken.get(key, 2)
        while (free := f"{name}#{i}") in among:
            i += 1
        self.taken[key] = i + 1
        return free

    def name(self, characters: int, path: str, place: str) -> None:
        """Count names before they are made. Raises MalformedFile for more than there is room for."""
        self.letters -= characters
        if self.letters < 0:
            raise MalformedFile(
                path, place=place[:_MOST_LABEL] or "top level", found="names unfold without end",
                needed="names that take about as much room as the pickle",
                next_step="no library writes this; find out where the file comes from",
            )  # fmt: skip


def flatten(tree: Any, path: str, size: int = 0) -> Flat:
    """Walk a checkpoint's object tree.

    The metadata block is taken out. A key that holds a model's state dict is left out of the names, unless that would
    give one name to two tensors. An optimizer's state dict (`state` and `param_groups`) becomes
    `optimizer.<parameter>.<state>`. size: bytes of the pickle. Raises MalformedFile for trees that do not end.
    """
    flat = Flat(most=MAX_NODES + NODES_PER_BYTE * size, letters=MAX_LETTERS + LETTERS_PER_BYTE * size)
    if isinstance(tree, dict) and isinstance(tree.get(KEY), dict):
        flat.metadata = parse(tree[KEY], path)
        tree = {key: value for key, value in tree.items() if key != KEY}
    optimizers: list[Any] = []
    _walk(tree, flat, optimizers, path)
    models = {name: place.shape for name, place in flat.tensors.items()}
    for i, state in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer.{i}"
        names = parameter_names(state, models, flat.metadata)
        _add_optimizer(state, prefix, names, flat, path)
    return flat


def is_optimizer(value: Any) -> bool:
    """Whether a value is what torch's Optimizer.state_dict returns."""
    return (
        isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


def label(key: Any) -> str:
    """Write the key of a container, as `str` does where that is short: it may be a number of 5,000 digits."""
    return key if isinstance(key, str) else brief(key, _MOST_LABEL)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container, or None for a leaf."""
    if isinstance(node, dict):
        return [(key if type(key) is str else label(key), value) for key, value in node.items()]
    if isinstance(node, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(node)]
    if isinstance(node, (set, frozenset)):
        # Sets have no order of their own; by text they have the same one on every rank.
        return [(str(i), value) for i, value in enumerate(sorted(node, key=label))]
    if isinstance(node, Inert):
        parts: list[tuple[str, Any]] = [(label(key), value) for key, value in node.items.items()]
        for i, given in enumerate(node.given):
            parts += (children(given) or []) if isinstance(given, dict) else [(str(i), given)]
        return parts
    return None


def _walk(tree: Any, flat: Flat, optimizers: list[Any], path: str) -> None:
    """Depth first, in the order of insertion, without recursion: the tree's depth is the file's to choose."""
    stack: list[tuple[str, Any, tuple[int, ...]]] = [("", tree, ())]
    while stack:
        name, node, above = stack.pop()
        flat.nodes += 1
        if flat.nodes > flat.most or len(above) > MAX_DEPTH or id(node) in above:
            limit = "a container holds itself" if id(node) in above else "containers unfold without end"
            raise MalformedFile(path, place=name or "top level", found=limit, needed=f"at most {MAX_DEPTH} levels")
        if isinstance(node, TensorPlace):
            flat.tensors[flat.free(name, flat.tensors)] = node
        elif isinstance(node, Storage):
            flat.tensors[flat.free(name, flat.tensors)] = node.as_tensor()
        elif is_optimizer(node):
            optimizers.append(node)
        elif isinstance(node, _PLAIN):
            flat.values[flat.free(name, flat.values)] = node
        else:
            parts = children(node)
            if parts is None:  # a dtype, or a rebuild function that nothing used
                continue
            short = _without_container(name, node)
            flat.name(len(parts) * len(short), path, name)
            below = (*above, id(node))
            stack += [(f"{short}.{key}" if short else key, value, below) for key, value in reversed(parts)]


def _without_container(name: str, node: Any) -> str:
    """Drop a last key such as `model` in front of a state dict: {'model': {'fc.weight': ...}} gives fc.weight."""
    head, _, last = name.rpartition(".")
    if last in MODEL_CONTAINERS and isinstance(node, dict) and any(isinstance(v, TensorPlace) for v in node.values()):
        return head
    return name


def _add_optimizer(state: Any, prefix: str, names: dict[Any, str], flat: Flat, path: str) -> None:
    for key, entries in state["state"].items():
        parameter = names[key] if key in names else label(key)
        for entry, value in children(entries) or []:
            flat.name(len(parameter), path, parameter)
            full = f"{prefix}.{parameter}.{entry}"
            if isinstance(value, TensorPlace):
                flat.tensors[flat.free(full, flat.tensors)] = value
            elif isinstance(value, _PLAIN):
                flat.values[flat.free(full, flat.values)] = value
            else:
                _walk({full: value}, flat, [], path)
    for i, group in enumerate(state["param_groups"]):
        for entry, value in children(group) or []:
            # The ids and names of the parameters say nothing about the replica's state.
            if entry in ("params", "param_names"):
                continue
            full = f"{prefix}.param_groups.{i}.{entry}"
            if isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value):
                flat.values[full] = _several(value)  # betas
            else:
                _walk({full: value}, flat, [], path)  # lr may be a tensor


def _several(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return brief(value, _MOST_LABEL)
