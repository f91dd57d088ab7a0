"""The parallel methods: training equal to one process, and the tensors that are in sync between ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_fields, list_rank_files
from support.scenarios import SMALL, differing, load, run, tensors, widest_gap
from torch.nn.parallel import DistributedDataParallel

from syncheck.testing import assert_in_sync
from train.engine import Job
from train.launch import RankContext
from train.methods import METHODS, ddp
from train.methods.ddp import Ddp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from syncheck.testing import Rank
    from train.settings import Settings

STATISTICS = (".running_mean", ".running_var")
EQUIVALENCE = replace(SMALL, model="convnet", width=None, shuffle=False, max_steps=20)
# `ddp` sums a batch's gradient in two parts, which rounds differently from `single`: 6e-8 relative in float32 per sum,
# on weights below 1, over 20 steps of momentum at a learning rate of up to 0.1. Measured: 3e-8, and 4e-7 for 1 of 12
# seeds. The tolerance is ten times as large; the injected faults below cause differences of at least 1e-3.
ROUNDING = 5e-6


def difference_to_single(ctx: RankContext, settings: Settings) -> float:
    """Train on all ranks, then in each rank's process alone; return the maximum difference of the weights."""
    run(ctx, settings)
    alone = replace(settings, method="single", out=settings.out / f"alone{ctx.rank}")
    run(RankContext(), alone)
    return widest_gap(settings.out / f"ddp_rank{ctx.rank}.pth", alone.out / "single_rank0.pth")


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("batch_size", [32, 33], ids=["even shares", "uneven shares"])
def test_ddp_trains_like_single(ctx: RankContext, syncheck_rank: Rank, batch_size: int) -> None:
    """Without BatchNorm, 20 steps on two ranks end within rounding of one process, even with shares of 17 and 16."""
    settings = replace(EQUIVALENCE, batch_size=batch_size, out=syncheck_rank.shared)
    assert difference_to_single(ctx, settings) < ROUNDING
    assert differing(settings.out / "ddp_rank0.pth", settings.out / "ddp_rank1.pth") == set()


def average_rank_means(self: Ddp, loss: Tensor) -> None:
    """Average the ranks' own means as if their shares were equal, although they have 17 and 16 samples."""
    (loss * 33 / (17, 16)[self.ctx.rank]).backward()


def omit_scaling(self: Ddp, loss: Tensor) -> None:
    """Omit the scaling, so DDP divides a share of the global mean by the number of ranks again."""
    loss.backward()


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(("backward", "least"), [(average_rank_means, 1e-3), (omit_scaling, 1e-2)])
def test_wrong_averages_exceed_the_tolerance(
    ctx: RankContext,
    syncheck_rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    backward: Callable[[Ddp, Tensor], None],
    least: float,
) -> None:
    """Averaging the ranks' own means, or dividing twice, far exceeds the tolerance of the test above."""
    monkeypatch.setattr(Ddp, "backward", backward)
    assert difference_to_single(ctx, replace(EQUIVALENCE, batch_size=33, out=syncheck_rank.shared)) > least


