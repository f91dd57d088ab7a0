"""Context parallelism: the ranks of a group have the same samples, and each rank a slice of their tokens.

The remaining steps are inherited from ddp.py. Activations of long sequences are divided by the number of ranks. Only
attention needs other tokens, so only attention communicates. With `--context-mode allgather` each rank gathers the keys
and values of all tokens (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2). With `ulysses`, ranks exchange
slices of tokens for slices of heads, and attention itself is unchanged (https://arxiv.org/abs/2309.14509).
torch's `context_parallel` is not used, because it has no kernels for CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError
from train.methods.ddp import Ddp
from train.methods.single import find_parallel_degree
from train.models.gpt import HEADS, Attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from train.launch import RankContext
    from train.settings import Settings

MODES = ("allgather", "ulysses")


class Cp(Ddp):
    """Every rank has the whole model. Parameters and optimizer state stay bitwise equal on all ranks."""

    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "its models have no BatchNorm",
        "--no-buffer-sync": "its models have no buffers",
    }
    parallel: ClassVar[bool] = True

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        self.mode = settings.context_mode or MODES[0]
        self.at, self.degree = ctx.mesh.coordinate("context"), ctx.mesh.size("context")
        if self.mode == "ulysses" and HEADS % self.degree:
            found = f"{HEADS} attention heads cannot be divided by {self.degree} ranks"
            raise UserError(f"--context-mode ulysses: {found}; use --context-mode allgather")

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a two-dimensional mesh: each row shares the tokens of its samples. Raises UserError."""
        degree = find_parallel_degree(settings, world_size)
        return {"data": world_size // degree, "context": degree}

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report the mesh coordinate of this rank."""
        return {**super().metadata_fields, "mesh": self.ctx.mesh.coordinates}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replace the attention, and wrap the model in DDP. Raises UserError."""
        group = self.ctx.mesh.build(self.ctx.device.type).get_group("context")
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        if not layers:
            raise UserError(f"--model {self.settings.model}: cp divides text; use gpt-tiny or gpt-tiny-moe")
        # 1a. All other layers compute each token separately, and need no change.
        for layer in layers:
            layer.attend = build_attention(self.mode, group)  # type: ignore[method-assign]
        # 1. As in ddp.py: DDP averages the gradients of all ranks, those with equal samples included.
        return super().wrap(model)

    def select_tokens(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's slice of the tokens and targets, [N, T / ranks]. Raises UserError."""
        if x.shape[1] % self.degree:
            found = f"sequences of {x.shape[1]} tokens cannot be divided by {self.degree} ranks"
            raise UserError(f"--method cp: {found}; change --parallel-degree")
        length = x.shape[1] // self.degree
        # Rotary embedding needs the position in the whole sequence.
        for layer in self.module.modules():
            if isinstance(layer, Attention):
                layer.position_offset = self.at * length
        return x.chunk(self.degree, 1)[self.at], y.chunk(self.degree, 1)[self.at]

    def train(self, forward: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Add the gradient of this rank's tokens of a micro-batch."""
        super().train(forward, *self.select_tokens(x, y), compute_loss)

    def evaluate(self, x: Tensor, y: Tensor, measure: Callable[[Tensor, Tensor], object]) -> None:
        """Measure the outputs for this rank's tokens; a collective of its group."""
        super().evaluate(*self.select_tokens(x, y), measure)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, averaged over all ranks by DDP."""
        # 3b. As in ddp.py, undo DDP's division: the losses of all ranks, each of its own tokens, add up to the global
        #     mean. Ranks with the same samples count too, because each computes another part of the gradient.
        # 3. Every rank must call backward equally often: attention communicates in backward too.
        (loss * self.ctx.world_size).backward()  # type: ignore[no-untyped-call]


class Exchange(torch.autograd.Function):
    """Divide a dimension over the ranks of a group, and gather another; backward does the opposite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divided: int, gathered: int, group: ProcessGroup) -> Tensor:
        """x: this rank's slice along `gathered`. Returns its slice along `divided`."""
        ctx.dimensions, ctx.group = (gathered, divided), group
        sent = torch.stack(x.chunk(group.size(), divided))  # the slice of each rank
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return each slice of the gradient to its rank."""
        return Exchange.apply(gradients[0], *ctx.dimensions, ctx.group), None, None, None


class Gather(torch.autograd.Function):
    """Concatenate the tokens of all ranks of a group: [N, heads, T / ranks, head_dim] to [N, heads, T, head_dim]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """Gather the slices of all ranks in order."""
        ctx.group, slices = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(slices, x.contiguous(), group)
        return torch.cat(slices, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's tokens: the sum over the ranks that used them."""
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


def build_attention(mode: str, group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a replacement for `Attention.attend` for slices of tokens."""

    def gather_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = Gather.apply(k, group), Gather.apply(v, group)
        # Each query attends to all keys up to its own position.
        own, total = q.shape[2], k.shape[2]
        mask = torch.ones(own, total, dtype=torch.bool, device=q.device).tril(group.rank() * own)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def exchange_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] % group.size():  # too few key and value heads: one for each query head
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        heads_of_tokens: Tensor = Exchange.apply(y, 2, 1, group)
        return heads_of_tokens

    return {"allgather": gather_keys, "ulysses": exchange_heads}[mode]
