"""Settings of the GPT, and the losses of a run, for the tests of methods that divide a model or its tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from support.scenarios import make_job
from train.launch import RankContext
from train.metrics import MetricSums
from train.settings import Settings

if TYPE_CHECKING:
    from train.engine import Job

GPT = Settings(
    model="gpt-tiny", data="text", width=32, depth=2, batch_size=12, max_steps=20, limit_train=240, shuffle=False
)
# Four float32 roundings of a loss near 5; measured: up to 1.1e-6.
ROUNDING = 2e-6
MOE = replace(GPT, model="gpt-tiny-moe")


def train_losses(ctx: RankContext, settings: Settings) -> tuple[Job, list[float]]:
    """Train, and return the job and the mean loss of each step over all ranks."""
    job = make_job(ctx, settings)
    losses = []
    for step, (x, y) in zip(range(1, job.plan.steps + 1), job.loaders.train_batches, strict=False):
        metric_sums = MetricSums(ctx.device)
        job.trainer.run(step, x, y, settings.batch_size, metric_sums)
        losses.append(metric_sums.over_ranks(job.ctx).loss)
    return job, losses


@cache
def losses_alone(settings: Settings) -> list[float]:
    """Train in this process alone. Cached, because several tests have the same reference."""
    return train_losses(RankContext(), settings)[1]


def difference_to_single(ctx: RankContext, settings: Settings) -> float:
    """Train on all ranks, and in each process alone on whole batches; return the maximum difference of the losses."""
    alone = replace(settings, method="single", accumulate=1, parallel_degree=None, context_mode=None)
    pairs = list(zip(train_losses(ctx, settings)[1], losses_alone(alone), strict=True))
    assert len(pairs) == settings.max_steps
    assert not torch.tensor(pairs).isnan().any()
    return max(abs(mine - expected) for mine, expected in pairs)
