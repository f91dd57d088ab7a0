"""Post-local SGD: ranks train independently for N steps, then average their parameters.

The remaining steps are inherited from ddp.py. Parameters are sent every N steps instead of gradients at every step (Lin
et al. 2020, https://arxiv.org/abs/1808.07217). The first N steps are plain DDP, because models change fastest at the
start. https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from train.errors import UserError
from train.methods.ddp import Ddp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

EVERY = 4


class LocalSgd(Ddp):
    """Replicas differ by design, except after every N-th step. Optimizer state always differs.

    Each rank's momentum comes from its own samples and is not averaged.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "--amp fp16": "each rank would adapt its loss scale separately and skip different steps; use bf16",
        "--join": "DDP's join does not take part in parameter averaging",
        "--comm-hook": "localsgd registers its own hook, which sends no gradients after the first steps",
        "--ema": "each rank would average a different model, and the averages would never be synchronized",
    }

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        self.every = settings.average_every or EVERY
        if self.every < 2:
            raise UserError("--average-every 1: must be at least 2; for averaging at every step use --method ddp")
        self.steps = 0

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report the averaged steps: the multiples of `period` after the first `warmup_steps`."""
        last = 0 if self.steps < 2 * self.every else self.steps // self.every * self.every
        averaging = {"period": self.every, "warmup_steps": self.every, "last_step": last}
        return {**super().metadata_fields, "averaging": averaging}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap as in ddp.py, and stop averaging gradients after the first N steps."""
        wrapper = super().wrap(model)
        # 1e. After N steps the hook returns the rank's own gradient.
        self.hook = PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, None, start_localSGD_iter=self.every, post_local_gradient_allreduce=False
        )
        self.wrapper.register_comm_hook(self.hook, post_localSGD_hook)
        # 1f. The averager counts steps from 0: its step 2N - 1 is our step 2N, the N-th step without gradient
        #     averaging. (The example in torch's documentation passes N, and so averages after the first such step.)
        self.averager = PeriodicModelAverager(period=self.every, warmup_steps=2 * self.every - 1)
        return wrapper

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters with this rank's gradient, and average them over all ranks every N steps."""
        # 4. As in ddp.py.
        scaler.step(optimizer)
        scaler.update()
        # 4a. All ranks call the averager at every step, so that their counts agree. Clear gradients afterwards: the
        #     averager skips parameters without a gradient as frozen.
        self.averager.average_parameters(self.module.parameters())
        optimizer.zero_grad()
        self.steps += 1

    def extra_state(self) -> dict[str, Any]:
        """Return the step counts of the hook, which end the warm-up, and of the averager."""
        return {"hook": self.hook.iter, "averager": self.averager.step, "steps": self.steps}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the step counts."""
        self.hook.iter, self.averager.step, self.steps = state["hook"], state["averager"], state["steps"]
