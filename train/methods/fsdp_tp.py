"""FSDP2 and tensor parallelism: each tensor-parallel shard is sharded again over the data-parallel ranks.

Compare with fsdp.py and tp.py: only the mesh has both dimensions. Tensor-parallel ranks are neighbors, usually the GPUs
of one machine, because they communicate within every block.
https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, ClassVar

from train.errors import UserError
from train.mesh import find_parallel_degree
from train.methods.fsdp import Fsdp
from train.methods.hsdp import REPLICAS
from train.methods.tp import Tp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from train.settings import Settings

DEGREE = 2


class FsdpTp(Fsdp, Tp):
    """With degree 2 on 4 ranks, ranks 0 and 1 have the same samples, and ranks 0 and 2 the same columns.

    Norms are sharded over ranks 0 and 2, so ranks 0 and 1 must hold equal shards of them.
    """

    refuses: ClassVar[Mapping[str, str]] = {**Fsdp.refuses, "--sync-bn": Tp.refuses["--sync-bn"]}

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a mesh whose rows are tensor-parallel groups. Raises UserError if the number of ranks does not fit."""
        degree = find_parallel_degree(settings, world_size, DEGREE)
        return {"shard": world_size // degree, "tensor": degree}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model along the tensor dimension, then along the data dimensions."""
        # 1, 1a. As in tp.py. FSDP comes second, because the forward needs gathered tensor-parallel shards.
        Tp.wrap(self, model)
        # 1b. As in fsdp.py. A matrix sharded by columns becomes a strided shard: rows of rows.
        #     FSDP warns that the logits are a view, which only matters to in-place operations.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        self.shard(self.mesh[self.ctx.mesh.names[:-1]])
        return self.module

    # 3. As in fsdp.py. FSDP reduces partial gradients of norms over the tensor dimension first.


class HsdpTp(FsdpTp):
    """HSDP and tensor parallelism: replicas of the sharded model, on a mesh of three dimensions.

    With 2 copies and degree 2 on 8 ranks, ranks 0 to 3 hold the first copy, and rank 4 equals rank 0.
    """

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
