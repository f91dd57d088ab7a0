"""Where the tensors and values that a report names live in this process, and how to change them in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from syncheck.errors import UsageError
from syncheck.live.memory import snapshot
from syncheck.live.memory.held import Held, is_tensor
from syncheck.live.memory.modules import has_extra_state
from syncheck.live.memory.sharded import sharding_of
from syncheck.live.memory.things import Tree, is_module, is_optimizer, named_parts
from syncheck.live.repair.plan import EXTRA_STATE
from syncheck.names import MODEL_CONTAINERS, normalize
from syncheck.replica_groups import divide, is_whole
from syncheck.snapshots import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Change = Literal["", "values", "created", "removed"]


@dataclass(frozen=True, slots=True)
class Content:
    """What a source holds under a name, as it is sent. keys: the way to it from the container.

    kind: a tensor is made on the other ranks and its bytes follow apart; any other object is sent whole.
    value: of a tensor (dtype, shape, device type, whether it is on its parameter's device).
    """

    keys: tuple[Any, ...]
    kind: Literal["absent", "tensor", "object"]
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Root:
    """A container of values. read: gives it; write: takes the changed one. parameter: the one whose state it is.

    whole: it is changed as a whole only.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    parameter: Any = None
    whole: bool = False


class Places:
    """The live tensors and values of this rank's replica, by the names of a report.

    parts: as `memory.snapshot` takes them. tensors: by normalized name.
    """

    def __init__(self, parts: tuple[Any, ...]) -> None:
        taken = snapshot(*parts)
        roots = dict(_roots(parts))
        short = normalize(taken.tensors)
        self.tensors: dict[str, Tensor] = {short[name]: tensor for name, tensor in taken.tensors.items()}
        self._made: dict[str, Any] = {}
        # Tensors are named without wrappers' prefixes, values with them. A name is normalized among its like only.
        like = [f"{name}.x" for name, root in roots.items() if root.parameter is not None or root.whole]
        plain = normalize([*taken.tensors, *like])
        self._roots = {plain[name].removesuffix(".x"): roots[name.removesuffix(".x")] for name in like} | roots

    def live(self, name: str) -> Any:
        """Return the tensor of this rank into which bytes are copied. Raises UsageError where there is none."""
        if name in self._made:
            return self._made[name]
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UsageError(f"{name} is not on this rank and cannot be created")
        if not isinstance(tensor.data, Held):
            raise UsageError(f"{name} has no bytes to copy: {tensor.refused or 'they are not in memory'}")
        return tensor.data.source

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the replica groups of the parameter that a state belongs to; nothing where it is on all ranks whole.

        Some ranks lack the state, so that it cannot tell its groups itself. The same on all ranks of a mesh.
        """
        parameter = self._place(name)[0].parameter
        if not hasattr(parameter, "placements"):
            return ()
        sharding = replace(sharding_of(parameter), coordinate=())
        part = Tensor(name, "", (), (), "", 0, sharding=sharding)
        whole = is_whole(sharding)
        return () if whole else divide(dict.fromkeys(sharding.ranks, part), sharding.ranks, {}).sets

    def known(self, name: str) -> None:
        """Raise UsageError where this rank could not set a value of that name."""
        self._place(name)

    def content(self, name: str, *, held: bool) -> Content:
        """Return what this rank holds under a name. held: there is something, so that nothing found is an error."""
        root, path = self._place(name)
        tree = root.read()
        found = _find(tree, path)
        if found is None:
            if held:
                raise UsageError(f"{name} is in no place from which it can be copied")
            return Content((), "absent")
        keys, value = found
        if not is_tensor(value) or root.whole:
            return Content(keys, "object", _moved(value, "cpu"))
        beside = root.parameter is not None and value.device == root.parameter.device
        return Content(keys, "tensor", (value.dtype, tuple(value.shape), value.device.type, beside))

    def take(self, name: str, content: Content) -> Change:
        """Make this rank hold what a source does, but for a tensor's bytes; say what had to be done for it."""
        root, path = self._place(name)
        tree = root.read()
        found = _find(tree, path)
        if content.kind == "absent":
            if found is None:
                return ""
            root.write(_without(tree, found[0]))
            return "removed"
        if content.kind == "tensor":
            dtype, shape, _, _ = content.value
            own: Any = found[1] if found is not None else None
            if is_tensor(own) and own.dtype == dtype and tuple(own.shape) == shape:
                return ""
            made = _made(content, root.parameter)
            root.write(_with(tree, content.keys, made))
            self._made[name] = _local(made)
            return "created"
        if found is not None and _same(_moved(found[1], "cpu"), content.value):
            return ""
        device = "cpu" if root.parameter is None else root.parameter.device
        root.write(_with(tree, content.keys, _moved(content.value, device)))
        return "values"

    def _place(self, name: str) -> tuple[_Root, str]:
        """Return the container that a name is in, and the rest of the name: the container with the longest name."""
        at = name
        while at and at not in self._roots:
            at = at.rpartition(".")[0]
        if not at:
            raise UsageError(
                f"{name} differs and is in no place known to resync: of this rank's optimizer, scaler or another "
                "object with a state_dict(); set it to the same on all ranks and call it again"
            )
        root = self._roots[at]
        return root, "" if root.whole else name[len(at) + 1 :]


def _roots(parts: tuple[Any, ...]) -> Iterator[tuple[str, _Root]]:
    """Give the containers of values of a replica, by the beginning of their values' names."""
    listed = named_parts(parts)
    names = Tree(parts).names
    optimizers = [part for _, part in listed if is_optimizer(part)]
    for name, part in listed:
        if is_module(part):
            yield from _extra_states(name, part)
        elif is_optimizer(part):
            at = "optimizer" if len(optimizers) == 1 else f"optimizer.{optimizers.index(part)}"
            yield from _of_optimizer(at, part, names)
        elif hasattr(part, "load_state_dict"):
            yield name, _Root(part.state_dict, part.load_state_dict)


def _extra_states(name: str, module: Any) -> Iterator[tuple[str, _Root]]:
    head, _, last = name.rpartition(".")
    prefix = head if last in MODEL_CONTAINERS else name
    for path, owner in module.named_modules(remove_duplicate=False):
        if has_extra_state(owner):
            at = ".".join(part for part in (prefix, path, EXTRA_STATE) if part)
            yield at, _Root(owner.get_extra_state, owner.set_extra_state, whole=True)


def _of_optimizer(at: str, optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, _Root]]:
    """Give the parameter groups, and the states of the parameters whose names are known."""
    known = all(id(p) in names for group in optimizer.param_groups for p in group["params"])
    for i, group in enumerate(optimizer.param_groups):
        yield f"{at}.param_groups.{i}", _in_place(group)
        called = group.get("param_names") or ([names[id(p)] for p in group["params"]] if known else [])
        if isinstance(getattr(optimizer, "state", None), Mapping):
            for parameter, name in zip(group["params"], called, strict=False):
                yield f"{at}.{name}", _state(optimizer.state, parameter)


