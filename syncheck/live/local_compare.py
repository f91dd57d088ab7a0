"""Compare things within one process, each a replica: modules, state dicts, bundles, and files beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.api import Found, Options, find, judge
from syncheck.comparison import reference
from syncheck.errors import UsageError
from syncheck.layout.groups import ReplicaGroup
from syncheck.live.channel import world_size
from syncheck.live.memory import agree_on_buffers, snapshot
from syncheck.live.memory.modules import get_transient_buffers
from syncheck.live.memory.tensor_bytes import describe_tensor, is_tensor
from syncheck.live.memory.type_checks import class_title, has_module, is_bundle, is_module, is_optimizer
from syncheck.messages import Grouping
from syncheck.names import normalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Report, Unreadable
    from syncheck.snapshots import Snapshot

NO_OBJECTS = "nothing given to compare; needs paths of checkpoints, or modules, state dicts and the like"


def compare_objects(things: Sequence[Any], options: Options) -> Report:
    """Compare things of this process. Ranks are their positions.

    things: each one replica: what `memory.snapshot` takes, or the path of one file. A file that cannot be read does
    not raise: it is listed, and the verdict is then never "in sync". Raises UsageError for fewer than two things, for
    a module beside an optimizer, and for a path of anything but one file.
    """
    _check_objects(things)
    # A state dict or a file cannot hold the buffers that a module does not save.
    persistent = not all(map(has_module, things))
    ranked: dict[int, Snapshot] = {}
    unreadable: list[Unreadable] = []
    for i, thing in enumerate(things):
        if not isinstance(thing, (str, os.PathLike)):
            ranked[i] = snapshot(thing, path=f"things[{i}], {class_title(thing)}", persistent=persistent)
            continue
        there = find(thing, options=replace(options, reference=None))
        opened = [snapshot for replicas in there.groups for _, snapshot in replicas.ranks]
        if len(opened) + len(there.unreadable) != 1:
            raise UsageError(
                f"{os.fspath(thing)}: {len(opened)} checkpoints; beside things in memory, a path has to be of one file"
            )
        ranked.update((i, taken) for taken in opened)
        unreadable += there.unreadable
    agreed = tuple(zip(ranked, agree_on_buffers(ranked.values()), strict=True))
    groups = (ReplicaGroup("model", None, agreed, (Grouping.MEMORY(),)),) if agreed else ()
    reference.check(options.reference, groups, unreadable)
    return judge(Found(groups, tuple(unreadable)), options)


def _check_objects(things: Sequence[Any]) -> None:
    if not things:
        raise UsageError(NO_OBJECTS)
    if len(things) < 2:
        where = "in a process group of one rank" if world_size() == 1 else "outside a process group"
        raise UsageError(
            f"one thing to compare, {where}: needs two or more, each a replica; in a process group of several ranks, "
            "the things are this rank's replica"
        )
    if any(map(is_module, things)) and any(map(is_optimizer, things)):
        raise UsageError(
            "a module and an optimizer are no replicas of one another; outside a process group each thing is one "
            "replica: give tuples, as in assert_in_sync((model, optimizer), (other_model, other_optimizer))"
        )


def check_unambiguous(things: Sequence[Any]) -> None:
    """Raise UsageError where two things look like one part of two replicas: two models of one architecture.

    Compared across ranks they would be parts of this rank's replica, and equal to the same parts elsewhere whatever
    differs between them. A model and its average are such a pair too, so only the caller can tell.
    """
    if any(map(is_module, things)) and any(map(is_optimizer, things)):
        return  # these cannot each be a replica
    seen: dict[Any, int] = {}
    for i, thing in enumerate(things):
        for part in thing if is_bundle(thing) else (thing,):
            for role in _find_roles(part):
                if seen.setdefault(role, i) != i:
                    first = seen[role]
                    raise UsageError(
                        f"things[{first}], {class_title(things[first])}, and things[{i}], {class_title(thing)}, look like "
                        "two of one kind, and this is a process group: say across_ranks=True where all things together "
                        "are this rank's replica, to be compared with the other ranks', or across_ranks=False where "
                        "each thing is a replica, to be compared within this process"
                    )


def _find_roles(part: Any) -> list[Any]:
    """Return what two things have in common if one may stand for the other; nothing where that cannot be told."""
    if is_module(part):
        parameters = [name for name, _ in part.named_parameters(remove_duplicate=False)]
        buffers = [name for name, _ in part.named_buffers(remove_duplicate=False)]
        transient = get_transient_buffers(dict(part.named_modules(remove_duplicate=False)))
        # With all buffers, without any, and with those that a state dict has: such a one may stand beside its module.
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
        # Parts of one replica share no key; a state dict may also stand beside its module.
        return [_make_name_role(map(str, part)), *(("key", str(key)) for key in part)] if part else []
    if isinstance(part, (list, tuple)):
        return [("list", len(part))] if part else []
    # A scheduler belongs to its optimizer; of other helpers, such as gradient scalers, a replica has one.
    return [
        (type(part), _get_parameter_shapes(part.optimizer) if is_optimizer(getattr(part, "optimizer", None)) else ())
    ]


def _make_name_role(names: Any) -> Any:
    return ("names", frozenset(normalize(names).values()))


def _get_parameter_shapes(optimizer: Any) -> tuple[tuple[int, ...], ...]:
    listed = [p for group in optimizer.param_groups for p in group.get("params", ())]
    return tuple(describe_tensor(p).shape for p in listed if is_tensor(p))
