"""Random models of some kB: their tensors by role, and the names that two libraries give to these roles.

A role is a part of the architecture and a layer, such as ("q.weight", 1). Mutations change roles, and a naming turns
roles into names, so the oracle never derives anything from a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from random import Random

# A part of the architecture, and its layer; None for a tensor outside of the layers.
Role = tuple[str, int | None]
Tensors = dict[Role, torch.Tensor]

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The values of parts that are constant in a freshly initialized model.
INITIAL_VALUES = {"norm.weight": 1.0, "norm1.weight": 1.0, "norm2.weight": 1.0, "o.bias": 0.0, "down.bias": 0.0}
# Parts that libraries store in one tensor, by the first part.
FUSED = {"q.weight": ("q.weight", "k.weight", "v.weight"), "gate.weight": ("gate.weight", "up.weight")}
# Parts that do not belong to the parameters.
BUFFERS = ("stats.running_mean", "stats.num_batches_tracked")
LAYERS = ("layers", "h", "blocks", "encoder.layer", "trunk.units")
SYLLABLES = ("ka", "ro", "mi", "te", "su", "lo", "ven", "dar", "pix", "zu")
# Text that str.format, regular expressions, TOML, shells and terminals read as instructions.
HOSTILE = (
    "{", "}", "{0}", "{}", "{i}", "{p}", "{0.__class__}", "{i:9999999999}", "{i!r}", "[a-z]*", "(", ")+", "\\d+", "^",
    "$", "|", "%s", "%(x)s", "é", " ", "'", '"', "#", "*", "?", "\x7f", "\x1b[2J", "::error::",
)  # fmt: skip
# The names of Hugging Face for Llama, which syncheck has a map for.
LLAMA = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "q.weight": "model.layers.<i>.self_attn.q_proj.weight",
    "k.weight": "model.layers.<i>.self_attn.k_proj.weight",
    "v.weight": "model.layers.<i>.self_attn.v_proj.weight",
    "o.weight": "model.layers.<i>.self_attn.o_proj.weight",
    "o.bias": "model.layers.<i>.self_attn.o_proj.bias",
    "gate.weight": "model.layers.<i>.mlp.gate_proj.weight",
    "up.weight": "model.layers.<i>.mlp.up_proj.weight",
    "down.weight": "model.layers.<i>.mlp.down_proj.weight",
    "down.bias": "model.layers.<i>.mlp.down_proj.bias",
    "norm1.weight": "model.layers.<i>.input_layernorm.weight",
    "norm2.weight": "model.layers.<i>.post_attention_layernorm.weight",
    "stats.running_mean": "model.stats.running_mean",
    "stats.num_batches_tracked": "model.stats.num_batches_tracked",
}


@dataclass
class Model:
    """A model.

    tensors: the data by role.
    layers: the number of layers.
    heads: the number of attention heads, for config.json.
    is_tied: whether the embedding and the head are one tensor.
    is_fresh: whether norms are 1 and biases 0, so that several tensors have equal data.
    """

    tensors: Tensors
    layers: int
    heads: int
    is_tied: bool
    is_fresh: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the architecture, in order."""
        # The keys are pairs of part and layer, so a dict of them has each part once.
        return tuple(dict(self.tensors.keys()))

    @property
    def layered_parts(self) -> frozenset[str]:
        """The parts that each layer has."""
        return frozenset(part for part, layer in self.tensors if layer is not None)

    def copy(self) -> Model:
        """Return an independent copy; tied tensors stay tied."""
        copies: dict[int, torch.Tensor] = {}
        tensors: Tensors = {}
        for role, tensor in self.tensors.items():
            # By identity, because two roles of a tied tensor are one object.
            copies.setdefault(id(tensor), tensor.clone())
            tensors[role] = copies[id(tensor)]
        return Model(tensors, self.layers, self.heads, self.is_tied, self.is_fresh)


@dataclass
class Naming:
    """The names of one library.

    templates: the name of each part; `<i>` stands for the layer.
    fused: the parts that the library stores in one tensor, by the part that names it.
    prefix: text in front of every name.
    """

    templates: dict[str, str]
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prefix: str = ""

    def name(self, role: Role) -> str:
        """Return the name of a role, or of the fused tensor that contains it."""
        part, layer = role
        template = self.prefix + self.templates[part]
        # No str.format, because names contain braces.
        return template.replace("<i>", str(layer))

    def is_follower(self, part: str) -> bool:
        """Whether a part is stored in the tensor of another part."""
        return any(part in parts[1:] for parts in self.fused.values())

    def name_tensors(self, model: Model) -> dict[str, torch.Tensor]:
        """Return the tensors of a model by name, with fused tensors."""
        by_name = {}
        for role, tensor in model.tensors.items():
            part, layer = role
            name = self.name(role)
            # The first part of a fused tensor stands for all of its parts.
            if part in self.fused:
                members = [model.tensors[member, layer] for member in self.fused[part]]
                by_name[name] = torch.cat(members)
            elif not self.is_follower(part):
                by_name[name] = tensor
        return by_name


