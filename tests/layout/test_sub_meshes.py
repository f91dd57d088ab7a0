"""DTensors on sub-meshes, as torch saves them: sibling meshes hold replicas, pipeline stages do not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import save_pth
from support.dtensors import dtensor, mesh_of_2_6
from support.listings import find_all, list_codes, list_failing, list_fields, list_names
from support.states import pick
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import syncheck
from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report
    from syncheck.testing import Rank

needs_fsdp2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of this torch does not run on CPU"
)
W = torch.arange(32.0).reshape(8, 4)
HALVES = W.chunk(2)


def compare(folder: Path, make: Callable[[int], dict[str, Any]], world: int = 4) -> Report:
    """Save a checkpoint for each rank of a world and compare the files. make: returns a rank's checkpoint."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            torch.save(make(rank), folder / f"m_rank{rank}.pth")
        finally:
            dist.destroy_process_group()
    return syncheck.compare(folder)


def local(tensor: Any, mesh: Any, *placements: Any) -> DTensor:
    """Return a DTensor with this rank's shard."""
    return DTensor.from_local(tensor.clone(), mesh, placements, run_check=False)


def change_if_odd(tensor: Any, rank: int, odd: int | None) -> Any:
    """Return a copy of the tensor, with one element changed if rank equals odd."""
    created = tensor.clone()
    created.view(-1)[0] += rank == odd
    return created


