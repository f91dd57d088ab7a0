"""One optimizer step: micro-batches, mixed precision and clipping, the same for every method."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.metrics import Meter

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.faults import Fault
    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings


class WeightAverage:
    """The average of one rank's parameters.

    Every rank keeps its own, and nothing is sent: equal parameters give equal averages, if all ranks start and
    update them together. Buffers stay those of the model. decay: what the average keeps of itself in a step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.averaged_model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def update(self, module: nn.Module) -> None:
        """Take the parameters in; the first time they are the average."""
        self.averaged_model.update_parameters(module)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The averages, by the names of the model's parameters; not copied."""
        return dict(self.averaged_model.module.named_parameters())


# What layers compute in under autocast; "off" leaves it disabled.
PRECISION = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step:
    """Trains on one global batch; in other modules its object is the `trainer`.

    The order is that of https://docs.pytorch.org/docs/stable/notes/amp_examples.html: forward and loss under
    autocast, backward outside it on the scaled loss, unscale, clip, step. Parameters stay in float32.
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
        self.optimizer, self.fault = optimizer, fault
        # float16 ends at 6e-8, where many gradients lie: they are computed of a larger loss, and scaled back.
        # bfloat16 has the range of float32 and needs none of it.
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=settings.amp == "fp16")
        fault.scaler = self.scaler  # a planted desync may look at it, or change it
        self.grad_norm: Tensor | None = None  # before clipping, of the last step
        self.average = None if settings.ema is None else WeightAverage(method.module, settings.ema)

    def run(self, step: int, x: Tensor, y: Tensor, samples: int, meter: Meter) -> None:
        """Update the model once.

        step: counted from 1. x: [N, ...] this rank's share of a global batch of `samples`. y: [N] int64. meter:
        counts the share.
        """
        parts = self.settings.accumulate
        device = self.ctx.device
        for part, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True), 1):
            on_device = xs.to(device, non_blocking=True)  # where it is pinned, the CPU goes on meanwhile
            if self.settings.channels_last and on_device.dim() == 4:
                # As the weights are, or each convolution would rearrange one of the two.
                on_device = on_device.contiguous(memory_format=torch.channels_last)
            # Gradients add up over the micro-batches; they travel to the other ranks once, with the last.
            with nullcontext() if part == parts else self.method.no_sync():
                self._accumulate(on_device, ys.to(device, non_blocking=True), samples, meter)
        self.scaler.unscale_(self.optimizer)
        if self.settings.grad_clip is not None:
            # Complete now, so one factor for all of it. All ranks have the same gradient, or parts of it (fsdp), of
            # which torch takes the norm together; under localsgd each clips its own.
            self.grad_norm = clip_grad_norm_(self.method.module.parameters(), self.settings.grad_clip)
        # Here and behind the step a desync that --fault plants may strike; without it nothing happens.
        self.fault.before_step(step, self.method, self.optimizer, on_device)
        self.method.step(self.optimizer, self.scaler)
        if self.average is not None and self.fault.should_update_average(step):
            self.average.update(self.method.module)
        self.fault.after_step(step, self.method, self.optimizer)

    def warm_up_buckets(self, x: Tensor, y: Tensor) -> None:
        """Go forward and backward once without a step, on a run that is resumed; a collective.

        DDP sends gradients in buckets in the order of the parameters, and after the first backward in the order in
        which gradients were ready (torch/nn/parallel/distributed.py, _rebuild_buckets). With three ranks or more the
        place in a bucket decides in which order gloo and NCCL add the ranks' values, and so the rounding: the first
        step after a resume must find the buckets as it would have found them without the interruption.

        x, y: a batch. What this changes is restored by the caller: buffers, random states, counts.
        """
        self._accumulate(x.to(self.ctx.device), y.to(self.ctx.device), len(x), Meter(self.ctx.device))
        self.optimizer.zero_grad()

    def _accumulate(self, x: Tensor, y: Tensor, samples: int, meter: Meter) -> None:
        """Add the gradient of one micro-batch."""
        precision = PRECISION[self.settings.amp]
        with torch.autocast(self.ctx.device.type, precision, enabled=self.settings.amp != "off"):
            logits = self.forward(x)
            loss_sum = F.cross_entropy(logits, y, reduction="sum")
        # Divided by the global batch, not by this micro-batch: uneven shares then weigh what they should.
        self.method.backward(self.scaler.scale(loss_sum / samples))
        meter.add(loss_sum, logits, y)
