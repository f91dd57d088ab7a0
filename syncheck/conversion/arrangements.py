"""Find the layout of a tensor from the positions of the rows of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck.conversion.name_maps import Rule
from syncheck.conversion.recognition import HEAD_SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored tensor contains its parts; see `Rule`.

    sizes: shares of the parts, none if they are equal.
    groups: the groups in which the parts alternate, or "rows".
    transpose: whether the last two dimensions are exchanged.
    head_dim: rows of a head whose halves alternate, 0 if they do not.
    stacked: whether each index of the first dimension is a part.
    """

    sizes: tuple[int, ...] = ()
    groups: int | str = 1
    transpose: bool = False
    head_dim: int = 0
    stacked: bool = False

    def make_rule(self, name: str, parts: Sequence[str]) -> Rule:
        """Return the rule for tensors with this layout. name, parts: templates."""
        return Rule(
            name,
            tuple(parts),
            sizes=self.sizes,
            groups=self.groups,
            transpose=self.transpose,
            rotary=self.head_dim > 0,
        )


def find_layout(parts: Sequence[list[int]], length: int) -> Layout | None:
    """Return the layout of a tensor of this length; None if its rows are in an order that no layout has.

    parts: for each part, the position of each of its rows in the tensor; the part that begins first is the first.
    """
    if len(parts) != 1:
        return _find_groups(parts, length)
    (rows,) = parts
    # If the tensor is longer, the pair has different numbers of rows, which is a difference and not a layout.
    if rows == list(range(len(rows))):
        return Layout()
    for head_dim in HEAD_SIZES:
        if rows == _alternate_halves(length, head_dim):
            return Layout(head_dim=head_dim)
    return None


def _alternate_halves(length: int, head_dim: int) -> list[int]:
    """Return the positions of all rows if the halves of each head alternate."""
    positions: list[int] = []
    for start in range(0, length, head_dim):
        head = range(start, start + head_dim)
        first_half, second_half = head[::2], head[1::2]
        positions += first_half
        positions += second_half
    return positions


def _find_groups(parts: Sequence[list[int]], length: int) -> Layout | None:
    """Return the layout of parts that alternate in groups; None for any other order, and for rows without a part."""
    sizes = [len(part) for part in parts]
    # The parts of a rule are the whole tensor.
    if sum(sizes) != length:
        return None
    # The first group of the first part ends where the second part begins. Equal rows may begin at one position.
    first_group = max(1, parts[1][0])
    groups = max(1, sizes[0] // first_group)
    if parts != _alternate_parts(sizes, groups):
        return None

    unit = math.gcd(*sizes)
    shares = tuple(size // unit for size in sizes)
    layout = Layout(shares, groups)
    if len(set(shares)) == 1:
        layout = replace(layout, sizes=())
    # The smallest groups have one unit of rows; their number depends on the length, but the rule does not.
    if groups > 1 and groups == unit:
        layout = replace(layout, groups="rows")
    return layout


def _alternate_parts(sizes: Sequence[int], groups: int) -> list[list[int]]:
    """Return the positions of the rows of each part if parts of these sizes alternate in so many groups."""
    positions: list[list[int]] = []
    total = sum(sizes)
    begin = 0
    for size in sizes:
        share = size // groups
        rows: list[int] = []
        for start in range(begin, total, total // groups):
            rows += range(start, start + share)
        positions.append(rows)
        begin += share
    return positions
