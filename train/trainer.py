"""One optimizer step: micro-batches, mixed precision and gradient clipping, equal for all methods."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.metrics import MetricSums
from train.task import make_task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.faults import Fault
    from train.launch import RankContext
    from train.methods.single import Method
    from train.settings import Settings


class Trainer:
    """Trains on one global batch at a time.

    The order follows https://docs.pytorch.org/docs/stable/notes/amp_examples.html: forward and loss under autocast,
    backward of the scaled loss outside autocast, unscale, clip, step.
    """

    def __init__(
        self,
        settings: Settings,
        ctx: RankContext,
        method: Method,
        wrapped: nn.Module,
        optimizer: Optimizer,
        fault: Fault,
    ) -> None:
        self.settings, self.ctx, self.method, self.wrapped = settings, ctx, method, wrapped
        self.optimizer, self.fault, self.task = optimizer, fault, make_task(settings)
        # float16 cannot represent values below 6e-8, and many gradients are smaller. Scaling the loss scales the
        # gradients; they are unscaled before the step. bfloat16 has the range of float32 and needs no scaling.
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=settings.amp == "fp16")
        self.grad_norm: Tensor | None = None  # before clipping, of the last step
        # Every rank averages its own parameters without communication: equal parameters give equal averages.
        # https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
        self.average: AveragedModel | None = None
        if settings.ema is not None:
            self.average = AveragedModel(method.module, multi_avg_fn=get_ema_multi_avg_fn(settings.ema))  # type: ignore[no-untyped-call]

    def run(self, step: int, x: Tensor, y: Tensor, batch_size: int, metric_sums: MetricSums) -> None:
        """Update the model once.

        step: counted from 1. x: [N, ...] this rank's share of a global batch. y: [N, ...] targets. batch_size:
        of the global batch. metric_sums: accumulates the loss and the metrics of the share.
        """
        method = self.method
        micro_batches = list(method.split(self._move(x), y.to(self.ctx.device, non_blocking=True)))
        measured = MetricSums(self.ctx.device, self.task)
        for number, (micro_x, micro_y) in enumerate(micro_batches, 1):
            # Gradients accumulate over micro-batches, and are reduced once, with the last micro-batch.
            with nullcontext() if number == len(micro_batches) else method.no_sync():
                self.accumulate(micro_x, micro_y, batch_size, measured)
        metric_sums.add_sums(method.share_sums(measured.totals))
        self.scaler.unscale_(self.optimizer)
        if self.settings.grad_clip is not None:
            self.grad_norm = method.clip(self.settings.grad_clip)
        self.update(step)

    def update(self, step: int) -> None:
        """Update the parameters with the complete gradients, and the moving average of --ema."""
        self.method.step(self.optimizer, self.scaler)
        self.update_average(step)

    def update_average(self, step: int) -> None:  # noqa: ARG002
        """Add the parameters to the average; the first call copies them."""
        if self.average is not None:
            self.average.update_parameters(self.method.module)

    @property
    def averages(self) -> dict[str, Tensor] | None:
        """Return the moving averages of --ema by parameter name, as they are saved, not copied."""
        if self.average is None:
            return None
        parameters = self.average.module.named_parameters()
        return {name: self.method.mark(name, average.detach()) for name, average in parameters}

    @property
    def scaler_state(self) -> dict[str, Any] | None:
        """Return the state of the loss scaling of --amp fp16; None without it."""
        if self.scaler.is_enabled():
            state: dict[str, Any] = self.scaler.state_dict()
            return state
        return None

    def _move(self, x: Tensor) -> Tensor:
        """Copy inputs to the device."""
        x = x.to(self.ctx.device, non_blocking=True)  # asynchronous from pinned memory
        if self.settings.channels_last and x.dim() == 4:
            # Use the layout of the weights, or each convolution would convert its input.
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    def accumulate(self, x: Tensor, y: Tensor, batch_size: int, metric_sums: MetricSums) -> None:
        """Add the gradient of one micro-batch. batch_size: of the global batch."""
        # Divide by the number of predictions of the global batch, not of the micro-batch, so that uneven shares are
        # weighted correctly. A sample of text has one prediction per token.
        self.predictions_per_sample = self.task.count_predictions(y[:1])
        predictions = batch_size * self.predictions_per_sample

        def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            loss_sum = self.task.loss(outputs, targets)
            metric_sums.add(loss_sum, outputs, targets)
            return self.scaler.scale(loss_sum / predictions)

        self.method.train(self.wrapped, x, y, compute_loss)
