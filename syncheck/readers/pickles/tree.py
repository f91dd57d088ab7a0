"""Flatten the object tree of a checkpoint into named tensors and named Python values."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile, UnsupportedFormat
from syncheck.frozen import mutable_record
from syncheck.messages import Refusal
from syncheck.readers import untrusted
from syncheck.readers.metadata_block import KEY, parse_metadata
from syncheck.readers.pickles import keys
from syncheck.readers.pickles.cycles import ContainsItself, Owners, find_owners
from syncheck.readers.pickles.membership import (
    BUFFERS,
    CERTAIN,
    OF_MODULES,
    find_membership,
    find_membership_of_part,
    find_omitted_buffers,
    holds_tensors,
    is_pickled_module,
    list_submodules,
    name_of_class,
    name_of_object,
)
from syncheck.readers.pickles.optimizer_names import (
    find_stored_names,
    list_ids,
    list_members,
    list_parameters,
    match_parameters,
)
from syncheck.readers.pickles.parts import CONTAINERS, children, has_parts
from syncheck.readers.pickles.stand_ins import Compound, Inert, Storage, TensorLocation
from syncheck.snapshots import Membership
from syncheck.tensors.names import MODEL_CONTAINERS
from syncheck.tensors.value_kinds import MODULES, is_aside
from syncheck.text import make_unique_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


@mutable_record
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
    matched: tuple[str, ...] = ()
    """The same, if the order of the model's parameters names all of them."""
    nodes: int = 0
    letters: int = 0
    most: int = MAX_NODES
    whole_names: bool = False
    """Whether names include the keys of model containers, because two tensors would otherwise have the same name."""
    repeated: dict[str, int] = field(default_factory=dict)
    """The last suffix number of each repeated name."""
    omitted: list[Any] = field(default_factory=list)
    """Buffers of pickled modules that are in no state dict."""
    owners: Owners = field(default_factory=Owners)
    """Where containers that contain themselves are entered."""

    def count(self, path: str, name: str, parts: int) -> None:
        """Count parts below a name before naming them. Raises MalformedFile above the limit."""
        self.nodes += parts
        self.letters += parts * len(name)
        has_long_names = self.letters > MAX_LETTERS
        if self.nodes <= self.most and not has_long_names:
            return

        problem = "containers unfold without end"
        # At the absolute limit, the file may really contain this many parts.
        if self.most == untrusted.MOST_ENTRIES and not has_long_names:
            problem = f"more than {self.most} parts"
        raise _endless_error(path, name, problem, f"at most {self.most} parts")

    def add_tensor(self, name: str, tensor: TensorLocation) -> None:
        """Add a tensor under a name of its own."""
        self.tensors[self.unique_name(name, self.tensors)] = tensor

    def add_value(self, name: str, value: Any, membership: Membership) -> None:
        """Add a plain value, and note whether it belongs to the model."""
        unique_name = self.unique_name(name, self.values)
        self.values[unique_name] = value
        describes_tensors = membership is Membership.BESIDE and not is_aside(name)
        if membership in CERTAIN or describes_tensors:
            self.model_values[unique_name] = membership

    def unique_name(self, name: str, used_names: Mapping[str, Any]) -> str:
        """Return the name, or `name#2` if it is used: {'a': {'b': t}, 'a.b': t} has the name 'a.b' twice."""
        name = name or "tensor"
        # Without the last number, a name that is repeated a million times would take as many tries each time.
        unique_name = make_unique_name(name, used_names, first=self.repeated.get(name, 1) + 1)
        if unique_name != name:
            self.repeated[name] = int(unique_name.rpartition("#")[2])
        return unique_name


def flatten(tree: Any, path: str, size: int = MAX_NODES, rebuilt: Sequence[TensorLocation] = ()) -> Flat:
    """Flatten a checkpoint's object tree.

    The metadata block is removed. The key of a model's state dict is omitted from names, unless there are two models
    or two tensors would get the same name; so names do not depend on the order of keys. An optimizer's state dict
    (`state` and `param_groups`) becomes `optimizer.<parameter>.<state>`, and its other keys `optimizer.<key>`.
    size: bytes of the pickle.
    rebuilt: all tensors that the pickle rebuilt; each gets a name.
    Raises MalformedFile for endless trees.
    """
    flat = Flat(most=min(MAX_NODES + NODES_PER_BYTE * size, untrusted.MOST_ENTRIES))
    try:
        try:
            return _flatten_all(tree, path, flat, rebuilt)
        except ContainsItself:
            flat = Flat(most=flat.most, owners=_find_owners(tree, path, flat.most, rebuilt))
            return _flatten_all(tree, path, flat, rebuilt)
    except keys.UnboundedKey:
        raise _endless_error(path, "a key", "it has parts without end", "a string or a number") from None


