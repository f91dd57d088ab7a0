"""Convert modules, optimizers, state dicts and tensors in memory to the tree that a checkpoint file would hold.

Then `readers.pickles.tree` names the tensors of both alike. Modules are read through their parameters and buffers,
because `state_dict()` lacks non-persistent buffers and communicates for sharded modules.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Mapping
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import UsageError
from syncheck.live.digest.parts import is_instance
from syncheck.live.memory.attributes import AttributeReader, describe_modes
from syncheck.live.memory.objects import (
    CODE,
    EXTRA_STATE,
    add_dot,
    get_attributes,
    get_custom_state,
    get_no_sync,
    get_referents,
    get_transient_buffers,
    get_wrapped,
    has_extra_state,
    has_state,
    has_tensor,
    is_fsdp1,
    is_module,
    is_optimizer,
    is_sharded,
    is_stateful,
    list_parameters,
    list_updated,
)
from syncheck.live.memory.optimizers import read_optimizer
from syncheck.live.memory.origins import find_plain_path, is_read
from syncheck.live.memory.replica_parts import get_prefix, merge_parts
from syncheck.live.memory.tensor_bytes import MemoryTensor, describe_tensor, is_tensor, make_refused
from syncheck.messages import Refusal
from syncheck.readers.metadata_block import get_buffers_synced
from syncheck.readers.pickles.tree import is_optimizer as is_optimizer_state
from syncheck.tensors.averages import is_averaging_class

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from syncheck.snapshots import NoSync


def get_local_optimizer(optimizer: Any) -> tuple[Any, bool]:
    """Return the optimizer with this rank's states, and whether other ranks hold the states of other parameters.

    ZeroRedundancyOptimizer has an inner optimizer. Its own `state_dict()` has the states of all ranks, after gathering
    them.
    """
    inner = getattr(optimizer, "optim", None)
    class_names = [kind.__name__ for kind in type(optimizer).__mro__]
    if "ZeroRedundancyOptimizer" in class_names and hasattr(inner, "state_dict"):
        return inner, True

    return optimizer, False


def add_parameter_names(state_dict: Any, optimizer: Any, names: Mapping[int, str], sharded: Container[int]) -> Any:
    """Return an optimizer's state dict with parameter names, if the given modules have all parameters.

    state_dict: converted; it is changed.
    names: by the id of a parameter.
    sharded: ids of flat shards.
    """
    if not _has_equal_groups(state_dict, optimizer):
        return state_dict

    are_named = all(id(parameter) in names for parameter in list_parameters(optimizer))
    for saved_group, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        ids = [id(parameter) for parameter in group["params"]]
        if are_named:
            saved_group.setdefault("param_names", [names[key] for key in ids])

        for key, number in zip(ids, saved_group.get("params") or (), strict=True):
            if key in sharded:
                # Ranks differ in the states: a rank with an empty shard of the parameter has no states.
                state_dict["state"][number] = {"state": make_refused(Refusal.FLAT_PARAMETER())}

    return state_dict


def _has_equal_groups(state_dict: Any, optimizer: Any) -> bool:
    """Whether a state dict has torch's keys, and groups with as many parameters as the groups of the optimizer."""
    if not is_optimizer_state(state_dict):
        return False

    saved_sizes = [len(group.get("params") or ()) for group in state_dict["param_groups"]]
    return saved_sizes == [len(group["params"]) for group in optimizer.param_groups]


# Below the limit of `readers.pickles.tree`, because this module uses recursion.
MAX_DEPTH = 200
_EXACT = (bool, int, float, complex, str, bytes, bytearray)
_EXACT_OR_NONE = (*_EXACT, NoneType)
# Objects that belong to the program rather than to a model. A logger or handler refers to all loggers, and to what they
# have logged.
_OF_THE_PROGRAM = (*CODE, FunctionType, MethodType, BuiltinFunctionType, logging.Filterer)
# The keys of an optimizer's state dict.
_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
# How `_pre_dp_module_transform` of torch states the placements of a parameter of a tensor-parallel module.
_OF_SHARDS = frozenset({"_st_info"})


