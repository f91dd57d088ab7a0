"""Map an optimizer's integer ids to the names of its parameters."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from syncheck.readers.pickles import keys
from syncheck.readers.pickles.stand_ins import TensorLocation
from syncheck.readers.untrusted import are_strings
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
_STATE = r"optimizer\.(?P<id>\d+)\.(?P<entry>[^.]+)"


def match_parameters(
    state: Mapping[str, Any], models: Mapping[str, tuple[int, ...]], ordered: Sequence[str]
) -> dict[Any, str]:
    """Map the ids of an optimizer's state dict to parameter names by the order of the parameters (see `_align`).

    models: shapes of the checkpoint's other tensors by name.
    ordered: the parameters among them, by `list_parameters`.
    Returns {} if ids and parameters do not match.
    """
    ids = list_ids(state)
    if not ids or not _are_ids(ids):
        return {}

    groups = [_as_list(group, "params") for group in state["param_groups"]]
    # If the ids match the tensors outside of `ema` and similar keys, the tensors below these keys are averages.
    without_averages = [name for name in ordered if not is_average_key(name.partition(".")[0])]
    if len(without_averages) == len(ids):
        ordered = without_averages

    # Parameters within a group are in model order, but the order of the groups is the user's.
    divisions = [groups]
    if len(ids) == len(ordered) or len(groups) == 1:
        divisions = [[ids], groups]
    for division in divisions:
        names: list[str] = []
        for part in division:
            state_shapes = [_list_state_shapes(state["state"].get(key)) for key in part]
            names += _align(state_shapes, ordered, models)
        if len(set(names)) == len(ids):
            return dict(zip(ids, names, strict=True))
    return {}


def list_ids(state: Mapping[str, Any]) -> list[Any]:
    """List the parameter ids of an optimizer's state dict, group by group."""
    return _join_groups(state, "params")


def _join_groups(state: Mapping[str, Any], key: str) -> list[Any]:
    """Join the lists under a key of all parameter groups."""
    elements: list[Any] = []
    for group in state["param_groups"]:
        elements += _as_list(group, key)
    return elements


def _are_ids(ids: Sequence[Any]) -> bool:
    return all(isinstance(key, (int, str)) for key in ids)


def find_stored_names(state: Mapping[str, Any], metadata: Metadata | None) -> dict[Any, str]:
    """Map the ids of an optimizer's state dict to names stored in the file; {} without names.

    Sources, best first: keys that are names, `param_names` of recent torch versions, and the metadata block.
    """
    ids = list_ids(state)
    if are_strings(ids):
        return {key: key for key in ids}
    if not _are_ids(ids):
        return {}

    names_in_groups = _join_groups(state, "param_names")
    described_names = () if metadata is None else metadata.optimizer_parameters
    for names in (names_in_groups, described_names):
        if len(names) == len(ids) and _are_names(names):
            return dict(zip(ids, names, strict=True))
    return {}


def _are_names(names: Sequence[Any]) -> bool:
    return are_strings(names) and "" not in names


def list_members(ids: Sequence[Any], names: Mapping[Any, str], *, ordered: bool) -> tuple[str, list[str]]:
    """Return the members of a parameter group under `params`, or without stored names, their ids under `(positions)`.

    names: from `find_stored_names`.
    ordered: whether the order of ids matters, because torch loads states by position.
    """
    if names:
        short_names = normalize(names.values())
        return "params", sorted(short_names[names[key]] for key in ids)

    positions = [keys.to_text(key) for key in ids]
    if not ordered:
        # By number, so that a rank whose ids are matched to names has the same list as a rank whose ids are not.
        positions.sort(key=_numeric_order)
    return "(positions)", positions


def _numeric_order(text: str) -> tuple[int, str]:
    return len(text), text


def list_parameters(models: Mapping[str, tuple[int, ...]], metadata: Metadata | None) -> list[str]:
    """List a model's parameters. models: shapes of all tensors by name, in state-dict order."""
    kinds = classify_tensors(models, metadata).by_name
    parameters = [name for name, kind in kinds.items() if kind == "parameter"]
    return [name for name in parameters if not name.startswith(_NOT_MODEL)]


