"""What an optimizer in memory keeps: which one it is in truth, and whose states its numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.memory.held import HeldPlace
from syncheck.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def own_part(optimizer: Any) -> tuple[Any, bool]:
    """Return the optimizer that keeps this rank's states, and whether the other ranks keep those of other parameters.

    ZeroRedundancyOptimizer has another one within. Its own `state_dict()` is that of all ranks, once it was gathered.
    """
    inner = getattr(optimizer, "optim", None)
    dealt_out = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    return (inner, True) if dealt_out and hasattr(inner, "state_dict") else (optimizer, False)


def with_names(made: Any, optimizer: Any, names: Mapping[int, str], sharded: Container[int]) -> Any:
    """Return an optimizer's state dict with the names of its parameters, where the modules given have them all.

    made: the converted state dict, which is changed. names: by the id of a parameter; sharded: ids of flat shards.
    """
    if not isinstance(made, dict) or not (
        isinstance(made.get("param_groups"), list) and isinstance(made.get("state"), dict)
    ):
        return made
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    numbers = [group.get("params") for group in made["param_groups"]]
    known = all(key in names for group in groups for key in group)
    if [len(n or ()) for n in numbers] != [len(group) for group in groups]:
        return made
    for group, keys, ids in zip(made["param_groups"], groups, numbers, strict=True):
        if known and "param_names" not in group:
            group["param_names"] = [names[key] for key in keys]
        for key, number in zip(keys, ids, strict=True):
            if key in sharded:
                # Which states there are differs: a rank whose shard of the parameter is empty has none.
                made["state"][number] = {"state": HeldPlace(None, (), None, Refusal.FLAT_PARAMETER())}
    return made
