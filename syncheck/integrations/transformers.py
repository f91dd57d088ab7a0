"""Watch a model that transformers' Trainer trains.

    from syncheck.integrations.transformers import SyncCheckCallback

    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[SyncCheckCallback(every=100)])

Importing this module imports transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncheck.integrations.accelerate import unwrap_optimizer
from syncheck.integrations.session import MonitorSession

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor


def _base() -> type:
    try:
        base: type = import_module("transformers.trainer_callback").TrainerCallback
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise  # it is there, and something that it needs is not
        text = "syncheck.integrations.transformers needs transformers, which is not installed: pip install transformers"
        raise ImportError(text) from None
    return base


class SyncCheckCallback(_base()):  # type: ignore[misc]
    """Checks, after every N-th optimizer step of a training, that all ranks hold the same model, and once at its end.

    every, on_desync and monitor_options are those of `syncheck.live.SyncMonitor`. Watched are the model, the optimizer
    inside Accelerate's and its gradient scaler. In a single process there is nothing to compare, which it says once.

    A check is made after an optimizer step, before the evaluation and the checkpoint that may follow it: under DDP an
    evaluation copies rank 0's buffers to all ranks, and so hides that BatchNorm's statistics had drifted apart. The
    last one is made after the last step; where a run is stopped by an evaluation, as by early stopping, after that.
    """

    def __init__(self, every: int = 100, on_desync: Any = "raise", **monitor_options: Any) -> None:
        self._session = MonitorSession(every, on_desync, monitor_options)

    @property
    def monitor(self) -> SyncMonitor | None:
        """The monitor of the training that runs, or that ran last."""
        return self._session.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to watch, when a checkpoint to resume from is loaded."""
        optimizer = kwargs.get("optimizer")
        scaler = getattr(optimizer, "scaler", None)
        self._session.begin(kwargs["model"], unwrap_optimizer(optimizer), scaler, start=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the optimizer step, and check if it is time to, or if no step will follow."""
        self._session.step(last=state.global_step >= state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Check what has been trained since the last check, if anything has."""
        self._session.end()
