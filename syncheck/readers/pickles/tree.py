"""Flatten the object tree of a checkpoint into named tensors and named Python values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile, UnsupportedFormat
from syncheck.messages import Refusal
from syncheck.readers import untrusted
from syncheck.readers.metadata_block import KEY, parse_metadata
from syncheck.readers.pickles import keys
from syncheck.readers.pickles.cycles import ContainsItself, Owners, find_owners
from syncheck.readers.pickles.membership import (
    CERTAIN,
    find_membership,
    find_membership_of_part,
    holds_tensors,
    list_submodules,
    name_of_class,
    name_of_object,
)
from syncheck.readers.pickles.optimizer_names import (
    list_ids,
    list_members,
    list_parameters,
    match_parameters,
    stored_names,
)
from syncheck.readers.pickles.rebuild import NumpyDType
from syncheck.readers.pickles.stand_ins import Compound, Inert, Storage, TensorLocation, attributes_of, refused_tensor
from syncheck.snapshots import Membership
from syncheck.tensors.names import MODEL_CONTAINERS
from syncheck.tensors.value_kinds import MODULES, is_aside
from syncheck.text import make_unique_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.snapshots import Metadata

# Limit of named parts: this many, plus some for each byte of the pickle. Without repetition each part takes at least
# one byte, but repeated references to the same containers can unfold without bound.
MAX_NODES = 200_000
NODES_PER_BYTE = 4
# Limit of characters in all names, because a long key is repeated in the names of everything below it.
MAX_LETTERS = 1 << 28
# Python's pickle fails at about 500 levels, unless the program raises its limit.
MAX_DEPTH = 1_000
LOST = "unnamed tensor"
# Tables of shapes in DeepSpeed's files: an empty shape is a parameter, too.
_SHAPES = ("param_shapes.", "frozen_param_shapes.")
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


@dataclass
class Flat:
    """The flattened content of a checkpoint, by dotted name."""

    tensors: dict[str, TensorLocation] = field(default_factory=dict)
    """In the order of the containers, and thus of the parameters."""
    values: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None
    block: Any = None
    """The metadata block, whose parts have no names."""
    model_values: dict[str, Membership] = field(default_factory=dict)
    """Values that belong to the model; see `Snapshot.model_values`."""
    numbered: tuple[str, ...] = ()
    """Parameters of the only optimizer, if the file does not name them."""
    nodes: int = 0
    letters: int = 0
    most: int = MAX_NODES
    whole_names: bool = False
    """Whether names include the keys of model containers, because two tensors would otherwise have the same name."""
    repeated: dict[str, int] = field(default_factory=dict)
    """The last suffix number of each repeated name."""
    owners: Owners = field(default_factory=Owners)
    """Where containers that contain themselves are entered."""

    def count(self, path: str, name: str, parts: int) -> None:
        """Count parts below a name before naming them. Raises MalformedFile above the limit."""
        self.nodes += parts
        self.letters += parts * len(name)
        if self.nodes > self.most or self.letters > MAX_LETTERS:
            # At the absolute limit, the file may really contain this many parts.
            many = self.most == untrusted.MOST_ENTRIES and self.letters <= MAX_LETTERS
            found = f"more than {self.most} parts" if many else "containers unfold without end"
            raise _endless_error(path, name, found, f"at most {self.most} parts")

    def add_value(self, name: str, value: Any, membership: Membership) -> None:
        """Add a plain value, and note whether it belongs to the model."""
        unique_name = self.unique_name(name, self.values)
        self.values[unique_name] = value
        described = membership is Membership.BESIDE and not is_aside(name)
        if membership in CERTAIN or described:
            self.model_values[unique_name] = membership

    def unique_name(self, name: str, taken: Mapping[str, Any]) -> str:
        """Return the name, or `name#2` if it is taken: {'a': {'b': t}, 'a.b': t} has the name 'a.b' twice."""
        name = name or "tensor"
        # Without the last number, a name that is repeated a million times would take as many tries each time.
        unique_name = make_unique_name(name, taken, first=self.repeated.get(name, 1) + 1)
        if unique_name != name:
            self.repeated[name] = int(unique_name.rpartition("#")[2])
        return unique_name


def flatten(tree: Any, path: str, size: int = MAX_NODES, made: Sequence[TensorLocation] = ()) -> Flat:
    """Flatten a checkpoint's object tree.

    The metadata block is removed. The key of a model's state dict is omitted from names, unless there are two models
    or two tensors would get the same name; so names do not depend on the order of keys. An optimizer's state dict
    (`state` and `param_groups`) becomes `optimizer.<parameter>.<state>`, and its other keys `optimizer.<key>`. size:
    bytes of the pickle. made: all tensors that the pickle rebuilt; each gets a name.
    Raises MalformedFile for endless trees.
    """
    flat = Flat(most=min(MAX_NODES + NODES_PER_BYTE * size, untrusted.MOST_ENTRIES))
    try:
        try:
            return _flatten_with_lost(tree, path, flat, made)
        except ContainsItself:
            flat = Flat(most=flat.most, owners=_find_owners(tree, path, flat.most, made))
            return _flatten_with_lost(tree, path, flat, made)
    except keys.UnboundedKey:
        raise _endless_error(path, "a key", "it has parts without end", "a string or a number") from None


def _flatten_with_lost(tree: Any, path: str, flat: Flat, made: Sequence[TensorLocation]) -> Flat:
    _flatten(tree, path, flat)
    if not flat.repeated.keys().isdisjoint(flat.tensors):
        flat = Flat(most=flat.most, whole_names=True, owners=flat.owners)
        _flatten(tree, path, flat)
    _add_lost(made, flat, path)
    return flat


def _find_owners(tree: Any, path: str, most: int, made: Sequence[TensorLocation]) -> Owners:
    """Find the containers that contain themselves. Raises MalformedFile for more than `most` parts."""
    counter = Flat(most=most)

    def list_containers(node: Any) -> list[tuple[int, Any]]:
        parts = children(node) or []
        counter.count(path, "", len(parts))
        return [(position, part) for position, (_, part) in enumerate(parts) if _has_parts(part)]

    roots = [tree, *[location for location in made if _has_parts(location)]]
    return find_owners(roots, list_containers)


def _has_parts(node: Any) -> bool:
    if isinstance(node, Compound):
        return bool(node.inner)
    return isinstance(node, (*_CONTAINERS, Inert, NumpyDType))


def _endless_error(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path, place=place or "top level", found=found, needed=needed,
        next_step="no library writes this; check the origin of the file",
    )  # fmt: skip


def _flat_parameter_error(path: str, name: str) -> UnsupportedFormat:
    """Return the error for a local state dict of FSDP1: its pieces of parameters have no original shape or offset."""
    return UnsupportedFormat(
        path, place=name, found="a flat parameter of FSDP1 (LOCAL_STATE_DICT), without the shapes of its parameters",
        needed="parameters with names and shapes", next_step="save with StateDictType.SHARDED_STATE_DICT",
    )  # fmt: skip


def _flatten(tree: Any, path: str, flat: Flat) -> None:
    if isinstance(tree, dict) and isinstance(tree.get(KEY), dict):
        flat.block = tree[KEY]
        flat.metadata = parse_metadata(flat.block, path)
    optimizers: list[Any] = []
    _walk([("", tree)], flat, path, optimizers)
    models = {name: location.full_shape for name, location in flat.tensors.items()}
    ordered = list_parameters(models, flat.metadata) if optimizers else []
    for i, state in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer.{i}"
        known = stored_names(state, flat.metadata)
        names = known or match_parameters(state, models, ordered)
        if len(optimizers) == 1 and not known and (not names or len(names) < len(ordered)):
            flat.numbered = tuple(names.get(key) or keys.to_text(key) for key in list_ids(state) if type(key) is int)
        parts = _name_optimizer_parts(state, prefix, names, known)
        flat.letters += sum(len(value) for _, value in parts if isinstance(value, str))
        flat.count(path, prefix, len(parts))
        _walk(parts, flat, path)


def _add_lost(made: Sequence[TensorLocation], flat: Flat, path: str) -> None:
    """Name the tensors outside the tree: keys of dictionaries, and tensors without a reference."""
    reached = set(map(id, flat.tensors.values()))
    lost = [location for location in made if id(location) not in reached]
    if not lost:
        return
    compounds = [location for location in (*flat.tensors.values(), *made) if isinstance(location, Compound)]
    waiting = [part for location in compounds for part in location.hidden]
    while waiting:
        node = waiting.pop()
        if id(node) not in reached:
            reached.add(id(node))
            nested = [*node.hidden, node.inner] if isinstance(node, Compound) else None
            waiting += nested or [part for _, part in children(node) or []]
    for location in lost:
        if id(location) not in reached:
            reached.add(id(location))
            flat.count(path, LOST, 1)
            _walk([(LOST, location)], flat, path)


def is_optimizer(value: Any) -> bool:
    """Whether a value has the form of Optimizer.state_dict()."""
    return (
        isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container, or None for a leaf."""
    if isinstance(node, Compound):
        return children(node.inner) if node.inner else None
    if isinstance(node, dict):
        parts = [(keys.to_text(key), value) for key, value in node.items()]
        for state in getattr(node, "attributes", ()):
            # torch stores module versions here, which are not part of the model.
            parts += [(key, value) for key, value in children(attributes_of(state)) or [] if key != "_metadata"]
        return parts
    if isinstance(node, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(node)]
    if isinstance(node, (set, frozenset)):
        return [(str(i), value) for i, value in enumerate(_sort_set(node))]
    if isinstance(node, NumpyDType):
        return list(node.list_parts().items())
    if isinstance(node, Inert):
        parts = [(keys.to_text(key), value) for key, value in node.items.items()]
        for i, given in enumerate(node.given):
            parts += (children(given) or []) if isinstance(given, dict) else [(str(i), given)]
        return parts
    return None


