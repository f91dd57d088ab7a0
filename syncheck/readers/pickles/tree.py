"""From the nested object that a checkpoint holds to flat names: tensors on one side, plain values on the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.messages import Refusal
from syncheck.metadata_block import KEY, parse
from syncheck.names import MODEL_CONTAINERS
from syncheck.readers import bounds
from syncheck.readers.pickles import keys
from syncheck.readers.pickles.inert import Inert
from syncheck.readers.pickles.optimizer_names import ids_of, in_order, known_names, members_of, parameter_names
from syncheck.readers.pickles.stand_ins import Compound, Storage, TensorPlace, attributes_of, refused_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.snapshots import Metadata

# Parts of containers that are named: so many, and more of a longer pickle. One that names each part once has at least a
# byte for each; one that refers to the same containers again and again can unfold to any number.
MAX_NODES = 200_000
NODES_PER_BYTE = 4
# Characters of all names: a long key stands in the name of everything below it.
MAX_LETTERS = 1 << 28
MAX_DEPTH = 200
LOST = "unnamed tensor"
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


@dataclass
class Flat:
    """What a checkpoint holds, by dotted name."""

    tensors: dict[str, TensorPlace] = field(default_factory=dict)
    """In the order of the containers, which is the order of the parameters."""
    values: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None
    numbered: tuple[str, ...] = ()
    """Parameters of the only optimizer, if at most the shapes say which these are."""
    nodes: int = 0
    letters: int = 0
    most: int = MAX_NODES
    whole_names: bool = False
    """Whether containers of models stay in names: without them, two tensors would get one name."""
    repeated: dict[str, int] = field(default_factory=dict)
    """Of a name that several have, the last number that was put behind it."""

    def count(self, path: str, name: str, parts: int) -> None:
        """Count parts below a name before they are named. Raises MalformedFile where there are too many."""
        self.nodes += parts
        self.letters += parts * len(name)
        if self.nodes > self.most or self.letters > MAX_LETTERS:
            # A file that is long enough for the most that any may have may really hold so many.
            many = self.most == bounds.MOST_ENTRIES and self.letters <= MAX_LETTERS
            found = f"more than {self.most} parts" if many else "containers unfold without end"
            raise _endless(path, name, found, f"at most {self.most} parts")

    def free(self, name: str, taken: Mapping[str, Any]) -> str:
        """Keep both of two that end at one name, as in {'a': {'b': t}, 'a.b': t}: the second is `name#2`."""
        name = name or "tensor"
        free, i = name, self.repeated.get(name, 1)
        while free in taken:
            i += 1
            free = f"{name}#{i}"
        if i > 1:
            self.repeated[name] = i
        return free


def flatten(tree: Any, path: str, size: int = MAX_NODES, made: Sequence[TensorPlace] = ()) -> Flat:
    """Walk a checkpoint's object tree.

    The metadata block is taken out. A key that holds a model's state dict is left out of the names, unless there are
    two such keys, or two tensors would get one name: names do not depend on the order of keys. An optimizer's
    state dict (`state` and `param_groups`) becomes `optimizer.<parameter>.<state>`, and what else it holds
    `optimizer.<key>`. size: bytes of the pickle. made: all tensors that the pickle rebuilt; each ends under a name.
    Raises MalformedFile for trees that do not end.
    """
    flat = Flat(most=min(MAX_NODES + NODES_PER_BYTE * size, bounds.MOST_ENTRIES))
    try:
        _flatten(tree, path, flat)
        if not flat.repeated.keys().isdisjoint(flat.tensors):
            flat = Flat(most=flat.most, whole_names=True)
            _flatten(tree, path, flat)
        _add_lost(made, flat, path)
    except keys.Unending:
        raise _endless(path, "a key", "it has parts without end", "a text or a number") from None
    return flat


def _endless(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path, place=place or "top level", found=found, needed=needed,
        next_step="no library writes this; find out where the file comes from",
    )  # fmt: skip


def _flatten(tree: Any, path: str, flat: Flat) -> None:
    if isinstance(tree, dict) and isinstance(tree.get(KEY), dict):
        flat.metadata = parse(tree[KEY], path)
        tree = {key: value for key, value in tree.items() if key != KEY}
    optimizers: list[Any] = []
    _walk([("", tree)], flat, path, optimizers)
    models = {name: place.shape for name, place in flat.tensors.items()}
    ordered = in_order(models, flat.metadata) if optimizers else []
    for i, state in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer.{i}"
        known = known_names(state, flat.metadata)
        names = known or parameter_names(state, models, ordered)
        if len(optimizers) == 1 and not known and (not names or len(names) < len(ordered)):
            flat.numbered = tuple(names.get(key) or keys.text(key) for key in ids_of(state) if type(key) is int)
        parts = _optimizer_parts(state, prefix, names, known)
        flat.letters += sum(len(value) for _, value in parts if isinstance(value, str))
        flat.count(path, prefix, len(parts))
        _walk(parts, flat, path)


def _add_lost(made: Sequence[TensorPlace], flat: Flat, path: str) -> None:
    """Name the tensors that the walk did not reach: keys of dictionaries, and what nothing in the tree refers to."""
    reached = set(map(id, flat.tensors.values()))
    lost = [place for place in made if id(place) not in reached]
    if not lost:
        return
    compounds = [place for place in (*flat.tensors.values(), *made) if isinstance(place, Compound)]
    waiting = [part for place in compounds for part in place.hidden]
    while waiting:
        node = waiting.pop()
        if id(node) not in reached:
            reached.add(id(node))
            below = [*node.hidden, node.inner] if isinstance(node, Compound) else None
            waiting += below or [part for _, part in children(node) or []]
    for place in lost:
        if id(place) not in reached:
            reached.add(id(place))
            flat.count(path, LOST, 1)
            _walk([(LOST, place)], flat, path)


def is_optimizer(value: Any) -> bool:
    """Whether a value is what torch's Optimizer.state_dict returns."""
    return (
        isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container, or None for a leaf."""
    if isinstance(node, dict):
        parts = [(keys.text(key), value) for key, value in node.items()]
        for state in getattr(node, "attributes", ()):
            # torch writes the versions of modules there, which are no part of the model.
            parts += [(key, value) for key, value in children(attributes_of(state)) or [] if key != "_metadata"]
        return parts
    if isinstance(node, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(node)]
    if isinstance(node, (set, frozenset)):
        return [(str(i), value) for i, value in enumerate(_in_order(node))]
    if isinstance(node, Inert):
        parts = [(keys.text(key), value) for key, value in node.items.items()]
        for i, given in enumerate(node.given):
            parts += (children(given) or []) if isinstance(given, dict) else [(str(i), given)]
        return parts
    return None


def _in_order(parts: AbstractSet[Any]) -> list[Any]:
    """Sort a set. Of tensors of one dtype and shape nothing says which is which on another rank."""
    found = sorted(parts, key=keys.ordering)
    several = Counter(keys.ordering(part) for part in found if isinstance(part, TensorPlace))
    for i, part in enumerate(found):
        if several[keys.ordering(part)] > 1:
            place = refused_place(Refusal.SET_MEMBER(), part.shape, part.dtype)
            found[i] = Compound.around(place, None, part)
    return found


def _walk(trees: Sequence[tuple[str, Any]], flat: Flat, path: str, optimizers: list[Any] | None = None) -> None:
    """Depth first, in the order of insertion, without recursion: the tree's depth is the file's to choose.

    optimizers: to be filled with the state dicts of optimizers, which are left to the caller then; without it, as
    within an optimizer, one is a container like any other. trees: each with its name.
    """
    stack: list[tuple[str, Any, tuple[int, ...]]] = [(name, tree, ()) for name, tree in reversed(trees)]
    while stack:
        name, node, above = stack.pop()
        if len(above) > MAX_DEPTH or id(node) in above:
            limit = "a container holds itself" if id(node) in above else "containers lie in each other without end"
            raise _endless(path, name, limit, f"at most {MAX_DEPTH} levels")
        if isinstance(node, TensorPlace):
            flat.tensors[flat.free(name, flat.tensors)] = node
            if isinstance(node, Compound) and node.inner:
                inside = children(node.inner) or []
                flat.count(path, name, len(inside))
                stack += [(f"{name or 'tensor'}.{key}", value, (*above, id(node))) for key, value in reversed(inside)]
        elif isinstance(node, Inert) and node.name.endswith(".ShardedTensor"):
            place = refused_place(Refusal.SHARDED_TENSOR())
            flat.tensors[flat.free(name, flat.tensors)] = Compound.around(place, None, node)
        elif isinstance(node, Storage):
            flat.tensors[flat.free(name, flat.tensors)] = node.as_tensor()
        elif optimizers is not None and is_optimizer(node):
            optimizers.append(node)
        elif isinstance(node, _PLAIN):
            flat.values[flat.free(name, flat.values)] = keys.plain(node)
        else:
            if isinstance(node, _CONTAINERS) and flat.nodes + len(node) > flat.most:
                flat.count(path, name, len(node))  # and end, before they have names
            parts = children(node)
            if parts is None:  # a dtype, or a rebuild function that nothing used
                continue
            flat.count(path, name, len(parts))
            below = (*above, id(node))
            models = [key for key, value in parts if key in MODEL_CONTAINERS and _is_model(value)]
            only = models[0] if len(models) == 1 and not flat.whole_names else None
            start = f"{name}." if name else ""
            stack += [(name if key == only else start + key, value, below) for key, value in reversed(parts)]


def _is_model(value: Any) -> bool:
    """Whether a value is a state dict, for which a key such as `model` is no part of the names."""
    return isinstance(value, dict) and any(isinstance(part, TensorPlace) for part in value.values())


def _optimizer_parts(
    state: Any, prefix: str, names: Mapping[Any, str], known: Mapping[Any, str]
) -> list[tuple[str, Any]]:
    """Name the parts of an optimizer's state dict. names: of parameters by id; known: those that the file gives."""
    parts = [(f"{prefix}.{names.get(key) or keys.text(key)}", entries) for key, entries in state["state"].items()]
    for i, group in enumerate(state["param_groups"]):
        start = f"{prefix}.param_groups.{i}"
        inside = children(group)
        if inside is None:
            parts.append((start, group))
        for entry, value in inside or []:
            listed = isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value)
            if entry == "params" and listed:
                key, members = members_of(value, known, ordered=not names)
                parts.append((f"{start}.{key}", ", ".join(members)))
            elif entry != "param_names" or not listed:  # lr may be a tensor, betas are a tuple
                parts.append((f"{start}.{entry}", keys.text(value) if listed else value))
    # Those that wrap another keep more, as Lookahead its slow weights.
    rest = (item for item in state.items() if item[0] not in ("state", "param_groups"))
    return parts + [(f"{prefix}.{keys.text(key)}", value) for key, value in rest]
