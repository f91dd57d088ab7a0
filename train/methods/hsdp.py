"""Hybrid Sharded Data Parallel: the model divided within a group of ranks, and as many copies as groups.

Compare with fsdp.py: only the mesh has one dimension more. Parts are gathered within a group, usually the GPUs
of one machine with fast links, and only gradients travel between the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.methods.fsdp import Fsdp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS = 2


class Hsdp(Fsdp):
    """With 2 copies on 4 ranks, ranks 0 and 1 hold one copy between them, ranks 2 and 3 the other.

    So rank 0 and rank 2 must hold the same bytes, while rank 0 and rank 1 hold different parts.
    """

    def make_mesh(self) -> DeviceMesh:
        """Arrange the ranks in rows: a copy of the model in each, the same part in each column.

        Raises UserError when the ranks do not fill the rows.
        """
        from torch.distributed.device_mesh import init_device_mesh

        world_size, copies = self.ctx.world_size, self.settings.replicas or REPLICAS
        if world_size % copies or world_size == copies:
            raise UserError(
                f"--method hsdp --replicas {copies}: {world_size} ranks are not {copies} copies of 2 or more parts; "
                f"start {2 * copies}, or choose --replicas"
            )
        shape = (copies, world_size // copies)
        return init_device_mesh(self.ctx.device.type, shape, mesh_dim_names=("replicate", "shard"))
