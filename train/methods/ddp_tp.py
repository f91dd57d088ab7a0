"""DDP and tensor parallelism: replicas of the tensor-parallel model of tp.py.

DDP flattens parameters into buckets, so it must see this rank's shards as plain tensors. `replicate()` would accept the
DTensors of tp.py and train another model without an error: its losses were off by 8e-3 after 5 steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from train.mesh import find_parallel_degree, join_shards
from train.methods.ddp import Ddp
from train.methods.fsdp_tp import DEGREE
from train.methods.tp import Tp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from train.settings import Settings


class LocalShards(nn.Module):
    """A model whose parameters are this rank's shards as plain tensors, in the memory of the model's DTensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = (model,)  # hidden from `parameters()`
        self.shards = nn.ParameterList(nn.Parameter(p.detach().to_local()) for p in model.parameters())  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        """Call the model with DTensors made of the shards, through which gradients reach the shards."""
        (model,) = self.model
        pairs = zip(model.named_parameters(), self.shards, strict=True)
        return functional_call(model, {name: join_shards(shard, like=p) for (name, p), shard in pairs}, (x,))


class DdpTp(Ddp, Tp):
    """With degree 2 on 4 ranks, ranks 0 and 2 are replicas, and so are ranks 1 and 3."""

    refuses: ClassVar[Mapping[str, str]] = {
        **Tp.refuses,
        "--join": "the optimizer state is broadcast from rank 0 at the end, and other ranks have other shards",
        "--comm-hook": "the hooks reduce over all ranks, and would add gradients of different shards",
        "--find-unused": "DDP finds unused modules, but every forward uses all shards",
    }

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a mesh whose rows are tensor-parallel groups. Raises UserError if the number of ranks does not fit."""
        degree = find_parallel_degree(settings, world_size, DEGREE)
        return {"data": world_size // degree, "tensor": degree}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model along the tensor dimension, and wrap the shards in DDP."""
        # 1, 1a. As in tp.py.
        Tp.wrap(self, model)
        # 1b. As in ddp.py, but gradients are averaged over the ranks with the same shards.
        self.shards = LocalShards(self.module)
        self.wrapper = DistributedDataParallel(self.shards, process_group=self.mesh["data"].get_group())
        return self.wrapper

    # 2. As in tp.py. The optimizer updates the DTensors, and thereby the shards in the same memory.

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the shards, averaged over all replicas, and give them to the DTensors."""
        # 3a. A cleared gradient of a DTensor (step 4) also clears the gradient of its shard.
        pairs = list(zip(self.module.parameters(), self.shards.shards, strict=True))
        for parameter, shard in pairs:
            if parameter.grad is None:
                shard.grad = None
        # 3. As in ddp.py. A partial gradient of a norm is reduced before it reaches its shard.
        Ddp.backward(self, loss)
        for parameter, shard in pairs:
            parameter.grad = join_shards(shard.grad, like=parameter)
