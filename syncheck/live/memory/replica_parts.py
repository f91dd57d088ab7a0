"""Store the parts of a replica, such as a model and its optimizer, under the keys that trainers use in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from syncheck.live.memory.objects import add_dot, has_state, is_bundle, is_data, is_module, is_optimizer
from syncheck.readers.pickles.tree import is_optimizer as is_optimizer_state
from syncheck.tensors.averages import is_averaging_class
from syncheck.tensors.names import MODEL_CONTAINERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The key of an averaged copy beside the model, as in files.
_AVERAGE = "ema"


def get_prefix(name: str) -> str:
    """Return the prefix of the names in a module: its own name and a dot, but no name for a container like `model`.

    `readers.pickles.tree` does the same.
    """
    head, _, last = name.rpartition(".")
    return add_dot(head if last in MODEL_CONTAINERS else name)


def name_parts(parts: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return the modules, optimizers and other stateful objects of a replica with their names in `Tree`.

    'model', 'optimizer', 'scaler' and so on; 'optimizer.0' and 'optimizer.1' for two of a kind.
    """
    merged = merge_parts(parts)
    if not isinstance(merged, Mapping):
        return []

    named_parts: list[tuple[str, Any]] = []
    for key, value in merged.items():
        if isinstance(value, list):
            named_parts += [(f"{key}.{number}", part) for number, part in enumerate(value)]
        else:
            named_parts.append((key, value))

    return [(name, part) for name, part in named_parts if has_state(part)]


def merge_parts(parts: tuple[Any, ...]) -> Any:
    """Store the parts of a replica under the keys that trainers use. A single part remains as it is."""
    if len(parts) == 1 and not is_bundle(parts[0]):
        (part,) = parts
        return part if is_data(part) else {_default_key(part): part}

    all_parts: list[Any] = []
    for part in parts:
        all_parts += part if is_bundle(part) else [part]

    averages = _find_averages(all_parts)
    by_key: dict[str, list[Any]] = {}
    data: dict[str, Any] = {}
    for number, part in enumerate(all_parts):
        # With other keys beside it, the whole tree would look like the state of an optimizer.
        if is_data(part) and not is_optimizer_state(part):
            data[f"things.{number}"] = part
        else:
            key = _AVERAGE if id(part) in averages else _default_key(part)
            by_key.setdefault(key, []).append(part)

    # Only several parts of a kind are numbered.
    tree: dict[str, Any] = {}
    for key, objects in by_key.items():
        tree[key] = objects[0] if len(objects) == 1 else objects

    for key, part in data.items():
        if isinstance(part, Mapping) and part.keys().isdisjoint(tree):
            tree.update(part)
        else:
            tree[key] = part

    return tree


def _find_averages(parts: Sequence[Any]) -> frozenset[int]:
    """Return the ids of the objects that average a model, if the model is another one of the parts."""
    averages: set[int] = set()
    has_model = False
    for part in parts:
        if not is_averaging_class(type(part)):
            has_model = has_model or _holds_model(part)
        elif not is_optimizer(part):
            averages.add(id(part))

    # An average alone is the model.
    return frozenset(averages) if has_model else frozenset()


def _holds_model(part: Any) -> bool:
    return is_module(part) or (isinstance(part, Mapping) and not is_optimizer_state(part))


def _default_key(part: Any) -> str:
    """Return the key that trainers use for an object of this kind, by default its class name."""
    for key, is_of_kind in _KEYS.items():
        if is_of_kind(part):
            return key

    return type(part).__name__


def _is_any_optimizer(part: Any) -> bool:
    return is_optimizer(part) or is_optimizer_state(part)


def _is_scaler(part: Any) -> bool:
    # By name, because several packages have a GradScaler of their own.
    return type(part).__name__.endswith("Scaler")


def _is_scheduler(part: Any) -> bool:
    return hasattr(part, "get_last_lr")


# The keys of checkpoints, and which objects they have.
_KEYS: dict[str, Callable[[Any], bool]] = {
    "model": is_module,
    "optimizer": _is_any_optimizer,
    "scaler": _is_scaler,
    "lr_scheduler": _is_scheduler,
}
