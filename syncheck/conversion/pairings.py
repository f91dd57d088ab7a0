"""Find tensors of two models that have the same data: whole tensors, parts of fused tensors, stacks and transposes.

Only data counts here, never names or positions. `layer_rules` turns the pairings into a map with one rule for all
layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import split_numbers
from syncheck.conversion.recognition import HEAD_SIZES
from syncheck.conversion.rows import MOST_ROWS, digest_rows
from syncheck.frozen import record
from syncheck.layout import views

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Limit of equal rows of a model: more of them do not identify a tensor.
_MOST_EQUAL = 64
# Fewer elements than this are equal to the first elements of another tensor by chance.
_FEW = 8


@record
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


@record
class Pairing:
    """A stored tensor of one model, and the tensors of the other model with its data.

    side: 0 if A stores it, 1 if B does.
    stored: the name of the stored tensor.
    parts: the names of its parts in the other model.
    """

    side: int
    stored: str
    parts: tuple[str, ...]
    layout: Layout = Layout()

    @property
    def tensors(self) -> list[tuple[int, str]]:
        """All tensors of the pairing by side and name, the stored one first."""
        parts = [(1 - self.side, part) for part in self.parts]
        return [(self.side, self.stored), *parts]

    @property
    def part_patterns(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parts without their numbers."""
        return tuple(split_numbers(part)[0] for part in self.parts)


@dataclass(slots=True)
class Candidates:
    """The tensors that only one of two models has, and their pairings.

    tensors: of each side by name.
    rows: the digests of the rows of these tensors.
    pairings: tensors with the same data.
    ambiguous: names of A and of B with equal data, whose pairs no number in their names shows.
    used: for each side, the names in `pairings` and `ambiguous`.
    """

    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    rows: tuple[Mapping[str, Sequence[bytes]], Mapping[str, Sequence[bytes]]]
    files: Files
    pairings: list[Pairing] = field(default_factory=list)
    ambiguous: list[tuple[list[str], list[str]]] = field(default_factory=list)
    used: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    def add(self, pairing: Pairing) -> None:
        """Add a pairing, whose tensors are then used."""
        self.pairings.append(pairing)
        self.used[pairing.side].add(pairing.stored)
        self.used[1 - pairing.side].update(pairing.parts)

    def add_ambiguous(self, names_a: list[str], names_b: list[str]) -> None:
        """Add names of A and of B with equal data, whose tensors are then used."""
        self.ambiguous.append((names_a, names_b))
        self.used[0].update(names_a)
        self.used[1].update(names_b)

    def unused(self, side: int) -> list[str]:
        """Return the names of the tensors of a side without a pairing."""
        return [name for name in self.tensors[side] if name not in self.used[side]]

    def unused_tensors(self, side: int) -> dict[str, Tensor]:
        """Return the tensors of a side without a pairing."""
        return {name: self.tensors[side][name] for name in self.unused(side)}

    def unused_rows(self, side: int) -> dict[str, Sequence[bytes]]:
        """Return the rows of the tensors of a side without a pairing."""
        return {name: self.rows[side][name] for name in self.unused(side)}


def find_pairings(models: Sequence[Mapping[str, Tensor]], files: Files) -> Candidates:
    """Return the tensors with the same data.

    models: the tensors that only one of two models has, by name. Reads each once, and some matrices twice.
    """
    model_a, model_b = models
    rows_a, rows_b = _digest_model(model_a, files), _digest_model(model_b, files)
    candidates = Candidates((model_a, model_b), (rows_a, rows_b), files)
    _pair_equal(candidates)
    _join_rows(candidates, 0)
    _join_rows(candidates, 1)
    # B first, as for equal tensors.
    _join_columns(candidates, 1)
    _join_columns(candidates, 0)
    for transpose in (False, True):
        _join_stacks(candidates, 1, transpose=transpose)
        _join_stacks(candidates, 0, transpose=transpose)
    return candidates


def _digest_model(model: Mapping[str, Tensor], files: Files) -> dict[str, list[bytes]]:
    """Return the digests of the rows of each tensor."""
    digests = {}
    for name, tensor in model.items():
        # A number without dimensions is one row.
        row_count = math.prod(tensor.shape[:1])
        digests[name] = digest_rows(tensor, files, row_count)
    return digests


