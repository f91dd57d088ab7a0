"""From the flat entries of a torch.distributed.checkpoint folder back to the nested state dict that was saved.

What torch.save would have written is then named by the same rules as in its files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, brief
from syncheck.readers.pickles.tree import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

_STATE, _GROUPS = "state.", "param_groups."


class _Branch(dict[Any, Any]):
    """A container that was saved; apart from dicts that a pickle holds."""


def rebuild(leaves: Iterable[tuple[tuple[str | int, ...], Any]], folder: str) -> Any:
    """Return the nested state dict. leaves: what was saved, each under its keys; integers are places in a list.

    Raises MalformedFile where the keys of one lead through another.
    """
    root = _Branch()
    for path, leaf in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
            if not isinstance(node, _Branch):
                break
        if len(path) > MAX_DEPTH or not isinstance(node, _Branch) or path[-1] in node:
            raise MalformedFile(folder, place=".metadata", found=f"keys {brief(path)}", needed="keys of their own")
        node[path[-1]] = leaf
    return _finished(root)


def _finished(node: Any) -> Any:
    """Turn branches into what they were: lists, and the state dicts of optimizers."""
    if not isinstance(node, _Branch):
        return node
    parts = {key: _finished(part) for key, part in node.items()}
    if parts and all(type(key) is int for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[i] for i in range(len(parts))]
    if any(str(key).startswith(_GROUPS) for key in parts):
        if all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in parts):
            return _unflattened(parts)
    elif isinstance(parts.get("param_groups"), list) and parts.keys() <= {"state", "param_groups"}:
        return _optimizer(parts)
    return parts


def _optimizer(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo what saving does to an optimizer's state dict: keys become texts, and an empty state is left out."""
    state = parts.get("state", {})
    groups = [group for group in parts["param_groups"] if isinstance(group, dict)]
    listed = [group["params"] for group in groups if isinstance(group.get("params"), list)]
    ids = {str(key): key for keys in listed for key in keys if type(key) is int}
    if isinstance(state, dict):
        state = {ids.get(key, key) if isinstance(key, str) else key: entries for key, entries in state.items()}
    return {"state": state, "param_groups": parts["param_groups"]}


def _unflattened(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo flatten_optimizer_state_dict=True: keys such as state.fc.weight.exp_avg and param_groups.fc.weight.lr.

    Each parameter has settings of its own there; those with the same ones make up a group.
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in parts.items():
        of, start = (state, _STATE) if key.startswith(_STATE) else (settings, _GROUPS)
        parameter, _, entry = key.removeprefix(start).rpartition(".")
        of.setdefault(parameter, {})[entry] = value
    groups: dict[Hashable, dict[str, Any]] = {}
    for parameter, found in settings.items():
        alike = tuple((name, _comparable(value, parameter)) for name, value in sorted(found.items()))
        group = groups.setdefault(alike, {**found, "params": []})
        group["params"].append(parameter)
    return {"state": state, "param_groups": list(groups.values())}


def _comparable(value: Any, parameter: str) -> Hashable:
    """Return what tells one setting from another; one that is no plain value is the parameter's own."""
    if isinstance(value, (tuple, list)) and all(isinstance(part, (int, float, str)) for part in value):
        return tuple(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else (parameter, id(value))
