"""One rank loses a step or a state, or makes a decision that must be common to all ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from train.faults.base import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from train.methods.single import Method


class SkippedStep(Fault):
    """Skip one optimizer step on the last rank, like a rank that alone rejects a batch or a loss.

    https://github.com/ecmwf/WeatherGenerator/issues/2718.
    """

    summary = "one rank skips one optimizer step (add --optimizer adamw, which counts steps)"
    code = "SYN214"
    when = "half"

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Set the gradients to None: the optimizer then skips weight decay and step counters too."""
        if step != self.fault_step:
            return
        self.refuse_overflow(method)
        if self.is_faulty:
            optimizer.zero_grad(set_to_none=True)


class OptimizerOnOneRank(Fault):
    """Simulate a resume that restores the optimizer state only on rank 0.

    DDP broadcasts rank 0's parameters, so a resume on rank 0 looks correct, but the optimizer state is not broadcast:
    https://github.com/vllm-project/speculators/issues/926.
    """

    summary = "a resume restores the optimizer state on rank 0 only (add --optimizer adamw, which counts steps)"
    code = "SYN215"
    when = "half"

    def _check(self) -> None:
        if self.fault_step < 2:
            self.refuse("there is no optimizer state before step 1; use --fault-step 2 or more")
        if self.settings.has_stateless_optimizer:
            self.refuse("--optimizer sgd without momentum has no state; use --momentum 0.9 or --optimizer adamw")

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Clear the state just before the first step after the simulated resume."""
        if step != self.fault_step:
            return
        self.refuse_overflow(method)
        if not optimizer.state:
            self.refuse(f"the optimizer has no state before step {self.fault_step}; use a later --fault-step")
        if self.ctx.rank != 0:
            optimizer.state.clear()


class ScalerDiverged(SkippedStep):
    """Simulate an overflow that only the last rank's loss scaler detects.

    That rank skips the step and halves its scale. From then on, gradients of different scales are averaged, and each
    rank divides them by its own scale. DDP averages gradients before the scaler checks them, so its scalers agree. They
    can disagree if each rank checks its own gradients or shards: https://github.com/pytorch/pytorch/issues/136009.
    """

    summary = "only one rank's loss scaler detects an overflow, skips a step and halves its scale (needs --amp fp16)"
    code = "SYN216"
    needs: ClassVar[Mapping[str, str]] = {
        "--amp fp16": "--amp {amp} has no loss scaler; add --amp fp16",
    }

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Halve the scale, as GradScaler.update() does after an overflow."""
        if self.changes_step(step):
            state = self.scaler.state_dict()
            state |= {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
            self.scaler.load_state_dict(state)


class StaleRank(Fault):
    """Reset the last rank to its state of one step ago: parameters, buffers and optimizer.

    Examples: a gather that returns the previous step's values, a skipped last step, an old file:
    https://github.com/NVIDIA/Megatron-LM/issues/950.
    """

    summary = "one rank keeps the state of the previous step (add --save-every 1 to save that step too)"
    code = "SYN217"
    when = "last"

    def _check(self) -> None:
        if self.fault_step < 2:
            self.refuse("step 1 has no previous step; use --fault-step 2 or more")
        self.previous: tuple[list[Tensor], dict[str, Any]]

    def after_resume(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Copy the restored state, because saved states do not contain the copy."""
        if step < self.fault_step:
            self.after_step(step, method, optimizer)

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Copy the state of one step, and restore it after the next."""
        if not self.is_faulty:
            return
        tensors = [*method.module.parameters(), *method.module.buffers()]
        if step == self.fault_step - 1:
            self.previous = [tensor.detach().clone() for tensor in tensors], deepcopy(optimizer.state_dict()["state"])
        if step == self.fault_step:
            values, state = self.previous
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            # Keep the learning rate, which the trainer sets on every rank.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


class StaleStage(StaleRank):
    """Reset the stages of the last rank to their state of one step ago.

    Example: a pipeline whose stages resume from files of different steps.
    """

    summary = "one rank's pipeline stages keep the state of the previous step (add --save-every 1)"
    code = "SYN217"
    methods = ("pp",)


class AverageNotUpdated(Fault):
    """Stop updating the average of the weights on the last rank.

    Examples: a resume that restores it on some ranks only, an update that depends on the rank:
    https://github.com/lucidrains/ema-pytorch/issues/9. Training does not use the average, so only the average differs.
    """

    summary = "one rank stops updating its moving average of the weights (needs --ema)"
    code = "SYN219"
    when = "half"
    needs: ClassVar[Mapping[str, str]] = {
        "--ema": "the run has no average; add --ema 0.9",
    }

    def should_update_average(self, step: int) -> bool:
        """Stop at the step of the fault."""
        return not self.is_faulty or step < self.fault_step


class OtherLearningRate(Fault):
    """Halve the learning rate of the last rank.

    Examples: a schedule that depends on the rank's own loss, epoch or configuration. Averaged gradients, and so AdamW's
    moments, stay equal; parameters differ.
    """

    summary = "one rank halves its learning rate, like a schedule that depends on the rank's own loss"
    code = "SYN107"

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Halve the learning rate, which the engine sets before each step."""
        if self.is_faulty:
            scale_learning_rate(optimizer, 0.5)


class SmallerSteps(OtherLearningRate):
    """Halve the updates of the last rank, but save the common learning rate.

    Examples: code that scales updates, or restores the learning rate before saving. No saved setting differs.
    """

    summary = "one rank halves its updates, but saves the common learning rate (add --optimizer adamw)"
    code = "SYN299"

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Restore the learning rate before anything is saved."""
        if self.is_faulty:
            scale_learning_rate(optimizer, 2.0)


def scale_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