def _pair_equal(candidates: Candidates) -> None:
    """Pair each tensor of B with the tensor of A of equal data, and list tensors with several equals."""
    contents_a = _group_by_content(candidates, 0)
    contents_b = _group_by_content(candidates, 1)
    for content, names_a in contents_a.items():
        names_b = contents_b.get(content, [])
        if len(names_a) == len(names_b) == 1:
            candidates.add(Pairing(1, names_b[0], tuple(names_a)))
        elif names_b:
            candidates.add_ambiguous(names_a, names_b)


def _group_by_content(candidates: Candidates, side: int) -> dict[object, list[str]]:
    """Return the names of the tensors of a side with each dtype, shape and data."""
    groups: dict[object, list[str]] = defaultdict(list)
    for name, digests in candidates.rows[side].items():
        tensor = candidates.tensors[side][name]
        data = b"".join(digests)
        groups[tensor.dtype, tensor.shape, data].append(name)
    return groups


def _join_rows(candidates: Candidates, side: int) -> None:
    """Pair each tensor of a side with tensors of the other side whose rows it consists of."""
    _join_parts(
        candidates,
        side,
        joined=candidates.unused_rows(side),
        transpose=False,
    )


def _join_columns(candidates: Candidates, side: int) -> None:
    """Pair each matrix of a side with tensors of the other side whose rows are its columns."""
    part_tensors = candidates.tensors[1 - side]
    row_shapes = {part_tensors[name].shape[1:] for name in candidates.unused(1 - side)}
    columns = {}
    for name in candidates.unused(side):
        tensor = candidates.tensors[side][name]
        is_matrix = len(tensor.shape) == 2 and tensor.shape[1] <= MOST_ROWS
        # Columns of another length than all rows of the other model are no rows of it.
        if is_matrix and tensor.shape[:1] in row_shapes:
            transposed = views.permute(tensor, (1, 0))
            columns[name] = digest_rows(transposed, candidates.files, tensor.shape[1])
    _join_parts(
        candidates,
        side,
        joined=columns,
        transpose=True,
    )


class _RowIndex:
    """The tensors of a side without a pairing, to be found by the digests of their rows."""

    def __init__(self, candidates: Candidates, side: int) -> None:
        self._used = candidates.used[side]
        self._rows = candidates.unused_rows(side)
        # For each digest, names of tensors and numbers of their rows.
        self._places: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
        for name, digests in self._rows.items():
            for row, digest in enumerate(digests):
                self._places[digest].append((name, row))

    def find_parts(self, digests: Sequence[bytes]) -> dict[str, list[int]]:
        """Return the positions of the rows of each tensor whose rows are all in a tensor with these digests.

        The part that begins first is the first.
        """
        positions: dict[str, dict[int, int]] = defaultdict(dict)
        for position, digest in enumerate(digests):
            for name, row in self._places.get(digest, [])[:_MOST_EQUAL]:
                # Equal rows have the position of the first of them.
                positions[name].setdefault(row, position)

        parts = {}
        for name, positions_by_row in positions.items():
            is_complete = len(positions_by_row) == len(self._rows[name])
            # A part of another tensor is not a part of this one too.
            if is_complete and name not in self._used:
                parts[name] = [positions_by_row[row] for row in range(len(positions_by_row))]
        return dict(sorted(parts.items(), key=_get_begin))


def _get_begin(part: tuple[str, list[int]]) -> int:
    """Return the position of the first row of a part."""
    _, positions = part
    return positions[0]


def _join_parts(candidates: Candidates, side: int, joined: Mapping[str, Sequence[bytes]], *, transpose: bool) -> None:
    """Pair tensors of a side with tensors of the other side that they consist of.

    joined: the digests of the rows of each tensor, or of its columns.
    transpose: whether they are columns.
    """
    index = _RowIndex(candidates, 1 - side)
    for name, digests in joined.items():
        parts = index.find_parts(digests)
        layout = _find_layout(list(parts.values()), len(digests))
        if layout is None:
            continue
        pairing = Pairing(
            side,
            stored=name,
            parts=tuple(parts),
            layout=replace(layout, transpose=transpose),
        )
        if _has_fitting_shapes(pairing, candidates):
            candidates.add(pairing)


