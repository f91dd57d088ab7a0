"""Live checks for models trained with the Trainer of transformers.

    from syncheck.integrations.transformers import SyncCheckCallback

    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[SyncCheckCallback(every=100)])

Importing this module imports transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncheck.integrations.accelerate import unwrap_optimizer
from syncheck.integrations.watching import Watching

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor


def _find_base() -> type:
    try:
        base: type = import_module("transformers.trainer_callback").TrainerCallback
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise  # transformers is installed, but a dependency is missing
        text = "syncheck.integrations.transformers needs transformers, which is not installed: pip install transformers"
        raise ImportError(text) from None
    return base


class SyncCheckCallback(_find_base()):  # type: ignore[misc]
    """Check that all ranks hold the same model, every N optimizer steps and at the end of the training.

    every, on_desync and monitor_options: as for `syncheck.live.SyncMonitor`. The callback watches the model, the torch
    optimizer in Accelerate's wrapper, and the gradient scaler. In a single process, the monitor logs once that there is
    nothing to compare.

    Checks run after an optimizer step, before the evaluation and checkpoint of the same step, because an evaluation
    under DDP copies rank 0's buffers to all ranks and hides BatchNorm drift. The last check runs after the last step,
    or after the last evaluation if that ends the training, for example by early stopping.
    """

    def __init__(self, every: int = 100, on_desync: Any = "raise", **monitor_options: Any) -> None:
        self._watching = Watching(every, on_desync, monitor_options)

    @property
    def monitor(self) -> SyncMonitor | None:
        """The monitor of the current or most recent training."""
        return self._watching.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Create the monitor, after a checkpoint is loaded."""
        optimizer = kwargs.get("optimizer")
        scaler = getattr(optimizer, "scaler", None)
        self._watching.begin(kwargs["model"], unwrap_optimizer(optimizer), scaler, start=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the optimizer step, and check if a check is due or this is the last step."""
        self._watching.step(last=state.global_step >= state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the steps since the last check, if any."""
        self._watching.end()
