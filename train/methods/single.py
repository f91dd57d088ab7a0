"""One process, one device: the baseline for the parallel methods. `Step` (train/step.py) calls these functions."""

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
    """Training without parallelism."""

    grouped: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "a single replica has nothing to synchronize",
        "--no-buffer-sync": "a single replica has nothing to synchronize",
        "--join": "a single process never waits for another rank",
        "--comm-hook": "a single process sends no gradients to compress",
        "--find-unused": "a single process reduces no gradients",
    }
    replicas = 1

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings, self.ctx = settings, ctx
        self.module: nn.Module

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report synchronized buffers, because a single replica equals itself."""
        return {"buffers_synced": True}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to its device."""
        # 1. Move the parameters and buffers to the device before the optimizer refers to them.
        self.module = model.to(self.ctx.device)
        return self.module

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer for all parameters."""
        # 2. All parameters: a parameter missing in the optimizer is never trained.
        return kind(self.module.parameters(), **arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: there is no communication, and gradients accumulate until they are cleared."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        # 3. The batch is the global batch, so its gradient is the global gradient.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters."""
        # 4. Clear the gradients after the step, or the next backward would add to them. With --amp fp16 the scaler
        #    skips the step if a gradient overflowed and adjusts its scale; otherwise it just calls the optimizer.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Return the only replica."""
        # 5. The state dict of the unwrapped module, which any other program can load.
        return [Replica(self.module.state_dict(), optimizer)]
