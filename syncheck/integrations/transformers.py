"""Monitor a model that the transformers Trainer trains.

    from syncheck.integrations.transformers import SyncCheckCallback

    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[SyncCheckCallback(every=100)])

Importing this module imports transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from syncheck.errors import UsageError
from syncheck.integrations.accelerate import unwrap_optimizer
from syncheck.integrations.session import MonitorSession
from syncheck.parity.case import ParityCase, count_samples


def _base() -> type:
    """Return the base class of transformers' callbacks."""
    try:
        base: type = import_module("transformers.trainer_callback").TrainerCallback
    except ModuleNotFoundError as error:
        missing_package = (error.name or "").partition(".")[0]
        if missing_package != "transformers":
            raise  # the package is installed but lacks a dependency

        text = "syncheck.integrations.transformers needs transformers, which is not installed: pip install transformers"
        raise ImportError(text) from None

    return base


class SyncCheckCallback(MonitorSession, _base()):  # type: ignore[misc]
    """Checks after every N-th optimizer step of a training whether all ranks hold the same model, and once at its end.

    every, on_desync and monitor_options: as in `syncheck.live.SyncMonitor`. The monitor checks the model, the optimizer
    inside Accelerate's and the gradient scaler. In a single process it only prints a warning, once.

    A check follows an optimizer step and precedes evaluation and saving: under DDP, an evaluation copies rank 0's
    buffers to all ranks, and would hide drift of the BatchNorm statistics. The last check follows the last step, or the
    last evaluation if it stops the run, for example by early stopping.

    The attribute `monitor` is the monitor of the current or last training.
    """

    def __init__(self, every: int = 100, on_desync: Any = "raise", **monitor_options: Any) -> None:
        super().__init__(every, on_desync, **monitor_options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Create the monitor, after a checkpoint was loaded."""
        optimizer = kwargs.get("optimizer")
        # Accelerate's optimizer knows the scaler, which the callback does not get otherwise.
        scaler = getattr(optimizer, "scaler", None)
        self._begin(kwargs["model"], unwrap_optimizer(optimizer), scaler, start=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the optimizer step; check if a check is due or no step follows."""
        self._step(last=state.global_step >= state.max_steps)


class _Stopped(Exception):
    """The gradients of the first step are complete."""


class TrainerParity(ParityCase):
    """Compare the gradient of the first step of a real Trainer with that of one process.

    Subclasses define `build_trainer(model)` besides `build`, `batch`, `loss_terms` and `ignored`. The Trainer needs
    max_grad_norm=0, train_sampling_strategy="sequential", per_device_train_batch_size=self.trainer_batch_size, and
    `batch` as its data. Its accumulation, its counting of items and its wrapper compute the gradient; it makes no step.
    """

    # per_device_train_batch_size of the Trainer.
    trainer_batch_size = 1

    def build_trainer(self, model: Any) -> Any:
        """Return a Trainer for a model."""
        raise NotImplementedError

    def parallelize(self, model: Any, mesh: Any) -> Any:  # noqa: ARG002
        """Build the Trainer, which wraps the model later."""
        self.trainer = self.build_trainer(model)
        return model

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:  # noqa: ARG002
        """Train until the gradients of the first step are complete."""
        # The callback runs after the last micro-batch of the step, and before the optimizer.
        self.trainer.add_callback(type("Stop", (_base(),), {"on_pre_optimizer_step": _stop}))
        try:
            self.trainer.train()
        except _Stopped:
            return
        raise UsageError(f"{self.title}.build_trainer: the Trainer made no optimizer step")

    def owner(self, batch: Any) -> tuple[Any, Any]:
        """Return data rank and micro-batch of each sample: Accelerate gives whole batches to ranks in turn."""
        import torch

        # The number of the batch of each sample.
        number = torch.arange(count_samples(batch)) // self.trainer_batch_size
        return number % self.count_data_ranks(), number // self.count_data_ranks()


def _stop(*_: Any, **__: Any) -> None:
    raise _Stopped
