"""DiLoCo: ranks train independently for N steps, then an outer optimizer takes one step along their average change.

Compare with single.py, and with localsgd.py, which just averages. --optimizer selects the inner optimizer, whose state
stays on its rank. The outer optimizer is SGD with Nesterov momentum. Its gradient is the average over ranks of the
parameters before the N steps minus the parameters after the N steps (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105, algorithm 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from train.methods.single import Method
from train.methods.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

EVERY, LR, MOMENTUM = 20, 0.7, 0.9  # the paper has 500 steps


class DiLoCo(Method):
    """Replicas differ by design, except after every N-th step. Inner optimizer state and buffers always differ.

    The outer optimizer and its parameters, `start`, are always equal. All ranks must begin with one seed.
    """

    grouped = True
    refuses: ClassVar[Mapping[str, str]] = {
        "--no-buffer-sync": "diloco never synchronizes buffers; --sync-bn makes the statistics equal",
        "--amp fp16": "each rank would adapt its loss scale separately and skip different steps; use bf16",
        "--find-unused": "diloco reduces no gradients, and unused parameters do not change",
        "--join": "the outer step waits for all ranks, and a rank without batches would not take part",
        "--comm-hook": "diloco sends changes of the parameters, without DDP and its hooks",
        "--ema": "each rank would average a different model, and the averages would never be synchronized",
    }

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        self.every = settings.average_every or EVERY
        self.steps = 0

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report the steps at which parameters are equal: the multiples of `period`, without a warm-up."""
        last = self.steps // self.every * self.every
        averaging = {"period": self.every, "warmup_steps": 0, "last_step": last}
        return {"buffers_synced": self.settings.sync_bn, "averaging": averaging}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to its device, and copy its parameters for the outer optimizer."""
        # 1a. Convert to SyncBatchNorm first, as in ddp.py.
        if self.settings.sync_bn:
            model = convert_sync_batchnorm(model)
        # 1. Move the parameters and buffers to the device. There is no wrapper: gradients stay on their rank.
        self.module = model.to(self.ctx.device)
        # 1b. The outer optimizer has its own copy of the parameters: their values at the last outer step.
        self.start = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        momentum = MOMENTUM if self.settings.outer_momentum is None else self.settings.outer_momentum
        lr = self.settings.outer_lr or LR
        self.outer = torch.optim.SGD(self.start.values(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        return self.module

    # 2. As in single.py: the inner optimizer.

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of this rank's samples."""
        # 3. The rank trains on its share alone: undo the division by the number of all samples, as in ddp.py.
        (loss * self.ctx.mesh.data_size).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters with this rank's gradient, and take an outer step every N steps; then a collective."""
        # 4. As in single.py.
        super().step(optimizer, scaler)
        self.steps += 1
        if self.steps % self.every == 0:
            self.outer_step()

    @torch.no_grad()
    def outer_step(self) -> None:
        """Average the change of the parameters over all ranks, and move all ranks to the same new parameters."""
        parameters = dict(self.module.named_parameters())
        # 4a. The outer gradient points from the new parameters to the old ones. Every rank computes the same step from
        #     the same average, so that nothing else is sent.
        for name, start in self.start.items():
            start.grad = (start - parameters[name]) / self.ctx.mesh.data_size
            dist.all_reduce(start.grad)
        self.outer.step()
        # 4b. The next N steps begin here. The inner optimizer keeps its momentum.
        for name, start in self.start.items():
            parameters[name].copy_(start)
            start.grad = None

    # 5. As in single.py: only the inner optimizer's state is saved in a checkpoint.

    def extra_state(self) -> dict[str, Any]:
        """Return the step count, and the parameters and momentum of the outer optimizer; equal on all ranks."""
        momentum = {name: self.outer.state[start].get("momentum_buffer") for name, start in self.start.items()}
        return {"steps": self.steps, "start": self.start, "momentum": momentum}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the step count and the outer optimizer."""
        self.steps = state["steps"]
        for name, start in self.start.items():
            start.copy_(state["start"][name])
            if (momentum := state["momentum"][name]) is not None:
                self.outer.state[start]["momentum_buffer"] = momentum.to(start)
