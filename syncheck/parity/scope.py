"""What a check has compared of the step after the gradients, and which limits of clipping had no effect, as notes."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.messages import Compared, Note
from syncheck.parity.case import ParityCase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.messages import Message
    from syncheck.parity.step import Step


def has_step(case: ParityCase) -> bool:
    """Whether a case clips or updates."""
    return type(case).finish is not ParityCase.finish


def list_scope(case: ParityCase, steps: Mapping[int, Step]) -> list[Message]:
    """Return one note on everything that was compared, then one for each part of the step that was not, and why.

    steps: of all ranks; empty if gradients are wrong before them, or without `finish`.
    """
    compared = [Compared.GRADIENTS()]
    notes: list[Message] = []
    if not has_step(case):
        notes.append(Note.PARITY_NO_FINISH())
    elif not steps:
        notes.append(Note.PARITY_NO_STEP())
    else:
        for parts, omissions in (_describe_norm(steps), _describe_clipping(case, steps), _describe_update(steps)):
            compared += parts
            notes += omissions
    return [Note.PARITY_COMPARED(parts=compared), *notes]


def _list_ranks_without(steps: Mapping[int, Step], measurement: Callable[[Step], float | None]) -> tuple[int, ...]:
    """Return the ranks that lack a measurement."""
    ranks = []
    for rank, step in steps.items():
        if measurement(step) is None:
            ranks.append(rank)
    return tuple(ranks)


def _describe_norm(steps: Mapping[int, Step]) -> tuple[list[Message], list[Message]]:
    """Return the part that was compared, and the note if it was not, of the gradient norm."""
    silent_ranks = _list_ranks_without(steps, attrgetter("norm"))
    if silent_ranks:
        return [], [Note.PARITY_NO_NORM(ranks=silent_ranks)]
    return [Compared.NORM()], []


def _describe_clipping(case: ParityCase, steps: Mapping[int, Step]) -> tuple[list[Message], list[Message]]:
    """Return the limits of clipping that had an effect, and a note for each other limit."""
    idle_ranks = _list_ranks_without(steps, attrgetter("scale"))
    if idle_ranks:
        return [], [Note.PARITY_NO_CLIPPING(ranks=idle_ranks)]
    parts: list[Message] = []
    notes: list[Message] = []
    # All ranks have the gradient of one process, up to rounding.
    first = next(iter(steps.values()))
    if case.max_norm is not None:
        if first.true_norm > case.max_norm:
            parts.append(Compared.MAX_NORM(limit=case.max_norm))
        else:
            notes.append(Note.PARITY_SMALL_NORM(norm=first.true_norm, limit=case.max_norm))
    if case.clip_value is not None:
        if first.largest > case.clip_value:
            parts.append(Compared.CLIP_VALUE(limit=case.clip_value))
        else:
            notes.append(Note.PARITY_SMALL_ELEMENTS(largest=first.largest, limit=case.clip_value))
    # A program that clips without saying so would have been found.
    if not parts:
        parts.append(Compared.UNCLIPPED())
    return parts, notes


def _describe_update(steps: Mapping[int, Step]) -> tuple[list[Message], list[Message]]:
    """Return the part that was compared, and the note if it was not, of the parameters after the step."""
    first = next(iter(steps.values()))
    if not first.settings:
        return [], [Note.PARITY_NO_UPDATE()]
    parts: list[Message] = [Compared.UPDATE(optimizer=first.settings["optimizer"])]
    if first.compared_settings:
        return [*parts, Compared.SETTINGS(names=first.compared_settings)], []
    return parts, [Note.PARITY_NO_SETTINGS()]