def _sort_set(parts: AbstractSet[Any]) -> list[Any]:
    """Sort a set. Tensors of equal dtype and shape cannot be matched between ranks, and are refused."""
    found = sorted(parts, key=keys.sort_key)
    counts = Counter(keys.sort_key(part) for part in found if isinstance(part, TensorLocation))
    for i, part in enumerate(found):
        if counts[keys.sort_key(part)] > 1:
            location = refused_tensor(Refusal.SET_MEMBER(), part.shape, part.dtype)
            found[i] = Compound.wrap(location, None, part)
    return found


def _walk(trees: Sequence[tuple[str, Any]], flat: Flat, path: str, optimizers: list[Any] | None = None) -> None:
    """Name all leaves depth first in insertion order, without recursion because the file controls the depth.

    trees: (name, tree) pairs.
    optimizers: collects optimizer state dicts instead of entering them. None within an optimizer, which may contain
    similar dictionaries.
    Raises ContainsItself for a container within itself, unless its owner is known.
    """
    stack = [_Node(name, tree, (), Membership.NONE) for name, tree in reversed(trees)]
    while stack:
        node = stack.pop()
        name, content = node.name, node.content
        if id(content) in node.above:
            raise ContainsItself
        if len(node.above) > MAX_DEPTH:
            raise _endless_error(path, name, "containers are nested without end", f"at most {MAX_DEPTH} levels")
        if isinstance(content, Storage):
            flat.tensors[flat.unique_name(name, flat.tensors)] = content.as_tensor()
        elif optimizers is not None and is_optimizer(content):
            optimizers.append(content)
        elif isinstance(content, _PLAIN):
            flat.add_value(name, keys.to_plain(content), node.membership)
        elif (text := name_of_object(content)) is not None:
            flat.add_value(name, text, node.membership)
        else:
            if isinstance(content, TensorLocation):
                _add_tensor(content, name, flat, path)
            stack += reversed(_list_named_parts(node, flat, path))


