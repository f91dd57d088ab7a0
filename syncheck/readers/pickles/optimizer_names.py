"""Whose state is it? From an optimizer's integer ids to the names of its parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from syncheck.kinds import kinds_of
from syncheck.readers.pickles.stand_ins import TensorPlace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Metadata

# Where Lightning keeps what callbacks and users give it: a tensor in there is no parameter.
_BESIDE = ("callbacks.", "hyper_parameters.", "datamodule_hyper_parameters.", "custom_checkpoint.")
_STATE = re.compile(r"optimizer\.(\d+)\.([^.]+)")


def parameter_names(
    state: Mapping[str, Any],
    models: Mapping[str, tuple[int, ...]],
    metadata: Metadata | None,
    ordered: Sequence[str],
) -> dict[Any, str]:
    """Map the ids of an optimizer's state dict to parameter names; ids that cannot be resolved are left out.

    models: shapes of the checkpoint's other tensors by name. ordered: of these, the parameters, `in_order`.
    Sources, best first: names used as keys already, `param_names` of newer torch, the metadata block, and the order of
    the parameters, provided that there are as many and every state has its parameter's shape.
    """
    ids = [key for group in state["param_groups"] for key in _listed(group, "params")]
    if not ids or all(isinstance(key, str) for key in ids) or not all(isinstance(key, (int, str)) for key in ids):
        return {}
    stored = [name for group in state["param_groups"] for name in _listed(group, "param_names")]
    if len(stored) == len(ids) and all(isinstance(name, str) for name in stored):
        return dict(zip(ids, stored, strict=True))
    if metadata is not None and len(metadata.optimizer_parameters) == len(ids) and all(metadata.optimizer_parameters):
        return dict(zip(ids, metadata.optimizer_parameters, strict=True))
    by_id = dict(zip(ids, ordered, strict=False)) if len(ids) == len(ordered) else {}
    fits = all(_fits(state["state"].get(key), models[name]) for key, name in by_id.items())
    return by_id if fits else {}


def in_order(models: Mapping[str, tuple[int, ...]], metadata: Metadata | None) -> list[str]:
    """List a model's parameters. models: shapes of all tensors by name, in the order of the state dict."""
    kinds = kinds_of(models, metadata).by_name
    return [name for name, kind in kinds.items() if kind == "parameter" and not name.startswith(_BESIDE)]


def named_by_order(shapes: Mapping[str, tuple[int, ...]], groups: int) -> dict[str, str]:
    """Map `optimizer.<id>.<state>` to names with the parameter's, of an optimizer that was saved in its own file.

    shapes: of all tensors by name, those of the model in the order of its state dict. groups: of the optimizer; with
    several, the ids are not in the order of the model. Returns nothing where ids and parameters do not fit.
    """
    states = {name: match for name in shapes if (match := _STATE.fullmatch(name))}
    ordered = in_order({name: shape for name, shape in shapes.items() if name not in states}, None)
    if groups != 1 or {int(match[1]) for match in states.values()} != set(range(len(ordered))):
        return {}
    by_name = {name: ordered[int(match[1])] for name, match in states.items()}
    if any(shapes[name] not in (shapes[parameter], ()) for name, parameter in by_name.items()):
        return {}
    return {name: f"optimizer.{by_name[name]}.{match[2]}" for name, match in states.items()}


def _listed(group: Any, key: str) -> list[Any]:
    value = group.get(key) if isinstance(group, dict) else None
    return list(value) if isinstance(value, (list, tuple)) else []


def _fits(entries: Any, shape: tuple[int, ...]) -> bool:
    """Whether the states of one parameter have its shape; 0-d counters fit any."""
    places = (
        [value for value in entries.values() if isinstance(value, TensorPlace)] if isinstance(entries, dict) else []
    )
    return all(place.shape in (shape, ()) for place in places)
