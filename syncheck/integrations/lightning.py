"""Live checks for models trained with Lightning.

    import lightning
    from syncheck.integrations.lightning import SyncCheckCallback

    trainer = lightning.Trainer(devices=2, strategy="ddp", callbacks=[SyncCheckCallback(every=100)])

The callback works with `lightning` and `pytorch_lightning`: with every package that is already imported, otherwise with
the installed package. Importing this module imports the package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncheck.integrations.watching import Watching

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _find_bases() -> tuple[type, ...]:
    """Return the class Callback of each imported package, or of the first installed package if none is imported."""
    loaded = tuple(module.Callback for module in map(sys.modules.get, _PACKAGES) if module is not None)
    if loaded:
        return loaded
    for name in _PACKAGES:
        try:
            return (import_module(name).Callback,)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise  # the package is installed, but a dependency is missing
    raise ImportError("syncheck.integrations.lightning needs Lightning, which is not installed: pip install lightning")


class SyncCheckCallback(*_find_bases()):  # type: ignore[misc]
    """Check that all ranks hold the same model, every N optimizer steps and at the end of the fit.

    every, on_desync and monitor_options: as for `syncheck.live.SyncMonitor`. The callback watches the model as wrapped
    by the strategy, all optimizers and the gradient scaler. Without `writer=`, numbers go to the trainer's TensorBoard
    logger, if there is one. In a single process, the monitor logs once that there is nothing to compare.

    Checks run after a batch, before validation and checkpoints of the same batch, because an evaluation under DDP
    copies rank 0's buffers to all ranks and hides BatchNorm drift. The last check runs after the last batch if the fit
    ends by `max_steps` or `max_epochs`, and otherwise, for example by early stopping, after the last evaluation.
    """

    def __init__(self, every: int = 100, on_desync: Any = "raise", **monitor_options: Any) -> None:
        super().__init__()
        self._watching = Watching(every, on_desync, monitor_options)
        self._steps = 0  # the trainer's count, which includes the steps of every optimizer

    @property
    def monitor(self) -> SyncMonitor | None:
        """The monitor of the current or most recent fit."""
        return self._watching.monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor, after the model is wrapped and a checkpoint is loaded."""
        self._steps = trainer.global_step
        # The wrapped model shows whether DDP synchronizes buffers.
        model = trainer.model if trainer.model is not None else pl_module
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._watching.begin(model, tuple(trainer.optimizers), scaler, start=self._steps, writer=_find_writer(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:  # noqa: ARG002
        """Count the batch if the optimizer made a step, and check if a check is due or this is the last batch."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._watching.step(last=_is_last(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Check the steps since the last check, if any."""
        self._watching.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Stop without a check, because other ranks may have exited."""
        self._watching.fail(exception)


def _is_last(trainer: Any) -> bool:
    """Whether the fit ends after this batch by `max_steps` or `max_epochs`, which are equal on all ranks."""
    if trainer.global_step == trainer.max_steps:
        return True
    return bool(trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs)


def _find_writer(trainer: Any) -> Any:
    """Return the writer of the TensorBoard logger on rank 0; None without this logger and on other ranks."""
    if not trainer.is_global_zero:
        return None
    # Selected by class name, because accessing `experiment` may start a run in other loggers.
    boards = (log for log in trainer.loggers if any("TensorBoard" in kind.__name__ for kind in type(log).__mro__))
    writers = (log.experiment for log in boards)
    return next((writer for writer in writers if callable(getattr(writer, "add_scalar", None))), None)
