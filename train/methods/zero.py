"""ZeroRedundancyOptimizer under DDP: whole parameters on every rank, but each keeps only its part of the state.

Compare with ddp.py, all of whose other steps it takes over (Rajbhandari et al. 2020, stage 1,
https://arxiv.org/abs/1910.02054): Adam's state is twice as large as the model, and no rank needs all of it.
https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from train.methods.base import Replica
from train.methods.ddp import Ddp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import Optimizer


class Zero(Ddp):
    """Every parameter belongs to one rank, which updates it and sends the others its new value."""

    refuses: ClassVar[Mapping[str, str]] = {
        "--join": "a rank that is done would leave its part of the parameters as it is",
    }
    optimizer: ZeroRedundancyOptimizer

    @property
    def facts(self) -> dict[str, Any]:
        """Say that no two ranks hold the same part of the optimizer's state."""
        return {**super().facts, "optimizer_sharded": True}

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build an optimizer that deals the parameters out to the ranks."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # 2a. Whole parameters are dealt out, the largest first, to the rank that has the fewest elements.
        # 4. The call is that of ddp.py. Its step() updates this rank's parameters and then broadcasts them.
        self.optimizer = ZeroRedundancyOptimizer(self.module.parameters(), optimizer_class=kind, **arguments)
        return self.optimizer

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Give this rank's replica, with the part of the optimizer's state that is its own."""
        # 5a. `optimizer.state_dict()` wants all parts sent to one rank first; the optimizer inside holds this
        #     rank's, and names only the parameters that are its own.
        assert optimizer is self.optimizer
        return [Replica(self.module.state_dict(), self.optimizer.optim)]
