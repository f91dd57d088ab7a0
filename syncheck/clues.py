"""Small records: of a second look at what differs, and of what stands beside tensors. Import them from `records`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

# Elements of a tensor, from its first, that norms and the cosine are of.
MEASURED = 1 << 18

# The decades of a histogram: the powers of ten where they begin.
DECADES = range(-12, 6)
Trend = Literal["constant", "shrinking", "growing", "varying"]

# The running averages of the gradients in torch's optimizers, and in those that follow its names.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a second look at a tensor that differs tells; empty or None is what was not looked at, or does not apply.

    Norms and the cosine are over the tensor's first `MEASURED` elements, without those that are not finite everywhere.
    """

    damaged: tuple[int, ...] = ()
    """Ranks whose bytes, or others of the same storage, do not match the CRC-32 that torch.save stored for them."""
    first: int | None = None
    """Of a tensor in which adjacent elements differ, and no others: the first of them, counted in C order."""
    values: Mapping[int, int | float | str] = field(default_factory=dict)
    """Of a tensor of which one element differs: that element by rank; NaN and infinity as text."""
    flipped_bits: int | None = None
    """Of such a tensor: in how many bits the element differs between the two replicas where these are most."""
    bit: int | None = None
    """If that is one: which, 0 for the lowest of the element's bits."""
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


@dataclass(frozen=True, slots=True)
class FreeRunning:
    """Whether running statistics lag by one update or run freely, by their gaps at several steps of a run.

    The gaps are those between the first rank and each other one. misfit_free, misfit_lag: how far they are from what
    statistics would do that run freely, and from what a lag does, in squares of their usual scatter; None where the
    steps are too few, too late or too far apart to tell the two.
    """

    steps: tuple[int, ...]
    """That were looked at."""
    cosine: float
    """Mean cosine between the gaps at neighbouring steps."""
    growth: float
    """Median ratio of the gaps at the last step to those at the first."""
    misfit_free: float | None = None
    misfit_lag: float | None = None
    below: int = 0
    """Running variances that are lower than they can be if they were copied from rank 0 since an earlier step."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many elements of a tensor are how far apart, of those looked at: of a very large one evenly spread parts.

    An element counts with its gap against a majority or a reference. Without one, or with a tolerance and no reference,
    it counts with the gap between the two farthest replicas.
    """

    equal: int
    counts: tuple[int, ...]
    """First of gaps below 1e-12, then by decade (from 1e-12 up to 1e-11, ..., from 1e5 up to 1e6), last of the rest."""
    not_finite: int
    """Elements that differ and are NaN or infinite on some replica."""

    @property
    def elements(self) -> int:
        """How many were looked at."""
        return self.equal + sum(self.counts) + self.not_finite


@dataclass(frozen=True, slots=True)
class Tie:
    """Names that are one tensor, sharing its memory, on some ranks, and several tensors on the others."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those on which they are one."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Tensors that the ranks hold in parts, all laid out alike."""

    kind: str
    """`DTensor`, `model parallel`, or `optimizer` where the metadata says that each rank has a part of its state."""
    layout: str
    """In words."""
    tensors: int
    compared: int
    """Those of which at least two ranks hold the same part."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The sets of ranks that were compared."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A finding that the baseline accepts, or a part of it, which is not found any more."""

    code: str
    names: tuple[str, ...]
    """Tensors and values."""
