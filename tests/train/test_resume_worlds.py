"""A run that goes on with another number of ranks: what is exact, what is rounding, and what is said of it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from resumed import TINY, Stops, interrupt, resume, whole
from scenarios import NEEDS_FSDP, fsdp, whole_state

from train.engine import train
from train.errors import UserError
from train.job import prepare
from train.launch import RankContext
from train.resume import state_path, states_folder
from train.resume.shards import merge_states
from train.resume.state import find_local_optimizer, parameter_names, restore_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from syncheck.testing import Rank
    from train.settings import Settings

# Without BatchNorm, and with statistics over all ranks; 16 samples are 4 for each of 4 ranks.
PLAIN = replace(TINY, model="convnet", width=None, save_per_rank=False)
# As in test_equivalence.py: other sums, carried along for five steps of momentum.
ROUNDING = 1e-5


@contextmanager
def world(syncheck_rank: Rank, name: str, size: int) -> Iterator[RankContext | None]:
    """Put the first `size` ranks in a process group of their own for the block; None for the others."""
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
    """Close the process group when all ranks are connected, and gloo's threads have let go of the last tensors.

    They need the interpreter for it, for which the older torch would wait while it holds it
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def whole_optimizer(settings: Settings, ctx: RankContext) -> dict[str, Tensor]:
    """Resume, and give the optimizer's tensors of all ranks, whole, by the name of their parameter."""

    job = prepare(replace(settings, resume=True), ctx)
    optimizer = find_local_optimizer(job.trainer)
    names = parameter_names(job.method.module, optimizer)
    mine = {}
    for index, states in optimizer.state_dict()["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                mine[f"{names[index]}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    ranks = ctx.gather(mine)
    return {name: value for rank in ranks for name, value in rank.items()} | whole_state(job)


@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("method", ["ddp", "zero", fsdp("fsdp")])
@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2)])
@pytest.mark.slow
def test_state_is_exact_on_another_number_of_ranks(syncheck_rank: Rank, method: str, old: int, new: int) -> None:
    """Parameters and Adam's moments are the same bits on 2 and on 4 ranks, whoever holds them; then all goes on alike.

    To the end of the run the weights differ by rounding only.
    """
    settings = replace(PLAIN, method=method, optimizer="adamw", lr=0.005, out=syncheck_rank.shared / "parts")
    then: dict[str, Tensor] = {}
    with world(syncheck_rank, "old", old) as ctx:
        if ctx is not None:
            interrupt(ctx, settings, 3)
            then = whole_optimizer(settings, ctx)
    with world(syncheck_rank, "new", new) as ctx:
        if ctx is not None:
            now = whole_optimizer(settings, ctx)
            if then:
                assert then.keys() == now.keys()
                assert [name for name in then if not then[name].equal(now[name])] == []
            _, notes = resume(ctx, settings)
            assert notes.steps == [4, 5, 6, 7, 8]
            reference, uninterrupted = whole(ctx, replace(settings, out=syncheck_rank.shared / "once"))
            assert reference.steps == 8
            for mine, theirs in zip(notes.epochs, uninterrupted.epochs, strict=True):
                assert mine[2].samples == theirs[2].samples
                assert mine[2].loss == pytest.approx(theirs[2].loss, rel=1e-5)
            gap = _gap(settings, replace(settings, out=syncheck_rank.shared / "once"), ctx)
            assert 0 < gap < ROUNDING


def _gap(a: Settings, b: Settings, ctx: RankContext) -> float:
    """Resume two runs at their ends, and return how far apart their weights are."""
    left, right = (whole_state(prepare(replace(s, resume=True), ctx)) for s in (a, b))
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("model", ["convnet", "resnet8"])
def test_goes_on_alone(syncheck_rank: Rank, capfd: pytest.CaptureFixture[str], model: str) -> None:
    """ddp of two ranks goes on as ddp of one, within rounding, with SyncBatchNorm too; what is not bitwise is said."""
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
        assert 0 < _gap(settings, replace(settings, out=syncheck_rank.shared / "once"), alone) < 10 * ROUNDING


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("method", ["ddp", "zero", "localsgd", fsdp("fsdp")])
def test_each_rank_starts_as_one_of_then(syncheck_rank: Rank, method: str) -> None:
    """BatchNorm's own statistics, and all that localsgd leaves to each rank, go on as those of rank r modulo 2.

    Width 2 leaves ranks 2 and 3 of fsdp without a row of most tensors.
    """
    settings = replace(TINY, method=method, width=2, average_every=2 if method == "localsgd" else None)
    settings = replace(settings, out=syncheck_rank.shared, save_per_rank=False)
    with world(syncheck_rank, "old", 2) as ctx:
        if ctx is not None:
            interrupt(ctx, settings, 5)
    with world(syncheck_rank, "new", 4) as ctx:
        assert ctx is not None
        job = prepare(replace(settings, resume=True), ctx)
        model = whole_state(job)
        saved = torch.load(state_path(states_folder(settings.out, settings.run), 5, ctx.rank % 2), weights_only=True)[
            "model"
        ]
        own = [name for name in saved if method == "localsgd" or "running" in name]
        assert own
        assert [name for name in own if not model[name].equal(saved[name])] == []
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
def test_back_from_empty_parts(syncheck_rank: Rank, size: int) -> None:
    """Tensors of two rows, of which two of four ranks hold nothing, are whole again on fewer ranks, bit by bit."""
    settings = replace(PLAIN, model="resnet8", width=2, method="fsdp", sync_bn=True, out=syncheck_rank.shared)
    then: dict[str, Tensor] = {}
    with world(syncheck_rank, "old", 4) as ctx:
        assert ctx is not None
        interrupt(ctx, settings, 3)
        then = whole_optimizer(settings, ctx)
    with world(syncheck_rank, "new", size) as ctx:
        if ctx is not None:
            now = whole_optimizer(settings, ctx)
            assert [name for name in then if not then[name].equal(now[name])] == []
            assert resume(ctx, settings)[1].steps == [4, 5, 6, 7, 8]


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
def test_copies_of_parts_are_put_together_once(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Under hsdp the files of the first copy make the whole model; cut for the mesh, it is what each rank held."""
    settings = replace(TINY, method="hsdp", optimizer="adamw", lr=0.005, save_per_rank=False, out=syncheck_rank.shared)
    interrupt(ctx, settings, 3)
    folder = states_folder(settings.out, settings.run)
    states = {rank: torch.load(state_path(folder, 3, rank), weights_only=True) for rank in range(4)}
    job = prepare(replace(settings, resume=True), ctx)
    before = {name: _local(tensor).clone() for name, tensor in job.method.module.state_dict().items()}
    together = merge_states(states, ctx.rank)
    full = whole_state(job)
    assert [name for name in full if not full[name].equal(together["model"][name])] == []
    with torch.no_grad():
        for parameter in job.method.module.parameters():
            _local(parameter).zero_()
    restore_state(together, job.trainer)
    after = job.method.module.state_dict()
    assert [name for name in before if not _local(after[name]).equal(before[name])] == []


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.syncheck(ranks=2)
def test_parts_need_all_files(syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]) -> None:
    """With another number of ranks zero needs the files of all; ddp goes on from any one of them."""
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
            capfd.readouterr()
            if method == "zero":
                with pytest.raises(UserError, match=r"no state in .* is usable"):
                    train(replace(settings, resume=True), alone, Stops(8))
                told = capfd.readouterr().err
                assert f"skipping step 1: rank 0 cannot read {lost}" in told
            else:
                assert resume(alone, settings)[1].steps[0] == 2