def _flatten_all(tree: Any, path: str, flat: Flat, rebuilt: Sequence[TensorLocation]) -> Flat:
    """Flatten the tree, and the rebuilt tensors outside of it."""
    _flatten(tree, path, flat)
    # Two tensors of one name: start again, with the keys of model containers in all names.
    if not flat.repeated.keys().isdisjoint(flat.tensors):
        flat = Flat(most=flat.most, whole_names=True, owners=flat.owners)
        _flatten(tree, path, flat)
    _add_lost(rebuilt, flat, path)
    return flat


def _find_owners(tree: Any, path: str, most: int, rebuilt: Sequence[TensorLocation]) -> Owners:
    """Find the containers that contain themselves. Raises MalformedFile for more than `most` parts."""
    counter = Flat(most=most)

    def list_containers(node: Any) -> list[tuple[int, Any]]:
        parts = children(node) or []
        counter.count(path, "", len(parts))
        return [(position, part) for position, (_, part) in enumerate(parts) if has_parts(part)]

    roots = [tree]
    roots += [location for location in rebuilt if has_parts(location)]
    return find_owners(roots, list_containers)


def _endless_error(path: str, name: str, problem: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=name or "top level",
        found=problem,
        needed=needed,
        next_step="no library writes this; check the origin of the file",
    )


def _flat_parameter_error(path: str, name: str) -> UnsupportedFormat:
    """Return the error for a local state dict of FSDP1: its slices of parameters have no original shape or offset."""
    return UnsupportedFormat(
        path,
        place=name,
        found="a flat parameter of FSDP1 (LOCAL_STATE_DICT), without the shapes of its parameters",
        needed="parameters with names and shapes",
        next_step="save with StateDictType.SHARDED_STATE_DICT",
    )


def _flatten(tree: Any, path: str, flat: Flat) -> None:
    if isinstance(tree, dict) and isinstance(tree.get(KEY), dict):
        flat.block = tree[KEY]
        flat.metadata = parse_metadata(flat.block, path)
    optimizers: list[Any] = []
    _walk([("", tree)], flat, path, optimizers)
    if not optimizers:
        return

    models = {name: location.full_shape for name, location in flat.tensors.items()}
    ordered = list_parameters(models, flat.metadata)
    is_only = len(optimizers) == 1
    for number, state in enumerate(optimizers):
        prefix = "optimizer" if is_only else f"optimizer.{number}"
        stored_names = find_stored_names(state, flat.metadata)
        names = stored_names or match_parameters(state, models, ordered)
        # Also if neither the model nor the optimizer has a parameter with a name.
        if is_only and not stored_names:
            listed = "numbered" if len(names) < max(len(ordered), 1) else "matched"
            setattr(flat, listed, _name_ids(state, names))
        parts = _name_optimizer_parts(state, prefix, names, stored_names)
        # A list of members is one value, but as long as the names of all its members.
        flat.letters += sum(len(value) for _, value in parts if isinstance(value, str))
        flat.count(path, prefix, len(parts))
        # Optimizers within an optimizer are not optimizers of the checkpoint.
        _walk(parts, flat, path)


def _name_ids(state: Any, names: Mapping[Any, str]) -> tuple[str, ...]:
    """Return the names of an optimizer's integer ids, or the ids without a name as text."""
    integer_ids = [key for key in list_ids(state) if type(key) is int]
    return tuple(names.get(key) or keys.to_text(key) for key in integer_ids)


def _add_lost(rebuilt: Sequence[TensorLocation], flat: Flat, path: str) -> None:
    """Name the tensors outside the tree: keys of dictionaries, and tensors without a reference."""
    reached = {id(location) for location in (*flat.tensors.values(), *flat.omitted)}
    lost = [location for location in rebuilt if id(location) not in reached]
    if not lost:
        return

    _reach_hidden([*flat.tensors.values(), *rebuilt], reached)
    for location in lost:
        if id(location) not in reached:
            reached.add(id(location))
            flat.count(path, LOST, 1)
            _walk([(LOST, location)], flat, path)


