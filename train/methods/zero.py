"""ZeroRedundancyOptimizer with DDP: every rank has all parameters, and a part of the optimizer state.

The remaining steps are inherited from ddp.py. Adam's state is twice the size of the parameters, and each rank needs
only its part (Rajbhandari et al. 2020, stage 1, https://arxiv.org/abs/1910.02054).
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
    """Each parameter is owned by one rank, which updates it and broadcasts the new value."""

    refuses: ClassVar[Mapping[str, str]] = {
        "--join": "a rank without batches would stop updating its part of the parameters",
    }
    optimizer: ZeroRedundancyOptimizer

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report a sharded optimizer: ranks have different parts of its state."""
        return {**super().metadata_fields, "optimizer_sharded": True}

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build an optimizer that partitions the parameters between ranks."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # 2a. It assigns each parameter, largest first, to the rank with the fewest elements so far.
        # 4. As in ddp.py. step() updates this rank's parameters, then broadcasts them.
        self.optimizer = ZeroRedundancyOptimizer(self.module.parameters(), optimizer_class=kind, **arguments)
        return self.optimizer

    def list_replicas(self, optimizer: Optimizer) -> list[Replica]:
        """Return this rank's replica with its part of the optimizer state."""
        # 5a. `optimizer.state_dict()` requires consolidation on one rank. The inner optimizer has this rank's part.
        assert optimizer is self.optimizer
        return [Replica(self.module.state_dict(), self.optimizer.optim)]
