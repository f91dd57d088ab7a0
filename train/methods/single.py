"""One process, one device: the loop that every parallel method starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


class Single:
    """Plain training."""

    grouped = False

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        if settings.sync_bn or not settings.buffer_sync:
            option = "--sync-bn" if settings.sync_bn else "--no-buffer-sync"
            raise UserError(f"{option}: --method single has no other replica; use --method ddp")
        self.device = ctx.device
        self.module: nn.Module

    @property
    def buffers_synced(self) -> bool:
        """One replica always agrees with itself."""
        return True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model where it computes."""
        # 1. Move the parameters and buffers to the device, before an optimizer takes hold of them.
        self.module = model.to(self.device)
        return self.module

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        # 2. The batch is the global batch, so its gradient is the global gradient.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters."""
        # 3. Step, then drop the gradients, or the next backward would add to them.
        optimizer.step()
        optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Name the model's tensors."""
        # 4. The module is the model: its state dict is what any other program loads.
        return self.module.state_dict()
