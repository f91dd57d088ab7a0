"""Are the things of a call parts of one replica, or replicas of one another? In a process group both make sense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.memory.held import is_tensor, place_of
from syncheck.live.memory.modules import transient_buffers
from syncheck.live.memory.things import is_bundle, is_module, is_optimizer, title_of
from syncheck.names import normalize

if TYPE_CHECKING:
    from collections.abc import Sequence


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
            for role in _roles(part):
                if seen.setdefault(role, i) != i:
                    first = seen[role]
                    raise UsageError(
                        f"things[{first}], {title_of(things[first])}, and things[{i}], {title_of(thing)}, look like "
                        "two of one kind, and this is a process group: say across_ranks=True where all things together "
                        "are this rank's replica, to be compared with the other ranks', or across_ranks=False where "
                        "each thing is a replica, to be compared within this process"
                    )


def _roles(part: Any) -> list[Any]:
    """Return what two things have in common if one may stand for the other; nothing where that cannot be told."""
    if is_module(part):
        parameters = [name for name, _ in part.named_parameters(remove_duplicate=False)]
        buffers = [name for name, _ in part.named_buffers(remove_duplicate=False)]
        transient = transient_buffers(dict(part.named_modules(remove_duplicate=False)))
        # With all buffers, without any, and with those that a state dict has: such a one may stand beside its module.
        ways = (
            [*parameters, *buffers],
            parameters,
            [*parameters, *(name for name in buffers if name not in transient)],
        )
        return [_names(names) for names in ways if names]
    if is_optimizer(part):
        return [("optimizer", _shapes(part))]
    if is_tensor(part):
        return [("tensor", place_of(part).shape)]
    if isinstance(part, Mapping):
        # Parts of one replica share no key; a state dict may also stand beside its module.
        return [_names(map(str, part)), *(("key", str(key)) for key in part)] if part else []
    if isinstance(part, (list, tuple)):
        return [("list", len(part))] if part else []
    # A scheduler belongs to its optimizer; of other helpers, such as gradient scalers, a replica has one.
    return [(type(part), _shapes(part.optimizer) if is_optimizer(getattr(part, "optimizer", None)) else ())]


def _names(names: Any) -> Any:
    return ("names", frozenset(normalize(names).values()))


def _shapes(optimizer: Any) -> tuple[tuple[int, ...], ...]:
    listed = [p for group in optimizer.param_groups for p in group.get("params", ())]
    return tuple(place_of(p).shape for p in listed if is_tensor(p))
