"""Property: DTensors that torch split and saved in any layout are joined, and a difference is located."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support.listings import list_rank_files
from support.marks import slow
from support.strategies import EXAMPLES, for_all

import syncheck

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

specs = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
if not hasattr(specs, "ShardOrderEntry"):
    pytest.skip("DTensors have an order of splits since torch 2.10", allow_module_level=True)

if TYPE_CHECKING:
    from pathlib import Path

    # A shape, a mesh, and (mesh dimension, tensor dimension) in the order of the splits.
    Layout = tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 8), min_size=1, max_size=3).filter(lambda sizes: 2 <= math.prod(sizes) <= 8).map(tuple)


@st.composite
def layouts(draw: Any) -> Layout:
    """Return a layout with any order of splits: FSDP2 splits a tensor after tensor parallelism."""
    shape, mesh = draw(shapes), draw(meshes)
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    return shape, mesh, draw(st.permutations([(i, dim) for i, dim in enumerate(dims) if dim is not None]))


def list_meshes(mesh: tuple[int, ...]) -> list[Any]:
    """Return the mesh as each rank sees it, without processes. Ranks are numbered backwards."""
    ranks = torch.arange(math.prod(mesh)).flip(0).reshape(mesh)
    return [DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank) for rank in range(math.prod(mesh))]


def split(whole: Any, layout: Layout, mesh: Any, form: str) -> Any:
    """Return a rank's DTensor of a tensor. form: how torch stores the order of the splits."""
    _, sizes, order = layout
    placements: list[Any] = [Replicate() for _ in sizes]
    mesh_dims: dict[int, list[int]] = defaultdict(list)
    part = whole
    for mesh_dim, dim in order:
        parts, _ = Shard(dim)._split_tensor(part, sizes[mesh_dim], with_padding=False)
        part, placements[mesh_dim] = parts[mesh.get_coordinate()[mesh_dim]], Shard(dim)
        mesh_dims[dim].append(mesh_dim)
    entries = tuple(specs.ShardOrderEntry(dim, tuple(dims)) for dim, dims in sorted(mesh_dims.items()))
    if form == "strided":
        placements = specs.DTensorSpec._convert_shard_order_to_StridedShard(entries, tuple(placements), mesh)
    meta = specs.TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = specs.DTensorSpec(mesh, tuple(placements), meta, **({} if form == "strided" else {"shard_order": entries}))
    # torch saves a view with the offset 0, as FSDP2 makes for padded shards, but no view with another offset.
    padded = torch.zeros([size + (form != "strided") for size in part.shape], dtype=part.dtype)
    local = padded[tuple(slice(size) for size in part.shape)].copy_(part)
    created = DTensor(local, spec, requires_grad=False)
    if order == sorted(order):
        by_torch = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        assert torch.equal(by_torch.to_local(), created.to_local())
    return created


def save(folder: Path, tensors: list[Any]) -> list[Path]:
    """Write one file per rank."""
    folder.mkdir(exist_ok=True)
    files = list_rank_files(folder, "m_rank{}.pth", len(tensors))
    for file, tensor in zip(files, tensors, strict=True):
        torch.save({"w": tensor}, file)
    return files


@EXAMPLES
def test_any_layout_is_joined(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    """The joined tensor equals the full tensor; one changed element is found at its index, in the file of its rank."""

    def check(case: tuple[Layout, str, Any, float]) -> None:
        layout, form, dtype, where = case
        shape, sizes, _ = layout
        folder = tmp_path_factory.mktemp("layout")
        complete = torch.arange(math.prod(shape), dtype=dtype).reshape(shape)
        torch.save({"w": complete}, folder / "full.pth")
        parts = [split(complete.clone(), layout, mesh, form) for mesh in list_meshes(sizes)]
        files = save(folder / "ranks", parts)
        report = syncheck.diff(folder / "ranks", folder / "full.pth")
        assert (report.exit_code, report.counts.identical) == (0, 1), (case, report)
        holders = [rank for rank, part in enumerate(parts) if part.to_local().numel()]
        if not holders:
            return
        rank = holders[int(where * len(holders))]
        local = parts[rank].to_local()
        position = np.unravel_index(int(where * local.numel()), local.shape)
        value = int(local[position])
        copies = [i for i, part in enumerate(parts) if i != rank and (part.to_local() == value).any()]
        local[position] += 1
        save(folder / "ranks", parts)
        report = syncheck.diff(folder / "ranks", folder / "full.pth")
        assert report.exit_code == 1, (case, report)
        index = tuple(int(i) for i in np.unravel_index(value, shape))
        if copies:
            (diff,) = report.groups[0].tensors
            assert (rank,) in diff.clusters, (case, diff)
        else:
            (diff,) = report.groups[-1].tensors
            assert (diff.index, diff.mismatched) == (index, 1), (case, diff)
            assert (diff.places[0].rank, diff.places[0].path) == (rank, str(files[rank])), (case, diff)

    forms = st.sampled_from(["strided", "ordered"])
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int16])
    for_all(st.tuples(layouts(), forms, dtypes, st.floats(0, 0.999)), check, examples)


@pytest.mark.parametrize("form", ["strided", "ordered"])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 4)])
def test_uneven_shards_of_fsdp2_and_tensor_parallelism(tmp_path: Path, mesh: tuple[int, ...], form: str) -> None:
    """FSDP2 splits the parts of tensor parallelism, of which the last is shorter or empty."""
    for length in range(1, 12):
        layout: Layout = (length,), mesh, [(1, 0), (0, 0)]
        complete = torch.arange(length, dtype=torch.float32)
        torch.save({"w": complete}, tmp_path / "full.pth")
        save(tmp_path / "ranks", [split(complete, layout, rank, form) for rank in list_meshes(mesh)])
        report = syncheck.diff(tmp_path / "ranks", tmp_path / "full.pth")
        assert (report.exit_code, report.counts.identical) == (0, 1), length


@pytest.mark.parametrize("mesh", [(2, 2), *slow((3, 2))])
def test_any_stripes_are_joined_or_refused(tmp_path: Path, mesh: tuple[int, ...]) -> None:
    """Strided shards of views, which no order of splits describes, cause no false difference."""
    kinds = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=factor) for factor in (2, 3, 4))]
    outcomes: dict[Any, int] = defaultdict(int)
    for length, *placements in itertools.product((7, 8, 24), *[kinds] * len(mesh)):
        complete = torch.arange(length, dtype=torch.float32)
        torch.save({"w": complete}, tmp_path / "full.pth")
        parts = [distribute_tensor(complete, rank, placements, src_data_rank=None) for rank in list_meshes(mesh)]
        save(tmp_path / "ranks", parts)
        try:
            code = syncheck.diff(tmp_path / "ranks", tmp_path / "full.pth").exit_code
        except syncheck.CheckpointError:
            code = 2
        assert code != 1, (length, placements)
        outcomes[code] += 1
    assert outcomes[0] > 0.9 * sum(outcomes.values()), outcomes
