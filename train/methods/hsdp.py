"""Hybrid Sharded Data Parallel: shards within a group of ranks, replicas between groups.

Compare with fsdp.py: only the mesh has a second dimension. Parameters are gathered within a group, usually the GPUs of
one machine with fast links, and only gradients are sent between groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.methods.fsdp import Fsdp

if TYPE_CHECKING:
    from train.settings import Settings

REPLICAS = 2


class Hsdp(Fsdp):
    """With 2 copies on 4 ranks, ranks 0 and 1 hold the first copy, and ranks 2 and 3 the second.

    Ranks 0 and 2 must hold equal shards, and ranks 0 and 1 hold different shards.
    """

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a two-dimensional mesh: each row is a copy of the model, each column holds equal shards.

        Raises UserError if the number of ranks does not fit.
        """
        copies = settings.replicas or REPLICAS
        if world_size % copies or world_size == copies:
            raise UserError(
                f"--method hsdp --replicas {copies}: {world_size} ranks cannot hold {copies} copies of 2 or more "
                f"shards each; start {2 * copies} ranks, or change --replicas"
            )
        return {"replicate": copies, "shard": world_size // copies}