def _reach_hidden(tensors: Sequence[TensorLocation], reached: set[int]) -> None:
    """Add the ids of all objects that the tensors hide, and of the parts of these objects."""
    waiting: list[Any] = []
    for compound in [tensor for tensor in tensors if isinstance(tensor, Compound)]:
        waiting += compound.hidden

    while waiting:
        node = waiting.pop()
        if id(node) in reached:
            continue
        reached.add(id(node))
        if isinstance(node, Compound):
            waiting += [*node.hidden, node.inner]
        else:
            waiting += [part for _, part in children(node) or []]


def is_optimizer(value: Any) -> bool:
    """Whether a value has the form of Optimizer.state_dict()."""
    return (
        isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


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
        if id(node.content) in node.above:
            raise ContainsItself
        if len(node.above) > MAX_DEPTH:
            problem = "containers are nested without end"
            raise _endless_error(path, node.name, problem, f"at most {MAX_DEPTH} levels")
        if optimizers is not None and is_optimizer(node.content):
            optimizers.append(node.content)
        elif not _add_leaf(node, flat):
            if isinstance(node.content, TensorLocation):
                _add_tensor(node.content, node.name, flat, path)
            stack += reversed(_list_named_parts(node, flat, path))


def _add_leaf(node: _Node, flat: Flat) -> bool:
    """Add a storage or a plain value, and return True. Returns False for other content, which may have parts."""
    if isinstance(node.content, Storage):
        flat.add_tensor(node.name, node.content.as_tensor())
        return True

    is_plain = isinstance(node.content, _PLAIN)
    value = keys.to_plain(node.content) if is_plain else name_of_object(node.content)
    if value is None and not is_plain:
        return False

    flat.add_value(node.name, value, node.membership)
    return True


class _Node(NamedTuple):
    """A part of the tree that is not named yet."""

    name: str
    content: Any
    above: tuple[int, ...]
    """The ids of the containers around it."""
    membership: Membership
    omitted_keys: frozenset[str] = frozenset()
    """The keys of parts without a name."""


def _add_tensor(tensor: TensorLocation, name: str, flat: Flat, path: str) -> None:
    if name.endswith("_flat_param") and (tensor.sharding or tensor.refused):
        raise _flat_parameter_error(path, name)
    flat.add_tensor(name, tensor)


def _list_named_parts(node: _Node, flat: Flat, path: str) -> list[_Node]:
    """Return the parts of a container or tensor to enter, with their full names."""
    # A shortcut for most tensors, which have no further content.
    if type(node.content) is TensorLocation:
        return []

    parts = _list_counted_parts(node, flat, path)
    if isinstance(node.content, TensorLocation):
        prefix = f"{node.name or 'tensor'}."
        unnamed_keys = frozenset[str]()
        membership = _find_membership_in_tensor(node.content)
    else:
        prefix = _make_prefix(node.name)
        unnamed_keys = _find_unnamed_keys(node, parts, flat)
        membership = find_membership(node.content, dict(parts), node.membership)
    if isinstance(node.content, Inert) and membership in CERTAIN:
        _add_class(node.content, dict(parts), prefix, membership, flat)

    above = (*node.above, id(node.content))
    named_parts = []
    for position, (key, part) in enumerate(parts):
        entered_part = _enter(node, position, part, flat)
        if entered_part is None:
            continue
        if key in node.omitted_keys:
            flat.omitted.append(part)
            continue
        name = node.name if key in unnamed_keys else prefix + key
        part_membership = find_membership_of_part(key, part, membership)
        omitted_keys = find_omitted_buffers(node.content, parts) if key == BUFFERS else frozenset[str]()
        named_parts.append(_Node(name, entered_part.content, above, part_membership, omitted_keys))
    return named_parts


def _list_counted_parts(node: _Node, flat: Flat, path: str) -> list[tuple[str, Any]]:
    """Return the parts of a container or tensor by key, after counting them."""
    if isinstance(node.content, CONTAINERS) and flat.nodes + len(node.content) > flat.most:
        # Raises the error before the keys are converted to text, which takes time.
        flat.count(path, node.name, len(node.content))
    parts = children(node.content)
    # A tensor without further content, or a rebuild function that nothing used.
    if parts is None:
        return []

    # An empty tuple is the shape of a scalar.
    if node.content == () and node.name.startswith(_SHAPES):
        flat.values[flat.unique_name(node.name, flat.values)] = "()"
    flat.count(path, node.name, len(parts))
    return parts


def _find_membership_in_tensor(tensor: TensorLocation) -> Membership:
    """Return the membership of the values of a tensor.

    The parts of a tensor determine its values, wherever it is; libraries also set attributes for their own use.
    """
    if tensor.refused is not None and tensor.refused.code is Refusal.IN_PARTS:
        return Membership.MODEL
    return Membership.MODULE


def _make_prefix(name: str) -> str:
    """Return the start of the names of a container's parts."""
    return f"{name}." if name else ""


def _add_class(content: Inert, parts: Mapping[str, Any], prefix: str, membership: Membership, flat: Flat) -> None:
    """Add the class of an object in the model, which determines what its attributes mean, and its submodules."""
    flat.add_value(f"{prefix}(class)", name_of_class(content), membership)
    submodules = list_submodules(content, parts)
    if submodules is not None:
        flat.add_value(prefix + MODULES, ", ".join(submodules), membership)


class _Entered(NamedTuple):
    """The content of a part to enter, which may be None."""

    content: Any


def _enter(node: _Node, position: int, part: Any, flat: Flat) -> _Entered | None:
    """Return what to enter of a part of a container; None for the metadata block and for references back."""
    is_block = flat.block is not None and part is flat.block
    if is_block and not node.name:
        return None
    if flat.owners.allows(node.content, position, part):
        return _Entered(part)
    if isinstance(part, TensorLocation):
        # Its attributes have names already, and the tensor itself gets a further one.
        return _Entered(part.without_attributes())
    # A reference back to an object that has a name.
    return None


def _find_unnamed_keys(node: _Node, parts: Sequence[tuple[str, Any]], flat: Flat) -> frozenset[str]:
    """Return the keys that names do not include: of the only model among parts, and of the containers of a module."""
    # The names of a pickled module are the names of its state dict.
    if is_pickled_module(node.content, dict(parts)):
        return OF_MODULES
    if flat.whole_names:
        return frozenset()
    # A submodule may have the name of a model.
    is_model = holds_tensors if node.membership in CERTAIN else _is_model
    models = [key for key, value in parts if key in MODEL_CONTAINERS and is_model(value)]
    return frozenset(models if len(models) == 1 else ())


def _is_model(value: Any) -> bool:
    """Whether a value is a state dict or a pickled module."""
    if isinstance(value, Inert):
        return is_pickled_module(value, dict(children(value) or ()))
    return holds_tensors(value)


def _name_optimizer_parts(
    state: Any, prefix: str, names: Mapping[Any, str], stored_names: Mapping[Any, str]
) -> list[tuple[str, Any]]:
    """Name the parts of an optimizer's state dict.

    names: of parameters by id.
    stored_names: the names that the file contains; {} without any.
    """
    parts: list[tuple[str, Any]] = []
    for key, entries in state["state"].items():
        parameter = names.get(key) or keys.to_text(key)
        parts.append((f"{prefix}.{parameter}", entries))

    for number, group in enumerate(state["param_groups"]):
        group_prefix = f"{prefix}.param_groups.{number}"
        settings = children(group)
        if settings is None:
            parts.append((group_prefix, group))
            continue
        for setting, value in settings:
            parts += _name_setting(setting, value, group_prefix, stored_names, ordered=not names)

    # Optimizers that wrap another one store more, like the slow weights of Lookahead.
    further_keys = [key for key in state if key not in ("state", "param_groups")]
    parts += [(f"{prefix}.{keys.to_text(key)}", state[key]) for key in further_keys]
    return parts


def _name_setting(
    setting: str, value: Any, group_prefix: str, stored_names: Mapping[Any, str], *, ordered: bool
) -> list[tuple[str, Any]]:
    """Name a setting of a parameter group.

    ordered: whether the order of the group's members matters.
    """
    # The learning rate may be a tensor.
    if not _is_plain_list(value):
        return [(f"{group_prefix}.{setting}", value)]
    if setting == "params":
        key, members = list_members(value, stored_names, ordered=ordered)
        return [(f"{group_prefix}.{key}", ", ".join(members))]
    # The names of the members are part of the members.
    if setting == "param_names":
        return []
    return [(f"{group_prefix}.{setting}", keys.to_text(value))]


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value)