def make_model(random: Random) -> Model:
    """Return a random model. It uses torch's global generator, which is seeded here."""
    torch.manual_seed(random.randrange(1 << 31))
    width, heads = random.choice((8, 12, 16)), random.choice((2, 4))
    inner, rows = random.choice((20, 24, 32)), random.choice((24, 33, 40))
    key_rows = random.choice((width, width // 2))
    shapes = {
        "norm1.weight": (width,), "q.weight": (width, width), "k.weight": (key_rows, width),
        "v.weight": (key_rows, width), "o.weight": (width, width), "norm2.weight": (width,),
        "gate.weight": (inner, width), "up.weight": (inner, width), "down.weight": (width, inner),
    }  # fmt: skip
    if random.random() < 0.4:
        shapes |= {"o.bias": (width,), "down.bias": (width,)}
    layers, is_fresh = random.choice((2, 3, 4)), random.random() < 0.25
    is_tied = random.random() < 0.2
    model = Model({}, layers, heads, is_tied, is_fresh)
    tensors = model.tensors
    tensors["embed.weight", None] = torch.randn(rows, width)
    for layer in range(layers):
        for part, shape in shapes.items():
            tensors[part, layer] = _fill(part, shape, is_fresh=is_fresh)
    tensors["norm.weight", None] = _fill("norm.weight", (width,), is_fresh=is_fresh)
    tensors["head.weight", None] = torch.randn(rows, width)
    if is_tied:
        tensors["head.weight", None] = tensors["embed.weight", None]
    cast_model(model, random.choice(DTYPES))
    if random.random() < 0.2:
        # After the cast, because trainers keep statistics in float32.
        tensors["stats.running_mean", None] = torch.randn(width)
        tensors["stats.num_batches_tracked", None] = torch.tensor(random.randrange(1, 1000))
    return model


def _fill(part: str, shape: tuple[int, ...], *, is_fresh: bool) -> torch.Tensor:
    """Return the data of a part: random, or constant for the norms and biases of a fresh model."""
    if is_fresh and part in INITIAL_VALUES:
        return torch.full(shape, INITIAL_VALUES[part])
    return torch.randn(shape)


def cast_model(model: Model, dtype: torch.dtype) -> None:
    """Convert all floating-point tensors; tied tensors stay tied."""
    converted: dict[int, torch.Tensor] = {}
    for role, tensor in list(model.tensors.items()):
        if tensor.is_floating_point():
            # By identity, because two roles of a tied tensor are one object.
            converted.setdefault(id(tensor), tensor.to(dtype))
            model.tensors[role] = converted[id(tensor)]


def make_naming(random: Random, model: Model, style: str) -> Naming:
    """Return random names for the parts of a model. style: plain, hostile or llama."""
    if style == "llama":
        # Fused parts would have the name of the query projection.
        return Naming(LLAMA)
    naming = Naming({})
    container = random.choice(LAYERS)
    words: dict[str, str] = {}
    for part in model.parts:
        module, _, leaf = part.partition(".")
        # The weight and the bias of a module have one word.
        if module not in words:
            words[module] = _make_word(random, set(words.values()), style)
        naming.templates[part] = f"{words[module]}.{leaf}"
    # Every library has one container for its layers.
    for part in model.layered_parts:
        naming.templates[part] = f"{container}.<i>.{naming.templates[part]}"
    fused_parts = random.sample(sorted(FUSED), random.choice((0, 0, 1, 2)))
    for part in fused_parts:
        naming.fused[part] = FUSED[part]
    return naming


def _make_word(random: Random, used: set[str], style: str) -> str:
    """Return a word that is not used yet."""
    texts = HOSTILE if style == "hostile" else ("",)
    while True:
        word = "".join(random.choices(SYLLABLES, k=3))
        # At any position, because a name may start or end with the text.
        start = random.randrange(len(word) + 1)
        word = word[:start] + random.choice(texts) + word[start:]
        # Words are few, so a word may repeat.
        if word not in used:
            return word
