"""Watch a model that Accelerate trains.

    from syncheck.integrations.accelerate import monitor

    watched = monitor(accelerator, model, optimizer, every=100)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:    # an optimizer step was made, not only a part of its gradient
            watched.step()

Importing this module imports neither accelerate nor torch: all that it needs comes with the accelerator given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside Accelerate's; each one's of a list or tuple; anything else as it is."""
    if isinstance(optimizer, (list, tuple)):
        return tuple(unwrap_optimizer(each) for each in optimizer)
    if any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__):
        return optimizer.optimizer
    return optimizer


def monitor(accelerator: Any, model: Any, optimizer: Any = None, **options: Any) -> SyncMonitor:
    """Return a SyncMonitor of what `accelerator.prepare` returned; call its `step()` after each optimizer step.

    model, optimizer: prepared ones, or a tuple of them; the optimizers inside Accelerate's are watched. The gradient
    scaler is the accelerator's unless options has a `scaler`. options: of SyncMonitor, such as every= and on_desync=.
    Its log and its events are written by rank 0 only, which is Accelerate's main process.
    Raises UsageError as SyncMonitor does.
    """
    from syncheck.live import SyncMonitor

    options.setdefault("scaler", getattr(accelerator, "scaler", None))
    return SyncMonitor(model, unwrap_optimizer(optimizer), **options)