class _Node(NamedTuple):
    """A part of the tree that is not named yet. above: the ids of the containers around it."""

    name: str
    content: Any
    above: tuple[int, ...]
    membership: Membership


def _add_tensor(tensor: TensorLocation, name: str, flat: Flat, path: str) -> None:
    if name.endswith("_flat_param") and (tensor.sharding or tensor.refused):
        raise _flat_parameter_error(path, name)
    flat.tensors[flat.unique_name(name, flat.tensors)] = tensor


def _list_named_parts(node: _Node, flat: Flat, path: str) -> list[_Node]:
    """Return the parts of a container or tensor to enter, with their full names."""
    name, content = node.name, node.content
    if isinstance(content, _CONTAINERS) and flat.nodes + len(content) > flat.most:
        flat.count(path, name, len(content))  # and end, before they have names
    parts = children(content)
    if parts is None:  # a tensor, or a rebuild function that nothing used
        return []
    if content == () and name.startswith(_SHAPES):  # of a scalar
        flat.values[flat.unique_name(name, flat.values)] = "()"
    flat.count(path, name, len(parts))
    if isinstance(content, TensorLocation):
        start, omitted = f"{name or 'tensor'}.", None
        # The parts of a tensor determine its values, wherever it is; libraries also set attributes for their own use.
        in_parts = content.refused is not None and content.refused.code is Refusal.IN_PARTS
        own = Membership.MODEL if in_parts else Membership.MODULE
    else:
        start, omitted = f"{name}." if name else "", _find_model_key(parts, flat)
        own = find_membership(content, dict(parts), node.membership)
    if isinstance(content, Inert) and own in CERTAIN:
        # The class of an object in the model determines what its attributes mean.
        flat.add_value(f"{start}(class)", name_of_class(content), own)
        submodules = list_submodules(content, dict(parts))
        if submodules is not None:
            flat.add_value(start + MODULES, ", ".join(submodules), own)
    above = (*node.above, id(content))
    named = []
    for position, (key, part) in enumerate(parts):
        if flat.block is not None and part is flat.block and not name:
            continue
        membership = find_membership_of_part(key, part, own)
        if not flat.owners.allows(content, position, part):
            if not isinstance(part, TensorLocation):  # a reference back to an object that has a name
                continue
            # Its attributes have names, and the tensor itself gets a further one.
            part = part.without_attributes()
        named.append(_Node(name if key == omitted else start + key, part, above, membership))
    return named


