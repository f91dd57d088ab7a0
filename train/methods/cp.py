"""Context parallelism: the ranks of a group have the same samples, and each rank a slice of their tokens.

The remaining steps are inherited from ddp.py. Activations of long sequences are divided by the number of ranks. Only
attention needs other tokens, so only attention communicates. With `--context-mode allgather` each rank gathers the keys
and values of all tokens (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2). With `ulysses`, ranks exchange
slices of tokens for slices of heads, and attention itself is unchanged (https://arxiv.org/abs/2309.14509).
torch's `context_parallel` is not used, because it has no kernels for CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError
from train.mesh import find_parallel_degree, refuse_model
from train.methods.ddp import Ddp
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
            problem = f"{HEADS} attention heads cannot be divided by {self.degree} ranks"
            raise UserError(f"--context-mode ulysses: {problem}; use --context-mode allgather")

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a two-dimensional mesh: each row shares the tokens of its samples. Raises UserError."""
        degree = find_parallel_degree(settings, world_size)
        return {"data": world_size // degree, "context": degree}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replace the attention, and wrap the model in DDP. Raises UserError."""
        group = self.ctx.mesh.build(self.ctx.device.type).get_group("context")
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        if not layers:
            raise refuse_model(self.settings, "divides only the attention of text models")
        # 1a. All other layers compute each token separately, and need no change.
        for layer in layers:
            layer.attend = build_attention(self.mode, group)  # type: ignore[assignment,method-assign]
        # 1. As in ddp.py: DDP averages the gradients of all ranks, those with equal samples included.
        return super().wrap(model)

    def select_tokens(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's slice of the tokens and targets, [N, T / ranks]. Raises UserError."""
        if x.shape[1] % self.degree:
            problem = f"sequences of {x.shape[1]} tokens cannot be divided by {self.degree} ranks"
            raise UserError(f"--method cp: {problem}; change --parallel-degree")
        length = x.shape[1] // self.degree
        # Rotary embedding needs the position in the whole sequence.
        for layer in self.module.modules():
            if isinstance(layer, Attention):
                layer.position_offset = self.at * length
        return x.chunk(self.degree, 1)[self.at], y.chunk(self.degree, 1)[self.at]

    def train(self, wrapped: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Add the gradient of this rank's tokens of a micro-batch."""
        super().train(wrapped, *self.select_tokens(x, y), compute_loss)

    def evaluate(self, x: Tensor, y: Tensor, measure: Callable[[Tensor, Tensor], object]) -> None:
        """Measure the outputs for this rank's tokens; a collective of its group."""
        super().evaluate(*self.select_tokens(x, y), measure)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, averaged over all ranks by DDP."""
        # 3b. As in ddp.py, undo DDP's division: the losses of all ranks, each of its own tokens, add up to the global
        #     mean. Ranks with the same samples count too, because each computes another part of the gradient.
        # 3. Every rank must call backward equally often: attention communicates in backward too.
        (loss * self.ctx.world_size).backward()  # type: ignore[no-untyped-call]


def build_attention(mode: str, group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a replacement for `Attention.attend` for slices of tokens."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd  # takes half a second

    ranks, rank = group.size(), group.rank()

    def exchange(slices: tuple[Tensor, ...], dimension: int) -> Tensor:
        """Send a slice to each rank, and concatenate the received slices; backward returns their gradients."""
        received = all_to_all_single_autograd(torch.cat(slices), None, None, group)
        return torch.cat(received.chunk(ranks), dimension)

    def gather_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (exchange((x,) * ranks, 2) for x in (k, v))
        # Each query attends to all keys up to its own position.
        queries, keys = q.shape[2], k.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(rank * queries)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def exchange_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] % ranks:  # too few key and value heads: repeat them for each query head
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (exchange(x.chunk(ranks, 1), 2) for x in (q, k, v))  # [N, heads / ranks, T, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return exchange(y.chunk(ranks, 2), 1)

    return {"allgather": gather_keys, "ulysses": exchange_heads}[mode]
