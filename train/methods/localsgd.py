"""Post-local SGD: ranks train on their own for a few steps, then average their models.

Compare with ddp.py, all of whose other steps it takes over. Parameters travel once in N steps instead of
gradients at each (Lin et al. 2020, https://arxiv.org/abs/1808.07217). The first N steps are plain DDP, for the models
change fastest there.
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
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
    """Replicas differ by design, except after every N-th step, and the optimizer's state even then.

    Each rank's momentum comes from its own samples, and is not averaged.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "--amp fp16": "each rank would scale its loss on its own, and leave out other steps than the rest; use bf16",
        "--join": "join does not answer its averages on a rank that is done",
        "--comm-hook": "it has a hook of its own, which after the first steps sends no gradient",
        "--ema": "each rank would average a model of its own, and nothing would bring the averages together",
    }

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        self.every = settings.average_every or EVERY
        if self.every < 2:
            raise UserError("--average-every 1: needs 2 or more; averaging at every step is what --method ddp does")
        self.steps = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Say when models are averaged: not in the first `warmup_steps`, then after every step `period` divides."""
        last = 0 if self.steps < 2 * self.every else self.steps // self.every * self.every
        averaging = {"period": self.every, "warmup_steps": self.every, "last_step": last}
        return {**super().facts, "averaging": averaging}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap as in ddp.py, and stop averaging gradients after the first N steps."""
        wrapper = super().wrap(model)
        # 1e. From then on the hook that DDP asks to reduce a gradient hands back the rank's own.
        self.hook = PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, None, start_localSGD_iter=self.every, post_local_gradient_allreduce=False
        )
        self.wrapper.register_comm_hook(self.hook, post_localSGD_hook)
        # 1f. The averager counts from 0: the step that it calls 2N - 1 is our 2N-th, the N-th on which ranks were on
        #     their own. (torch's example says N here too, and so averages after the first of them already.)
        self.averager = PeriodicModelAverager(period=self.every, warmup_steps=2 * self.every - 1)
        return wrapper

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update this rank's parameters with its own gradient, and now and then take the average of all ranks'."""
        # 4. As in ddp.py.
        scaler.step(optimizer)
        scaler.update()
        # 4a. Every rank calls this at every step, so that all count alike. Before the gradients are dropped: a
        #     parameter without one is taken for frozen, and passed over.
        self.averager.average_parameters(self.module.parameters())
        optimizer.zero_grad()
        self.steps += 1

    def extra_state(self) -> dict[str, Any]:
        """Give the counts of steps: of the hook, which ends the warm-up, and of the averager."""
        return {"hook": self.hook.iter, "averager": self.averager.step, "steps": self.steps}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self.hook.iter, self.averager.step, self.steps = state["hook"], state["averager"], state["steps"]
