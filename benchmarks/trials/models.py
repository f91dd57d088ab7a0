"""Small models with their data, for simulated runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

# Inputs and targets of one batch.
Batch = tuple[Tensor, Tensor]

CLASSES = 6
TOKENS = 48


class Sizes(NamedTuple):
    """The sizes of a model. width: channels or features. depth: layers. length: of a text, in tokens."""

    width: int
    depth: int
    length: int = 8


class Model(NamedTuple):
    """A kind of model. build: returns a module. draw: returns a batch of so many samples from a generator."""

    build: Callable[[Sizes], nn.Module]
    draw: Callable[[Sizes, int, torch.Generator], Batch]
    has_batchnorm: bool = False
    has_frozen: bool = False
    has_tokens: bool = False


class Mlp(nn.Module):
    """Linear layers with LayerNorm, as in a stranger's report (cases/newcomer_late.py)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(sizes.width, sizes.width)]
        for _ in range(sizes.depth):
            layers += [nn.LayerNorm(sizes.width), nn.GELU(), nn.Linear(sizes.width, sizes.width)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(sizes.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, classes] of features [N, width]."""
        logits: Tensor = self.head(F.gelu(self.body(x)))
        return logits


class ConvNet(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for _ in range(sizes.depth):
            blocks += [nn.Conv2d(channels, sizes.width, 3, padding=1, bias=False), nn.BatchNorm2d(sizes.width)]
            blocks.append(nn.ReLU())
            channels = sizes.width
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, classes] of images [N, 3, H, W]."""
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits


class Block(nn.Module):
    """Attention with one head and a feed-forward layer, each after a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states [N, T, width]."""
        q, k, v = self.qkv(self.attn_norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return hidden


class Gpt(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N x T, tokens] of tokens [N, T]."""
        hidden = self.embed(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits.flatten(0, 1)


class Bag(nn.Module):
    """A classifier over a bag of tokens. A batch contains few tokens, so most rows of the table have no gradient."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8 * TOKENS, sizes.width, mode="mean")
        layers: list[nn.Module] = []
        for _ in range(sizes.depth):
            layers += [nn.Linear(sizes.width, sizes.width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(sizes.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, classes] of tokens [N, T]."""
        logits: Tensor = self.head(self.body(self.table(x)))
        return logits


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of two small matrices."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_A = nn.Linear(width, rank, bias=False)
        self.lora_B = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [N, width]."""
        features: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return features


class Lora(nn.Module):
    """Frozen layers with trained adapters, and a trained head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoraLinear(sizes.width) for _ in range(sizes.depth))
        self.head = nn.Linear(sizes.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, classes] of features [N, width]."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def draw_features(sizes: Sizes, samples: int, generator: torch.Generator) -> Batch:
    """Draw normal features [N, width], and classes by a fixed linear rule."""
    x = torch.randn(samples, sizes.width, generator=generator)
    rule = torch.randn(sizes.width, CLASSES, generator=torch.Generator().manual_seed(1))
    return x, (x @ rule).argmax(1)


def draw_images(sizes: Sizes, samples: int, generator: torch.Generator) -> Batch:  # noqa: ARG001
    """Draw images [N, 3, 6, 6]: a fixed pattern for each class, and noise."""
    patterns = torch.randn(CLASSES, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    classes = torch.randint(CLASSES, (samples,), generator=generator)
    return patterns[classes] + torch.randn(samples, 3, 6, 6, generator=generator), classes


def draw_text(sizes: Sizes, samples: int, generator: torch.Generator) -> Batch:
    """Draw texts [N, T] in which most tokens follow from the token before, and the next tokens [N x T]."""
    following = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(TOKENS, (samples, sizes.length + 1), generator=generator)
    follows = torch.rand(samples, sizes.length, generator=generator) < 0.8
    for position in range(sizes.length):
        expected = following[tokens[:, position]]
        tokens[:, position + 1] = torch.where(follows[:, position], expected, tokens[:, position + 1])
    return tokens[:, :-1], tokens[:, 1:].flatten()


def draw_bags(sizes: Sizes, samples: int, generator: torch.Generator) -> Batch:
    """Draw bags of tokens [N, T], frequent tokens first as in natural text, and classes by the first token."""
    numbers = torch.rand(samples, sizes.length, generator=generator)
    tokens = (8 * TOKENS * numbers**3).long()
    return tokens, tokens[:, 0] % CLASSES


MODELS = {
    "mlp": Model(Mlp, draw_features),
    "conv": Model(ConvNet, draw_images, has_batchnorm=True),
    "gpt": Model(Gpt, draw_text, has_tokens=True),
    "bag": Model(Bag, draw_bags, has_tokens=True),
    "lora": Model(Lora, draw_features, has_frozen=True),
}
