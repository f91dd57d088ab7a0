"""Monitor a model that Lightning trains.

    import lightning
    from syncheck.integrations.lightning import SyncCheckCallback

    trainer = lightning.Trainer(devices=2, strategy="ddp", callbacks=[SyncCheckCallback(every=100)])

Works with `lightning` and `pytorch_lightning`: with the packages that are already imported, or else with the installed
package, which importing this module imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from syncheck.integrations.session import MonitorSession
from syncheck.loaded import find_loaded

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[type, ...]:
    """Return the Callback class of each loaded package, or else of the first installed package."""
    # A program may use both packages, and each accepts only callbacks of its own class.
    loaded = [module.Callback for module in map(find_loaded, _PACKAGES) if module is not None]
    if loaded:
        return tuple(loaded)

    for name in _PACKAGES:
        try:
            return (import_module(name).Callback,)
        except ModuleNotFoundError as error:
            package, _, _ = name.partition(".")
            is_installed = error.name not in (name, package)
            if is_installed:
                raise  # the package lacks a dependency

    raise ImportError("syncheck.integrations.lightning needs Lightning, which is not installed: pip install lightning")


class SyncCheckCallback(MonitorSession, *_bases()):  # type: ignore[misc]
    """Checks after every N-th optimizer step of a fit that all ranks hold the same model, and once at its end.

    every, on_desync and monitor_options: as in `syncheck.live.SyncMonitor`. The monitor checks the model as wrapped by
    the strategy, all optimizers and the gradient scaler. Without `writer=`, scalars go to the trainer's TensorBoard
    logger, if any. In a single process it warns once that there is nothing to compare.

    A check follows a batch and precedes validation: under DDP, an evaluation copies rank 0's buffers to all ranks, and
    would hide drift of the BatchNorm statistics. The last check therefore follows the last batch if the run ends by
    `max_steps` or `max_epochs`, and the last evaluation if it ends otherwise, for example by early stopping. A
    checkpoint of the same batch is saved after the check.

    The attribute `monitor` is the monitor of the current or last fit.
    """

    _steps = 0  # as counted by the trainer: the steps of all optimizers

    def __init__(self, every: int = 100, on_desync: Any = "raise", **monitor_options: Any) -> None:
        super().__init__(every, on_desync, **monitor_options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor, after the strategy has wrapped the model and loaded a checkpoint."""
        self._steps = trainer.global_step
        # The wrapped model has the buffer settings of DDP. The inner module gives the names.
        model = trainer.model if trainer.model is not None else pl_module
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._begin(model, tuple(trainer.optimizers), scaler, start=self._steps, writer=_find_writer(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:  # noqa: ARG002
        """Count the batch if the optimizer made a step; check if a check is due or no batch follows."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._step(last=_is_last(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """End without a check, because other ranks may have exited."""
        self._fail(exception)


def _is_last(trainer: Any) -> bool:
    """Whether the trainer ends after this batch by its own limits, which are equal on all ranks."""
    if trainer.global_step == trainer.max_steps:
        return True
    return bool(trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs)


def _find_writer(trainer: Any) -> Any:
    """Return the writer of a TensorBoard logger on rank 0, or None."""
    if not trainer.is_global_zero:
        return None

    for logger in trainer.loggers:
        # By class name, because accessing the experiment of another logger may start a run.
        class_names = [kind.__name__ for kind in type(logger).__mro__]
        if "TensorBoard" not in " ".join(class_names):
            continue

        writer = logger.experiment
        if callable(getattr(writer, "add_scalar", None)):
            return writer

    return None
