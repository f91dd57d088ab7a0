"""Property: DTensors of any layout, split by torch, are joined to the full tensor, and a difference is located."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import save_pth
from dtensors import dtensor, mesh_of_2_6
from hypothesis import strategies as st
from strategies import EXAMPLES, for_all

import syncheck

torch = pytest.importorskip("torch")
from torch.distributed.tensor.placement_types import Shard  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    Layout = tuple[tuple[int, ...], tuple[int, ...], list[str], list[tuple[int, int]]]


@st.composite
def layouts(draw: Any) -> Layout:
    """Return a shape, a mesh, its placements, and (mesh dimension, tensor dimension) pairs in the order of splits."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    order = draw(st.permutations([(i, dim) for i, dim in enumerate(dims) if dim is not None]))
    placements = ["R" if dim is None else f"S({dim})" for dim in dims]
    by_dim: dict[int, list[int]] = defaultdict(list)
    for mesh_dim, dim in order:
        # As DTensorSpec._convert_shard_order_to_StridedShard of torch 2.15.
        factor = math.prod(mesh[earlier] for earlier in by_dim[dim] if earlier > mesh_dim)
        if factor > 1:
            placements[mesh_dim] = f"_S({dim}, {factor})"
        by_dim[dim].append(mesh_dim)
    return shape, mesh, placements, order


def split(whole: Any, layout: Layout, coordinate: tuple[int, ...]) -> Any:
    """Return the part of a tensor at a mesh coordinate, as torch splits it."""
    _, mesh, _, order = layout
    for mesh_dim, dim in order:
        parts, _ = Shard(dim)._split_tensor(whole, mesh[mesh_dim], with_padding=False)
        whole = parts[coordinate[mesh_dim]]
    return whole


def save(folder: Path, layout: Layout, whole: Any, changed: tuple[int, int] | None = None) -> None:
    """Write one file per rank. changed: a rank, and an element of its part to change."""
    shape, mesh, placements, _ = layout
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        part = split(whole, layout, coordinate).clone()
        if changed is not None and changed[0] == rank:
            part.view(-1)[changed[1]] += 1
        mesh_object = mesh_of_2_6(ranks, coordinate)
        save_pth(folder / f"m_rank{rank}.pth", {"w": dtensor(part.numpy(), placements, mesh_object, shape)})


@EXAMPLES
def test_any_layout_is_joined(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    """The joined tensor equals the full tensor; one changed element is found at its index, in the file of its rank."""

    def check(case: tuple[Layout, float]) -> None:
        layout, where = case
        shape, mesh, *_ = layout
        folder = tmp_path_factory.mktemp("layout")
        whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        save_pth(folder / "full.pth", {"w": whole.numpy()})
        (folder / "ranks").mkdir()
        save(folder / "ranks", layout, whole)
        report = syncheck.diff(folder / "ranks", folder / "full.pth")
        assert (report.exit_code, report.counts.identical) == (0, 1), (layout, report)
        # Change an element of a rank that alone holds it.
        coordinates = list(itertools.product(*map(range, mesh)))
        held = [split(whole, layout, at).reshape(-1).tolist() for at in coordinates]
        alone = [r for r, at in enumerate(coordinates) if held[r] and sum(map(held[r].__eq__, held)) == 1]
        if not alone:
            return
        rank = alone[int(where * len(alone))]
        at = int(where * len(held[rank]))
        save(folder / "ranks", layout, whole, (rank, at))
        report = syncheck.diff(folder / "ranks", folder / "full.pth")
        (diff,) = report.groups[-1].tensors
        expected = tuple(int(i) for i in np.unravel_index(int(held[rank][at]), shape))
        assert (report.exit_code, diff.index, diff.mismatched) == (1, expected, 1), (layout, diff)
        if len(coordinates) > 1:
            assert diff.places[0].rank == rank

    for_all(st.tuples(layouts(), st.floats(0, 0.999)), check, examples)