class _Root(NamedTuple):
    """A module of the replica with all its submodules.

    prefix: of its tensors in the tree.
    entries: its tensors and extra states, by their names in the module.
    modules: by path.
    flat_prefixes: prefixes of the names below FSDP1 wrappers.
    transient: names of non-persistent buffers.
    """

    prefix: str
    entries: dict[str, Any]
    modules: dict[str, Any]
    flat_prefixes: tuple[str, ...]
    transient: set[str]

    def is_flat(self, name: str) -> bool:
        """Whether a parameter, or the module of a name with a dot at its end, is below an FSDP1 wrapper."""
        return name.startswith(self.flat_prefixes)


class Tree:
    """Converts the parts of one replica; `root` is the equivalent content of a checkpoint.

    parts: modules, optimizers, other objects with a `state_dict()`, tensors, containers.
    persistent: skip non-persistent buffers.
    modules: number of modules among the parts.
    buffers, frozen, parameters: names, as in `readers.pickles.tree`.
    averaged: names of objects that average a model.
    bn_momentum: by BatchNorm module.
    buffers_synced: as in `snapshots.Metadata`; None if no module defines it.
    no_sync: as in `snapshots.Metadata`.
    stubs: unknown classes whose tensors are all compared.
    unread: classes and module attributes that may have more tensors.
    hidden: the same with names, if tensors were found.
    attributes: reads the plain attributes of the modules.
    modes: whether modules are in training mode, by the name of the root.
    names: of the modules' parameters, by `id`.
    partitioned: an optimizer holds the states of some parameters only, as with ZeRO.
    local_parameters: the names of these parameters on this rank.

    Raises UsageError for objects that cannot be read.
    """

    def __init__(self, parts: tuple[Any, ...], *, persistent: bool = False) -> None:
        self.persistent = persistent
        self.modules = 0
        self.partitioned = False
        self.local_parameters: list[str] = []
        self.buffers: list[str] = []
        self.frozen: list[str] = []
        self.parameters: set[str] = set()
        self.averaged: list[str] = []
        self.bn_momentum: dict[str, float | None] = {}
        self.synced: set[bool | None] = set()
        self.no_sync: NoSync = ""
        self.stubs: set[str] = set()
        self.unread: set[str] = set()
        self.names: dict[int, str] = {}
        self._sharded: set[int] = set()
        self._optimizers: list[tuple[dict[str, Any], Any, str]] = []
        self._converted: dict[int, Any] = {}
        self._searched: list[tuple[str, Any, list[Any]]] = []
        self._attributes: list[tuple[str, Any]] = []
        self._owners: list[tuple[str, Any]] = []
        self._roots: list[_Root] = []
        self.modes: dict[str, str] = {}
        self._above: set[int] = set()
        # Keeps objects, because ids are unique only among live objects.
        self._alive: list[Any] = []
        self.root = self._convert(merge_parts(parts), "", 0)
        self.attributes = self._read_attributes()
        # After all modules, when the names of all parameters are known.
        for target, optimizer, name in self._optimizers:
            self._fill_optimizer(target, optimizer, name)
        self.hidden = self._find_hidden()

    def _fill_optimizer(self, target: dict[str, Any], optimizer: Any, name: str) -> None:
        """Convert the state of an optimizer into its place in the tree."""
        converted = self._convert(read_optimizer(optimizer), name, 1)
        state_dict = add_parameter_names(converted, optimizer, self.names, self._sharded)
        if self.partitioned:
            self.local_parameters += [self.names.get(id(parameter), "") for parameter in list_parameters(optimizer)]

        # A wrapper of another optimizer (fp32 masters) is treated as a plain mapping.
        if not state_dict.keys() >= _OPTIMIZER_KEYS:
            target.clear()

        target.update(state_dict)
        # A GAN freezes one model for a while, as other steps update it.
        updated = set(map(self.names.get, map(id, list_updated(optimizer))))
        self.frozen = sorted(set(self.frozen).difference(updated), key=self.frozen.index)

    def _list_compared(self) -> set[int]:
        """Return the ids of all objects in the tree, which are compared anyway."""
        alive = {id(value) for value in self._alive}
        return alive.union(self._converted, self.names)

    def _find_hidden(self) -> list[tuple[str, str]]:
        """Return names and classes of objects with tensors that are not in the tree, and complete `unread`."""
        compared = self._list_compared()
        hidden: list[tuple[str, str]] = []
        # Objects that were not converted may hold tensors of the model.
        for name, node, referents in self._searched:
            if has_tensor(referents, compared):
                hidden.append((name, get_class_name(node)))

        self.unread.update(kind for _, kind in hidden)
        self.unread.update(attribute for attribute, tensor in self._attributes if id(tensor) not in compared)
        self.stubs -= self.unread
        return hidden

    def _read_attributes(self) -> AttributeReader:
        """Read the plain attributes of all modules, and add the parameters in them that an optimizer trains."""
        optimized: set[int] = set()
        for _, optimizer, _ in self._optimizers:
            optimized.update(id(parameter) for parameter in list_parameters(optimizer))

        reader = AttributeReader(self._list_compared(), optimized)
        for path, module in self._owners:
            reader.read_module(path, module)

        for name, parameter in reader.attributes.trained.items():
            # A module may contain another root, whose prefix is longer.
            roots = [root for root in self._roots if name.startswith(root.prefix)]
            root = max(roots, key=attrgetter("prefix"))
            self._add_parameter(root, name.removeprefix(root.prefix), parameter, describe_tensor(parameter))

        return reader

    @property
    def buffers_synced(self) -> bool | None:
        """Whether the buffers are synchronized; None if the modules disagree."""
        return next(iter(self.synced)) if len(self.synced) == 1 else None

    def _convert(self, node: Any, name: str, depth: int) -> Any:
        """Return the equivalent of an object in a checkpoint. name: in the tree. depth: of the containers around it."""
        if depth > MAX_DEPTH:
            raise UsageError(f"{name[:80]}: containers are nested more than {MAX_DEPTH} levels deep")

        if type(node) in _EXACT_OR_NONE:
            return node

        if type(node).__name__ == "UntypedStorage":
            self._alive.append(node)
            node = _view_storage(node)

        if is_tensor(node):
            return self._convert_tensor(node, name)

        kind: Any
        for kind in _EXACT:
            if isinstance(node, kind):  # numpy.float64 is a float, an IntEnum is an int
                self._alive.append(node)
                self._searched.append((name, node, get_referents(node)))
                return kind.__str__(node) if kind is str else kind(node)

        if is_instance(node, "numpy", "generic"):
            # Like the file reader: numbers that `struct` can pack, otherwise bytes.
            is_number = node.dtype.kind in "fiub" and node.itemsize <= 8
            return node.item() if is_number else node.tobytes()

        if id(node) not in self._converted:
            if id(node) in self._above:  # a reference back to an object that contains this one
                return None

            self._above.add(id(node))
            self._add_to_search(node, name)
            self._converted[id(node)] = self._convert_object(node, name, depth)
            self._above.discard(id(node))
            self._alive.append(node)

        return self._converted[id(node)]

    def _convert_tensor(self, tensor: Any, name: str) -> MemoryTensor:
        self._alive.append(tensor)
        description = describe_tensor(tensor)
        is_complete = description.sharding is None and not description.refused
        attributes = get_attributes(tensor) if is_complete else {}
        if attributes.keys() - _OF_SHARDS:
            self._searched.append((f"{name}.(attributes)", tensor, [attributes]))

        return description

    def _add_to_search(self, node: Any, name: str) -> None:
        """Remember to search an object for tensors, unless all that it refers to is converted."""
        if _is_plain_container(node):
            return

        if not has_state(node) and not isinstance(node, CODE):
            self._searched.append((name, node, get_referents(node)))

    def _convert_object(self, node: Any, name: str, depth: int) -> Any:
        """Convert a container, a module or another object. Parameters as in `_convert`."""
        if is_module(node):
            return self._convert_module(node, name)

        if is_optimizer(node):
            return self._add_optimizer(node, name)

        if isinstance(node, Mapping):
            return self._convert_items([(key, node[key]) for key in _list_keys(node)], name, depth)

        if isinstance(node, (list, tuple, deque)):
            items = list(self._convert_items(enumerate(node), name, depth).values())
            return tuple(items) if isinstance(node, tuple) else items

        if isinstance(node, (set, frozenset)):  # a set of tensors has no order for a comparison
            return None if has_tensor(node) else node

        if is_stateful(node):
            if is_averaging_class(type(node)):
                self.averaged.append(name)
            return self._convert(node.state_dict(), name, depth + 1)

        if isinstance(node, _OF_THE_PROGRAM):
            return None

        return self._convert_items(self._list_fields(node).items(), name, depth)

    def _convert_items(self, items: Iterable[tuple[Any, Any]], name: str, depth: int) -> dict[Any, Any]:
        """Return the converted items of a container by key. name, depth: of the container."""
        prefix = add_dot(name)
        converted = {}
        # No comprehension: before Python 3.12, it would be another level of the stack.
        for key, value in items:
            converted[key] = self._convert(value, f"{prefix}{key}", depth + 1)

        return converted

    def _list_fields(self, node: Any) -> dict[str, Any]:
        """Return the attributes of an object of an unknown class, and add its class to `stubs` or `unread`."""
        fields = get_attributes(node)
        if not hasattr(node, "__dict__") and not has_tensor(fields.values()):
            fields = {}  # plain values in slots are usually internals of a library, for example pathlib

        # Objects unknown to the garbage collector may hold tensors out of reach of Python.
        is_readable = len(fields) > 0 or gc.is_tracked(node)
        classes = self.stubs if is_readable else self.unread
        classes.add(get_class_name(node))
        return fields

    def _add_optimizer(self, optimizer: Any, name: str) -> dict[str, Any]:
        """Return an empty optimizer for `readers.pickles.tree`, filled when all names are known."""
        local_optimizer, partitioned = get_local_optimizer(optimizer)
        self.partitioned = self.partitioned or partitioned
        target: dict[str, Any] = {"state": {}, "param_groups": []}
        self._optimizers.append((target, local_optimizer, name))
        return target

    def _convert_module(self, module: Any, name: str) -> dict[str, Any]:
        """Return parameters and buffers by name, in the order of a state dict."""
        self.modules += 1
        self.synced.add(get_buffers_synced(module))
        self.no_sync = self.no_sync or get_no_sync(module.modules())
        modules = dict(get_wrapped(module).named_modules(remove_duplicate=False))
        flat_prefixes = tuple(add_dot(path) for path, owner in modules.items() if is_fsdp1(owner))
        root = _Root(
            prefix=get_prefix(name),
            entries={},
            modules=modules,
            flat_prefixes=flat_prefixes,
            transient=get_transient_buffers(modules),
        )
        self._roots.append(root)
        self.modes[f"{root.prefix}training"] = describe_modes(modules)
        for path, owner in modules.items():
            # As in state dicts, keep the wrapper names of torch.compile and FSDP1, which the methods of modules hide.
            self._read_parameters(root, path, owner)
            self._read_buffers(root, path, owner)
            self._read_owner(root, path, owner)

        self._read_custom_state(root)
        return root.entries

    def _read_parameters(self, root: _Root, path: str, owner: Any) -> None:
        """Add the parameters of one module, without its submodules. path: of the module in the root."""
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{add_dot(path)}{key}"
            description = describe_tensor(parameter)
            if root.is_flat(name):
                self._sharded.add(id(parameter))
                description = description.refuse(Refusal.FLAT_PARAMETER())

            self._add_parameter(root, name, parameter, description)

    def _add_parameter(self, root: _Root, name: str, parameter: Any, description: MemoryTensor) -> None:
        """Add a parameter. name: in the root."""
        full_name = f"{root.prefix}{name}"
        root.entries[name] = description
        self.names.setdefault(id(parameter), full_name)
        self.parameters.add(full_name)
        if not parameter.requires_grad:
            self.frozen.append(full_name)

    def _read_buffers(self, root: _Root, path: str, owner: Any) -> None:
        """Add the buffers of one module, as `_read_parameters` does."""
        for key, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            name = f"{add_dot(path)}{key}"
            is_skipped = self.persistent and name in root.transient
            if not is_skipped:
                root.entries[name] = describe_tensor(buffer)
                self.buffers.append(f"{root.prefix}{name}")

    def _read_owner(self, root: _Root, path: str, owner: Any) -> None:
        """Add everything of one module that is neither a parameter nor a buffer."""
        self._alive += [owner, *owner.buffers(recurse=False)]
        full_path = f"{root.prefix}{path}".removesuffix(".")
        if is_averaging_class(type(owner)):
            self.averaged.append(full_path)

        if getattr(owner, "running_mean", None) is not None and hasattr(owner, "momentum"):
            self.bn_momentum[full_path] = owner.momentum

        for parameter in owner.parameters(recurse=False):
            self._add_tensor_attributes(parameter)

        if is_read(owner):
            plain_path = find_plain_path(path, root.modules)
            self._owners.append((f"{root.prefix}{plain_path}".removesuffix("."), owner))
        else:
            self._add_tensor_attributes(owner)

        if has_extra_state(owner):
            name = f"{add_dot(path)}{EXTRA_STATE}"
            root.entries[name] = self._convert(owner.get_extra_state(), f"{root.prefix}{name}", 1)

    def _add_tensor_attributes(self, holder: Any) -> None:
        """Remember the tensors in the attributes of a module or parameter, which may be compared elsewhere."""
        for key, value in vars(holder).items():
            # The test of the dtype is faster, and most attributes are no tensors.
            if hasattr(value, "dtype") and is_tensor(value):
                self._attributes.append((f"{get_class_name(holder)}.{key}", value))

    def _read_custom_state(self, root: _Root) -> None:
        """Add the entries that the modules' own code adds to a state dict."""
        # Sharded modules would gather their shards.
        complete: dict[str, Any] = {}
        for path, owner in root.modules.items():
            if not root.is_flat(f"{path}.") and not is_sharded(owner):
                complete[path] = owner

        custom_entries, not_called = get_custom_state(complete, root.entries.keys() | root.transient)
        self.unread.update(not_called)
        for key, value in custom_entries.items():
            root.entries[key] = self._convert(value, f"{root.prefix}{key}", 1)
            if is_tensor(value):
                self.buffers.append(f"{root.prefix}{key}")


def _view_storage(storage: Any) -> Any:
    """Return a storage as a tensor of bytes."""
    torch: Any = sys.modules["torch"]
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)


def _is_plain_container(node: Any) -> bool:
    """Whether the items of an object are all that it refers to: a container of Python without objects as keys."""
    if type(node) in (list, tuple, deque):
        return True

    return type(node) is dict and all(type(key) in _EXACT for key in node)


def _list_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of a mapping in their order, or in an order of their own if two of them have one name."""
    # 1 and "1" have the same name. Their order distinguishes them, so it must not depend on the mapping.
    if len({str(key) for key in mapping}) == len(mapping):
        return list(mapping)

    return sorted(mapping, key=_sort_key)


def _sort_key(key: Any) -> tuple[str, str]:
    return type(key).__name__, str(key)


def get_class_name(value: Any) -> str:
    """Return the name of an object's class, with its module."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"[:120]
