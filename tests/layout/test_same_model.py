"""`assert_same_model`: files, objects in memory, and the shards of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_codes, list_fields
from support.marks import slow

import syncheck
from syncheck.errors import RankFailed, UsageError
from syncheck.messages import Note
from syncheck.records import OutOfSync
from syncheck.testing import assert_same_model, compare

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank


def make_model() -> Any:
    """Return a small model; its largest layer has a number of rows that no number of ranks divides."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 11), torch.nn.BatchNorm1d(11), torch.nn.Linear(11, 3))


def spread(model: Any, how: str) -> Any:
    """Shard a model over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "fsdp":
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("FSDP2 is in torch 2.6 and newer")
        return fsdp.fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"2": ColwiseParallel()})


def test_objects_and_files(tmp_path: Path) -> None:
    """A module, its state dict and a file of it are the same model in every combination; an edited element is found."""
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "full.pth")
    equal_copy = [model, model.state_dict(), tmp_path / "full.pth", str(tmp_path / "full.pth")]
    for a in equal_copy:
        for b in equal_copy:
            assert assert_same_model(a, b).counts.identical == 9
    second = make_model()
    with torch.no_grad():
        second[0].weight[7, 2] += 1
    for item in equal_copy:
        with pytest.raises(OutOfSync) as caught:
            assert_same_model(item, second)
        (diff,) = caught.value.report.groups[-1].tensors
        assert (diff.name, diff.index, caught.value.report.command) == ("0.weight", (7, 2), "diff")


def test_options_by_name(tmp_path: Path) -> None:
    """Fields of DiffOptions are keyword arguments; a wrong option and an object without tensors raise UsageError."""
    model, half = make_model(), make_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    half.load_state_dict(model.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pth")
    assert assert_same_model(tmp_path / "a.pth", half, subset=True, cast="bfloat16").counts.close == 8
    for options in ({}, {"subset": True}, {"cast": "bfloat16"}):
        with pytest.raises(OutOfSync):
            assert_same_model(tmp_path / "a.pth", half, **options)
    for call in (lambda: assert_same_model(model, model, subsets=True), lambda: assert_same_model(model, 3)):
        with pytest.raises(UsageError):
            call()


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("how", ["tp", *slow("fsdp")])
def test_shards_of_ranks(syncheck_rank: Rank, how: str) -> None:
    """Shards in memory against a file, a plain module and another layout; one rank's edit fails on all ranks alike."""
    rank = syncheck_rank
    model, path = make_model(), rank.shared / "full.pth"
    if not rank.rank:
        torch.save(model.state_dict(), path)
    sharded = spread(make_model(), how)
    second = spread(make_model(), "tp" if how == "fsdp" else "fsdp")
    for a, b in ((sharded, path), (path, sharded), (sharded, model), (sharded, second)):
        assert assert_same_model(a, b).counts.identical == 9
    name = "0.weight" if how == "fsdp" else "2.weight"
    if rank.rank == 1:
        with torch.no_grad():
            sharded.get_parameter(name).to_local()[0, 1] += 1
    with pytest.raises(OutOfSync) as caught:
        assert_same_model(sharded, path)
    (diff,) = caught.value.report.groups[-1].tensors
    assert (diff.name, diff.index, diff.places[0].rank) == (name, (4 if how == "fsdp" else 1, 1), 1)
    assert len(set(rank.gather(str(caught.value)))) == 1


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("change", ["", "value", "missing"])
def test_pipeline_stages_of_ranks_have_the_verdict_of_files(syncheck_rank: Rank, change: str) -> None:
    """Each rank passes its own stage; the verdict is that of the same states saved as files."""
    generator = torch.Generator().manual_seed(0)
    full = {f"layers.{i}.weight": torch.randn(3, 3, generator=generator) for i in range(4)}
    names = list(full)[2 * syncheck_rank.rank :][:2]
    stage = {name: full[name].clone() for name in names}
    if change and syncheck_rank.rank:
        stage[names[0]] += 1
        if change == "missing":
            del stage[names[0]]
    folder = syncheck_rank.shared
    torch.save(stage, folder / f"stage_rank{syncheck_rank.rank}.pt")
    torch.save(full, folder / "full.pt")
    syncheck_rank.barrier()
    on_disk = syncheck.diff(str(folder / "stage_rank*.pt"), folder / "full.pt")
    verdict = "in_sync"
    try:
        assert assert_same_model(stage, full).counts.identical == 4
    except OutOfSync as error:
        verdict = error.report.verdict
        codes = [list_codes(report.groups[-1].findings) for report in (error.report, on_disk)]
        assert codes[0] == codes[1]
    assert verdict == on_disk.verdict == ("out_of_sync" if change else "in_sync")


@pytest.mark.syncheck(ranks=2)
def test_a_failing_rank_fails_all(syncheck_rank: Rank) -> None:
    """An invalid object, a missing file and a copy that differs on one rank: the same error on all ranks."""
    rank = syncheck_rank
    model = make_model()
    calls: list[tuple[Any, Any, type[Exception]]] = [
        (model, 3 if rank.rank else model, UsageError),
        (model, rank.shared / "missing.pth", (UsageError, RankFailed)),  # type: ignore[list-item]
        (model, model if rank.rank else rank.shared / "x.pth", UsageError),
    ]
    for a, b, kind in calls:
        with pytest.raises(kind) as caught:
            assert_same_model(a, b)
        assert len(set(rank.gather(str(caught.value)))) == 1
    second = make_model()
    if rank.rank:
        with torch.no_grad():
            second[0].weight[3, 3] += 1
    with pytest.raises(OutOfSync) as differing:
        assert_same_model(second, model)
    assert list_fields(differing.value.report.groups, "verdict") == ["out_of_sync", "undecided"]
    notes = [note.code for note in differing.value.report.groups[0].notes]
    assert Note.COPIES_AND_OTHER_MODEL in notes


@pytest.mark.syncheck(ranks=3)
def test_whole_and_sharded_tensors_of_ranks(syncheck_rank: Rank) -> None:
    """Digests of shards and of the whole tensor cannot be compared: a live comparison is undecided, no rank fails."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    complete = torch.arange(12.0).reshape(6, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    mine = complete if syncheck_rank.rank == 2 else distribute_tensor(complete, mesh, [Shard(0)], src_data_rank=None)
    report = compare({"w": mine, "plain": complete}, across_ranks=True)
    assert report.exit_code == 2
    assert list_fields(report.groups[0].tensors, "name", "status") == [("w", "not_compared")]
