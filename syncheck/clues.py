"""Records of a second look at what differs: what points to a cause. Part of `records`; read from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Trend = Literal["constant", "shrinking", "growing", "varying"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a second look at a tensor that differs tells; empty or None is what was not looked at, or does not apply.

    Norms and the cosine are over the tensor's first 2^20 elements, without those that are not finite everywhere.
    """

    damaged: tuple[int, ...] = ()
    """Ranks whose bytes do not match the CRC-32 that torch.save stored for them."""
    values: Mapping[int, int | float | str] = field(default_factory=dict)
    """Of a tensor of which one element differs: that element by rank; NaN and infinity as text."""
    flipped_bits: int | None = None
    """Of such a tensor: in how many bits the element differs between the two replicas where these are most."""
    norms: Mapping[int, float] = field(default_factory=dict)
    """Euclidean norm by rank, of parameters and of the optimizer's first moments."""
    cosine: float | None = None
    """Smallest cosine between a majority's replica (the first, where there is none) and another one."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """How the tensors of a finding stood at one step."""

    step: int
    differing: int
    """How many of them were out of sync."""
    max_abs: float | None
    """Their largest gap, 0.0 where all agree; None where no number tells it."""


@dataclass(frozen=True, slots=True)
class History:
    """How a finding came about over the steps of its run that were compared.

    since: the first step at which one of its tensors was out of sync; agreed: the last one before, None where that is
    the first step compared. tensors: those that were out of sync at that step; ranks: the suspects then.
    """

    points: tuple[HistoryPoint, ...]
    since: int
    agreed: int | None
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    trend: Trend | None = None
    """What the gaps did from the first to the last step at which the same tensors differed; None with one such step."""
