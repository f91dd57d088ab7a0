"""One process, one device: what `Step` (train/step.py) calls, and what every parallel method changes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from train.methods.base import MethodDefaults, Replica

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


class Single(MethodDefaults):
    """Plain training."""

    grouped: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "it has no other replica to share statistics with",
        "--no-buffer-sync": "it has no other replica to share statistics with",
        "--join": "it waits for no other rank",
        "--comm-hook": "it sends no gradients that could be fewer bytes",
        "--find-unused": "it reduces no gradients, so it waits for none",
    }
    replicas = 1

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings, self.ctx = settings, ctx
        self.module: nn.Module

    @property
    def facts(self) -> dict[str, Any]:
        """One replica always agrees with itself."""
        return {"buffers_synced": True}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model where it computes."""
        # 1. Move the parameters and buffers to the device, before an optimizer takes hold of them.
        self.module = model.to(self.ctx.device)
        return self.module

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer over all parameters."""
        # 2. All of them: what the optimizer does not hold is never trained.
        return kind(self.module.parameters(), **arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to synchronize with, and gradients add up until they are cleared."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        # 3. The batch is the global batch, so its gradient is the global gradient.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters."""
        # 4. Step, then drop the gradients, or the next backward would add to them. With --amp fp16 the scaler
        #    leaves the step out where a gradient overflowed, and adjusts its scale; else it only passes on.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Give the one replica there is."""
        # 5. The module is the model: its state dict is what any other program loads.
        return [Replica(self.module.state_dict(), optimizer)]
