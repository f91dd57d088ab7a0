"""Resuming with another number of ranks: the exact state, the rounding afterwards, and the printed notes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.resumed import TINY, interrupt, resume, whole
from support.scenarios import NEEDS_FSDP, fsdp, make_job, whole_state
from support.states import find_largest_difference, merge

from train.errors import UserError
from train.launch import RankContext
from train.mesh import gather_whole
from train.resume import state_files, state_path, states_folder
from train.resume.sharded_state import load_shards
from train.resume.state import find_local_optimizer, parameter_names, restore_state
from train.resume.state_files import read_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from syncheck.testing import Rank
    from train.settings import Settings

# A model without BatchNorm. The batch size 16 is divisible by 4 ranks.
PLAIN = replace(TINY, model="convnet", width=None, save_per_rank=False)
# As in test_equivalence.py: sums in another order, accumulated over five steps of momentum.
ROUNDING = 1e-5


@contextmanager
def world(syncheck_rank: Rank, name: str, size: int) -> Iterator[RankContext | None]:
    """Put the first `size` ranks in a separate process group for the block; the remaining ranks get None."""
    if dist.is_initialized():
        leave_group()
    rank = syncheck_rank.rank
    if rank >= size:
        yield None
        return
    store = dist.FileStore(str(syncheck_rank.shared / f"store-{name}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield RankContext(rank, size, rank, syncheck_rank.device, "gloo")
    leave_group()


def leave_group() -> None:
    """Close the process group after all ranks have connected and gloo's threads have released the last tensors.

    The threads need the GIL to release tensors. Older torch versions deadlock because they hold the GIL while they
    wait for the threads (https://github.com/pytorch/pytorch/pull/179291).
    """
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def whole_optimizer(settings: Settings, ctx: RankContext) -> dict[str, Tensor]:
    """Resume, and return the full tensors of the model and of all ranks' optimizers by parameter name."""
    job = make_job(ctx, replace(settings, resume=True))
    optimizer = find_local_optimizer(job.trainer)
    names = parameter_names(job.method.module, optimizer)
    mine = {}
    for index, states in optimizer.state_dict()["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                mine[f"{names[index]}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return merge(ctx.gather(mine)) | whole_state(job)


@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("method", ["ddp", "zero", fsdp("fsdp")])
@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2)])
@pytest.mark.slow
def test_state_is_exact_on_another_number_of_ranks(syncheck_rank: Rank, method: str, old: int, new: int) -> None:
    """Parameters and Adam's moments are bitwise equal after a resume with 2 instead of 4 ranks and vice versa.

    At the end of the run, the weights differ from an uninterrupted run only by rounding.
    """
    settings = replace(PLAIN, method=method, optimizer="adamw", lr=0.005, out=syncheck_rank.shared / "parts")
    saved_state: dict[str, Tensor] = {}
    with world(syncheck_rank, "old", old) as ctx:
        if ctx is not None:
            interrupt(ctx, settings, 3)
            saved_state = whole_optimizer(settings, ctx)
    with world(syncheck_rank, "new", new) as ctx:
        if ctx is not None:
            restored_state = whole_optimizer(settings, ctx)
            if saved_state:
                assert saved_state.keys() == restored_state.keys()
                assert [name for name in saved_state if not saved_state[name].equal(restored_state[name])] == []
            _, notes = resume(ctx, settings)
            assert notes.steps == [4, 5, 6, 7, 8]
            reference, uninterrupted = whole(ctx, replace(settings, out=syncheck_rank.shared / "once"))
            assert reference.steps == 8
            for mine, theirs in zip(notes.epochs, uninterrupted.epochs, strict=True):
                assert mine[2].samples == theirs[2].samples
                assert mine[2].loss == pytest.approx(theirs[2].loss, rel=1e-5)
            difference = _max_difference(settings, replace(settings, out=syncheck_rank.shared / "once"), ctx)
            assert 0 < difference < ROUNDING


def _max_difference(a: Settings, b: Settings, ctx: RankContext) -> float:
    """Load the final states of two runs, and return the largest difference between their weights."""
    remaining = whole_state(make_job(ctx, replace(a, resume=True)))
    right = whole_state(make_job(ctx, replace(b, resume=True)))
    return find_largest_difference(remaining, right)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("model", ["convnet", "resnet8"])
