"""The optimizer step of a run with an injected fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor


class FaultyTrainer(Trainer):
    """An optimizer step with the hooks of an injected fault around it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fault.scaler = self.scaler
        self.fault.before_training(self.method)

    def run(self, step: int, *arguments: Any) -> None:
        """Run the step within the context of the fault."""
        with self.fault.around_step(step, self.method):
            super().run(step, *arguments)

    def accumulate(self, x: Tensor, *arguments: Any) -> None:
        """Keep the inputs of the last micro-batch."""
        self.last_inputs = x
        super().accumulate(x, *arguments)

    def update(self, step: int) -> None:
        """Run the hooks before and after the update."""
        self.fault.before_step(step, self.method, self.optimizer, self.last_inputs)
        super().update(step)
        self.fault.after_step(step, self.method, self.optimizer)

    def update_average(self, step: int) -> None:
        """Skip the update if the fault does."""
        if self.fault.should_update_average(step):
            super().update_average(step)
