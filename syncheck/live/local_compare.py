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
from syncheck.layout.groups import ReplicaGroup
from syncheck.live.channel import world_size
from syncheck.live.memory import agree_on_buffers, snapshot
from syncheck.live.memory.objects import (
    class_title,
    get_transient_buffers,
    has_module,
    is_bundle,
    is_module,
    is_optimizer,
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
    persistent = not all(map(has_module, things))
    ranked: dict[int, Snapshot] = {}
    unreadable: list[Unreadable] = []
    for i, thing in enumerate(things):
        if not isinstance(thing, (str, os.PathLike)):
            ranked[i] = snapshot(
                thing, path=f"things[{i}], {class_title(thing)}", persistent=persistent, attributes=True
            )
            continue
        found = find(thing, options=replace(options, reference=None))
        snapshots = [snapshot for replicas in found.groups for _, snapshot in replicas.ranks]
        if len(snapshots) + len(found.unreadable) != 1:
            raise UsageError(
                f"{os.fspath(thing)}: {len(snapshots)} checkpoints; together with objects in memory, a path must be "
                "one file"
            )
        ranked.update((i, opened) for opened in snapshots)
        unreadable += found.unreadable
    agreed = tuple(zip(ranked, agree_on_buffers(ranked.values()), strict=True))
    groups = (ReplicaGroup("model", None, agreed, (Grouping.MEMORY(),)),) if agreed else ()
    reference.check_reference(options.reference, groups, unreadable)
    return finish(judge(Found(groups, tuple(unreadable)), options), options)


def _check_objects(things: Sequence[Any]) -> None:
    if not things:
        raise UsageError(NO_OBJECTS)
    if len(things) < 2:
        context = "in a process group of one rank" if world_size() == 1 else "outside a process group"
        raise UsageError(
            f"one object to compare, {context}; pass two or more replicas, or run in a process group of several ranks, "
            "in which the objects are this rank's replica"
        )
    if any(map(is_module, things)) and any(map(is_optimizer, things)):
        raise UsageError(
            "a module and an optimizer are not replicas of each other; outside a process group each object is one "
            "replica, so pass tuples: assert_in_sync((model, optimizer), (other_model, other_optimizer))"
        )


def check_unambiguous(things: Sequence[Any]) -> None:
    """Raise UsageError if two objects look like the same part of two replicas, for example two models.

    Across ranks, both would be parts of this rank's replica, and a difference between them would go unnoticed. A model
    and its average look the same, so only the caller can decide.
    """
    if any(map(is_module, things)) and any(map(is_optimizer, things)):
        return  # a model and an optimizer are parts of one replica
    seen: dict[Any, int] = {}
    for i, thing in enumerate(things):
        for part in thing if is_bundle(thing) else (thing,):
            for role in _find_roles(part):
                if seen.setdefault(role, i) != i:
                    first = seen[role]
                    raise UsageError(
                        f"ambiguous call in a process group: things[{first}], {class_title(things[first])}, and "
                        f"things[{i}], {class_title(thing)}, look like copies; pass across_ranks=True if all objects "
                        "are parts of this rank's replica, or across_ranks=False if each object is a replica"
                    )


def _find_roles(part: Any) -> list[Any]:
    """Return the roles of a part in a replica. Two objects with a common role may be copies of each other."""
    if is_module(part):
        parameters = [name for name, _ in part.named_parameters(remove_duplicate=False)]
        buffers = [name for name, _ in part.named_buffers(remove_duplicate=False)]
        transient = get_transient_buffers(dict(part.named_modules(remove_duplicate=False)))
        # With all buffers, without buffers, and with the persistent buffers: the state dict may accompany its module.
        ways = (
            [*parameters, *buffers],
            parameters,
            [*parameters, *(name for name in buffers if name not in transient)],
        )
        return [_make_name_role(names) for names in ways if names]
    if is_optimizer(part):
        return [("optimizer", _get_parameter_shapes(part))]
    if is_tensor(part):
        return [("tensor", describe_tensor(part).shape)]
    if isinstance(part, Mapping):
        # Parts of one replica share no key, and a state dict may accompany its module.
        return [_make_name_role(map(str, part)), *(("key", str(key)) for key in part)] if part else []
    if isinstance(part, (list, tuple)):
        return [("list", len(part))] if part else []
    # A scheduler belongs to its optimizer. Every other helper, for example a gradient scaler, occurs once per replica.
    return [
        (type(part), _get_parameter_shapes(part.optimizer) if is_optimizer(getattr(part, "optimizer", None)) else ())
    ]


def _make_name_role(names: Any) -> Any:
    return ("names", frozenset(normalize(names).values()))


def _get_parameter_shapes(optimizer: Any) -> tuple[tuple[int, ...], ...]:
    listed = [p for group in optimizer.param_groups for p in group.get("params", ())]
    return tuple(describe_tensor(p).shape for p in listed if is_tensor(p))