def _has_fitting_shapes(pairing: Pairing, candidates: Candidates) -> bool:
    """Whether a tensor and its parts have rows of one shape, and enough of them."""
    shape = candidates.tensors[pairing.side][pairing.stored].shape
    # The rows of the parts are the columns of a transposed matrix.
    row_shape = shape[:1] if pairing.layout.transpose else shape[1:]
    part_row_shapes = set()
    elements = 0
    for part in pairing.parts:
        tensor = candidates.tensors[1 - pairing.side][part]
        part_row_shapes.add(tensor.shape[1:])
        elements += tensor.numel
    # Rows with the same bytes in another shape are other rows.
    return part_row_shapes == {row_shape} and elements >= _FEW


def _find_layout(parts: Sequence[list[int]], length: int) -> Layout | None:
    """Return the layout of a tensor of this length; None if its rows are in an order that no layout has.

    parts: for each part, the position of each of its rows in the tensor; the part that begins first is the first.
    """
    if len(parts) != 1:
        return _find_groups(parts, length)
    (rows,) = parts
    # The first rows of a longer tensor: a pair of tensors with another number of rows, which is a difference.
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
    """Return the layout of parts that alternate in groups of equal size; None for any other order.

    parts, length: see `_find_layout`.
    """
    sizes = [len(part) for part in parts]
    # The parts of a rule are the whole tensor.
    if not sizes or sum(sizes) != length:
        return None
    # The rows of the first group of the first part are consecutive.
    offsets = [position - row for row, position in enumerate(parts[0])]
    first_group = offsets.count(offsets[0])
    groups = sizes[0] // first_group
    if parts != _alternate_parts(sizes, groups):
        return None

    unit = math.gcd(*sizes)
    shares = tuple(size // unit for size in sizes)
    has_equal_shares = len(set(shares)) == 1
    # The smallest groups have one unit of rows; their number depends on the length, but the rule does not.
    has_smallest_groups = groups > 1 and groups == unit
    return Layout(
        sizes=() if has_equal_shares else shares,
        groups="rows" if has_smallest_groups else groups,
    )


def _alternate_parts(sizes: Sequence[int], groups: int) -> list[list[int]]:
    """Return the positions of the rows of each part if parts of these sizes alternate in so many groups."""
    positions: list[list[int]] = []
    group_length = sum(sizes) // groups
    begin = 0
    for size in sizes:
        share = size // groups
        rows: list[int] = []
        for group in range(groups):
            start = group * group_length + begin
            rows += range(start, start + share)
        positions.append(rows)
        begin += share
    return positions


def _join_stacks(candidates: Candidates, side: int, *, transpose: bool) -> None:
    """Pair each tensor of a side with the tensors of the other side at each index of its first dimension.

    transpose: whether the tensors of the other side are transposed.
    """
    stacks = _list_stacks(candidates, side, transpose=transpose)
    index_shapes = {stack.shape[1:] for stack in stacks.values()}
    names_by_digest: dict[bytes, str] = {}
    for name in candidates.unused(1 - side):
        tensor = candidates.tensors[1 - side][name]
        if tensor.shape in index_shapes:
            (digest,) = digest_rows(tensor, candidates.files, 1)
            names_by_digest[digest] = name
    # Without a part, transposed data is not read.
    if not names_by_digest:
        return

    for name, stack in stacks.items():
        digests = candidates.rows[side][name]
        if transpose:
            digests = digest_rows(stack, candidates.files, stack.shape[0])
        parts = tuple(names_by_digest.get(digest, "") for digest in digests)
        # Each index is another part, and all of them exist.
        if len(set(parts) - {""}) == len(digests):
            candidates.add(
                Pairing(
                    side,
                    stored=name,
                    parts=parts,
                    layout=Layout(stacked=True, transpose=transpose),
                )
            )


def _list_stacks(candidates: Candidates, side: int, *, transpose: bool) -> dict[str, Tensor]:
    """Return the tensors of a side that may be stacks, as views with exchanged last dimensions for `transpose`."""
    stacks = {}
    for name, tensor in candidates.unused_tensors(side).items():
        # A tensor with one index is no stack.
        if tensor.shape[:1] <= (1,):
            continue
        if not transpose:
            stacks[name] = tensor
        elif len(tensor.shape) == 3:
            stacks[name] = views.permute(tensor, (0, 2, 1))
    return stacks
