"""One optimizer step: micro-batches, mixed precision and gradient clipping, equal for all methods."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.metrics import Meter
from train.task import make_task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.faults import Fault
    from train.launch import RankContext
    from train.methods.single import Method
    from train.settings import Settings


class WeightAverage:
    """The exponential moving average of one rank's parameters.

    Every rank computes its own without communication: equal parameters give equal averages if all ranks update them at
    the same steps. Buffers are copied from the model. decay: the weight of the old average in each update.
    https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.averaged_model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def update(self, module: nn.Module) -> None:
        """Add the current parameters; the first call copies them."""
        self.averaged_model.update_parameters(module)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the averages by parameter name; not copied."""
        return dict(self.averaged_model.module.named_parameters())


class Step:
    """Trains on one global batch. Other modules call its instance `trainer`.

    The order follows https://docs.pytorch.org/docs/stable/notes/amp_examples.html: forward and loss under autocast,
    backward of the scaled loss outside autocast, unscale, clip, step.
    """

    def __init__(
        self,
        settings: Settings,
        ctx: RankContext,
        method: Method,
        forward: nn.Module,
        optimizer: Optimizer,
        fault: Fault,
    ) -> None:
        self.settings, self.ctx, self.method, self.forward = settings, ctx, method, forward
        self.optimizer, self.fault, self.task = optimizer, fault, make_task(settings)
        # float16 cannot represent values below 6e-8, and many gradients are smaller. Scaling the loss scales the
        # gradients; they are unscaled before the step. bfloat16 has the range of float32 and needs no scaling.
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=settings.amp == "fp16")
        fault.scaler = self.scaler  # an injected fault may read or change it
        self.grad_norm: Tensor | None = None  # before clipping, of the last step
        self.average = None if settings.ema is None else WeightAverage(method.module, settings.ema)

    def run(self, step: int, x: Tensor, y: Tensor, samples: int, meter: Meter) -> None:
        """Update the model once.

        step: counted from 1. x: [N, ...] this rank's share of a global batch of `samples`. y: [N, ...] targets. meter:
        accumulates the loss and the metrics of the share.
        """
        method, parts = self.method, list(self.method.split(self._prepare(x), y.to(self.ctx.device, non_blocking=True)))
        measured = Meter(self.ctx.device, self.task)
        for part, (xs, ys) in enumerate(parts, 1):
            # Gradients accumulate over micro-batches, and are reduced once, with the last micro-batch.
            with nullcontext() if part == len(parts) else method.no_sync():
                self._accumulate(xs, ys, samples, measured)
        meter.add_sums(method.share_sums(measured.sums))
        self.scaler.unscale_(self.optimizer)
        if self.settings.grad_clip is not None:
            self.grad_norm = method.clip(self.settings.grad_clip)
        # Hooks of an injected fault, here and after the step. Without --fault they do nothing.
        self.fault.before_step(step, method, self.optimizer, xs)
        method.step(self.optimizer, self.scaler)
        if self.average is not None and self.fault.should_update_average(step):
            self.average.update(method.module)
        self.fault.after_step(step, method, self.optimizer)

    def _prepare(self, x: Tensor) -> Tensor:
        x = x.to(self.ctx.device, non_blocking=True)  # asynchronous from pinned memory
        if self.settings.channels_last and x.dim() == 4:
            # Use the layout of the weights, or each convolution would convert its input.
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    def warm_up_buckets(self, x: Tensor, y: Tensor) -> None:
        """Run forward and backward once without a step, before a state is restored; a collective.

        DDP first fills its buckets in the order of the parameters. After the first backward it rebuilds them in the
        order in which gradients became ready (torch/nn/parallel/distributed.py, _rebuild_buckets). With three or more
        ranks, the position in a bucket determines the order in which gloo and NCCL add the ranks' values, and so the
        rounding. A resumed run must therefore start with rebuilt buckets.

        x, y: a batch. The caller restores everything that this changes: buffers, RNG states and counters.
        """
        meter = Meter(self.ctx.device, self.task)
        self._accumulate(x.to(self.ctx.device), y.to(self.ctx.device), len(x), meter)
        self.optimizer.zero_grad()

    def _accumulate(self, x: Tensor, y: Tensor, samples: int, meter: Meter) -> None:
        """Add the gradient of one micro-batch."""
        # Divide by the number of predictions of the global batch, not of the micro-batch, so that uneven shares are
        # weighted correctly. A sample of text has one prediction per token.
        self.predictions_per_sample = self.task.count_predictions(y[:1])
        predictions = samples * self.predictions_per_sample

        def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            loss_sum = self.task.loss(outputs, targets)
            meter.add(loss_sum, outputs, targets)
            return self.scaler.scale(loss_sum / predictions)

        self.method.train(self.forward, x, y, compute_loss)
