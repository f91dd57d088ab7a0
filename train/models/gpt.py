"""A byte-level causal GPT with the parts of current models, small enough to train on a CPU.

Blocks have RMSNorm (https://arxiv.org/abs/1910.07467), grouped-query attention (https://arxiv.org/abs/2305.13245) with
rotary position embedding (https://arxiv.org/abs/2104.09864), and a SwiGLU MLP (https://arxiv.org/abs/2002.05202) or a
mixture of such MLPs (https://arxiv.org/abs/2401.04088).

Parallel methods change instances, not this file. Attention takes its number of heads from the output of `q`, so `q`,
`k` and `v` may be sharded by columns. `Attention.attend`, `Attention.position_offset` and `Experts.apply_experts` may
be replaced. A pipeline stage is a model whose `embed`, or `norm` and `head`, is None.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import refuse
from train.models.transformer import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH, DEPTH, HEADS, KEY_VALUE_HEADS = 64, 4, 4, 2
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
ROTARY_BASE = 10_000


class Attention(nn.Module):
    """Causal self-attention in which two query heads share a key and value head.

    position_offset: position of the first token, if the input is a part of the sequence.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim, self.position_offset = width // HEADS, 0
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, KEY_VALUE_HEADS * self.head_dim, bias=False)
        self.v = nn.Linear(width, KEY_VALUE_HEADS * self.head_dim, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, T, width]. Returns the same shape."""
        # Each is [N, heads of this rank, T, head_dim].
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = self.attend(self.rotate(q), self.rotate(k), v)
        projected: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return projected

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Average the values of all earlier tokens: [N, heads, T, head_dim], with fewer heads in k and v."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of components of [N, heads, T, head_dim] by angles proportional to the position."""
        half = self.head_dim // 2
        frequencies = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
        positions = self.position_offset + torch.arange(x.shape[2], device=x.device)
        angles = positions[:, None] * frequencies  # [T, head_dim / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first_half, right = x.chunk(2, -1)
        return torch.cat([first_half * cos - right * sin, first_half * sin + right * cos], -1)


class Mlp(nn.Module):
    """SwiGLU: a gated hidden layer of three times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]. Returns the same shape."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """A mixture of experts: a router selects two of four MLPs for each token. No token is dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, T, width]. Returns the same shape."""
        tokens = x.flatten(0, 1)
        scores, expert_ids = self.router(tokens).topk(EXPERTS_PER_TOKEN)
        return self.apply_experts(tokens, expert_ids, scores.softmax(-1)).view_as(x)

    def apply_experts(self, tokens: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Add the weighted outputs of each token's experts.

        tokens: [tokens, width]. expert_ids, weights: [tokens, experts per token]. Returns [tokens, width].
        """
        # Sort the pairs of token and expert by expert. Gathering instead of adding in place is deterministic on GPUs.
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=len(self.experts)).tolist()
        inputs = torch.split(tokens[order // expert_ids.shape[1]], counts)
        # An expert without tokens computes an empty output, so that its parameters get gradients of zero.
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, inputs, strict=True)])
        # [tokens, experts per token, width].
        by_token = outputs[order.argsort()].view(*expert_ids.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


class Block(nn.Module):
    """Pre-norm block: attention and an MLP or experts, each with an RMSNorm and a residual connection."""

    def __init__(self, width: int, *, experts: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.RMSNorm(width)
        if experts:
            self.moe = Experts(width)
        else:
            self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, T, width]. Returns the same shape."""
        x = x + self.attention(self.norm1(x))
        feed_forward = self.moe if hasattr(self, "moe") else self.mlp
        y: Tensor = feed_forward(self.norm2(x))
        return x + y


class Gpt(nn.Module):
    """Embedding, `depth` blocks, RMSNorm, and a linear layer that predicts the next token.

    tied: the embedding is also the weight of the last layer. tp_plan: see train/methods/tensor_parallel_plan.py.
    Raises UserError for unsupported widths and depths.
    """

    tp_plan: ClassVar[Mapping[str, str]] = {
        "embed": "embedding",
        "layers.*.norm?": "norm",
        "layers.*.[qkv]": "colwise",
        "layers.*.o": "rowwise",
        "layers.*.moe": "all_tokens",
        "layers.*.router": "replicated",
        "layers.*.gate": "colwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "norm": "norm",
        "head": "head",
    }

    def __init__(
        self, vocabulary: int, width: int | None, depth: int | None, *, tied: bool = True, experts: bool = False
    ) -> None:
        super().__init__()
        width, depth = width or WIDTH, depth or DEPTH
        refuse(
            (
                width % (2 * HEADS),
                f"--width {width}: for gpt-tiny, must be a multiple of {2 * HEADS}, two for each head",
            ),
            (depth > MAX_DEPTH, f"--depth {depth}: must be at most {MAX_DEPTH}"),
        )
        # The norm of the logits is small at the start, as in GPT-2, so that the first loss is near log(vocabulary).
        self.embed: nn.Embedding | None = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Block(width, experts=experts) for _ in range(depth)))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(width)
        self.head: nn.Linear | None = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("attention.o.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if is_residual else 0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, T] int64. Returns logits [N, T, vocabulary]; a pipeline stage passes [N, T, width] to the next."""
        if self.embed is not None:
            x = self.embed(x)
        x = self.layers(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)
