"""--join: ranks with unequal numbers of batches, and the broadcast after the last batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from support.listings import find_all, list_codes, list_fields
from support.resumed import interrupt, resume
from support.scenarios import SMALL, differing, load, run, trained
from support.states import find_largest_difference
from torch import nn

import syncheck
from train.data import OwnSharesSampler, load_data
from train.engine import Job, train
from train.errors import UserError
from train.models import build_model
from train.recorders.base import EpochRecord, Recorder
from train.schedule import compute_lr_scale, set_learning_rate
from train.settings import check

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

# 9 batches of 8 or 7 samples per epoch: rank 0 has 5, rank 1 has 4.
UNEVEN = replace(SMALL, join=True, limit_train=71, batch_size=16, epochs=2, max_steps=None)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ranks_end_bitwise_equal(ctx: RankContext, syncheck_rank: Rank, optimizer: str) -> None:
    """After two epochs of 5 and 4 batches, ranks are bitwise equal, including BatchNorm statistics and momentum."""
    settings = replace(UNEVEN, optimizer=optimizer, out=syncheck_rank.shared)
    job = Job(settings, ctx)
    assert len(job.loaders.sampler.sizes) == (5, 4)[ctx.rank]
    assert job.plan.steps == 10
    saved = run(ctx, settings).saved
    assert differing(*saved) == set()
    (group,) = syncheck.compare(*saved).groups
    assert (group.verdict, group.counts.not_compared) == ("in_sync", 0)
    assert load(saved[1])["step"] == 10


@pytest.mark.syncheck(ranks=2)
def test_throughput_counts_real_samples(ctx: RankContext) -> None:
    """Throughput counts the 71 samples of an epoch, not 5 times 16, because rank 1 has no batch at the last step."""
    epochs: list[EpochRecord] = []

    class KeepEpochs(Recorder):
        def epoch(self, record: EpochRecord) -> None:
            epochs.append(record)

    train(replace(UNEVEN, save_per_rank=False), ctx, KeepEpochs())
    if ctx.is_main:
        assert [record.samples_per_second * record.epoch_time_s for record in epochs] == [pytest.approx(71)] * 2


@pytest.mark.syncheck(ranks=2)
def test_ddp_join_alone_leaves_momentum_out_of_sync(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's join alone synchronizes the models but not the momentum, and syncheck reports this difference."""
    monkeypatch.setattr("train.methods.ddp.broadcast_optimizer_state", lambda *_: None)
    saved = run(ctx, replace(UNEVEN, out=syncheck_rank.shared)).saved
    names = differing(*saved)
    assert names == {f"optimizer.{i}.momentum_buffer" for i in range(23)}
    (group,) = syncheck.compare(*saved).groups
    assert group.verdict == "out_of_sync"
    assert list_codes(group.findings) == ["SYN299"]
    assert set(list_fields(find_all(group.tensors, status="different"), "kind")) == {"optimizer"}


@pytest.mark.syncheck(ranks=3)
def test_join_equals_training_by_hand(ctx: RankContext) -> None:
    """A run ends within rounding of one process on the union of all batches, with equal weight for each sample."""
    settings = replace(UNEVEN, model="convnet", batch_size=24, save_per_rank=False, shuffle=False)
    settings = replace(settings, limit_train=60)  # 8 batches, the last with 4 samples: ranks have 3, 3 and 2
    actual = trained(ctx, settings).method.module.state_dict()
    expected = train_by_hand(settings, 3).state_dict()
    assert find_largest_difference(expected, actual) < 5e-6