@pytest.mark.syncheck(ranks=2)
def test_same_seed_same_bits(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Two runs with the same seed write bitwise equal tensors on each rank; a run with another seed does not."""
    files = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        run(ctx, replace(SMALL, out=syncheck_rank.shared / name, seed=seed))
        files[name] = syncheck_rank.shared / name / f"ddp_rank{ctx.rank}.pth"
    assert differing(files["one"], files["again"]) == set()
    assert "conv1.weight" in differing(files["one"], files["other"])


@pytest.mark.syncheck(ranks=2)
def test_ddp_leaves_running_statistics_out_of_sync(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Under default DDP, exactly the running means and variances differ between ranks, in every file."""
    # An epoch has two steps: steps 2 and 4 end an epoch, steps 3 and 5 follow an evaluation.
    out = syncheck_rank.shared
    run(ctx, replace(SMALL, limit_train=64, save_every=1, out=out))
    folders = [out / "history" / "ddp" / f"step_{step}" for step in range(1, 7)]
    pairs = [(folder / "rank_0.pth", folder / "rank_1.pth") for folder in folders]
    for a, b in [*pairs, (out / "ddp_rank0.pth", out / "ddp_rank1.pth")]:
        assert differing(a, b) == {name for name in tensors(a) if name.endswith(STATISTICS)}
    assert differing(folders[-1] / "rank_1.pth", out / "ddp_rank1.pth") == set()


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("changes", [{}, {"buffer_sync": False, "batch_size": 33}], ids=["default", "uneven shares"])
def test_sync_bn_keeps_all_tensors_in_sync(ctx: RankContext, syncheck_rank: Rank, changes: dict[str, Any]) -> None:
    """With --sync-bn, all tensors are bitwise equal between ranks, even without buffer sync and with uneven shares."""
    settings = replace(SMALL, sync_bn=True, out=syncheck_rank.shared, **changes)
    run(ctx, settings)
    a = settings.out / f"{settings.run}_rank0.pth"
    b = settings.out / f"{settings.run}_rank1.pth"
    assert differing(a, b) == set()
    assert "layer1.0.bn1.running_mean" in tensors(a)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Keep the jobs of the test's runs, so that the test can inspect their memory."""
    retained: list[Job] = []

    def keep(*arguments: Any) -> Job:
        retained.append(Job(*arguments))
        return retained[-1]

    monkeypatch.setattr("train.engine.Job", keep)
    return retained


@pytest.mark.syncheck(ranks=[2, 3])
def test_sync_bn_is_in_sync_in_memory(ctx: RankContext, jobs: list[Job]) -> None:
    """With --sync-bn, two or three ranks hold equal models and optimizers in memory."""
    run(ctx, replace(SMALL, sync_bn=True, save_per_rank=False))
    assert_in_sync(jobs[0].method.module, jobs[0].trainer.optimizer)


@pytest.mark.syncheck(ranks=2)
def test_plain_ddp_is_not_in_sync_in_memory(ctx: RankContext, jobs: list[Job]) -> None:
    """Without --sync-bn, only the running statistics differ between ranks, even after an evaluation.

    The evaluation must not use DDP's wrapper, which would synchronize the statistics and hide the difference.
    """
    run(ctx, replace(SMALL, save_per_rank=False))
    model, optimizer = jobs[0].method.module, jobs[0].trainer.optimizer
    with pytest.raises(AssertionError, match="SYN201"):
        assert_in_sync(model, optimizer)
    assert_in_sync(model, optimizer, exclude=[f"*{name}" for name in STATISTICS])


@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
def test_without_buffer_sync_statistics_are_unsynchronized(ctx: RankContext, syncheck_rank: Rank) -> None:
    """With --no-buffer-sync, the drift carries over to the next step; with DDP's default, each step starts in sync."""
    similarity = {}
    for sync in (True, False):
        settings = replace(SMALL, buffer_sync=sync, max_steps=20, save_every=19, out=syncheck_rank.shared)
        run(ctx, settings)
        folder = settings.out / "history" / settings.run / "step_19"
        before = measure_drift(folder / "rank_0.pth", folder / "rank_1.pth")
        after = measure_drift(*list_rank_files(settings.out, f"{settings.run}_rank{{}}.pth", 2))
        similarity[sync] = torch.cosine_similarity(before, after, dim=0).item()
    assert similarity[False] > 0.7  # nine tenths of the drift remain, and one step is added
    assert abs(similarity[True]) < 0.6  # each drift comes from one step only, so the two are unrelated


def measure_drift(a: Path, b: Path) -> Tensor:
    """Return the differences of the running means as one vector; only running statistics may differ."""
    remaining, right = load(a)["model"], load(b)["model"]
    assert all(remaining[name].equal(right[name]) for name in remaining if not name.endswith(STATISTICS))
    return torch.cat([remaining[name] - right[name] for name in remaining if name.endswith("running_mean")])


def test_buffer_argument_depends_on_the_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """--no-buffer-sync sets DDP's documented argument, or the older argument in older versions of torch."""

    def older(self: DistributedDataParallel, module: object, broadcast_buffers: bool = True) -> None: ...

    def newer(self: DistributedDataParallel, module: object, forward_sync_buffers: bool = True) -> None: ...

    assert ddp.build_buffer_arguments(True) == {}
    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    assert ddp.build_buffer_arguments(False) == {"broadcast_buffers": False}
    monkeypatch.setattr(DistributedDataParallel, "__init__", newer)
    assert ddp.build_buffer_arguments(False) == {"forward_sync_buffers": False}


def test_table_of_methods_is_complete() -> None:
    """METHODS contains the methods of all modules, under their own names."""
    folder = Path(ddp.__file__).parent
    modules = {method.__module__.rpartition(".")[2] for method in METHODS.values()}
    # Parts that several methods share.
    shared = {"comm_hooks", "pipeline_stages", "replica_threads", "sync_batchnorm", "tensor_parallel_plan"}
    assert modules == set(list_fields(folder.glob("*.py"), "stem")) - {"__init__", "base", "all_methods"} - shared
    assert all(method.__name__.lower() == name.replace("_", "") for name, method in METHODS.items())
