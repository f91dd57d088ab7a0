"""A curve on one line of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# From low to high; what agrees, and where no number tells the gap, have marks of their own.
_BLOCKS, _ASCII = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", ".:-=+*#@"
_AGREES, _AGREES_ASCII, _UNKNOWN = "\u00b7", "_", "?"
# Columns: of one point, of the least and the widest curve.
_CELL, _LEAST, _WIDEST = 4, 8, 100
# A larger ratio than this between the gaps is drawn by their logarithms.
_DECADES = 100


@dataclass(frozen=True)
class Sparkline:
    """Gaps with what stands before and after them. A gap is None where no number tells it."""

    gaps: tuple[float | None, ...]
    before: str
    after: str

    def drawn(self, width: int, *, ascii_only: bool = False) -> str:
        """Return the line, of at most `width` columns if that leaves the curve eight."""
        scale = ", log scale" if _is_wide(self.gaps) else ""
        room = width - len(self.before) - len(self.after) - len(scale) - 4
        marks = _marks(self.gaps, max(_LEAST, min(room, _WIDEST)), ascii_only)
        return f"{self.before} |{marks}| {self.after}{scale}"


def _marks(gaps: Sequence[float | None], room: int, ascii_only: bool) -> str:
    levels, agrees = (_ASCII, _AGREES_ASCII) if ascii_only else (_BLOCKS, _AGREES)
    found = _thinned(gaps, room)
    known = [gap for gap in gaps if gap]
    low, high = min(known, default=1.0), max(known, default=1.0)

    def mark(gap: float | None) -> str:
        if not gap:
            return _UNKNOWN if gap is None else agrees
        share = gap / high
        if _is_wide(gaps):
            # The largest gap has the highest mark, the smallest the lowest.
            share = (1 + 7 * (math.log(gap) - math.log(low)) / (math.log(high) - math.log(low))) / 8
        return levels[max(0, math.ceil(share * 8 - 1e-9) - 1)]

    return "".join(mark(gap) * max(1, min(_CELL, room // len(found))) for gap in found)


def _is_wide(gaps: Sequence[float | None]) -> bool:
    known = [gap for gap in gaps if gap]
    return max(known, default=0) > _DECADES * min(known, default=0)


def _thinned(gaps: Sequence[float | None], room: int) -> list[float | None]:
    """Return at most `room` gaps, each the largest of some neighbours."""
    if len(gaps) <= room:
        return list(gaps)
    parts = [gaps[i * len(gaps) // room : (i + 1) * len(gaps) // room] for i in range(room)]
    return [max((gap for gap in part if gap is not None), default=None) for part in parts]
