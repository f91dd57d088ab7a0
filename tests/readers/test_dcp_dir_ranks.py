"""Folders written by several ranks: DDP, FSDP2 and HSDP on gloo, compared with the full state in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.imports import import_or_skip
from support.listings import list_fields
from support.states import pick

torch = pytest.importorskip("torch")

from support.dcp_folders import contents, expected, load, save, trained  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

import syncheck  # noqa: E402

if TYPE_CHECKING:
    from syncheck.testing import Rank

FULL = StateDictOptions(full_state_dict=True)


def fully_sharded(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return an FSDP2 network after one step. Its 5, 3 and 1 rows are uneven, and some ranks have no rows."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard") or torch.__version__ < "2.7":
        pytest.skip("FSDP2 on the CPU needs torch 2.7")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 1, bias=False))
    for layer in (model[0], model[2]):
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    model(torch.randn(8, 7)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save_and_compare(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Save a folder on all ranks and the full state in a file on rank 0; return the report on both."""
    states, steps = get_state_dict(model, optimizer)
    complete, whole_steps = get_state_dict(model, optimizer, options=FULL)
    folder = save(rank.shared / "folder", {"model": states, "optim": steps})
    if rank.rank == 0:
        torch.save({"model": complete, "optim": whole_steps}, rank.shared / "whole.pth")
    rank.barrier()
    return syncheck.compare(rank.shared / "whole.pth", folder)


@pytest.mark.syncheck(ranks=2)
def test_ddp_and_columns(syncheck_rank: Rank) -> None:
    """A folder of a DDP run, with tensors in the files of both ranks, is in sync with a file of rank 0.

    Tensors sharded unevenly by column, as in tensor parallelism, are assembled to the same bits.
    """
    model, optimizer = trained()
    ddp = nn.parallel.DistributedDataParallel(model)
    report = save_and_compare(syncheck_rank, ddp, optimizer)
    assert report.verdict == "in_sync"
    assert report.counts.identical == report.counts.tensors == 9 + 3 * 6
    paths = set(list_fields(syncheck.read(str(syncheck_rank.shared / "folder")).tensors.values(), "path"))
    assert len(paths) == 2
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    wide, deep = torch.randn(6, 5), torch.randn(3, 4, 7).bfloat16()
    state = {"wide": distribute_tensor(wide, mesh, [Shard(1)]), "deep": distribute_tensor(deep, mesh, [Shard(2)])}
    folder = save(syncheck_rank.shared / "columns", state)
    syncheck_rank.barrier()
    assert contents(folder) == expected({"wide": wide, "deep": deep})


@pytest.mark.syncheck(ranks=2)
def test_fsdp2_with_uneven_rows(syncheck_rank: Rank) -> None:
    """Uneven and empty FSDP2 shards give the full state dict; a flipped bit is found at its index."""
    model, optimizer = fully_sharded(init_device_mesh("cpu", (2,)))
    report = save_and_compare(syncheck_rank, model, optimizer)
    assert report.verdict == "in_sync"
    assert report.counts.identical == report.counts.tensors == 10 + 3 * 7
    folder = syncheck_rank.shared / "folder"
    snapshot = syncheck.read(str(folder))
    assert {len(snapshot.tensors[name].shards) for name in ("0.weight", "2.weight")} == {2}
    full = get_model_state_dict(model, options=FULL)
    assert pick(contents(snapshot), full) == expected(full)
    loaded = load(folder, {"model": {name: torch.zeros_like(t) for name, t in full.items()}})["model"]
    assert expected(loaded) == expected(full)
    syncheck_rank.barrier()
    if syncheck_rank.rank == 0:
        part = snapshot.tensors["0.weight"].shards[1]
        assert part.start == (3, 0)
        with open(part.tensor.path, "r+b") as file:
            file.seek(part.tensor.offset + 4 * (1 * 7 + 2))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    syncheck_rank.barrier()
    (diff,) = syncheck.compare(syncheck_rank.shared / "whole.pth", folder).groups[0].tensors
    assert (diff.name, diff.mismatched, diff.index) == ("0.weight", 1, (4, 2))


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
def test_hsdp(syncheck_rank: Rank) -> None:
    """With HSDP on 2 x 2 ranks, replicated shards are stored once and form the full state dict."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = fully_sharded(mesh)
    report = save_and_compare(syncheck_rank, model, optimizer)
    assert report.verdict == "in_sync"
    assert report.counts.identical == report.counts.tensors == 10 + 3 * 7


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_lightning_sharded_checkpoint(syncheck_rank: Rank) -> None:
    """Lightning's folder of a sharded model and its extra file are one checkpoint."""
    lightning = import_or_skip("lightning.fabric.strategies.model_parallel")
    model, optimizer = fully_sharded(init_device_mesh("cpu", (2,)))
    state = {"model": model, "optimizer_0": optimizer, "global_step": 12, "epoch": 3}
    folder = syncheck_rank.shared / "epoch=3.ckpt"
    lightning._save_checkpoint(folder, state, full_state_dict=False, rank=syncheck_rank.rank)
    syncheck_rank.barrier()
    snapshot = syncheck.read(str(folder))
    assert (snapshot.values["global_step"], snapshot.values["epoch"]) == (12, 3)
    assert {"0.weight", "optimizer.0.weight.exp_avg"} <= set(snapshot.tensors)
    report = syncheck.compare(syncheck_rank.shared)
    assert [group.replicas[0].path for group in report.groups] == [str(folder)]
    assert (report.unreadable, report.skipped) == ((), 0)
