"""The containers of values of a replica: how each is read, and how it takes changed values in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.live.memory.modules import EXTRA_STATE, has_extra_state
from syncheck.live.memory.optimizers import own_part
from syncheck.live.memory.things import is_module, is_optimizer
from syncheck.live.memory.tree import Tree, named_parts, prefix_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Root:
    """A container of values. read: gives it; write: takes the changed one. parameter: the one whose state it is.

    whole: it is changed as a whole only.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    parameter: Any = None
    whole: bool = False


def roots(parts: tuple[Any, ...]) -> Iterator[tuple[str, Root]]:
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
            yield name, Root(part.state_dict, part.load_state_dict)


def _extra_states(name: str, module: Any) -> Iterator[tuple[str, Root]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        if has_extra_state(owner):
            at = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
            yield f"{prefix_of(name)}{at}", Root(owner.get_extra_state, owner.set_extra_state, whole=True)


def _of_optimizer(at: str, optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Root]]:
    """Give the parameter groups, and the states of the parameters whose names are known."""
    own, _ = own_part(optimizer)
    known = all(id(p) in names for group in own.param_groups for p in group["params"])
    for i, group in enumerate(own.param_groups):
        # ZeRO's optimizer has groups of its own, and copies their values to those of the one within at each step.
        yield f"{at}.param_groups.{i}", _in_place(group, optimizer.param_groups[i])
        called = group.get("param_names") or ([names[id(p)] for p in group["params"]] if known else [])
        if isinstance(getattr(own, "state", None), Mapping):
            for parameter, name in zip(group["params"], called, strict=False):
                yield f"{at}.{name}", _state(own.state, parameter)


def _in_place(*groups: dict[str, Any]) -> Root:
    """Return a parameter group; schedulers hold on to it, so that it has to stay the same object.

    groups: the one that is read, and those that are to have the same values, each with parameters of its own.
    """

    def write(tree: Mapping[str, Any]) -> None:
        for group in groups:
            members: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
            for key in group.keys() - tree.keys() - members.keys():
                del group[key]
            group.update({**tree, **members})

    return Root(lambda: groups[0], write)


def _state(states: Any, parameter: Any) -> Root:
    def write(tree: Mapping[Any, Any]) -> None:
        if tree:
            states[parameter] = tree
        else:  # so that the optimizer begins anew with it, as on the source
            states.pop(parameter, None)

    return Root(lambda: states.get(parameter, {}), write, parameter)
