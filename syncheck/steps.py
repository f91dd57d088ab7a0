"""Records about the steps of a run: when a difference began, and since when the model is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# This module imports only the standard library, because `records` imports it.
Trend = Literal["constant", "shrinking", "growing", "varying"]


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The tensors of a finding at one step."""

    step: int
    differing: int
    """Number of tensors out of sync."""
    max_abs: float | None
    """Their largest difference, 0.0 if all agree; None if it is unknown."""
    others_differ: bool = False
    """Whether tensors or values of other findings were out of sync at this step."""


@dataclass(frozen=True, slots=True)
class History:
    """The history of a finding over the compared steps of its run."""

    points: tuple[HistoryPoint, ...]
    """One per compared step, in the order of steps."""
    since: int
    """The first step with a tensor out of sync."""
    agreed: int | None
    """The compared step before `since`; None if `since` is the first compared step."""
    tensors: tuple[str, ...]
    """The tensors out of sync at step `since`."""
    ranks: tuple[int, ...]
    """The suspects at step `since`."""
    trend: Trend | None = None
    """The trend from the first to the last step with differences; None if only a single step differs."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The tensors that hold NaN or infinity on all replicas."""

    # Buffers count with NaN only, because masks legitimately hold infinity.
    names: tuple[str, ...]
    count: int
    """Number of these tensors; events of a monitor list only the first names."""
    since: int | None = None
    """The first compared step with such a tensor; None if only one step was compared."""
    finite: int | None = None
    """The compared step before it; None if there is none."""
    first: tuple[str, ...] = ()
    """The tensors at step `since`."""
