"""The GPT: causality, rotary positions, experts, and the changes that parallel methods make to instances."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.states import count_elements
from torch import nn

from train.errors import UserError
from train.models import build_model
from train.models.gpt import Attention, Experts, Gpt

BYTES = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
GPTS = ("gpt-tiny", "gpt-tiny-moe")


def build(name: str = "gpt-tiny", **options: int) -> Gpt:
    """Build a model from seed 0."""
    torch.manual_seed(0)
    model = build_model(name, 0, 256, options.pop("width", None), **options)
    assert isinstance(model, Gpt)
    return model


@pytest.mark.parametrize("name", GPTS)
def test_predictions_are_causal(name: str) -> None:
    """A changed byte changes no earlier logits; the first loss is near log(256), and all parameters get gradients."""
    model = build(name, width=32, depth=2)
    changed = BYTES.clone()
    changed[:, 40] += 1
    logits, remaining = model(BYTES), model(changed % 256)
    assert logits.shape == (2, 64, 256)
    torch.testing.assert_close(logits[:, :40], remaining[:, :40], rtol=0, atol=1e-6)
    assert not torch.allclose(logits[:, 40:], remaining[:, 40:], rtol=0, atol=1e-4)
    loss = F.cross_entropy(logits.flatten(0, 1), BYTES.roll(-1, 1).flatten())
    assert 5.4 < loss < 5.7
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sizes_and_tied_embeddings() -> None:
    """gpt-tiny shares one tensor between embedding and head, gpt-tiny-moe does not."""
    tied, moe = build(), build("gpt-tiny-moe")
    assert tied.head is not None
    assert tied.embed is not None
    assert tied.head.weight is tied.embed.weight
    assert count_elements(tied.parameters()) == 213_568
    assert count_elements(moe.parameters()) == 673_344
    with pytest.raises(UserError, match=r"^--width 12: .* multiple of 8"):
        build(width=12)
    with pytest.raises(UserError, match=r"^--depth 3000: "):
        build(depth=3000)


@pytest.mark.parametrize(
    ("name", "channels", "message"), [("gpt-tiny", 1, "--data text"), ("resnet8", 0, "use gpt-tiny, gpt-tiny-moe")]
)
def test_models_for_other_data_are_refused(name: str, channels: int, message: str) -> None:
    """A text model is refused for images, and an image model for text."""
    with pytest.raises(UserError, match=f"^--model {name}: .*{message}"):
        build_model(name, channels, 256, None)


def test_attention_depends_on_distances() -> None:
    """A common offset of all positions changes nothing; a rotation keeps the norm and depends on the position."""
    attention, x = Attention(32), torch.randn(2, 8, 32)
    expected = attention(x)
    q = torch.ones(1, 1, 8, 8)
    turned = attention.rotate(q)
    assert torch.equal(turned[:, :, 0], q[:, :, 0])
    assert not torch.allclose(turned[:, :, 5], q[:, :, 5], atol=0.1)
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    attention.position_offset = 5
    torch.testing.assert_close(attention.rotate(q)[:, :, 0], turned[:, :, 5])
    torch.testing.assert_close(attention(x), expected)


def test_attention_with_a_shard_of_the_heads() -> None:
    """Two halves of the columns of q, k and v, and of the rows of o, add up to the whole attention."""
    complete, x, total = Attention(32), torch.randn(2, 8, 32), torch.zeros(2, 8, 32)
    for half in range(2):
        part = Attention(32)
        for name in ("q", "k", "v", "o"):
            weight = getattr(complete, name).weight.chunk(2, int(name == "o"))[half]
            getattr(part, name).weight = nn.Parameter(weight.detach().clone())
        total += part(x)
    torch.testing.assert_close(total, complete(x))


def test_experts_add_the_weighted_outputs_of_two() -> None:
    """The dispatch equals a loop over tokens; experts without tokens get gradients of zero."""
    torch.manual_seed(0)
    moe = Experts(16)
    with torch.no_grad():
        moe.router.weight[3] = 0  # its score is 0; the tokens below have two higher scores
        moe.router.weight[:3] = moe.router.weight[:3].abs()
    x = torch.randn(3, 5, 16).abs()
    y = moe(x)
    for token, result in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        scores, ids = moe.router(token).topk(2)
        outputs = torch.stack([moe.experts[int(number)](token) for number in ids])
        torch.testing.assert_close(result, (scores.softmax(0)[:, None] * outputs).sum(0))
    y.sum().backward()
    *used, unused = (expert.gate.weight.grad for expert in moe.experts)
    assert unused is not None
    assert not unused.any()
    assert any(gradient.any() for gradient in used)


def test_two_stages_compute_the_model() -> None:
    """A stage without norm and head, and a stage without embedding, together return the logits of the whole model."""
    complete, first, last = build(), build(), build()
    first.norm = first.head = last.embed = None
    del first.layers[2:], last.layers[:2]
    assert torch.equal(last(first(BYTES)), complete(BYTES))
