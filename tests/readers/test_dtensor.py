"""DTensors in torch.save files: the local tensor is read with its sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.checkpoints import Call, save_pth
from support.dtensors import dtensor, mesh_of_2_6, mesh_of_2_15, new
from support.listings import list_fields

import syncheck
from syncheck.messages import Refusal
from syncheck.snapshots import Sharding

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = np.arange(6, dtype=np.float32).reshape(2, 3)


def read_entry(path: Path, value: Any) -> Any:
    """Write a checkpoint with one entry `w` and return the tensor from the reader."""
    return syncheck.read(str(save_pth(path / "f.pth", {"w": value}))).tensors["w"]


def test_dtensors_of_the_installed_torch(tmp_path: Path) -> None:
    """For a DTensor on a mesh or submesh, the reader returns the layout of torch."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        created = {
            "hsdp": DTensor.from_local(torch.ones(2, 3), mesh, [Replicate(), Shard(0), Shard(1)], run_check=False),
            "sum": DTensor.from_local(torch.ones(2, 3), mesh["tp"], [Partial()], run_check=False),
            "part": DTensor.from_local(
                torch.ones(2, 3), mesh["replicate", "shard"], [Replicate(), Shard(0)], run_check=False
            ),
        }
        torch.save(created | {"p": torch.nn.Parameter(created["hsdp"])}, tmp_path / "f.pth")
        rows = {name: value.device_mesh.mesh.flatten().tolist() for name, value in created.items()}
    finally:
        dist.destroy_process_group()
    read = syncheck.read(str(tmp_path / "f.pth")).tensors
    assert {name: list(read[name].sharding.ranks) for name in created} == rows  # type: ignore[union-attr]
    cube = (2, 2, 2), tuple(range(8)), ("R", "S(0)", "S(1)"), (4, 6), ("replicate", "shard", "tp"), (1, 0, 1)
    assert read["hsdp"].sharding == read["p"].sharding == Sharding(*cube)
    assert read["part"].sharding == Sharding(
        (2, 2), (1, 3, 5, 7), ("R", "S(0)"), (4, 3), ("replicate", "shard"), (1, 0), (("tp", 1),)
    )
    beside = ("replicate", 1), ("shard", 0)
    assert read["sum"].sharding == Sharding((2,), (4, 5), ("P(sum)",), (2, 3), ("tp",), (1,), beside)
    assert set(list_fields(read.values(), "dtype", "shape", "refused")) == {("float32", (2, 3), None)}


def test_mesh_tensor_of_torch_2_6(tmp_path: Path) -> None:
    """A mesh with a tensor of ranks in any order is read from the list of ranks."""
    mesh = mesh_of_2_6([[4, 6], [5, 7]], (1, 0), ("a", "b"))
    tensor = read_entry(tmp_path, dtensor(LOCAL, ["_S(0, 2)", "R"], mesh))
    assert tensor.sharding == Sharding((2, 2), (4, 6, 5, 7), ("_S(0, 2)", "R"), (8, 3), ("a", "b"), (1, 0))


def test_submesh_of_the_rank(tmp_path: Path) -> None:
    """Among equal submeshes, the rank's own is found by its coordinates in the root mesh."""
    root = mesh_of_2_15((2, 2), (2, 1), 4, (1, 0))
    tensor = read_entry(tmp_path, dtensor(LOCAL, ["S(0)"], mesh_of_2_15((2,), (1,), 4, (0,), root)))
    assert tensor.sharding.ranks == (2, 3)
    tensor = read_entry(tmp_path, dtensor(LOCAL, ["S(0)"], mesh_of_2_15((2,), (2,), 4, (1,), root)))
    assert tensor.sharding.ranks == (0, 2)


ODD = {
    "a placement of another kind": dtensor(LOCAL, ["R"], mesh_of_2_6([0, 1], [0])),
    "more placements than dimensions": dtensor(LOCAL, ["R", "R"], mesh_of_2_6([0, 1], [0])),
    "a coordinate outside the mesh": dtensor(LOCAL, ["S(0)"], mesh_of_2_6([0, 1], [2])),
    "a rank twice": dtensor(LOCAL, ["S(0)"], mesh_of_2_6([1, 1], [0])),
    "no coordinate": dtensor(LOCAL, ["S(0)"], mesh_of_2_6([0, 1], [])),
    "a layout beyond the ranks": dtensor(LOCAL, ["S(0)"], mesh_of_2_15((2,), (7,), 2, (0,))),
    "a layout of a trillion ranks": dtensor(LOCAL, ["S(0)"], mesh_of_2_15((10**12,), (1,), 2, (0,))),
    "a layout of part of the ranks, of no mesh": dtensor(LOCAL, ["S(0)"], mesh_of_2_15((2,), (1,), 4, (0,))),
    "an empty layout": dtensor(LOCAL, ["S(0)"], mesh_of_2_15((0,), (1,), 2, (0,))),
    "no mesh": dtensor(LOCAL, ["S(0)"], new("torch", "Nothing")),
    "no local tensor": dtensor(None, ["S(0)"], mesh_of_2_6([0, 1], [0])),
    "a shape that is none": dtensor(LOCAL, ["S(0)"], mesh_of_2_6([0, 1], [0]), shape=(-1, 2)),
}


def with_invalid_placements(call: Call) -> Call:
    """Replace a DTensor's placements by invalid objects."""
    call.arguments[3][1]["_spec"].state["placements"] = (new("torch.distributed.tensor.placement_types", "Other"),)
    return call


ODD["a placement of another kind"] = with_invalid_placements(ODD["a placement of another kind"])


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_an_unknown_dtensor_is_counted_as_sharded(tmp_path: Path, value: Call) -> None:
    """An invalid DTensor is refused with a reason, which is neither an error nor a difference."""
    tensor = read_entry(tmp_path, value)
    assert (tensor.refused, tensor.sharding) == (Refusal.SHARDED_DTENSOR(), None)
