"""--join: ranks with unequal numbers of batches, and what must be sent when the last of them is done."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from resumed import interrupt, resume
from scenarios import SMALL, differing, load, run, trained
from torch import nn

import syncheck
from train.data import OwnSharesSampler, load_data
from train.engine import train
from train.errors import UserError
from train.job import prepare
from train.models import build_model
from train.recorders.base import EpochRecord, Recorder
from train.schedule import compute_lr_scale, set_learning_rate
from train.settings import check

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

# 9 batches of 8 or 7 samples: rank 0 has 5 an epoch, rank 1 has 4.
UNEVEN = replace(SMALL, join=True, limit_train=71, batch_size=16, epochs=2, max_steps=None)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_all_agree_in_the_end(ctx: RankContext, syncheck_rank: Rank, optimizer: str) -> None:
    """After two epochs of 5 and 4 batches all ranks hold the same bits, BatchNorm's statistics and momentum too."""
    settings = replace(UNEVEN, optimizer=optimizer, out=syncheck_rank.shared)
    job = prepare(settings, ctx)
    assert len(job.sampler.sizes) == (5, 4)[ctx.rank]
    assert job.plan.steps == 10
    saved = run(ctx, settings).saved
    assert differing(*saved) == set()
    (group,) = syncheck.compare(*saved).groups
    assert (group.verdict, group.counts.not_compared) == ("in_sync", 0)
    assert load(saved[1])["step"] == 10


@pytest.mark.syncheck(ranks=2)
def test_the_speed_counts_real_samples(ctx: RankContext) -> None:
    """The last steps of an epoch, which not all ranks make, are no whole batches: 71 samples, not 5 times 16."""
    epochs: list[EpochRecord] = []

    class Kept(Recorder):
        def epoch(self, record: EpochRecord) -> None:
            epochs.append(record)

    train(replace(UNEVEN, save_per_rank=False), ctx, Kept())
    if ctx.is_main:
        assert [record.samples_per_second * record.train_time_s for record in epochs] == [pytest.approx(71)] * 2


@pytest.mark.syncheck(ranks=2)
def test_without_the_optimizer_momentum_parts(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's join alone makes the models equal and leaves each rank its own momentum, which syncheck says."""
    monkeypatch.setattr("train.methods.ddp.broadcast_optimizer_state", lambda *_: None)
    saved = run(ctx, replace(UNEVEN, out=syncheck_rank.shared)).saved
    apart = differing(*saved)
    assert apart == {f"optimizer.{i}.momentum_buffer" for i in range(23)}
    (group,) = syncheck.compare(*saved).groups
    assert group.verdict == "out_of_sync"
    assert [finding.code for finding in group.findings] == ["SYN299"]
    assert {diff.kind for diff in group.tensors if diff.status == "different"} == {"optimizer"}


@pytest.mark.syncheck(ranks=3)
def test_it_is_what_it_says(ctx: RankContext) -> None:
    """It ends where one process ends that sums each step's batches by hand: every sample weighs the same."""
    settings = replace(UNEVEN, model="convnet", batch_size=24, save_per_rank=False, shuffle=False)  # 3, 3 and 3 batches
    settings = replace(settings, limit_train=60)  # 8 batches, the last of 4: ranks have 3, 3 and 2
    found = trained(ctx, settings).method.module.state_dict()
    expected = by_hand(settings, 3).state_dict()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 5e-6


def by_hand(settings: Settings, ranks: int) -> nn.Module:
    """Train in one process on the batches that all ranks have at each step together."""
    torch.manual_seed(settings.seed)
    model = build_model(settings.model, 1, 10, settings.width)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    train = load_data("digits", None, settings.limit_train).train
    pairs = [train[i] for i in range(len(train))]
    x, y = torch.stack([a for a, _ in pairs]), torch.tensor([int(b) for _, b in pairs])
    per_epoch = -(-len(x) // settings.batch_size)
    for step in range(settings.epochs * per_epoch):
        start = step % per_epoch * settings.batch_size
        mine = slice(start, start + ranks * (settings.batch_size // ranks))
        loss = F.cross_entropy(model(x[mine]), y[mine], reduction="sum") / settings.batch_size
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        set_learning_rate(optimizer, settings.lr * compute_lr_scale(step, settings.epochs * per_epoch))
        optimizer.step()
    return model


@pytest.mark.syncheck(ranks=2)
def test_ranks_meet_at_the_end_of_an_epoch(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Files of each epoch's end agree; any other step to save or check at is refused on all ranks."""
    settings = replace(UNEVEN, save_every=5, monitor=5, out=syncheck_rank.shared)
    saved = run(ctx, settings).saved
    assert len(saved) == 6
    assert syncheck.compare(syncheck_rank.shared).verdict == "in_sync"
    for given in ({"save_every": 2}, {"monitor": 2}, {"checkpoint_every": 7}):
        with pytest.raises(UserError, match="must be a multiple of 5"):
            prepare(replace(UNEVEN, **given), ctx)


@pytest.mark.syncheck(ranks=2)
def test_a_resumed_run_goes_on_bit_by_bit(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A run that crashed in its second epoch goes on from the end of the first, and ends with the same bits."""
    settings = replace(UNEVEN, checkpoint_every=5, out=syncheck_rank.shared / "parts")
    whole = run(ctx, replace(settings, out=syncheck_rank.shared / "whole")).saved
    interrupt(ctx, settings, 6)
    result, notes = resume(ctx, settings)
    assert notes.steps == [6, 7, 8, 9, 10][: (5, 4)[ctx.rank]]
    assert result.steps == 10
    assert [differing(*pair) for pair in zip(whole, result.saved, strict=True)] == [set(), set()]


@pytest.mark.syncheck(ranks=2)
def test_a_single_sample_is_refused(ctx: RankContext) -> None:
    """A last batch of one sample, which BatchNorm refuses on its rank alone, is refused on all before it hangs."""
    with pytest.raises(UserError, match="the last batch of an epoch would be a single sample"):
        prepare(replace(UNEVEN, limit_train=73), ctx)
    prepare(replace(UNEVEN, limit_train=73, model="convnet"), ctx)
    with pytest.raises(UserError, match="each of 2 ranks needs one"):
        prepare(replace(UNEVEN, limit_train=8), ctx)


@pytest.mark.parametrize(("samples", "ranks"), [(71, 2), (64, 4), (65, 4), (9, 3)])
def test_every_sample_once(samples: int, ranks: int) -> None:
    """The ranks' batches are all samples, each once; rank 0 has as many as any, and a skip leaves out the first."""
    seen: list[int] = []
    for rank in range(ranks):
        sampler = OwnSharesSampler(samples, 4 * ranks, rank, ranks, shuffle=True, seed=1)
        sampler.set_epoch(2)
        batches = list(sampler)
        assert len(batches) == len(sampler) == len(sampler.sizes) <= sampler.longest
        assert rank > 0 or len(batches) == sampler.longest
        seen += [index for batch in batches for index in batch]
        sampler.set_epoch(2, 1)
        assert list(sampler) == batches[1:]
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize(
    "given",
    [
        {"sync_bn": True},
        {"amp": "fp16"},
        {"ema": 0.9},
        {"accumulate": 2},
        {"comm_hook": "powersgd"},
        {"fault": "extra-forward"},
        {"log_interval": 1},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_does_not_go_with_it(given: dict[str, Any]) -> None:
    """What waits for ranks that are done, or misses their last steps, is refused with the reason."""
    with pytest.raises(UserError, match=r"--join: not with --[a-z -]+[0-9]*: \w+.* \w+ \w+"):
        check(replace(UNEVEN, **given), 2)