def _in_place(group: dict[str, Any]) -> _Root:
    """Return a parameter group; schedulers hold on to it, so that it has to stay the same object."""

    def write(tree: Mapping[str, Any]) -> None:
        for key in group.keys() - tree.keys():
            del group[key]
        group.update(tree)

    return _Root(lambda: group, write)


def _state(states: Any, parameter: Any) -> _Root:
    def write(tree: Mapping[Any, Any]) -> None:
        if tree:
            states[parameter] = tree
        else:  # so that the optimizer begins anew with it, as on the source
            states.pop(parameter, None)

    return _Root(lambda: states.get(parameter, {}), write, parameter)


def _find(tree: Any, path: str) -> tuple[tuple[Any, ...], Any] | None:
    """Return the keys that lead to a dotted name in nested containers, and what is there; None for nothing."""
    if not path:
        return (), tree
    if isinstance(tree, Mapping):
        # A key may have dots itself.
        keys = sorted((key for key in tree if f"{path}.".startswith(f"{key}.")), key=lambda key: -len(str(key)))
    elif isinstance(tree, (list, tuple)):
        keys = [i for i in range(len(tree)) if f"{path}.".startswith(f"{i}.")]
    else:
        return None
    for key in keys:
        found = _find(tree[key], path[len(str(key)) + 1 :])
        if found is not None:
            return (key, *found[0]), found[1]
    return None


def _with(tree: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """Return containers with a value at a place in them; those on the way are copied, the others stay the same."""
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(tree, tuple):
        items = list(tree)
        items[first] = _with(items[first], rest, value)
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    changed = {} if tree is None else copy.copy(tree)
    below = changed.get(first) if isinstance(changed, Mapping) else changed[first]
    changed[first] = _with(below, rest, value)
    return changed


def _without(tree: Any, keys: tuple[Any, ...]) -> Any:
    changed = copy.copy(tree)
    if len(keys) > 1:
        changed[keys[0]] = _without(changed[keys[0]], keys[1:])
    else:
        del changed[keys[0]]
    return changed


def _made(content: Content, parameter: Any) -> Any:
    """Return a new tensor as the source has it: of the parameter's strides and mesh where it has its shape."""
    torch: Any = sys.modules["torch"]
    dtype, shape, device, beside = content.value
    with torch.inference_mode(mode=False):  # what is made in that mode could not be trained with
        if beside and parameter is not None:
            if tuple(parameter.shape) == shape:
                return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            device = parameter.device
        return torch.zeros(shape, dtype=dtype, device=device)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _moved(value: Any, device: Any) -> Any:
    """Return a value with the tensors in it copied to a device."""
    if is_tensor(value):
        return value.detach().to(device, copy=True) if hasattr(value, "detach") else value.copy()
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: _moved(part, device) for key, part in value.items()}
        return type(value)(_moved(part, device) for part in value)
    return value


def _same(first: Any, second: Any) -> bool:
    """Whether two values are equal in type and content, tensors bit by bit; NaN is equal to itself."""
    if type(first) is not type(second):
        return False
    if is_tensor(first):
        alike = first.dtype == second.dtype and first.shape == second.shape
        return bool(alike) and Held(first)[:] == Held(second)[:]
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second or (first != first and second != second))
