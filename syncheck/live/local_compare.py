"""Compare objects within one process: modules, state dicts, tuples of them, and files.

Also decides whether a call in a process group is ambiguous: its objects may be one replica or several.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.api import Found, Options, find, finish, judge
from syncheck.comparison import reference
from syncheck.errors import UsageError
from syncheck.layout.groups import CheckpointGroup
from syncheck.live.channel import world_size
from syncheck.live.memory import agree_on_buffers, snapshot
from syncheck.live.memory.objects import (
    class_title,
    get_transient_buffers,
    has_module,
    is_bundle,
    is_module,
    is_optimizer,
    list_parameters,
)
from syncheck.live.memory.tensor_bytes import describe_tensor, is_tensor
from syncheck.messages import Grouping
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Report, Unreadable
    from syncheck.snapshots import Snapshot

NO_OBJECTS = "nothing to compare; pass paths of checkpoints, or modules, state dicts and other objects with tensors"


def compare_objects(things: Sequence[Any], options: Options) -> Report:
    """Compare objects of this process. Their ranks are their positions.

    things: replicas, as in `memory.snapshot`, or paths of one file each. An unreadable file does not raise: the report
    lists it and is never "in sync". Raises UsageError if there are fewer than two objects, for a module and an
    optimizer as separate objects, and for a path of several files.
    """
    _check_objects(things)
    # State dicts and files lack non-persistent buffers.
    persistent = not all(has_module(value) for value in things)
    ranked: dict[int, Snapshot] = {}
    unreadable: list[Unreadable] = []
    for position, value in enumerate(things):
        if isinstance(value, (str, os.PathLike)):
            snapshots, unreadable_files = _open_file(value, options)
            ranked.update((position, opened) for opened in snapshots)
            unreadable += unreadable_files
        else:
            title = f"things[{position}], {class_title(value)}"
            ranked[position] = snapshot(
                value,
                path=title,
                persistent=persistent,
                attributes=True,
            )

    groups: tuple[CheckpointGroup, ...] = ()
    if ranked:
        agreed = zip(ranked, agree_on_buffers(ranked.values()), strict=True)
        groups = (
            CheckpointGroup(
                run="model",
                step=None,
                ranks=tuple(agreed),
                grouping=(Grouping.MEMORY(),),
            ),
        )

    reference.check_reference(options.reference, groups, unreadable)
    return finish(judge(Found(groups, tuple(unreadable)), options), options)


def _open_file(path: Any, options: Options) -> tuple[list[Snapshot], Sequence[Unreadable]]:
    """Return the checkpoint of a path, or the reason why it cannot be read. Raises UsageError for several files."""
    # The reference may be another one of the objects, so it is checked after all of them.
    opened = find(path, options=replace(options, reference=None))
    snapshots: list[Snapshot] = []
    for group in opened.groups:
        snapshots += [snapshot for _, snapshot in group.ranks]

    if len(snapshots) + len(opened.unreadable) != 1:
        raise UsageError(
            f"{os.fspath(path)}: {len(snapshots)} checkpoints; together with objects in memory, a path must be one file"
        )

    return snapshots, opened.unreadable


def _check_objects(things: Sequence[Any]) -> None:
    if not things:
        raise UsageError(NO_OBJECTS)

    if len(things) < 2:
        context = "in a process group of one rank" if world_size() == 1 else "outside a process group"
        raise UsageError(
            f"one object to compare, {context}; pass two or more replicas, or run in a process group of several ranks, "
            "in which the objects are this rank's replica"
        )

    if _are_parts_of_one_replica(things):
        raise UsageError(
            "a module and an optimizer are not replicas of each other; outside a process group each object is one "
            "replica, so pass tuples: assert_in_sync((model, optimizer), (other_model, other_optimizer))"
        )


def _are_parts_of_one_replica(values: Sequence[Any]) -> bool:
    """Whether objects are a model and its optimizer."""
    has_module_part = any(is_module(value) for value in values)
    return has_module_part and any(is_optimizer(value) for value in values)


def check_unambiguous(things: Sequence[Any]) -> None:
    """Raise UsageError if two objects look like the same part of two replicas, for example two models.

    Across ranks, both would be parts of this rank's replica, and a difference between them would go unnoticed. A model
    and its average look the same, so only the caller can decide.
    """
    if _are_parts_of_one_replica(things):
        return

    # The position of the first object with each role.
    positions: dict[Any, int] = {}
    for position, value in enumerate(things):
        for role in _list_roles_of_object(value):
            first = positions.setdefault(role, position)
            if first != position:
                raise UsageError(
                    f"ambiguous call in a process group: things[{first}], {class_title(things[first])}, and "
                    f"things[{position}], {class_title(value)}, look like copies; pass across_ranks=True if all "
                    "objects are parts of this rank's replica, or across_ranks=False if each object is a replica"
                )


def _list_roles_of_object(value: Any) -> list[Any]:
    """Return the roles of an object, or of the parts of a bundle."""
    roles: list[Any] = []
    parts = value if is_bundle(value) else [value]
    for part in parts:
        roles += _list_roles(part)

    return roles


def _list_roles(part: Any) -> list[Any]:
    """Return the roles of a part in a replica. Two objects with a common role may be copies of each other."""
    if is_module(part):
        return _list_roles_of_module(part)

    if is_optimizer(part):
        return [("optimizer", _get_parameter_shapes(part))]

    if is_tensor(part):
        return [("tensor", describe_tensor(part).shape)]

    if isinstance(part, (Mapping, list, tuple)):
        return _list_roles_of_container(part)

    # A scheduler belongs to its optimizer. Every other helper, for example a gradient scaler, occurs once per replica.
    optimizer = getattr(part, "optimizer", None)
    shapes = _get_parameter_shapes(optimizer) if is_optimizer(optimizer) else ()
    return [(type(part), shapes)]


def _list_roles_of_module(module: Any) -> list[Any]:
    """Return the names of a module with all buffers, without buffers, and with the persistent buffers.

    The state dict of the module may accompany it.
    """
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    transient = get_transient_buffers(dict(module.named_modules(remove_duplicate=False)))
    persistent_buffers = [name for name in buffers if name not in transient]
    roles = []
    for buffers_in_role in (buffers, [], persistent_buffers):
        names = [*parameters, *buffers_in_role]
        if names:
            roles.append(_make_name_role(names))

    return roles


def _list_roles_of_container(container: Any) -> list[Any]:
    # An empty container is no copy of anything.
    if not container:
        return []

    if not isinstance(container, Mapping):
        return [("list", len(container))]

    # Parts of one replica share no key, and a state dict may accompany its module.
    names = [str(key) for key in container]
    return [_make_name_role(names), *(("key", name) for name in names)]


def _make_name_role(names: Sequence[str]) -> Any:
    return ("names", frozenset(normalize(names).values()))


def _get_parameter_shapes(optimizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an optimizer's parameters; parameters of some optimizers are no tensors."""
    parameters = list_parameters(optimizer)
    return tuple(describe_tensor(parameter).shape for parameter in parameters if is_tensor(parameter))