def train_by_hand(settings: Settings, ranks: int) -> nn.Module:
    """Train in one process on the union of all ranks' batches at each step."""
    torch.manual_seed(settings.seed)
    model = build_model(settings.model, 1, 10, settings.width)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    train = load_data("digits", None, settings.limit_train).train
    pairs = [train[i] for i in range(len(train))]
    x, y = torch.stack(list_fields(pairs, 0)), torch.tensor([int(b) for _, b in pairs])
    per_epoch = -(-len(x) // settings.batch_size)
    for step in range(settings.epochs * per_epoch):
        start = step % per_epoch * settings.batch_size
        window = slice(start, start + ranks * (settings.batch_size // ranks))
        loss = F.cross_entropy(model(x[window]), y[window], reduction="sum") / settings.batch_size
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        set_learning_rate(optimizer, settings.lr * compute_lr_scale(step, settings.epochs * per_epoch))
        optimizer.step()
    return model


@pytest.mark.syncheck(ranks=2)
def test_checkpoints_and_checks_are_due_at_epoch_ends(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Checkpoints at epoch ends are in sync; intervals with other steps are refused on all ranks."""
    settings = replace(UNEVEN, save_every=5, monitor=5, out=syncheck_rank.shared)
    saved = run(ctx, settings).saved
    assert len(saved) == 6
    assert syncheck.compare(syncheck_rank.shared).verdict == "in_sync"
    for changes in ({"save_every": 2}, {"monitor": 2}, {"checkpoint_every": 7}):
        with pytest.raises(UserError, match="must be a multiple of 5"):
            Job(replace(UNEVEN, **changes), ctx)


@pytest.mark.syncheck(ranks=2)
def test_a_resumed_run_is_bitwise_equal(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A run that crashed in its second epoch resumes from the end of the first, and ends bitwise equal."""
    settings = replace(UNEVEN, checkpoint_every=5, out=syncheck_rank.shared / "parts")
    complete = run(ctx, replace(settings, out=syncheck_rank.shared / "whole")).saved
    interrupt(ctx, settings, 6)
    result, notes = resume(ctx, settings)
    assert notes.steps == [6, 7, 8, 9, 10][: (5, 4)[ctx.rank]]
    assert result.steps == 10
    assert [differing(*pair) for pair in zip(complete, result.saved, strict=True)] == [set(), set()]


@pytest.mark.syncheck(ranks=2)
def test_a_single_sample_is_refused(ctx: RankContext) -> None:
    """If one rank would have no batch, or a single sample for BatchNorm, all ranks refuse instead of hanging."""
    with pytest.raises(UserError, match="the last batch of an epoch would be a single sample"):
        Job(replace(UNEVEN, limit_train=73), ctx)
    Job(replace(UNEVEN, limit_train=73, model="convnet"), ctx)
    with pytest.raises(UserError, match="each of 2 ranks needs one"):
        Job(replace(UNEVEN, limit_train=8), ctx)


@pytest.mark.parametrize(("samples", "ranks"), [(71, 2), (64, 4), (65, 4), (9, 3)])
def test_every_sample_is_used_once(samples: int, ranks: int) -> None:
    """The ranks' batches contain each sample once; rank 0 has the most batches, and `skip` drops the first batches."""
    indices: list[int] = []
    for rank in range(ranks):
        sampler = OwnSharesSampler(samples, 4 * ranks, rank, ranks, shuffle=True, seed=1)
        sampler.set_epoch(2)
        batches = list(sampler)
        assert len(batches) == len(sampler) == len(sampler.sizes) <= sampler.longest
        assert rank > 0 or len(batches) == sampler.longest
        indices += list(chain.from_iterable(batches))
        sampler.set_epoch(2, 1)
        assert list(sampler) == batches[1:]
    assert sorted(indices) == list(range(samples))


@pytest.mark.parametrize(
    "changes",
    [
        {"sync_bn": True},
        {"amp": "fp16"},
        {"ema": 0.9},
        {"accumulate": 2},
        {"comm_hook": "powersgd"},
        {"fault": "extra-forward"},
        {"log_interval": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_incompatible_options_are_refused(changes: dict[str, Any]) -> None:
    """Options that need all ranks at each step are refused with a reason."""
    with pytest.raises(UserError, match=r"--join: not with --[a-z -]+[0-9]*: \w+.* \w+ \w+"):
        check(replace(UNEVEN, **changes), 2)