def test_one_rank_resumes_ddp_of_two(syncheck_rank: Rank, capfd: pytest.CaptureFixture[str], model: str) -> None:
    """One rank resumes a ddp run of two ranks within rounding, also with SyncBatchNorm, and prints a note."""
    settings = replace(PLAIN, model=model, width=4 if model == "resnet8" else None, out=syncheck_rank.shared / "parts")
    settings = replace(settings, sync_bn=model == "resnet8")
    with world(syncheck_rank, "old", 2) as ctx:
        assert ctx is not None
        interrupt(ctx, settings, 3)
        assert "resumed" not in capfd.readouterr().err
    with world(syncheck_rank, "new", 1) as alone:
        if alone is None:
            return
        _, notes = resume(alone, settings)
        first, second = capfd.readouterr().err.splitlines()
        assert first.startswith("run.py: resumed ddp")
        assert first.endswith(f"at step 3/8, epoch 1/2, from {settings.out}/.resume/{settings.run}/step_3")
        assert second.startswith("run.py: resumed: saved by 2 ranks, now 1 rank: ")
        assert ("buffers" in second) == (model == "resnet8")
        _, uninterrupted = whole(alone, replace(settings, out=syncheck_rank.shared / "once"))
        assert [epoch[2].samples for epoch in notes.epochs] == [64, 64]
        for mine, theirs in zip(notes.epochs, uninterrupted.epochs, strict=True):
            assert mine[2].loss == pytest.approx(theirs[2].loss, rel=1e-4)
        difference = _max_difference(settings, replace(settings, out=syncheck_rank.shared / "once"), alone)
        assert 0 < difference < 10 * ROUNDING


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("method", ["ddp", "zero", "localsgd", "diloco", fsdp("fsdp"), fsdp("replicate")])
def test_new_ranks_start_from_saved_ranks(syncheck_rank: Rank, method: str) -> None:
    """Rank r of 4 restores the per-rank tensors of saved rank r modulo 2: BatchNorm buffers, or all for localsgd.

    With width 2, ranks 2 and 3 of fsdp hold no rows of most tensors.
    """
    settings = replace(TINY, method=method, width=2, average_every=2 if method in ("localsgd", "diloco") else None)
    settings = replace(settings, out=syncheck_rank.shared, save_per_rank=False)
    with world(syncheck_rank, "old", 2) as ctx:
        if ctx is not None:
            interrupt(ctx, settings, 5)
    with world(syncheck_rank, "new", 4) as ctx:
        assert ctx is not None
        job = make_job(ctx, replace(settings, resume=True))
        model = whole_state(job)
        saved = torch.load(state_path(states_folder(settings.out, settings.run), 5, ctx.rank % 2), weights_only=True)[
            "model"
        ]
        own_values = [name for name in saved if method in ("localsgd", "diloco") or "running" in name]
        assert own_values
        assert [name for name in own_values if not model[name].equal(saved[name])] == []
        assert (
            len({model["bn1.running_mean"].numpy().tobytes(), *ctx.gather(model["bn1.running_mean"].numpy().tobytes())})
            == 2
        )
        result, notes = resume(ctx, settings)
        assert (result.steps, notes.steps) == (8, [6, 7, 8])


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("size", [3, 2])
def test_empty_shards_are_merged(syncheck_rank: Rank, size: int) -> None:
    """Tensors of two rows, of which two of four ranks hold empty shards, are bitwise equal on fewer ranks."""
    settings = replace(PLAIN, model="resnet8", width=2, method="fsdp", sync_bn=True, out=syncheck_rank.shared)
    saved_state: dict[str, Tensor] = {}
    with world(syncheck_rank, "old", 4) as ctx:
        assert ctx is not None
        interrupt(ctx, settings, 3)
        saved_state = whole_optimizer(settings, ctx)
    with world(syncheck_rank, "new", size) as ctx:
        if ctx is not None:
            restored_state = whole_optimizer(settings, ctx)
            assert [name for name in saved_state if not saved_state[name].equal(restored_state[name])] == []
            assert resume(ctx, settings)[1].steps == [4, 5, 6, 7, 8]


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
def test_hsdp_loads_the_shards_of_one_replica(ctx: RankContext, syncheck_rank: Rank) -> None:
    """torch's folder of an hsdp run has the full model, and loading it restores each rank's shard."""
    settings = replace(TINY, method="hsdp", optimizer="adamw", lr=0.005, save_per_rank=False, out=syncheck_rank.shared)
    interrupt(ctx, settings, 3)
    folder = states_folder(settings.out, settings.run)
    state = torch.load(state_path(folder, 3, ctx.rank), weights_only=True)
    job = make_job(ctx, replace(settings, resume=True))
    before = {name: _local(tensor).clone() for name, tensor in job.method.module.state_dict().items()}
    loaded = load_shards(folder / "step_3", job.trainer, state)
    full = whole_state(job)
    assert [name for name in full if not full[name].equal(gather_whole(loaded["model"][name]))] == []
    with torch.no_grad():
        for parameter in job.method.module.parameters():
            _local(parameter).zero_()
    restore_state(loaded, job.trainer)
    after = job.method.module.state_dict()
    assert [name for name in before if not _local(after[name]).equal(before[name])] == []


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_only_sharded_states_need_all_files(syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]) -> None:
    """With another number of ranks, zero needs the shards of all saved ranks; ddp needs only one file."""
    for method in ("zero", "ddp"):
        settings = replace(PLAIN, method=method, out=syncheck_rank.shared)
        with world(syncheck_rank, f"{method} old", 2) as ctx:
            assert ctx is not None
            interrupt(ctx, settings, 1)
        with world(syncheck_rank, f"{method} new", 1) as alone:
            if alone is None:
                continue
            lost = state_path(states_folder(settings.out, method), 1, 1)
            lost.unlink()
            if method == "zero":
                lost = lost.parent / ".sharded"
                (lost / ".metadata").unlink()
            capfd.readouterr()
            if method == "zero":
                with pytest.raises(UserError, match=r"no state in .* is usable"):
                    resume(alone, settings)
                stderr = capfd.readouterr().err
                assert f"skipping step 1: rank 0 cannot read {lost}" in stderr
            else:
                assert resume(alone, settings)[1].steps[0] == 2


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4, timeout=60)
@pytest.mark.parametrize("method", ["ddp_tp", pytest.param("ep", marks=pytest.mark.slow)])
def test_parts_of_a_model_need_the_same_number_of_ranks(
    syncheck_rank: Rank, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """If each rank has another part of the model, another number of ranks is refused after reading one file per rank.

    torch prints no warning about the saved mesh.
    """
    changes: dict[str, Any] = {"model": "gpt-tiny-moe" if method == "ep" else "gpt-tiny", "data": "text", "width": None}
    settings = replace(PLAIN, method=method, out=syncheck_rank.shared, **changes)
    with world(syncheck_rank, "old", 4) as ctx:
        assert ctx is not None
        interrupt(ctx, settings, 1)
    read: list[str] = []

    def record_file(path: Path, run: str) -> dict[str, Any]:
        read.append(path.name)
        return read_state(path, run)

    monkeypatch.setattr(state_files, "read_state", record_file)
    capfd.readouterr()
    with world(syncheck_rank, "new", 2) as ctx:
        if ctx is not None:
            with pytest.raises(UserError, match="step_1 was saved by 4 ranks, each with another part of the model"):
                resume(ctx, settings)
            assert read == [f"rank_{ctx.rank}.pth"]
    assert "DeviceMesh" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4, timeout=60)
def test_a_mesh_equal_to_the_default_is_accepted(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A run saved without --parallel-degree resumes with the default value, and refuses another value."""
    changes: dict[str, Any] = {"model": "gpt-tiny", "data": "text", "width": None, "max_steps": 2}
    settings = replace(PLAIN, method="cp", out=syncheck_rank.shared, **changes)
    interrupt(ctx, settings, 1)
    with pytest.raises(UserError, match=r"--parallel-degree: None when .* was saved, 2 now"):
        resume(ctx, replace(settings, parallel_degree=2))
    assert resume(ctx, replace(settings, parallel_degree=4))[1].steps == [2]
