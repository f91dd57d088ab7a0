"""Rebuild the nested state dict from the flat entries of a torch.distributed.checkpoint folder.

The result has the same names as in a torch.save file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, brief
from syncheck.readers.pickles.tree import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

_STATE, _GROUPS = "state.", "param_groups."


class _Branch(dict[Any, Any]):
    """A container of the saved state dict, as opposed to dicts within a pickled object."""


def rebuild(leaves: Iterable[tuple[tuple[str | int, ...], Any]], folder: str) -> Any:
    """Return the nested state dict. leaves: (keys, object) pairs; integer keys are list indexes.

    Raises MalformedFile if a path of keys continues below another leaf.
    """
    root = _Branch()
    for path, leaf in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
            if not isinstance(node, _Branch):
                break
        if len(path) > MAX_DEPTH or not isinstance(node, _Branch) or path[-1] in node:
            raise MalformedFile(folder, place=".metadata", found=f"keys {brief(path)}", needed="unique keys")
        node[path[-1]] = leaf
    return _convert(root)


def _convert(node: Any) -> Any:
    """Convert branches to lists, and to state dicts of optimizers."""
    if not isinstance(node, _Branch):
        return node
    parts = {key: _convert(part) for key, part in node.items()}
    if parts and all(type(key) is int for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[i] for i in range(len(parts))]
    if any(str(key).startswith(_GROUPS) for key in parts):
        if all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in parts):
            return _unflatten(parts)
    elif isinstance(parts.get("param_groups"), list) and parts.keys() <= {"state", "param_groups"}:
        return _restore_optimizer(parts)
    return parts


def _restore_optimizer(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo changes of saving an optimizer's state dict: integer keys became strings, empty states were omitted."""
    state = parts.get("state", {})
    groups = [group for group in parts["param_groups"] if isinstance(group, dict)]
    listed = [group["params"] for group in groups if isinstance(group.get("params"), list)]
    ids = {str(key): key for keys in listed for key in keys if type(key) is int}
    if isinstance(state, dict):
        state = {ids.get(key, key) if isinstance(key, str) else key: entries for key, entries in state.items()}
    return {"state": state, "param_groups": parts["param_groups"]}


def _unflatten(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo flatten_optimizer_state_dict=True: keys such as state.fc.weight.exp_avg and param_groups.fc.weight.lr.

    Settings are stored per parameter; parameters with equal settings form a group.
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in parts.items():
        entries, start = (state, _STATE) if key.startswith(_STATE) else (settings, _GROUPS)
        parameter, _, entry = key.removeprefix(start).rpartition(".")
        entries.setdefault(parameter, {})[entry] = value
    groups: dict[Hashable, dict[str, Any]] = {}
    for parameter, found in settings.items():
        settings_key = tuple((name, _make_comparable(value, parameter)) for name, value in sorted(found.items()))
        group = groups.setdefault(settings_key, {**found, "params": []})
        group["params"].append(parameter)
    return {"state": state, "param_groups": list(groups.values())}


def _make_comparable(value: Any, parameter: str) -> Hashable:
    """Return a key for comparing settings; a setting that is not a plain value belongs to this parameter only."""
    if isinstance(value, (tuple, list)) and all(isinstance(part, (int, float, str)) for part in value):
        return tuple(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else (parameter, id(value))