def tp_in_ddp(rank: int, odd: int | None, outer: str = "dp") -> dict[str, Any]:
    """Return tensor parallel shards on one of two sibling meshes of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, "tp"))
    return {"up": local(change_if_odd(HALVES[rank % 2], rank, odd), mesh["tp"], Shard(0))}


def fsdp_tp(rank: int, odd: int | None) -> dict[str, Any]:
    """Return FSDP2 x TP shards: a weight sharded over both dimensions, a norm over `dp` only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    norm = change_if_odd(W[rank // 2], rank, odd)
    return {"up": local(W.chunk(4)[rank], mesh, Shard(0), Shard(0)), "norm": local(norm, mesh["dp"], Shard(0))}


def explicit(rank: int, odd: int | None) -> dict[str, Any]:
    """Return tensor parallel shards on separately created meshes without names."""
    from torch.distributed.device_mesh import DeviceMesh

    first = rank // 2 * 2
    mesh = DeviceMesh("cpu", [first, first + 1], _init_backend=False)
    return {"up": local(change_if_odd(HALVES[rank % 2], rank, odd), mesh, Shard(0))}


@pytest.mark.parametrize("make", [tp_in_ddp, fsdp_tp, explicit])
def test_ranks_of_sibling_meshes_are_replicas(tmp_path: Path, make: Any) -> None:
    """Ranks with equal coordinates in sibling meshes are compared; one changed element gives exit code 1."""
    report = compare(tmp_path, lambda rank: make(rank, None))
    assert (report.exit_code, report.groups[0].uncompared) == (0, ())
    assert compare(tmp_path, lambda rank: make(rank, 3)).exit_code == 1


def test_pipeline_stages_are_not_siblings(tmp_path: Path) -> None:
    """Along the root mesh's `pp`, ranks hold different layers whatever their names are, and nothing is compared."""
    report = compare(tmp_path, lambda rank: tp_in_ddp(rank, 2, "pp"))
    assert (report.exit_code, report.counts.identical, report.counts.different) == (2, 0, 0)


def test_a_tensor_missing_from_a_sibling_mesh(tmp_path: Path) -> None:
    """If the ranks of a sibling mesh hold two of the model's three tensors, the third tensor is missing."""

    def make(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        contents = {name: local(HALVES[rank % 2], mesh, Shard(0)) for name in ("a", "b", "c")}
        return contents if rank < 2 else pick(contents, "ab")

    (group,) = compare(tmp_path, make).groups
    assert list_fields(list_failing(group), "code", "tensors") == [("SYN101", ("c",))]


@pytest.mark.parametrize(("odd", "code"), [(None, 0), (1, 1), (3, 1)])
def test_assembled_shards_are_compared_with_whole_tensors(tmp_path: Path, odd: int | None, code: int) -> None:
    """The assembled shards of ranks 0 and 1 are compared with the whole tensors of ranks 2 and 3."""
    rows = W.chunk(2)

    def make(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))["fsdp"]
        if rank < 2:
            return {
                "w": local(change_if_odd(rows[rank], rank, odd), mesh, Shard(0)),
                "n": local(W[0], mesh, Replicate()),
            }
        return {"w": change_if_odd(W, rank, odd), "n": W[0].clone()}

    report = compare(tmp_path, make)
    assert (report.exit_code, report.counts.not_compared, report.groups[0].uncompared) == (code, 0, ())


def test_uneven_shards_of_two_dimensions_beside_a_whole_tensor(tmp_path: Path) -> None:
    """Uneven shards of seven rows over three ranks and four columns over two are assembled like torch.chunk splits."""
    complete = np.arange(28, dtype=np.float32).reshape(7, 4)
    for rank in range(6):
        row, column = divmod(rank, 2)
        part = np.ascontiguousarray(complete[row * 3 : row * 3 + 3, column * 2 : column * 2 + 2])
        mesh = mesh_of_2_6(np.arange(6).reshape(3, 2), (row, column))
        save_pth(tmp_path / f"m_rank{rank}.pth", {"w": dtensor(part, ["S(0)", "S(1)"], mesh, (7, 4))})
    save_pth(tmp_path / "m_rank6.pth", {"w": complete})
    assert syncheck.compare(tmp_path).exit_code == 0
    complete[6, 3] += 1
    save_pth(tmp_path / "m_rank6.pth", {"w": complete})
    assert syncheck.compare(tmp_path).exit_code == 1


def test_shards_that_cannot_be_assembled_are_undecided(tmp_path: Path) -> None:
    """Partial sums beside whole tensors are not compared: exit code 2, even if a buffer is equal."""
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    for rank in range(2):
        part = dtensor(rows[:4], ["P(sum)"], mesh_of_2_6([0, 1], [rank]), (8, 4))
        save_pth(tmp_path / f"m_rank{rank}.pth", {"w": part, "mean": rows[0]})
        save_pth(tmp_path / f"m_rank{rank + 2}.pth", {"w": rows, "mean": rows[0]})
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, list_fields(report.groups[0].tensors, "reason")) == (2, [Reason.AMBIGUOUS])


class Block(torch.nn.Module):
    """A norm before two layers that tensor parallelism shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


@needs_fsdp2
@pytest.mark.syncheck(ranks=4)
def test_files_of_fsdp2_and_tensor_parallel_ranks(syncheck_rank: Rank, tmp_path: Path) -> None:
    """With real ranks under FSDP2 x TP, the norm's shards are compared along tp, and a difference is reported."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Block()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(16.0).reshape(2, 8)).sum().backward()
    optimizer.step()
    shared = [str(tmp_path)]
    dist.broadcast_object_list(shared, src=0)
    rank = dist.get_rank()
    for outlier in (False, True):
        if outlier and rank == 3:
            with torch.no_grad():
                model.norm.weight.to_local().add_(1)
        folder = f"{shared[0]}/{outlier}"
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/m_rank{rank}.pth")
        dist.barrier()
        report = syncheck.compare(folder)
        different = dict(list_fields(find_all(report.groups[0].tensors, status="different"), "name", "replica_groups"))
        assert report.exit_code == int(outlier)
        assert different == ({"norm.weight": ((0, 1), (2, 3))} if outlier else {})
        dist.barrier()


@pytest.mark.parametrize("odd", [None, 1])
@pytest.mark.parametrize("lost", [None, 3])
def test_copies_along_the_expert_dimension(tmp_path: Path, odd: int | None, lost: int | None) -> None:
    """DTensors copied over a mesh with experts are compared on all ranks, experts between ranks of one coordinate.

    The optimizer lists other experts on each rank, which is no difference in settings.
    """

    def make(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        names = ["router", f"experts.{rank % 2}"]
        model: dict[str, Any] = {names[1]: W + rank % 2}
        if rank != lost:
            model["router"] = local(change_if_odd(W, rank, odd), mesh, Replicate(), Replicate())
        state = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        position = {"data": rank // 2, "expert": rank % 2}
        block = syncheck.metadata(run="m", rank=rank, world_size=4, step=1, mesh=position) | {
            "optimizer_parameters": names
        }
        return {"model": model, "optimizer": state, "syncheck": block}

    (group,) = compare(tmp_path, make).groups
    assert group.verdict == ("in_sync" if odd is lost is None else "out_of_sync")
    assert "SYN107" not in list_codes(group.findings)
    assert ("SYN101" in list_codes(group.findings)) is (lost is not None)
    assert list_names(find_all(group.tensors, out_of_sync=True)) == ["router"] * (odd is not None or lost is not None)
