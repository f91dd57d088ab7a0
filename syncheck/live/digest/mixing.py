"""Constants of `lanes-128`, shared by its eager and its compiled implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

STEP_A, STEP_B = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


class Mix(NamedTuple):
    """The steps x ^= x >> shift, with a multiplication after the first and the second step."""

    shifts: tuple[int, int, int]
    factors: tuple[int, int]


MIX_A = Mix((30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
MIX_B = Mix((33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))


class Row(NamedTuple):
    """Contiguous, aligned bytes to add to the sums of a slot. first: the index of the first word."""

    tensor: Any
    first: int
    slot: int
