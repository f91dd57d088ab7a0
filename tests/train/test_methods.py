"""What the parallel methods promise: the same training, and which tensors agree between ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from scenarios import SMALL, differing, load, run, run_with_single, tensors, widest_gap
from torch.nn.parallel import DistributedDataParallel

from train.methods import METHODS, ddp
from train.methods.ddp import Ddp

if TYPE_CHECKING:
    from ranks import Ranks
    from torch import Tensor

    from train.launch import RankContext
    from train.settings import Settings

STATISTICS = (".running_mean", ".running_var")
EQUIVALENCE = replace(SMALL, model="convnet", width=None, shuffle=False, max_steps=20)
# `ddp` sums a batch's gradient in two parts, so it rounds otherwise than `single`: 6e-8 relative in float32
# for each sum, on weights below 1, carried along for 20 steps of momentum at a learning rate of up to 0.1.
# Measured: 3e-8, and 4e-7 for one seed of twelve. Ten times that is allowed; the planted faults below are at
# 1e-3 and more.
ROUNDING = 5e-6


@pytest.mark.parametrize("batch_size", [32, 33], ids=["even shares", "uneven shares"])
def test_ddp_trains_like_single(two_ranks: Ranks, tmp_path: Path, batch_size: int) -> None:
    """Twenty steps without BatchNorm on two ranks end where one process ends, also where 33 samples are 17 and 16."""
    two_ranks(run_with_single, replace(EQUIVALENCE, batch_size=batch_size, out=tmp_path))
    gap = widest_gap(tmp_path / "ddp_rank0.pth", tmp_path / "single_rank0.pth")
    assert gap < ROUNDING
    assert differing(tmp_path / "ddp_rank0.pth", tmp_path / "ddp_rank1.pth") == set()


def with_fault(ctx: RankContext, settings: Settings, fault: str) -> None:
    """Train with a mistake in how DDP's average is weighted."""

    def backward(self: Ddp, loss: Tensor) -> None:
        if fault == "mean of each rank":
            loss = loss * settings.batch_size / (17 if self.ctx.rank == 0 else 16)
        loss.backward()

    original, Ddp.backward = Ddp.backward, backward
    try:
        run_with_single(ctx, settings)
    finally:
        Ddp.backward = original


@pytest.mark.parametrize(("fault", "least"), [("mean of each rank", 1e-3), ("not scaled", 1e-2)])
def test_the_comparison_sees_wrong_weights(two_ranks: Ranks, tmp_path: Path, fault: str, least: float) -> None:
    """Averaging the ranks' own means, or dividing twice, is far outside the tolerance of the test above."""
    two_ranks(with_fault, replace(EQUIVALENCE, batch_size=33, out=tmp_path), fault)
    assert widest_gap(tmp_path / "ddp_rank0.pth", tmp_path / "single_rank0.pth") > least


def test_same_seed_same_bits(two_ranks: Ranks, tmp_path: Path) -> None:
    """Two runs with one seed write bitwise equal tensors on each rank; another seed does not."""
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        two_ranks(run, replace(SMALL, out=tmp_path / folder, seed=seed))
    for name in ("ddp_rank0.pth", "ddp_rank1.pth"):
        assert differing(tmp_path / "a" / name, tmp_path / "b" / name) == set()
        assert "conv1.weight" in differing(tmp_path / "a" / name, tmp_path / "c" / name)


def test_ddp_leaves_running_statistics_apart(two_ranks: Ranks, tmp_path: Path) -> None:
    """Under default DDP every running mean and variance differs between ranks, and nothing else does.

    In every file, those written just after an epoch's evaluation too: it does not pass through the wrapper,
    which would have made them equal.
    """
    # Epochs of two steps: step 2 and 4 end one, step 3 and 5 follow an evaluation.
    settings = replace(SMALL, limit_train=64, save_every=1, out=tmp_path)
    two_ranks(run, settings)
    folders = [tmp_path / "history" / "ddp" / f"step_{step}" for step in range(1, 7)]
    pairs = [(folder / "rank_0.pth", folder / "rank_1.pth") for folder in folders]
    for a, b in [*pairs, (tmp_path / "ddp_rank0.pth", tmp_path / "ddp_rank1.pth")]:
        assert differing(a, b) == {name for name in tensors(a) if name.endswith(STATISTICS)}
    assert differing(folders[-1] / "rank_1.pth", tmp_path / "ddp_rank1.pth") == set()


def test_sync_bn_leaves_nothing_apart(two_ranks: Ranks, tmp_path: Path) -> None:
    """With --sync-bn all tensors are bitwise equal between ranks, with and without buffer sync, uneven shares too."""
    for settings in (
        replace(SMALL, sync_bn=True, out=tmp_path),
        replace(SMALL, sync_bn=True, buffer_sync=False, batch_size=33, out=tmp_path),
    ):
        two_ranks(run, settings)
        a, b = (tmp_path / f"{settings.run}_rank{rank}.pth" for rank in range(2))
        assert differing(a, b) == set()
        assert "layer1.0.bn1.running_mean" in tensors(a)


def test_without_buffer_sync_statistics_run_free(two_ranks: Ranks, tmp_path: Path) -> None:
    """With --no-buffer-sync a drift is carried into the next step; with DDP's default each step starts afresh."""
    kept = {}
    for sync in (True, False):
        settings = replace(SMALL, buffer_sync=sync, max_steps=20, save_every=19, out=tmp_path)
        two_ranks(run, settings)
        moment = tmp_path / "history" / settings.run / "step_19"
        before = drift(moment / "rank_0.pth", moment / "rank_1.pth")
        after = drift(*(tmp_path / f"{settings.run}_rank{rank}.pth" for rank in range(2)))
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

    assert ddp.buffer_arguments(True) == {}
    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    assert ddp.buffer_arguments(False) == {"broadcast_buffers": False}
    monkeypatch.setattr(DistributedDataParallel, "__init__", newer)
    assert ddp.buffer_arguments(False) == {"forward_sync_buffers": False}


def test_table_names_every_method() -> None:
    """Each module in methods/ but the Protocol is in the table, under its own name."""
    folder = Path(ddp.__file__).parent
    assert set(METHODS) == {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert all(method.__module__ == f"train.methods.{name}" for name, method in METHODS.items())
