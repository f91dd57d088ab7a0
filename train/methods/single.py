"""One process, one device: the baseline, and base class, of the parallel methods. `train.trainer` calls it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.utils import clip_grad_norm_

from train.methods.base import MethodBase, Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

# The dtype of --amp under autocast; "off" disables autocast.
PRECISION = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Method(MethodBase):
    """Training without parallelism; the other methods override the steps that they change."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that is equal on all ranks. Returns the module that training calls."""
        # 1. Move the parameters and buffers to the device before the optimizer refers to them.
        self.module = model.to(self.ctx.device)
        return self.module

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer for all parameters of the unwrapped model, in their order."""
        # 2. All parameters: a parameter missing in the optimizer is never trained.
        return kind(self.module.parameters(), **arguments)

    def split(self, x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Split this rank's share of a global batch into the micro-batches of --accumulate."""
        parts = self.settings.accumulate
        return zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which forward and backward accumulate gradients without communication."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of --amp for the forward and the loss. Parameters stay in float32."""
        amp = self.settings.amp
        return torch.autocast(self.ctx.device.type, PRECISION[amp], enabled=amp != "off")

    def train(self, wrapped: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Add the gradient of one micro-batch.

        wrapped: the result of `wrap`. compute_loss: takes outputs and targets; it also measures them, and its result is
        scaled for `backward`.
        """
        with self.autocast():
            loss = compute_loss(wrapped(x), y)
        self.backward(loss)

    def evaluate(self, x: Tensor, y: Tensor, measure: Callable[[Tensor, Tensor], object]) -> None:
        """Measure the outputs of the unwrapped model for one batch.

        A forward through DDP's wrapper, even without gradients, would copy rank 0's buffers to all ranks and skip the
        copy before the next training step.
        """
        measure(self.module(x), y)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of the global batch.

        loss: this rank's share of the global mean, i.e. the sum over its samples divided by the global batch size.
        """
        # 3. The batch is the global batch, so its gradient is the global gradient.
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients if the norm of the whole gradient exceeds `max_norm`. Returns the norm before.

        All ranks scale complete gradients by one factor: gradients are equal on all ranks, or shards (fsdp), whose norm
        torch computes over all ranks. Under localsgd and diloco each rank clips its own gradient.
        """
        return clip_grad_norm_(self.module.parameters(), max_norm)

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters and clear the gradients. scaler: disabled except with --amp fp16."""
        # 4. Clear the gradients after the step, or the next backward would add to them. With --amp fp16 the scaler
        #    skips the step if a gradient overflowed and adjusts its scale; otherwise it just calls the optimizer.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def list_replicas(self, optimizer: Optimizer) -> list[Replica]:
        """Return the replicas of this process; always `replicas` of them."""
        # 5. The state dict of the unwrapped module, which any other program can load.
        return [Replica(self.module.state_dict(), optimizer)]


class Single(Method):
    """The baseline itself, and the options that it refuses."""

    grouped = False
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "a single replica has nothing to synchronize",
        "--no-buffer-sync": "a single replica has nothing to synchronize",
        "--join": "a single process never waits for another rank",
        "--comm-hook": "a single process sends no gradients to compress",
        "--find-unused": "a single process reduces no gradients",
    }
