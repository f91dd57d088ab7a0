"""Watch a model that Lightning trains.

    import lightning
    from syncheck.integrations.lightning import SyncCheckCallback

    trainer = lightning.Trainer(devices=2, strategy="ddp", callbacks=[SyncCheckCallback(every=100)])

It works with `lightning` and with `pytorch_lightning`: with those that are imported already, else with the one that is
installed. Importing this module imports it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncheck.integrations.session import MonitorSession

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[type, ...]:
    """Return the class Callback of each of the two packages that is loaded, else of the first that is installed."""
    loaded = tuple(module.Callback for module in map(sys.modules.get, _PACKAGES) if module is not None)
    if loaded:
        return loaded
    for name in _PACKAGES:
        try:
            return (import_module(name).Callback,)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise  # it is there, and something that it needs is not
    raise ImportError("syncheck.integrations.lightning needs Lightning, which is not installed: pip install lightning")


class SyncCheckCallback(*_bases()):  # type: ignore[misc]
    """Checks, after every N-th optimizer step of a fit, that all ranks hold the same model, and once at its end.

    every, on_desync and monitor_options are those of `syncheck.live.SyncMonitor`. Watched are the model as the strategy
    wrapped it, all optimizers and the gradient scaler. Without `writer=`, numbers go to the trainer's logger where that
    is TensorBoard's. In a single process there is nothing to compare, which it says once.

    A check is made after a batch, before the validation that may follow it: under DDP an evaluation copies rank 0's
    buffers to all ranks, and so hides that BatchNorm's statistics had drifted apart. So the last check is made after
    the last batch of a run that ends by `max_steps` or `max_epochs`; one that ends otherwise, as by early stopping,
    has it after its last evaluation. A checkpoint of the same batch is saved after the check.
    """

    def __init__(self, every: int = 100, on_desync: Any = "raise", **monitor_options: Any) -> None:
        super().__init__()
        self._session = MonitorSession(every, on_desync, monitor_options)
        self._steps = 0  # as the trainer counts them: by each optimizer

    @property
    def monitor(self) -> SyncMonitor | None:
        """The monitor of the fit that runs, or that ran last."""
        return self._session.monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch, when the model is wrapped and a checkpoint to resume from is loaded."""
        self._steps = trainer.global_step
        # A prepared model: its class says what DDP does with buffers. The names are those of the module in it.
        model = trainer.model if trainer.model is not None else pl_module
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._session.begin(model, tuple(trainer.optimizers), scaler, start=self._steps, writer=_writer(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:  # noqa: ARG002
        """Count the batch if the optimizer made a step, and check if it is time to, or if no batch will follow."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._session.step(last=_is_last(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Check what has been trained since the last check, if anything has."""
        self._session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Check nothing: the other ranks may be gone."""
        self._session.fail(exception)


def _is_last(trainer: Any) -> bool:
    """Whether the trainer will end after this batch by its own limits, which are the same on all ranks."""
    if trainer.global_step == trainer.max_steps:
        return True
    return bool(trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs)


def _writer(trainer: Any) -> Any:
    """Return, on rank 0, what TensorBoard's logger writes with; None where no logger is of its kind."""
    if not trainer.is_global_zero:
        return None
    # By name, for asking any other logger for its experiment may begin a run of it.
    boards = (log for log in trainer.loggers if any("TensorBoard" in kind.__name__ for kind in type(log).__mro__))
    writers = (log.experiment for log in boards)
    return next((writer for writer in writers if callable(getattr(writer, "add_scalar", None))), None)
