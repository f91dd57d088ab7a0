"""Live checks for models trained with Accelerate.

    from syncheck.integrations.accelerate import monitor

    watched = monitor(accelerator, model, optimizer, every=100)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:    # the optimizer made a step instead of accumulating gradients
            watched.step()

Importing this module does not import accelerate or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer in Accelerate's wrapper, also within lists and tuples; other objects unchanged."""
    if isinstance(optimizer, (list, tuple)):
        return tuple(unwrap_optimizer(each) for each in optimizer)
    if any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__):
        return optimizer.optimizer
    return optimizer


def monitor(accelerator: Any, model: Any, optimizer: Any = None, **options: Any) -> SyncMonitor:
    """Return a SyncMonitor of a prepared model and optimizer; call its `step()` after each optimizer step.

    model, optimizer: as returned by `accelerator.prepare`, or tuples of several. options: of SyncMonitor, such as every
    and on_desync; scaler is the accelerator's by default. Rank 0, which is Accelerate's main process, writes the log
    and the events. Raises UsageError as SyncMonitor does.
    """
    from syncheck.live import SyncMonitor

    options.setdefault("scaler", getattr(accelerator, "scaler", None))
    return SyncMonitor(model, unwrap_optimizer(optimizer), **options)
