"""Convert modules, optimizers, state dicts and tensors in memory to the tree that a checkpoint file would hold.

Then `readers.pickles.tree` names the tensors of both alike. Modules are read through their parameters and buffers,
because `state_dict()` lacks non-persistent buffers and communicates for sharded modules.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.memory.attributes import AttributeReader, describe_modes
from syncheck.live.memory.objects import (
    EXTRA_STATE,
    get_attributes,
    get_custom_state,
    get_no_sync,
    get_referents,
    get_transient_buffers,
    has_extra_state,
    has_tensor,
    is_bundle,
    is_fsdp1,
    is_module,
    is_optimizer,
    is_sharded,
    is_stateful,
)
from syncheck.live.memory.origins import find_plain_path, is_read
from syncheck.live.memory.tensor_bytes import MemoryTensor, describe_tensor, is_tensor
from syncheck.messages import Refusal
from syncheck.readers.metadata_block import get_buffers_synced
from syncheck.readers.pickles.tree import is_optimizer as is_optimizer_state
from syncheck.tensors.averages import is_averaging_class
from syncheck.tensors.names import MODEL_CONTAINERS

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from syncheck.snapshots import NoSync


def get_local_optimizer(optimizer: Any) -> tuple[Any, bool]:
    """Return the optimizer with this rank's states, and whether other ranks hold the states of other parameters.

    ZeroRedundancyOptimizer has an inner optimizer. Its own `state_dict()` has the states of all ranks, after gathering
    them.
    """
    inner = getattr(optimizer, "optim", None)
    partitioned = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    return (inner, True) if partitioned and hasattr(inner, "state_dict") else (optimizer, False)


def add_parameter_names(state_dict: Any, optimizer: Any, names: Mapping[int, str], sharded: Container[int]) -> Any:
    """Return an optimizer's state dict with parameter names, if the given modules have all parameters.

    state_dict: converted; it is changed. names: by the id of a parameter. sharded: ids of flat shards.
    """
    if not isinstance(state_dict, dict) or not (
        isinstance(state_dict.get("param_groups"), list) and isinstance(state_dict.get("state"), dict)
    ):
        return state_dict
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    numbers = [group.get("params") for group in state_dict["param_groups"]]
    known = all(key in names for group in groups for key in group)
    if [len(n or ()) for n in numbers] != [len(group) for group in groups]:
        return state_dict
    for group, keys, ids in zip(state_dict["param_groups"], groups, numbers, strict=True):
        if known and "param_names" not in group:
            group["param_names"] = [names[key] for key in keys]
        for key, number in zip(keys, ids, strict=True):
            if key in sharded:
                # Ranks differ in the states: a rank with an empty shard of the parameter has no states.
                state_dict["state"][number] = {"state": MemoryTensor(None, (), None, Refusal.FLAT_PARAMETER())}
    return state_dict


# The key of an averaged copy beside the model, as in files.
_AVERAGE = "ema"
# Below the limit of `readers.pickles.tree`, because this module uses recursion.
MAX_DEPTH = 200
_EXACT = (bool, int, float, complex, str, bytes, bytearray)
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


class Tree:
    """Converts the parts of one replica; `root` is the equivalent content of a checkpoint.

    parts: modules, optimizers, other objects with a `state_dict()`, tensors, containers. persistent: skip
    non-persistent buffers. buffers, frozen, parameters: names, as in `readers.pickles.tree`. averaged: names of
    objects that average a model. bn_momentum: by BatchNorm module. buffers_synced: as in `snapshots.Metadata`; None if
    no module defines it. no_sync: as in `snapshots.Metadata`. stubs: unknown classes whose tensors are all compared.
    unread: classes and module attributes that may have more tensors. hidden: the same with names, if tensors were
    found. attributes: reads the plain attributes of the modules. modes: whether modules are in training mode, by the
    name of the root. names: of the modules' parameters, by `id`. partitioned: an optimizer holds the states of some
    parameters only, as with ZeRO; local_parameters: their names on this rank. Raises UsageError for objects that cannot
    be read.
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
        self._seen: dict[int, Any] = {}
        self._searched: list[tuple[str, Any, list[Any]]] = []
        self._attributes: list[tuple[str, Any]] = []
        self._owners: list[tuple[str, Any]] = []
        self._roots: list[tuple[str, dict[str, Any]]] = []
        self.modes: dict[str, str] = {}
        self._above: set[int] = set()
        self._alive: list[Any] = []
        self.root = self._convert(_merge_parts(parts), "", 0)
        self.attributes = self._read_attributes()
        # After all modules, when the names of all parameters are known.
        for into, optimizer, name in self._optimizers:
            state_dict = add_parameter_names(
                self._convert(optimizer.state_dict(), name, 1), optimizer, self.names, self._sharded
            )
            if self.partitioned:
                self.local_parameters += [
                    self.names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]
                ]
            if not ("state" in state_dict and "param_groups" in state_dict):
                into.clear()  # a wrapper of another optimizer (fp32 masters), treated as a plain mapping
            into.update(state_dict)
        known = {*self._seen, *self.names, *map(id, self._alive)}
        self.hidden = [(name, class_name(n)) for name, n, inside in self._searched if has_tensor(inside, known)]
        self.unread.update(kind for _, kind in self.hidden)
        self.unread.update(attribute for attribute, tensor in self._attributes if id(tensor) not in known)
        self.stubs -= self.unread

    def _read_attributes(self) -> AttributeReader:
        """Read the plain attributes of all modules, and add the parameters in them that an optimizer trains."""
        optimized: set[int] = set()
        for _, optimizer, _ in self._optimizers:
            for group in optimizer.param_groups:
                optimized.update(map(id, group["params"]))
        known = {*self._seen, *self.names, *map(id, self._alive)}
        reader = AttributeReader(known, optimized)
        for path, module in self._owners:
            reader.read_module(path, module)
        for name, parameter in reader.attributes.trained.items():
            prefix, entries = max((root for root in self._roots if name.startswith(root[0])), key=lambda root: root[0])
            entries[name.removeprefix(prefix)] = describe_tensor(parameter)
            self.names.setdefault(id(parameter), name)
            self.parameters.add(name)
            if not parameter.requires_grad:
                self.frozen.append(name)
        return reader

    @property
    def buffers_synced(self) -> bool | None:
        """Whether the buffers are synchronized; None if the modules disagree."""
        return next(iter(self.synced)) if len(self.synced) == 1 else None

    def _convert(self, node: Any, name: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UsageError(f"{name[:80]}: containers are nested more than {MAX_DEPTH} levels deep")
        if node is None or type(node) in _EXACT:
            return node
        if type(node).__name__ == "UntypedStorage":
            self._alive.append(node)
            node = sys.modules["torch"].tensor([], dtype=sys.modules["torch"].uint8, device=node.device).set_(node)
        if is_tensor(node):
            self._alive.append(node)
            place = describe_tensor(node)
            if place.sharding is None and not place.refused and (own := get_attributes(node)):
                self._searched.append((f"{name}.(attributes)", node, [own]))
            return place
        exact = next((kind for kind in _EXACT if isinstance(node, kind)), None)
        if exact is not None:  # numpy.float64 is a float, an IntEnum is an int
            self._alive.append(node)
            self._searched.append((name, node, get_referents(node)))
            return exact.__str__(node) if exact is str else exact(node)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(node, numpy.generic):
            # Like the file reader: numbers that `struct` can pack, otherwise bytes.
            return node.item() if node.dtype.kind in "fiub" and node.itemsize <= 8 else node.tobytes()
        if id(node) in self._seen:
            return self._seen[id(node)]
        if id(node) in self._above:  # a reference back to an object that contains this one
            return None
        self._above.add(id(node))
        plain = type(node) in (list, tuple, deque) or (type(node) is dict and all(type(key) in _EXACT for key in node))
        if not (plain or is_module(node) or is_stateful(node) or isinstance(node, (type, ModuleType))):
            self._searched.append((name, node, get_referents(node)))
        converted = self._container(node, name, depth)
        self._above.discard(id(node))
        self._seen[id(node)] = converted
        self._alive.append(node)  # ids are unique only among live objects
        return converted

    def _container(self, node: Any, name: str, depth: int) -> Any:
        def below(key: Any, value: Any) -> Any:
            return self._convert(value, f"{name}.{key}" if name else str(key), depth + 1)

        if is_module(node):
            return self._module(node, name)
        if is_optimizer(node):
            into: dict[str, Any] = {}
            own, partitioned = get_local_optimizer(node)
            self.partitioned = self.partitioned or partitioned
            self._optimizers.append((into, own, name))
            # An empty optimizer for `readers.pickles.tree`, filled when all names are known.
            into.update(state={}, param_groups=[])
            return into
        if isinstance(node, Mapping):
            # 1 and "1" have the same name. Their order distinguishes them, so it must not depend on the mapping.
            keys = list(node) if len({str(key) for key in node}) == len(node) else sorted(node, key=_sort_key)
            return {key: below(key, node[key]) for key in keys}
        if isinstance(node, (list, tuple, deque)):
            listed = [below(i, value) for i, value in enumerate(node)]
            return tuple(listed) if isinstance(node, tuple) else listed
        if isinstance(node, (set, frozenset)):  # a set of tensors has no order for a comparison
            return None if has_tensor(node) else node
        if is_stateful(node):
            if is_averaging_class(type(node)):
                self.averaged.append(name)
            return self._convert(node.state_dict(), name, depth + 1)
        if isinstance(node, _CODE):
            return None
        fields = get_attributes(node)
        if not hasattr(node, "__dict__") and not has_tensor(fields.values()):
            fields = {}  # plain values in slots are usually internals of a library, for example pathlib
        # Objects unknown to the garbage collector may hold tensors out of reach of Python.
        (self.stubs if fields or gc.is_tracked(node) else self.unread).add(class_name(node))
        return {key: below(key, value) for key, value in fields.items()}

    def _module(self, module: Any, name: str) -> dict[str, Any]:
        """Return parameters and buffers by name, in the order of a state dict."""
        self.modules += 1
        self.synced.add(get_buffers_synced(module))
        prefix = get_prefix(name)
        entries: dict[str, Any] = {}
        modules = dict(module.named_modules(remove_duplicate=False))
        self.no_sync = self.no_sync or get_no_sync(modules.values())
        self._roots.append((prefix, entries))
        self.modes[f"{prefix}training"] = describe_modes(modules)
        flat = tuple(f"{path}." if path else "" for path, m in modules.items() if is_fsdp1(m))
        transient = get_transient_buffers(modules)
        for path, owner in modules.items():
            # As in state dicts, keep the wrapper names of torch.compile and FSDP1, which the methods of modules hide.
            at = f"{path}." if path else ""
            for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                place = describe_tensor(parameter)
                if flat and f"{at}{key}".startswith(flat):
                    self._sharded.add(id(parameter))
                    place = place.refuse(Refusal.FLAT_PARAMETER())
                entries[f"{at}{key}"] = place
                self.names.setdefault(id(parameter), f"{prefix}{at}{key}")
                self.parameters.add(f"{prefix}{at}{key}")
                if not parameter.requires_grad:
                    self.frozen.append(f"{prefix}{at}{key}")
            for key, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                if not (self.persistent and f"{at}{key}" in transient):
                    entries[f"{at}{key}"] = describe_tensor(buffer)
                    self.buffers.append(f"{prefix}{at}{key}")
            if is_averaging_class(type(owner)):
                self.averaged.append(f"{prefix}{path}".removesuffix("."))
            self._alive += [owner, *owner.buffers(recurse=False)]
            if is_read(owner):
                plain_path = find_plain_path(path, modules)
                self._owners.append((f"{prefix}{plain_path}" if plain_path else prefix.removesuffix("."), owner))
            for holder in (*([] if is_read(owner) else [owner]), *owner.parameters(recurse=False)):
                own = [(key, value) for key, value in vars(holder).items() if hasattr(value, "dtype")]
                self._attributes += [(f"{class_name(holder)}.{key}", value) for key, value in own if is_tensor(value)]
            if has_extra_state(owner):
                entries[f"{at}{EXTRA_STATE}"] = self._convert(owner.get_extra_state(), f"{prefix}{at}{EXTRA_STATE}", 1)
            if getattr(owner, "running_mean", None) is not None and hasattr(owner, "momentum"):
                self.bn_momentum[f"{prefix}{path}".removesuffix(".")] = owner.momentum
        # Sharded modules would gather their shards.
        whole = {at: m for at, m in modules.items() if not (flat and f"{at}.".startswith(flat)) and not is_sharded(m)}
        added, not_called = get_custom_state(whole, entries.keys() | transient)
        self.unread.update(not_called)
        for key, value in added.items():
            entries[key] = self._convert(value, f"{prefix}{key}", 1)
            if is_tensor(value):
                self.buffers.append(f"{prefix}{key}")
        return entries


def class_name(thing: Any) -> str:
    """Return the name of an object's class, with its module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"[:120]


def get_prefix(name: str) -> str:
    """Return the prefix of the names in a module: its own name and a dot, but no name for a container like `model`.

    `readers.pickles.tree` does the same.
    """
    head, _, last = name.rpartition(".")
    prefix = head if last in MODEL_CONTAINERS else name
    return f"{prefix}." if prefix else ""


def name_parts(parts: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return the modules, optimizers and other stateful objects of a replica with their names in `Tree`.

    'model', 'optimizer', 'scaler' and so on; 'optimizer.0' and 'optimizer.1' for two of a kind.
    """
    merged = _merge_parts(parts)
    named_parts: list[tuple[str, Any]] = []
    for key, value in merged.items() if isinstance(merged, Mapping) else ():
        several = [(f"{key}.{i}", part) for i, part in enumerate(value)] if isinstance(value, list) else [(key, value)]
        named_parts += [(name, part) for name, part in several if is_module(part) or is_stateful(part)]
    return named_parts


def _merge_parts(parts: tuple[Any, ...]) -> Any:
    """Store the parts of a replica under the keys that trainers use. A single part remains as it is."""
    if len(parts) == 1 and not is_bundle(parts[0]):
        only = parts[0]
        return only if isinstance(only, (Mapping, list, tuple)) or is_tensor(only) else {_default_key(only): only}
    by_key: dict[str, list[Any]] = {}
    plain: list[tuple[str, Any]] = []
    listed = [part for given in parts for part in (given if is_bundle(given) else (given,))]
    averages = _find_averages(listed)
    for i, part in enumerate(listed):
        if is_optimizer_state(part):  # with other keys beside it, the whole tree would look like an optimizer
            by_key.setdefault("optimizer", []).append(part)
        elif isinstance(part, (Mapping, list, tuple)) or is_tensor(part):
            plain.append((f"things.{i}", part))
        else:
            key = _AVERAGE if id(part) in averages else _default_key(part)
            by_key.setdefault(key, []).append(part)
    tree: dict[str, Any] = {key: parts[0] if len(parts) == 1 else parts for key, parts in by_key.items()}
    for key, part in plain:
        if isinstance(part, Mapping) and not part.keys() & tree.keys():
            tree.update(part)
        else:
            tree[key] = part
    return tree


def _find_averages(parts: Sequence[Any]) -> frozenset[int]:
    """Return the ids of the objects that average a model, if the model is another one of the parts."""
    averages = [part for part in parts if is_averaging_class(type(part)) and not is_optimizer(part)]
    has_model = any(not is_averaging_class(type(part)) and _holds_model(part) for part in parts)
    return frozenset(map(id, averages)) if has_model else frozenset()


def _holds_model(part: Any) -> bool:
    return is_module(part) or (isinstance(part, Mapping) and not is_optimizer_state(part))


def _sort_key(key: Any) -> tuple[str, str]:
    return type(key).__name__, str(key)


def _default_key(part: Any) -> str:
    """Return the key that trainers use for an object of this kind."""
    if is_module(part):
        return "model"
    if is_optimizer(part):
        return "optimizer"
    kind = type(part).__name__
    if kind.endswith("Scaler"):
        return "scaler"
    return "lr_scheduler" if hasattr(part, "get_last_lr") else kind
