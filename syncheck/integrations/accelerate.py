"""Monitor a model that Accelerate trains.

    from syncheck.integrations.accelerate import monitor

    sync_monitor = monitor(accelerator, model, optimizer, every=100)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:    # after an optimizer step, not after accumulating gradients
            sync_monitor.step()

Importing this module imports neither accelerate nor torch; it uses only the given accelerator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.parity.case import ParityCase, count_samples

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside Accelerate's, also for lists and tuples; other objects unchanged."""
    if isinstance(optimizer, (list, tuple)):
        return tuple(unwrap_optimizer(each) for each in optimizer)

    # By name, because the class cannot be imported without accelerate.
    class_names = [kind.__name__ for kind in type(optimizer).__mro__]
    if "AcceleratedOptimizer" in class_names:
        return optimizer.optimizer

    return optimizer


def monitor(accelerator: Any, model: Any, optimizer: Any = None, **options: Any) -> SyncMonitor:
    """Return a SyncMonitor for objects from `accelerator.prepare`; call its `step()` after each optimizer step.

    model, optimizer: prepared objects, or tuples of them; the monitor unwraps Accelerate's optimizers.
    options: of SyncMonitor, for example every= and on_desync=. The gradient scaler is the accelerator's unless they
        contain `scaler`.

    Only rank 0, which is Accelerate's main process, writes the log and the events. Raises UsageError like SyncMonitor.
    """
    from syncheck.live import SyncMonitor

    options.setdefault("scaler", getattr(accelerator, "scaler", None))
    return SyncMonitor(model, unwrap_optimizer(optimizer), **options)


class AccelerateParity(ParityCase):
    """Compare the gradient of one step of a loop with Accelerate with that of one process.

    Subclasses define `accelerator()` and `loss(model, part, batch)` besides `build`, `batch` and `loss_terms`. Each
    rank has the samples rank, rank + ranks, ..., divided into `micro_batches`, as in the default of `owner`.
    """

    def accelerator(self) -> Any:
        """Return an Accelerator, with gradient_accumulation_steps=self.micro_batches."""
        raise NotImplementedError

    def loss(self, model: Any, part: Any, batch: Any) -> Any:
        """Return the loss that the loop passes to `accelerator.backward`.

        model: as prepared. part: a micro-batch of this rank. batch: all samples of the step.
        """
        raise NotImplementedError

    def parallelize(self, model: Any, mesh: Any) -> Any:  # noqa: ARG002
        """Prepare the model."""
        self.prepared_accelerator = self.accelerator()
        return self.prepared_accelerator.prepare(model)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:  # noqa: ARG002
        """Accumulate the gradients of the micro-batches of this rank."""
        import torch

        accelerator = self.prepared_accelerator
        samples = torch.arange(accelerator.process_index, count_samples(batch), accelerator.num_processes)
        for part in samples.tensor_split(self.micro_batches):
            # Reduces gradients in the last micro-batch only.
            with accelerator.accumulate(model):
                accelerator.backward(self.loss(model, self.select(batch, part), batch))
