"""Find tensors of two models that have the same data: whole tensors, parts of fused tensors, stacks and transposes.

Only data counts here, never names or positions. `layer_rules` turns the pairings into a map with one rule for all
layers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.arrangements import Layout, find_layout
from syncheck.conversion.numbering import split_numbers
from syncheck.conversion.rows import MOST_ROWS, digest_rows
from syncheck.logical import views

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.conversion.numbering import Numbers
    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor

    Rows = Mapping[str, Sequence[bytes]]

# Limit of the tensors that begin with the same row: more of them do not identify a tensor.
_MOST_EQUAL = 64
# Fewer elements than this are equal to the first elements of another tensor by chance.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Pairing:
    """A stored tensor of one model, and the tensors of the other model with its data.

    side: 0 if A stores it, 1 if B does.
    name: of the stored tensor.
    parts: the names of its parts in the other model.
    """

    side: int
    name: str
    parts: tuple[str, ...]
    layout: Layout = field(default_factory=Layout)

    @property
    def numbers(self) -> Numbers:
        """The numbers in the name of the stored tensor."""
        return split_numbers(self.name).numbers

    @property
    def tensors(self) -> list[tuple[int, str]]:
        """All tensors of the pairing, by side and name."""
        parts = [(1 - self.side, part) for part in self.parts]
        return [(self.side, self.name), *parts]


@dataclass(slots=True)
class Pool:
    """The tensors that only one of two models has.

    tensors: by name.
    rows: the digests of the rows of each tensor.
    used: the names of tensors with a pairing, and of ambiguous tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Sequence[bytes]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def add(self, tensors: Mapping[str, Tensor], files: Files) -> None:
        """Add tensors, or replace them by tensors of the same names. Reads their data."""
        for name, tensor in tensors.items():
            # A number without dimensions is one row.
            count = max(1, *tensor.shape[:1])
            self.tensors[name] = tensor
            self.rows[name] = digest_rows(tensor, files, count)

    def select_tensors(self) -> dict[str, Tensor]:
        """Return the tensors without a pairing."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.used}

    def select_rows(self) -> Rows:
        """Return the rows of the tensors without a pairing."""
        rows = {}
        for name in self.select_tensors():
            rows[name] = self.rows[name]
        return rows

    def list_row_shapes(self, names: Iterable[str]) -> set[tuple[int, ...]]:
        """Return the shapes of the rows of these tensors."""
        return {self.tensors[name].shape[1:] for name in names}

    def count_elements(self, names: Iterable[str]) -> int:
        """Return the number of elements of these tensors."""
        return sum(self.tensors[name].numel for name in names)


class Candidates:
    """The tensors of two models that may belong together, and the pairings with the same data.

    pools: of A and of B.
    ambiguous: names of A and of B with equal data, whose pairs no data shows.
    """

    def __init__(self, models: Sequence[Mapping[str, Tensor]], files: Files) -> None:
        self.files = files
        self.pairings: list[Pairing] = []
        self.ambiguous: list[tuple[list[str], list[str]]] = []
        self.pools = (Pool(), Pool())
        self.pools[0].add(models[0], files)
        self.pools[1].add(models[1], files)

    def add(self, pairing: Pairing) -> None:
        """Add a pairing, whose tensors are then used."""
        self.pairings.append(pairing)
        self.pools[pairing.side].used.add(pairing.name)
        self.pools[1 - pairing.side].used.update(pairing.parts)

    def add_ambiguous(self, names_a: list[str], names_b: list[str]) -> None:
        """Add names of A and of B with equal data, whose tensors are then used."""
        self.ambiguous.append((names_a, names_b))
        self.pools[0].used.update(names_a)
        self.pools[1].used.update(names_b)


class RowIndex:
    """The unused tensors of a model, to be found by their rows."""

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._used = pool.used
        self._rows = rows
        # Tensors by their first row.
        self._beginnings: dict[bytes, list[str]] = defaultdict(list)
        for name, digests in rows.items():
            self._beginnings[digests[0]].append(name)

    def find_parts(self, digests: Sequence[bytes]) -> dict[str, list[int]]:
        """Return the positions of the rows of each tensor whose rows are all in a tensor with these rows.

        The tensors are in the order of their first rows.
        """
        # Equal rows have the position of the first of them.
        positions = dict(zip(reversed(digests), reversed(range(len(digests))), strict=True))
        parts = {}
        for digest in dict.fromkeys(digests):
            for name in self._beginnings.get(digest, [])[:_MOST_EQUAL]:
                rows = self._rows[name]
                # A part of another tensor is not a part of this one too.
                if name not in self._used and positions.keys() >= set(rows):
                    parts[name] = [positions[row] for row in rows]
        return parts


def find_pairings(candidates: Candidates) -> None:
    """Pair the unused tensors with the same data. Reads some of them again."""
    _pair_equal(candidates)
    _join_rows(candidates, 0)
    _join_rows(candidates, 1)
    _join_columns(candidates, 1)
    _join_columns(candidates, 0)
    _join_stacks(candidates, 1)
    _join_stacks(candidates, 0)


def _pair_equal(candidates: Candidates) -> None:
    """Pair each tensor of B with the tensor of A of equal data, and list tensors with several equals."""
    contents_a = _group_by_content(candidates.pools[0])
    contents_b = _group_by_content(candidates.pools[1])
    for content, names_a in contents_a.items():
        names_b = contents_b.get(content, [])
        if len(names_a) == len(names_b) == 1:
            candidates.add(Pairing(1, names_b[0], tuple(names_a)))
        elif names_b:
            candidates.add_ambiguous(names_a, names_b)


def _group_by_content(pool: Pool) -> dict[object, list[str]]:
    """Return the names of the tensors with each dtype, shape and data."""
    groups: dict[object, list[str]] = defaultdict(list)
    for name, tensor in pool.select_tensors().items():
        data = b"".join(pool.rows[name])
        groups[tensor.dtype, tensor.shape, data].append(name)
    return groups


def _join_rows(candidates: Candidates, side: int) -> None:
    """Pair each tensor of a side with tensors of the other side whose rows it consists of."""
    pool = candidates.pools[1 - side]
    index = RowIndex(pool, pool.select_rows())
    _join(candidates, side, candidates.pools[side].select_rows(), index, Layout())


def _join_columns(candidates: Candidates, side: int) -> None:
    """Pair each matrix of a side with tensors of the other side whose rows are its columns."""
    pool, part_pool = candidates.pools[side], candidates.pools[1 - side]
    part_rows = part_pool.select_rows()
    row_shapes = part_pool.list_row_shapes(part_rows)
    columns = {}
    for name in pool.select_rows():
        tensor = pool.tensors[name]
        is_matrix = len(tensor.shape) == 2 and tensor.shape[1] <= MOST_ROWS
        # Only matrices with columns as long as rows of the other model are read again.
        if is_matrix and tensor.shape[:1] in row_shapes:
            transposed = views.permute(tensor, (1, 0))
            columns[name] = digest_rows(transposed, candidates.files, tensor.shape[1])
    index = RowIndex(part_pool, part_rows)
    _join(candidates, side, columns, index, Layout(transpose=True))


def _join_stacks(candidates: Candidates, side: int) -> None:
    """Pair each tensor of a side with the tensors of the other side at each index of its first dimension."""
    pool, part_pool = candidates.pools[side], candidates.pools[1 - side]
    stacks = pool.select_rows()
    shapes = pool.list_row_shapes(stacks)
    contents = {}
    for part in part_pool.select_rows():
        tensor = part_pool.tensors[part]
        # Each index of a stack is a whole tensor.
        if tensor.shape in shapes:
            contents[part] = digest_rows(tensor, candidates.files, 1)
    index = RowIndex(part_pool, contents)
    _join(candidates, side, stacks, index, Layout(stacked=True))


def _join(candidates: Candidates, side: int, joined: Rows, index: RowIndex, kind: Layout) -> None:
    """Pair tensors of a side with the parts that they consist of.

    joined: the rows of the tensors, in the layout of this kind.
    index: the parts.
    """
    for name, digests in joined.items():
        parts = index.find_parts(digests)
        positions = list(parts.values())
        layout = find_layout(positions, len(digests))
        if layout is None:
            continue
        layout = replace(layout, transpose=kind.transpose, stacked=kind.stacked)
        pairing = Pairing(side, name, tuple(parts), layout)
        if _has_fitting_shapes(pairing, candidates):
            candidates.add(pairing)


def _has_fitting_shapes(pairing: Pairing, candidates: Candidates) -> bool:
    """Whether the shapes and sizes of the parts allow that the tensor consists of them."""
    if pairing.layout.stacked:
        # A tensor with one index is no stack.
        return len(pairing.parts) > 1
    tensor = candidates.pools[pairing.side].tensors[pairing.name]
    part_pool = candidates.pools[1 - pairing.side]
    row_shape = tensor.shape[1:]
    if pairing.layout.transpose:
        row_shape = tensor.shape[:1]
    elements = part_pool.count_elements(pairing.parts)
    # Rows with the same bytes in another shape are other rows.
    return elements >= _FEW and part_pool.list_row_shapes(pairing.parts) == {row_shape}
