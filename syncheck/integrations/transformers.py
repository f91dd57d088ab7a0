"""Monitor a model that the transformers Trainer trains.

    from syncheck.integrations.transformers import SyncCheckCallback

    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[SyncCheckCallback(every=100)])

Importing this module imports transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from syncheck.integrations.accelerate import unwrap_optimizer
from syncheck.integrations.session import MonitorSession


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
