"""Ranks that lose a step, a state, or a decision that all should have made together."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from train.faults.base import Fault

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings


class SkippedStep(Fault):
    """Lose one optimizer step on the last rank: a batch or a loss that this rank alone found bad.

    https://github.com/ecmwf/WeatherGenerator/issues/2718.
    """

    says = "one rank leaves one optimizer step out (add --optimizer adamw: only that counts steps)"
    code = "SYN214"
    when = "half"

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Drop the gradients: the optimizer passes over parameters without one, decay and counter included."""
        if step != self.at:
            return
        self.refuse_overflow(method)
        if self.bad:
            optimizer.zero_grad(set_to_none=True)


class OptimizerOnOneRank(Fault):
    """Resume with the optimizer's state on rank 0, and an empty one everywhere else.

    DDP sends rank 0's parameters around, so a resume that loads on rank 0 looks right; nobody sends the
    optimizer: https://github.com/vllm-project/speculators/issues/926.
    """

    says = "a resume restores the optimizer's state on rank 0 only (add --optimizer adamw: only that counts steps)"
    code = "SYN215"
    when = "half"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if self.at < 2:
            self.refuse("before step 1 there is no state to lose; use --fault-step 2 or more")
        if settings.optimizer == "sgd" and settings.momentum == 0:
            self.refuse(
                "--optimizer sgd without momentum has no state to lose; use --momentum 0.9 or --optimizer adamw"
            )

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Forget, just before the first step after the resume."""
        if step != self.at:
            return
        self.refuse_overflow(method)
        if not optimizer.state:
            self.refuse(f"the optimizer has no state before step {self.at}; use a later --fault-step")
        if self.ctx.rank != 0:
            optimizer.state.clear()


class ScalerDiverged(SkippedStep):
    """Let the loss scaler of the last rank find an overflow that the others do not.

    It leaves the step out and halves its scale; from then on gradients of unlike scale are averaged, and each
    rank divides them by its own. DDP averages before the scaler looks, so all its scalers see the same; where
    each rank looks at its own gradients or shards they do not: https://github.com/pytorch/pytorch/issues/136009.
    """

    says = "one rank's loss scaler finds an overflow alone: it skips a step and halves its scale (needs --amp fp16)"
    code = "SYN216"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.amp != "fp16":
            self.refuse(f"--amp {settings.amp} has no loss scaler; add --amp fp16")

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Back off, as GradScaler.update() does after an overflow."""
        if self.bad and step == self.at:
            state = self.scaler.state_dict()
            state |= {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
            self.scaler.load_state_dict(state)


class StaleRank(Fault):
    """Leave the last rank where it was one step ago: parameters, buffers and optimizer.

    A gather that returned last step's values, a skipped last step, an old file:
    https://github.com/NVIDIA/Megatron-LM/issues/950.
    """

    says = "one rank still holds what it held before the step (add --save-every 1: the step before shows it)"
    code = "SYN217"
    when = "last"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if self.at < 2:
            self.refuse("before step 1 there is no step to be left at; use --fault-step 2 or more")
        self.held: tuple[list[Tensor], dict[str, Any]]

    def resumed(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Remember what is remembered of this step, which no state holds."""
        if step < self.at:
            self.after_step(step, method, optimizer)

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Remember one step, and undo the next."""
        if not self.bad:
            return
        tensors = [*method.module.parameters(), *method.module.buffers()]
        if step == self.at - 1:
            self.held = [tensor.detach().clone() for tensor in tensors], deepcopy(optimizer.state_dict()["state"])
        if step == self.at:
            values, state = self.held
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            # Not the learning rate, which the trainer sets from the step, as it does on every rank.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


class AverageNotUpdated(Fault):
    """Update the average of the weights no more on the last rank.

    A resume that restores it on some ranks only, an update behind a check of the rank:
    https://github.com/lucidrains/ema-pytorch/issues/9. Training does not read it, so nothing else differs.
    """

    says = "one rank stops updating its moving average of the weights (needs --ema)"
    code = "SYN219"
    when = "half"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.ema is None:
            self.refuse("no average is kept; add --ema 0.9")

    def averages(self, step: int) -> bool:
        """Leave it as it is from the step on."""
        return not self.bad or step < self.at


class OtherLearningRate(Fault):
    """Halve the learning rate of the last rank.

    A schedule that follows the rank's own loss, epoch or configuration. The averaged gradients are the same, and
    so are the moments of AdamW that they make; the steps that follow from them are not.
    """

    says = "one rank halves its learning rate, as a schedule does that follows the rank's own loss"
    code = "SYN107"

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Halve it anew: the engine sets it before each step."""
        if self.bad:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


class SmallerSteps(OtherLearningRate):
    """Halve the steps of the last rank, and save the learning rate of all ranks.

    Code that scales the update on its own, or sets the rate back before it saves: no setting in the files differs.
    """

    says = "one rank takes steps of half the size, and its file has the common learning rate (add --optimizer adamw)"
    code = "SYN299"

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Set the rate back before anything is saved."""
        if self.bad:
            for group in optimizer.param_groups:
                group["lr"] *= 2.0
