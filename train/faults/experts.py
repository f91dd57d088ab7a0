"""Expert parallelism with gradients that are added over the wrong ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.faults.reduction import LocalGradients
from train.methods.ep import Ep, is_expert

if TYPE_CHECKING:
    from torch import nn

    from train.methods.single import Method


class ExpertReplicatedWrongly(LocalGradients):
    """Add the gradients of experts over the ranks with other experts.

    Swapped process groups have equal sizes here, so nothing fails: each expert trains on the gradient of another, and
    its replicas on the samples of their own group only.
    """

    summary = "gradients of experts are added over the ranks of other experts (needs 4 ranks)"
    code = "SYN212"
    methods = ("ep",)

    def _check(self) -> None:
        super()._check()
        if self.ctx.mesh.size("data") < 2:
            self.refuse(f"experts have no replicas on {self.ctx.world_size} ranks; start {2 * self.ctx.world_size}")

    def after_wrap(self, method: Method, forward: nn.Module) -> nn.Module:
        """Swap the process groups on all ranks."""
        assert isinstance(method, Ep)
        method.groups |= {name: method.mesh.get_group("expert") for name in method.groups if is_expert(name)}
        return forward


class RouterUpdatedLocally(LocalGradients):
    """Train each rank's routers on its own samples."""

    summary = "gradients of routers are not added, so each rank routes tokens differently"
    code = "SYN212"
    methods = ("ep",)

    def after_wrap(self, method: Method, forward: nn.Module) -> nn.Module:
        """Exclude the routers from the reduction on all ranks."""
        assert isinstance(method, Ep)
        method.groups = {name: group for name, group in method.groups.items() if ".router." not in name}
        return forward
