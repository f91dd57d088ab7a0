"""Pipeline stages, each sharded over several ranks with FSDP2.

Compare with pp.py: the copies of a stage are shards. Parameters of a stage are gathered for its forward and backward,
and their gradients are reduced once, after the last micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from train.errors import UserError
from train.methods.fsdp import Fsdp, find_blocks
from train.methods.pp import Pp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from train.settings import Settings


class PpFsdp(Pp):
    """With 4 ranks, ranks 0 and 1 have shards of the first stage, and ranks 2 and 3 of the second."""

    refuses: ClassVar[Mapping[str, str]] = {
        **Pp.refuses,
        **{option: Fsdp.refuses[option] for option in ("--channels-last", "--ema", "--save-format safetensors")},
    }
    default_degree = 2
    copies = "shard"

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return the mesh of stages and their shards. Raises UserError."""
        if settings.pipeline_schedule == "zbv":
            reason = "its losses differ by 0.4 from a single process after 20 steps; use interleaved"
            raise UserError(f"--pipeline-schedule zbv: not with --method pp_fsdp: {reason}")
        return super().mesh_shape(settings, world_size)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep the stages of this rank, and shard them."""
        from torch.distributed.fsdp import fully_shard

        module = super().wrap(model)
        # 1c. As in fsdp.py, for each stage: blocks, then the rest.
        for stage in self.stages.values():
            for block in find_blocks(stage):
                fully_shard(block, mesh=self.mesh["shard"])
            fully_shard(stage, mesh=self.mesh["shard"])
        return module

    def train(self, wrapped: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Run the schedule, with the loss multiplied by the number of shards, because FSDP averages."""
        super().train(wrapped, x, y, lambda outputs, targets: compute_loss(outputs, targets) * self.ctx.mesh.data_size)

    def reduce_gradients(self) -> None:
        """Do nothing: FSDP has reduced the gradients."""
