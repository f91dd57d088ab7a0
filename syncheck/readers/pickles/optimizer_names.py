"""Map an optimizer's integer ids to the names of its parameters."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from syncheck.readers.pickles import keys
from syncheck.readers.pickles.stand_ins import TensorLocation
from syncheck.tensors.averages import is_average_key
from syncheck.tensors.kinds import classify_tensors
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.snapshots import Metadata

    _Shape = tuple[int, ...]
    _Shapes = AbstractSet[_Shape]

# Lightning's keys for callbacks and user data, whose tensors are not parameters.
_NOT_MODEL = ("callbacks.", "hyper_parameters.", "datamodule_hyper_parameters.", "custom_checkpoint.")
_STATE = re.compile(r"optimizer\.(\d+)\.([^.]+)")


def match_parameters(
    state: Mapping[str, Any], models: Mapping[str, tuple[int, ...]], ordered: Sequence[str]
) -> dict[Any, str]:
    """Map the ids of an optimizer's state dict to parameter names by the order of the parameters (see `_align`).

    models: shapes of the checkpoint's other tensors by name. ordered: the parameters among them, by `list_parameters`.
    Returns {} if ids and parameters do not match.
    """
    ids = list_ids(state)
    if not ids or not all(isinstance(key, (int, str)) for key in ids):
        return {}
    groups = [_as_list(group, "params") for group in state["param_groups"]]
    # If the ids match the tensors outside of `ema` and similar keys, the tensors below these keys are averages.
    plain = [name for name in ordered if not is_average_key(name.partition(".")[0])]
    ordered = plain if len(plain) == len(ids) else ordered
    shapes = {key: _state_shapes(state["state"].get(key)) for key in ids}
    # Parameters within a group are in model order, but the order of the groups is the user's.
    for parts in ([ids], groups) if len(ids) == len(ordered) or len(groups) == 1 else (groups,):
        names = [name for part in parts for name in _align([shapes[key] for key in part], ordered, models)]
        if len(set(names)) == len(ids):
            return dict(zip(ids, names, strict=True))
    return {}


def list_ids(state: Mapping[str, Any]) -> list[Any]:
    """List the parameter ids of an optimizer's state dict, group by group."""
    return [key for group in state["param_groups"] for key in _as_list(group, "params")]


def stored_names(state: Mapping[str, Any], metadata: Metadata | None) -> dict[Any, str]:
    """Map the ids of an optimizer's state dict to names stored in the file; {} without names.

    Sources, best first: keys that are names, `param_names` of recent torch versions, and the metadata block.
    """
    ids = list_ids(state)
    if all(isinstance(key, str) for key in ids):
        return {key: key for key in ids}
    if not all(isinstance(key, (int, str)) for key in ids):
        return {}
    stored = [name for group in state["param_groups"] for name in _as_list(group, "param_names")]
    described = () if metadata is None else metadata.optimizer_parameters
    for names in (stored, described):
        if len(names) == len(ids) and all(isinstance(name, str) and name for name in names):
            return dict(zip(ids, names, strict=True))
    return {}


def list_members(ids: Sequence[Any], known: Mapping[Any, str], *, ordered: bool) -> tuple[str, list[str]]:
    """Return the members of a parameter group under `params`, or without stored names, their ids under `(positions)`.

    known: from `stored_names`. ordered: whether the order of ids matters, because torch loads states by position.
    """
    if known:
        short = normalize(known.values())
        return "params", sorted(short[known[key]] for key in ids)
    texts = [keys.to_text(key) for key in ids]
    # By number, so that a rank whose ids are matched to names has the same list as a rank whose ids are not.
    return "(positions)", texts if ordered else sorted(texts, key=lambda text: (len(text), text))


def list_parameters(models: Mapping[str, tuple[int, ...]], metadata: Metadata | None) -> list[str]:
    """List a model's parameters. models: shapes of all tensors by name, in state-dict order."""
    kinds = classify_tensors(models, metadata).by_name
    return [name for name, kind in kinds.items() if kind == "parameter" and not name.startswith(_NOT_MODEL)]


def match_by_order(shapes: Mapping[str, tuple[int, ...]], groups: int) -> dict[str, str]:
    """Map `optimizer.<id>.<state>` to the parameter's name, if the optimizer has its own file.

    shapes: of all tensors by name, with the model's in state-dict order. groups: number of parameter groups; with
    several, ids are not in model order. Returns {} if ids and parameters do not match.
    """
    states = {name: match for name in shapes if (match := _STATE.fullmatch(name))}
    ordered = list_parameters({name: shape for name, shape in shapes.items() if name not in states}, None)
    by_id: dict[int, set[tuple[int, ...]]] = {}
    for name, match in states.items():
        by_id.setdefault(int(match[1]), set()).add(shapes[name])
    if groups != 1 or by_id.keys() != set(range(len(by_id))):
        return {}
    names = _align([by_id[key] for key in range(len(by_id))], ordered, shapes)
    return {name: f"optimizer.{names[int(match[1])]}.{match[2]}" for name, match in states.items() if names}


def _as_list(group: Any, key: str) -> list[Any]:
    value = group.get(key) if isinstance(group, dict) else None
    return list(value) if isinstance(value, (list, tuple)) else []


def _state_shapes(entries: Any) -> set[tuple[int, ...]]:
    """Return the shapes of the tensors in one parameter's state."""
    values = entries.values() if isinstance(entries, dict) else ()
    return {value.full_shape for value in values if isinstance(value, TensorLocation)}


def _align(states: Sequence[_Shapes], ordered: Sequence[str], models: Mapping[str, _Shape]) -> list[str]:
    """Name the parameter of each state by shapes and order; [] if no assignment fits, or several do.

    states: shapes of the tensors in each parameter's state; 0-d counters fit any parameter. ordered: names of candidate
    parameters. Names without a state are buffers or frozen parameters. A module's state dict lists parameters before
    buffers, so if several assignments fit, a module's names with a state are its first ones.
    """
    if len(states) == len(ordered):
        return list(ordered) if all(map(_fits, states, (models[name] for name in ordered))) else []
    modules = [list(names) for _, names in groupby(ordered, lambda name: name.rpartition(".")[0])]
    for runs in ([[name] for name in ordered], modules):
        both = (_choose_first(states, runs, models), _choose_last(states, runs, models))
        found = [names for names in both if len(names) == len(states)]
        if found and found[0] == found[-1]:
            return found[0]
    return []


def _choose_first(states: Sequence[_Shapes], runs: Sequence[list[str]], models: Mapping[str, _Shape]) -> list[str]:
    """Assign states to names in order, as many of the first names of each run as fit."""
    names: list[str] = []
    for run in runs:
        fits = [_fits(of, models[name]) for of, name in zip(states[len(names) :], run, strict=False)]
        names += run[: [*fits, False].index(False)]
    return names


def _choose_last(states: Sequence[_Shapes], runs: Sequence[list[str]], models: Mapping[str, _Shape]) -> list[str]:
    """Assign states to names from the end."""
    names: list[str] = []
    for run in reversed(runs):
        left = len(states) - len(names)
        for start in range(max(0, left - len(run)), left):
            if all(_fits(of, models[name]) for of, name in zip(states[start:left], run, strict=False)):
                names += reversed(run[: left - start])
                break
    return names[::-1]


def _fits(shapes: _Shapes, parameter: _Shape) -> bool:
    """Whether all tensors of a state have the parameter's shape, or are counters."""
    return shapes <= {parameter, ()}
