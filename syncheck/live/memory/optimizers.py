"""The state dict of an optimizer whose parameter groups a script has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncheck.live.memory.objects import get_attributes, list_parameters
from syncheck.live.memory.tensor_bytes import is_tensor


def read_optimizer(optimizer: Any) -> Any:
    """Return the state dict of an optimizer, without states of parameters outside of all of its groups.

    A script may take a parameter or a whole group out, to freeze it. The optimizer keeps the state, and torch's
    `state_dict()` then raises KeyError. The optimizer is not changed.
    """
    # What wraps an optimizer may have no state of its own.
    state: Any = getattr(optimizer, "state", None)
    stale = _list_stale(optimizer, state)
    if not stale:
        return optimizer.state_dict()
    # What wraps an optimizer passes its own attributes on to it: only a copy of the inner one can have another state.
    owner = _find_owner(optimizer, state)
    copy = object.__new__(type(owner))
    copy.__dict__.update(owner.__dict__)
    kept = dict(state)
    for parameter in stale:
        del kept[parameter]
    copy.__dict__["state"] = kept
    return copy.state_dict()


def _list_stale(optimizer: Any, state: Any) -> list[Any]:
    """Return the parameters with a state that are in no group."""
    if not isinstance(state, Mapping):
        return []
    grouped = set(map(id, list_parameters(optimizer)))
    # Some optimizers keep further states by name.
    return [key for key in list(state) if is_tensor(key) and id(key) not in grouped]


def _find_owner(optimizer: Any, state: Any) -> Any:
    """Return the optimizer with a state as its attribute: the argument, or the value of an attribute."""
    for candidate in (optimizer, *get_attributes(optimizer).values()):
        if getattr(candidate, "__dict__", {}).get("state") is state:
            return candidate
    return optimizer