def _find_model_key(parts: Sequence[tuple[str, Any]], flat: Flat) -> str | None:
    """Return the key of the only state dict among parts, which names do not include."""
    models = [key for key, value in parts if key in MODEL_CONTAINERS and holds_tensors(value)]
    return models[0] if len(models) == 1 and not flat.whole_names else None


def _name_optimizer_parts(
    state: Any, prefix: str, names: Mapping[Any, str], known: Mapping[Any, str]
) -> list[tuple[str, Any]]:
    """Name the parts of an optimizer's state dict. names: of parameters by id. known: names stored in the file."""
    parts = [(f"{prefix}.{names.get(key) or keys.to_text(key)}", entries) for key, entries in state["state"].items()]
    for i, group in enumerate(state["param_groups"]):
        start = f"{prefix}.param_groups.{i}"
        inside = children(group)
        if inside is None:
            parts.append((start, group))
        for entry, value in inside or []:
            listed = isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value)
            if entry == "params" and listed:
                key, members = list_members(value, known, ordered=not names)
                parts.append((f"{start}.{key}", ", ".join(members)))
            elif entry != "param_names" or not listed:  # lr may be a tensor, betas are a tuple
                parts.append((f"{start}.{entry}", keys.to_text(value) if listed else value))
    # Optimizers that wrap another one store more, like the slow weights of Lookahead.
    rest = (item for item in state.items() if item[0] not in ("state", "param_groups"))
    return parts + [(f"{prefix}.{keys.to_text(key)}", value) for key, value in rest]