def match_by_order(shapes: Mapping[str, tuple[int, ...]], groups: int) -> dict[str, str]:
    """Map `optimizer.<id>.<state>` to the parameter's name, if the optimizer has its own file.

    shapes: of all tensors by name, with the model's in state-dict order.
    groups: number of parameter groups; with several, ids are not in model order.
    Returns {} if ids and parameters do not match.
    """
    states: dict[str, re.Match[str]] = {}
    models: dict[str, _Shape] = {}
    shapes_by_id: dict[int, set[_Shape]] = {}
    for name, shape in shapes.items():
        match = re.fullmatch(_STATE, name)
        if match is None:
            models[name] = shape
            continue
        states[name] = match
        shapes_by_id.setdefault(int(match["id"]), set()).add(shape)

    ids = range(len(shapes_by_id))
    # Ids are consecutive numbers from 0; with gaps, states or parameters are missing.
    if groups != 1 or shapes_by_id.keys() != set(ids):
        return {}

    parameters = _align([shapes_by_id[key] for key in ids], list_parameters(models, None), shapes)
    if not parameters:
        return {}
    return {name: f"optimizer.{parameters[int(match['id'])]}.{match['entry']}" for name, match in states.items()}


def _as_list(group: Any, key: str) -> list[Any]:
    """Return the list under a key of a parameter group; [] if there is none."""
    elements = group.get(key) if isinstance(group, dict) else None
    return list(elements) if isinstance(elements, (list, tuple)) else []


def _list_state_shapes(entries: Any) -> set[tuple[int, ...]]:
    """Return the shapes of the tensors in one parameter's state."""
    values = entries.values() if isinstance(entries, dict) else ()
    return {value.full_shape for value in values if isinstance(value, TensorLocation)}


def _align(states: Sequence[_Shapes], ordered: Sequence[str], models: Mapping[str, _Shape]) -> list[str]:
    """Name the parameter of each state by shapes and order; [] if no assignment fits, or several do.

    Names without a state are buffers or frozen parameters. A module's state dict lists parameters before buffers, so
    if several assignments fit, a module's names with a state are its first ones.
    states: shapes of the tensors in each parameter's state; 0-d counters fit any parameter.
    ordered: names of candidate parameters.
    """
    if len(states) == len(ordered):
        return list(ordered) if _all_fit(states, ordered, models) else []

    single_names = [[name] for name in ordered]
    modules = [list(names) for _, names in groupby(ordered, _name_module)]
    for runs in (single_names, modules):
        first = _choose_first(states, runs, models)
        last = _choose_last(states, runs, models)
        complete = [names for names in (first, last) if len(names) == len(states)]
        # If only one direction fits, its names are still the only ones that fit completely.
        if complete and complete[0] == complete[-1]:
            return complete[0]
    return []


def _name_module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _choose_first(states: Sequence[_Shapes], runs: Sequence[list[str]], models: Mapping[str, _Shape]) -> list[str]:
    """Assign states to names in order, as many of the first names of each run as fit."""
    names: list[str] = []
    for run in runs:
        remaining_states = states[len(names) :]
        for state, name in zip(remaining_states, run, strict=False):
            if not _fits(state, models[name]):
                break
            names.append(name)
    return names


def _choose_last(states: Sequence[_Shapes], runs: Sequence[list[str]], models: Mapping[str, _Shape]) -> list[str]:
    """Assign states to names from the end: of each run, the largest number of first names that fit the last states."""
    names: list[str] = []
    for run in reversed(runs):
        remaining = len(states) - len(names)
        for start in range(max(0, remaining - len(run)), remaining):
            first_names = run[: remaining - start]
            if _all_fit(states[start:remaining], first_names, models):
                names += reversed(first_names)
                break
    return names[::-1]


def _all_fit(states: Sequence[_Shapes], names: Sequence[str], models: Mapping[str, _Shape]) -> bool:
    return all(_fits(state, models[name]) for state, name in zip(states, names, strict=True))


def _fits(shapes: _Shapes, parameter: _Shape) -> bool:
    """Whether all tensors of a state have the parameter's shape, or are counters."""
    return shapes <= {parameter, ()}
