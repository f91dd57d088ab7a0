"""What the parallel methods promise: the same training, and which tensors agree between ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from scenarios import SMALL, differing, load, run, tensors, widest_gap
from torch.nn.parallel import DistributedDataParallel

from syncheck.testing import assert_in_sync
from train.job import Job, prepare
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
# `ddp` sums a batch's gradient in two parts, so it rounds otherwise than `single`: 6e-8 relative in float32
# for each sum, on weights below 1, carried along for 20 steps of momentum at a learning rate of up to 0.1.
# Measured: 3e-8, and 4e-7 for one seed of twelve. Ten times that is allowed; the planted faults below are at
# 1e-3 and more.
ROUNDING = 5e-6


def gap_to_single(ctx: RankContext, settings: Settings) -> float:
    """Train on all ranks, then in each rank's process alone; return how far apart the weights end."""
    run(ctx, settings)
    alone = replace(settings, method="single", out=settings.out / f"alone{ctx.rank}")
    run(RankContext(), alone)
    return widest_gap(settings.out / f"ddp_rank{ctx.rank}.pth", alone.out / "single_rank0.pth")


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("batch_size", [32, 33], ids=["even shares", "uneven shares"])
def test_ddp_trains_like_single(ctx: RankContext, syncheck_rank: Rank, batch_size: int) -> None:
    """Twenty steps without BatchNorm on two ranks end where one process ends, also where 33 samples are 17 and 16."""
    settings = replace(EQUIVALENCE, batch_size=batch_size, out=syncheck_rank.shared)
    assert gap_to_single(ctx, settings) < ROUNDING
    assert differing(settings.out / "ddp_rank0.pth", settings.out / "ddp_rank1.pth") == set()


def mean_of_each_rank(self: Ddp, loss: Tensor) -> None:
    """Average the ranks' own means, as if their shares were equal: 17 and 16 samples of 33 are not."""
    (loss * 33 / (17, 16)[self.ctx.rank]).backward()


def not_scaled(self: Ddp, loss: Tensor) -> None:
    """Let DDP divide by the number of ranks what is a share of the global mean already."""
    loss.backward()


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(("backward", "least"), [(mean_of_each_rank, 1e-3), (not_scaled, 1e-2)])
def test_the_comparison_sees_wrong_weights(
    ctx: RankContext,
    syncheck_rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    backward: Callable[[Ddp, Tensor], None],
    least: float,
) -> None:
    """Averaging the ranks' own means, or dividing twice, is far outside the tolerance of the test above."""
    monkeypatch.setattr(Ddp, "backward", backward)
    assert gap_to_single(ctx, replace(EQUIVALENCE, batch_size=33, out=syncheck_rank.shared)) > least


