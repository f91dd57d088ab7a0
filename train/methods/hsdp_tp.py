"""HSDP and tensor parallelism: replicas of the sharded model of fsdp_tp.py, on a mesh of three dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.methods.fsdp_tp import FsdpTp
from train.methods.hsdp import REPLICAS

if TYPE_CHECKING:
    from train.settings import Settings


class HsdpTp(FsdpTp):
    """With 2 copies and degree 2 on 8 ranks, ranks 0 to 3 hold the first copy, and rank 4 equals rank 0."""

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a three-dimensional mesh. Raises UserError if the number of ranks does not fit."""
        shape, copies = super().mesh_shape(settings, world_size), settings.replicas or REPLICAS
        if shape["shard"] % copies or shape["shard"] == copies:
            raise UserError(
                f"--method hsdp_tp --replicas {copies}: needs a multiple of {2 * copies * shape['tensor']} ranks, "
                f"found {world_size}"
            )
        return {"replicate": copies, "shard": shape["shard"] // copies, "tensor": shape["tensor"]}
