"""Find tensors of two models that have the same data: whole tensors, parts of fused tensors, stacks and transposes.

Only data counts here, never names or positions. `layer_rules` turns the pairings into a map with one rule for all
layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from syncheck.conversion.recognition import HEAD_SIZES
from syncheck.conversion.rows import MOST_ROWS, digest_rows
from syncheck.logical import views

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor

# Limit of equal rows of a model: more of them do not identify a tensor.
_MOST_EQUAL = 64
# Fewer elements than this are equal to the first elements of another tensor by chance.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored tensor contains its parts; see `Rule`.

    head_dim: rows of a head whose halves alternate, 0 if they do not.
    stacked: whether each index of the first dimension is a part.
    """

    sizes: tuple[int, ...] = ()
    groups: int | str = 1
    transpose: bool = False
    head_dim: int = 0
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Pairing:
    """A stored tensor of one model, and the tensors of the other model with its data.

    side: 0 if A stores it, 1 if B does.
    """

    side: int
    stored: str
    parts: tuple[str, ...]
    layout: Layout = Layout()


@dataclass(slots=True)
class Candidates:
    """The tensors that only one of two models has, and the pairings found so far.

    tensors, rows: for each side, tensors and the digests of their rows by name.
    ambiguous: names of A and of B with equal data, whose pairs no number in their names shows.
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

    def unused(self, side: int) -> list[str]:
        """Return the names of the tensors of a side without a pairing."""
        return [name for name in self.tensors[side] if name not in self.used[side]]


def find_pairings(models: Sequence[Mapping[str, Tensor]], files: Files) -> Candidates:
    """Return the tensors with the same data.

    models: the tensors that only one of two models has, by name. Reads each once, and some matrices twice.
    """
    rows = []
    for model in models:
        digests = {}
        for name, tensor in model.items():
            digests[name] = digest_rows(tensor, files, tensor.shape[0] if tensor.shape else 1)
        rows.append(digests)
    candidates = Candidates((models[0], models[1]), (rows[0], rows[1]), files)
    _pair_equal(candidates)
    for side in (0, 1):
        _join_parts(candidates, side, candidates.rows[side], transpose=False)
    # B first, as for equal tensors.
    for side in (1, 0):
        _join_parts(candidates, side, _digest_columns(candidates, side), transpose=True)
    for side in (1, 0):
        _unstack(candidates, side)
    return candidates


def _pair_equal(candidates: Candidates) -> None:
    """Pair each tensor of B with the tensor of A of equal data, and list tensors with several equals."""
    groups: dict[tuple[bytes, tuple[int, ...], str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for name, digests in candidates.rows[side].items():
            tensor = candidates.tensors[side][name]
            groups[b"".join(digests), tensor.shape, tensor.dtype][side].append(name)
    for ours, theirs in groups.values():
        if len(ours) == len(theirs) == 1:
            candidates.add(Pairing(1, theirs[0], (ours[0],)))
        elif ours and theirs:
            candidates.ambiguous.append((ours, theirs))
            candidates.used[0].update(ours)
            candidates.used[1].update(theirs)


def _digest_columns(candidates: Candidates, side: int) -> dict[str, list[bytes]]:
    """Return the digests of the columns of the matrices of a side without a pairing."""
    lengths = {candidates.tensors[1 - side][name].shape[1:] for name in candidates.unused(1 - side)}
    digests = {}
    for name in candidates.unused(side):
        tensor = candidates.tensors[side][name]
        # Columns of another length than all rows of the other model are no rows of it.
        if len(tensor.shape) == 2 and tensor.shape[:1] in lengths and tensor.shape[1] <= MOST_ROWS:
            digests[name] = digest_rows(views.permute(tensor, (1, 0)), candidates.files, tensor.shape[1])
    return digests


def _join_parts(candidates: Candidates, side: int, joined: Mapping[str, Sequence[bytes]], *, transpose: bool) -> None:
    """Pair each tensor of a side with tensors of the other side whose rows it consists of.

    joined: the digests of its rows, or of its columns if they are transposed.
    """
    parts = candidates.rows[1 - side]
    places: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
    for name in candidates.unused(1 - side):
        for i, digest in enumerate(parts[name]):
            places[digest].append((name, i))
    for name in candidates.unused(side):
        # The rows of each part, as positions in the joined tensor.
        positions: dict[str, dict[int, int]] = defaultdict(dict)
        for at, digest in enumerate(joined.get(name, ())):
            for part, i in places.get(digest, ())[:_MOST_EQUAL]:
                positions[part].setdefault(i, at)
        whole = {}
        for part, found in positions.items():
            if len(found) == len(parts[part]) and part not in candidates.used[1 - side]:
                whole[part] = [found[i] for i in range(len(found))]
        arrangement = _find_arrangement(whole, len(joined.get(name, ())))
        if arrangement is None:
            continue
        order, layout = arrangement
        shape = candidates.tensors[side][name].shape
        shapes = {candidates.tensors[1 - side][part].shape[1:] for part in order}
        elements = sum(candidates.tensors[1 - side][part].numel for part in order)
        if shapes == {shape[:1] if transpose else shape[1:]} and elements >= _FEW:
            candidates.add(Pairing(side, name, order, replace(layout, transpose=transpose)))


def _find_arrangement(parts: Mapping[str, Sequence[int]], length: int) -> tuple[tuple[str, ...], Layout] | None:
    """Return the order of the parts of a tensor and its layout; None if the parts do not alternate in groups.

    parts: the rows of each part, as positions in the tensor of this length.
    """
    if not parts:
        return None
    order = tuple(sorted(parts, key=lambda part: parts[part][0]))
    total = sum(map(len, parts.values()))
    if len(order) == 1 and list(parts[order[0]]) == list(range(total)):
        # The first rows of a longer tensor: a pair of tensors with another number of rows, which is a difference.
        return order, Layout()
    if total != length:
        return None
    if len(order) == 1:
        head_dim = _find_head_dim(parts[order[0]])
        return (order, Layout(head_dim=head_dim)) if head_dim else None
    layout = _find_groups([parts[part] for part in order], length)
    return None if layout is None else (order, layout)


def _find_head_dim(rows: Sequence[int]) -> int:
    """Return the number of rows of a head if the halves of each head alternate, else 0. rows: their positions."""
    for head_dim in HEAD_SIZES:
        half = head_dim // 2
        if len(rows) % head_dim:
            continue
        for i, at in enumerate(rows):
            start = i - i % head_dim
            if at != start + 2 * (i % half) + i % head_dim // half:
                break
        else:
            return head_dim
    return 0


def _find_groups(parts: Sequence[Sequence[int]], length: int) -> Layout | None:
    """Return the layout of parts that alternate in groups of equal size. parts: positions of the rows of each part."""
    first = parts[0]
    run = 1
    while run < len(first) and first[run] == first[run - 1] + 1:
        run += 1
    groups = len(first) // run
    if len(first) % run or any(len(part) % groups for part in parts):
        return None
    begin = 0
    for part in parts:
        step = len(part) // groups
        for i, at in enumerate(part):
            if at != i // step * (length // groups) + begin + i % step:
                return None
        begin += step
    unit = math.gcd(*map(len, parts))
    shares = tuple(len(part) // unit for part in parts)
    by_row = groups > 1 and groups == length // sum(shares)
    return Layout(sizes=() if len(set(shares)) == 1 else shares, groups="rows" if by_row else groups)


def _unstack(candidates: Candidates, side: int) -> None:
    """Pair each tensor of a side with the tensors of the other side at each index of its first dimension."""
    stacks = [name for name in candidates.unused(side) if candidates.tensors[side][name].shape[:1] > (1,)]
    wanted = {candidates.tensors[side][name].shape[1:] for name in stacks}
    single: dict[bytes, str] = {}
    for name in candidates.unused(1 - side):
        tensor = candidates.tensors[1 - side][name]
        if tensor.shape in wanted:
            single[digest_rows(tensor, candidates.files, 1)[0]] = name
    for name in stacks:
        parts = [single[digest] for digest in candidates.rows[side][name] if digest in single]
        if len(parts) == len(candidates.rows[side][name]) == len(set(parts)):
            candidates.add(Pairing(side, name, tuple(parts), Layout(stacked=True)))