@pytest.mark.syncheck(ranks=2)
def test_same_seed_same_bits(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Two runs with one seed write bitwise equal tensors on each rank; another seed does not."""
    files = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        run(ctx, replace(SMALL, out=syncheck_rank.shared / name, seed=seed))
        files[name] = syncheck_rank.shared / name / f"ddp_rank{ctx.rank}.pth"
    assert differing(files["one"], files["again"]) == set()
    assert "conv1.weight" in differing(files["one"], files["other"])


@pytest.mark.syncheck(ranks=2)
def test_ddp_leaves_running_statistics_apart(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Under default DDP every running mean and variance differs between ranks in every file, and nothing else does."""
    # Epochs of two steps: step 2 and 4 end one, step 3 and 5 follow an evaluation.
    out = syncheck_rank.shared
    run(ctx, replace(SMALL, limit_train=64, save_every=1, out=out))
    folders = [out / "history" / "ddp" / f"step_{step}" for step in range(1, 7)]
    pairs = [(folder / "rank_0.pth", folder / "rank_1.pth") for folder in folders]
    for a, b in [*pairs, (out / "ddp_rank0.pth", out / "ddp_rank1.pth")]:
        assert differing(a, b) == {name for name in tensors(a) if name.endswith(STATISTICS)}
    assert differing(folders[-1] / "rank_1.pth", out / "ddp_rank1.pth") == set()


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("changes", [{}, {"buffer_sync": False, "batch_size": 33}], ids=["default", "uneven shares"])
def test_sync_bn_leaves_nothing_apart(ctx: RankContext, syncheck_rank: Rank, changes: dict[str, Any]) -> None:
    """With --sync-bn all tensors are bitwise equal between ranks, with and without buffer sync, uneven shares too."""
    settings = replace(SMALL, sync_bn=True, out=syncheck_rank.shared, **changes)
    run(ctx, settings)
    a, b = (settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(2))
    assert differing(a, b) == set()
    assert "layer1.0.bn1.running_mean" in tensors(a)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What a run of this test holds in memory, for a look at it when the run is over."""
    kept: list[Job] = []

    def keep(*given: Any) -> Job:
        kept.append(prepare(*given))
        return kept[-1]

    monkeypatch.setattr("train.engine.prepare", keep)
    return kept


@pytest.mark.syncheck(ranks=[2, 3])
def test_sync_bn_is_in_sync_in_memory(ctx: RankContext, jobs: list[Job]) -> None:
    """With --sync-bn the model and the optimizer that two or three ranks hold are the same, file or no file."""
    run(ctx, replace(SMALL, sync_bn=True, save_per_rank=False))
    assert_in_sync(jobs[0].method.module, jobs[0].trainer.optimizer)


@pytest.mark.syncheck(ranks=2)
def test_plain_ddp_is_not_in_sync_in_memory(ctx: RankContext, jobs: list[Job]) -> None:
    """Without it the running statistics are each rank's own, after an evaluation too, and all else is the same.

    The evaluation must not pass through DDP's wrapper, which would make them equal and hide the difference.
    """
    run(ctx, replace(SMALL, save_per_rank=False))
    model, optimizer = jobs[0].method.module, jobs[0].trainer.optimizer
    with pytest.raises(AssertionError, match="SYN201"):
        assert_in_sync(model, optimizer)
    assert_in_sync(model, optimizer, exclude=[f"*{name}" for name in STATISTICS])


@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
def test_without_buffer_sync_statistics_run_free(ctx: RankContext, syncheck_rank: Rank) -> None:
    """With --no-buffer-sync a drift is carried into the next step; with DDP's default each step starts afresh."""
    kept = {}
    for sync in (True, False):
        settings = replace(SMALL, buffer_sync=sync, max_steps=20, save_every=19, out=syncheck_rank.shared)
        run(ctx, settings)
        moment = settings.out / "history" / settings.run / "step_19"
        before = drift(moment / "rank_0.pth", moment / "rank_1.pth")
        after = drift(*(settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(2)))
        kept[sync] = torch.cosine_similarity(before, after, dim=0).item()
    assert kept[False] > 0.7  # nine tenths of it stay, and one step is added
    assert abs(kept[True]) < 0.6  # one step of two batches each, unrelated


def drift(a: Path, b: Path) -> Tensor:
    """All running means' differences in one vector; all else must be equal."""
    left, right = load(a)["model"], load(b)["model"]
    assert all(left[name].equal(right[name]) for name in left if not name.endswith(STATISTICS))
    return torch.cat([left[name] - right[name] for name in left if name.endswith("running_mean")])


def test_buffer_argument_follows_the_torch_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """--no-buffer-sync uses the argument that DDP documents now, and the older one where there is no other."""

    def older(self: DistributedDataParallel, module: object, broadcast_buffers: bool = True) -> None: ...

    def newer(self: DistributedDataParallel, module: object, forward_sync_buffers: bool = True) -> None: ...

    assert ddp.build_buffer_arguments(True) == {}
    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    assert ddp.build_buffer_arguments(False) == {"broadcast_buffers": False}
    monkeypatch.setattr(DistributedDataParallel, "__init__", newer)
    assert ddp.build_buffer_arguments(False) == {"forward_sync_buffers": False}


def test_table_names_every_method() -> None:
    """The table contains every method module under its own name."""
    folder = Path(ddp.__file__).parent
    assert set(METHODS) == {path.stem for path in folder.glob("*.py")} - {"__init__", "base", "table"}
    assert all(method.__module__ == f"train.methods.{name}" for name, method in METHODS.items())
