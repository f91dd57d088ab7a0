"""The selection of a comparison: which tensors to compare, and how."""

from __future__ import annotations

from dataclasses import field

from syncheck.frozen import record
from syncheck.tensors import kinds
from syncheck.tensors.tolerance import Tolerances

# The kinds of tensors that each value of `Options.only` selects.
ONLY = {
    "params": kinds.PARAMETERS,
    "buffers": kinds.BUFFERS,
    "optimizer": kinds.OPTIMIZER,
    "rng": frozenset({"rng"}),
}


@record
class Selection:
    """The tensors to compare, and how.

    only: kinds; empty for all kinds except RNG states. include, exclude: globs of whole tensor names. buffers: globs of
    names that are buffers. tolerance: for floats. reference: the rank to measure differences against, instead of the
    majority. jobs: number of threads, None for the default. quick: compare stored checksums only. histograms: add them
    to the tensors that differ most. rng: also compare RNG states.
    """

    only: frozenset[str] = frozenset()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    tolerance: Tolerances = field(default_factory=Tolerances)
    reference: int | None = None
    jobs: int | None = None
    quick: bool = False
    histograms: bool = False
    rng: bool = False
