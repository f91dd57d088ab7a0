"""The networks: numbers of parameters, images and options."""

from __future__ import annotations

import pytest
import torch
from support.imports import import_or_skip
from support.scenarios import SMALLEST
from support.states import count_elements
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.errors import UserError
from train.methods.fsdp import find_blocks
from train.models import MODELS, build_model
from train.models.transformer import choose_patch_size
from train.options import list_models


def count_parameters(name: str, channels: int = 3, classes: int = 10, **options: int) -> int:
    """Return the number of parameters of a model, without allocating it."""
    with torch.device("meta"):
        model = build_model(name, channels, classes, options.pop("width", None), **options)
    return count_elements(model.parameters())


SHALLOW = ("convnet", "mnist_convnet")  # no stages
# torchvision's larger networks are slow: one size each.
FEWER = {"tv_resnet34": (32,), "tv_resnet50": (8,)}
IMAGE_MODELS = [name for name in MODELS if not MODELS[name].text]
SIZES = [(name, size) for name in IMAGE_MODELS for size in FEWER.get(name, (8, 28, 32))]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_small_images(name: str, size: int) -> None:
    """Every model accepts 8x8 and 28x28 gray and 32x32 color images, and all its parameters get gradients."""
    width = 8 if "width" in MODELS[name].options else None
    if width is None:
        import_or_skip("torchvision")
    channels = 3 if size == 32 else 1
    model = build_model(name, channels, 10, width, image_size=size, **SMALLEST.get(name, {}))
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_of_resnets() -> None:
    """resnet20 has 0.27 million parameters, as in table 6 of the paper, and resnet18 has 11.17 million."""
    assert round(count_parameters("resnet20") / 1e6, 2) == 0.27
    assert count_parameters("resnet18") == 11_173_962
    convolutions = [m for m in build_model("resnet8", 1, 10, None).modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth", "alpha", "expected"),
    [
        ("pyramidnet", 110, 48, 1.7),
        ("pyramidnet", 110, 84, 3.8),
        ("pyramidnet_bottleneck", 200, 240, 26.6),
        ("pyramidnet_bottleneck", 236, 220, 26.8),
        ("pyramidnet_bottleneck", 272, 200, 26.0),
        # Exact numbers of https://github.com/osmr/imgclsmob, within 1 % of 28.3 and 27.0 million in the paper.
        ("pyramidnet", 110, 270, 28_485_477),
        ("pyramidnet_bottleneck", 164, 270, 27_216_021),
    ],
)
def test_parameters_of_pyramidnets(name: str, depth: int, alpha: int, expected: float) -> None:
    """All seven networks have the paper's number of parameters in millions, truncated, or the exact number."""
    count = count_parameters(name, depth=depth, alpha=alpha)
    assert (count if isinstance(expected, int) else int(count / 1e5) / 10) == expected


def test_a_pyramid_grows_in_every_block() -> None:
    """Channels increase evenly by alpha over all blocks; a shortcut is the input, padded with zero channels."""
    model = build_model("pyramidnet", 3, 10, None, depth=20, alpha=36)
    convolutions = [m.out_channels for n, m in model.named_modules() if n.endswith("conv2")]
    assert convolutions == [20, 24, 28, 32, 36, 40, 44, 48, 52]
    block = model.get_submodule("layer1.1").eval()
    nn.init.zeros_(block.bn3.weight)
    x = torch.randn(2, 20, 4, 4)
    assert torch.equal(block(x), torch.cat([x, torch.zeros(2, 4, 4, 4)], 1))
    half = model.get_submodule("layer2.0").eval()
    nn.init.zeros_(half.bn3.weight)
    y = half(torch.ones(2, 28, 5, 5))  # an odd edge is rounded up, as in the convolution
    assert y.shape == (2, 32, 3, 3)
    assert torch.equal(y[:, :28], torch.ones(2, 28, 3, 3))


@pytest.mark.parametrize(("name", "tensors"), [("resnet18", 122), ("resnet34", 218), ("resnet50", 320)])
def test_resnets_are_named_like_torchvisions(name: str, tensors: int) -> None:
    """Tensors have the names, the order and, except for the stem, the shapes of torchvision's networks."""
    import_or_skip("torchvision")
    with torch.device("meta"):
        ours = build_model(name, 3, 10, None).state_dict()
        theirs = build_model(f"tv_{name}", 3, 10, None).state_dict()
    assert list(ours) == list(theirs)
    assert len(ours) == tensors
    assert [n for n in ours if ours[n].shape != theirs[n].shape] == ["conv1.weight"]


@pytest.mark.slow
def test_resnet50_computes_torchvisions_features() -> None:
    """With equal weights, the stages after the stem compute bitwise equal features."""
    import_or_skip("torchvision")
    ours = build_model("resnet50", 3, 10, None).eval()
    theirs = build_model("tv_resnet50", 3, 10, None).eval()
    ours.load_state_dict(theirs.state_dict() | {"conv1.weight": ours.state_dict()["conv1.weight"]})
    x = torch.randn(2, 64, 8, 8)
    with torch.no_grad():
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            ours_x, x = ours.get_submodule(stage)(x), theirs.get_submodule(stage)(x)
            assert torch.equal(ours_x, x)


def test_mnist_convnet() -> None:
    """mnist_convnet has the shapes of PyTorch's example for 28x28 images, and refuses images below 6x6."""
    assert count_parameters("mnist_convnet", 1, image_size=28) == 1_199_882
    with torch.device("meta"):
        shapes = [list(p.shape) for p in build_model("mnist_convnet", 1, 10, None, image_size=28).parameters()]
    assert shapes == [[32, 1, 3, 3], [32], [64, 32, 3, 3], [64], [128, 9216], [128], [10, 128], [10]]
    with pytest.raises(UserError, match=r"^--model mnist_convnet: .* 5x5 .* 6x6"):
        build_model("mnist_convnet", 1, 10, None, image_size=5)


@pytest.mark.parametrize(("size", "patch"), [(8, 2), (28, 4), (32, 4), (29, 29), (1, 1), (224, 28)])
def test_patch_size(size: int, patch: int) -> None:
    """A transformer has the smallest patches whose number is allowed; a prime edge leads to one patch."""
    assert choose_patch_size(size) == patch


def test_a_transformer_depends_on_the_position_of_patches() -> None:
    """Patches in another order lead to other logits; samples of a batch do not affect each other."""
    model = build_model("transformer", 1, 10, 8, image_size=8, depth=2).eval()
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        logits = model(x)
        assert not torch.allclose(logits, model(x.roll(2, 3)), atol=1e-3)
        assert torch.allclose(logits[:1], model(x[:1]), atol=1e-6)
    assert len(model.get_submodule("layers")) == 2


def test_width() -> None:
    """A smaller width has fewer parameters; torchvision's networks refuse it; the convnet has no BatchNorm."""
    for name in ("resnet8", "resnet18", "convnet", "resnet50", "transformer", "mnist_convnet"):
        assert count_parameters(name, width=4) < count_parameters(name, width=8)
    with pytest.raises(UserError, match=r"^--width 4: .*tv_resnet50"):
        build_model("tv_resnet50", 3, 10, 4)
    assert not any(isinstance(m, _BatchNorm) for m in build_model("convnet", 1, 10, None).modules())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet8",
            {"depth": 20},
            "^--depth 20: .*resnet8; .* pyramidnet, pyramidnet_bottleneck, transformer, gpt-tiny, .*-moe$",
        ),
        ("transformer", {"alpha": 48}, "^--alpha 48: .*transformer"),
        ("pyramidnet", {"depth": 109}, r"^--depth 109: .*--model pyramidnet, .* 8, 14, 20, ... \(6n\+2\)"),
        ("pyramidnet_bottleneck", {"depth": 2}, "^--depth 2: .* 11, 20, 29"),
        ("pyramidnet", {"depth": 2**20 * 6 + 2}, "^--depth 6291458: .* 2000"),
        ("pyramidnet", {"alpha": 2**20}, "^--alpha 1048576: .* 10000"),
        ("transformer", {"depth": 2**20}, "^--depth 1048576: .* 2000"),
        ("transformer", {"width": 10}, "^--width 10: .* 4 heads"),
    ],
)
def test_unsupported_options_are_refused(name: str, options: dict[str, int], message: str) -> None:
    """An option that the model lacks, or an unsupported number, is an error before allocation."""
    with pytest.raises(UserError, match=message):
        build_model(name, 3, 10, options.pop("width", None), **options)


def test_an_unknown_model_is_refused() -> None:
    """The error lists the known models."""
    with pytest.raises(UserError, match=r"^--model vgg: .*resnet8, resnet20, "):
        build_model("vgg", 1, 10, None)


@pytest.mark.slow
def test_the_list_has_every_model() -> None:
    """--list-models has a line per model: its parameters, normalization and source."""
    import_or_skip("torchvision")
    head, *lines = list_models().splitlines()
    assert head.split() == ["name", "parameters", "norm", "source"]
    table = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(table) == list(MODELS)
    assert table["resnet18"][:3] == ["11,173,962", "BatchNorm", "https://arxiv.org/abs/1512.03385,"]
    assert [table[name][1] for name in ("convnet", "transformer", "gpt-tiny")] == ["none", "LayerNorm", "RMSNorm"]


@pytest.mark.parametrize("name", MODELS)
def test_fsdp_finds_the_blocks(name: str) -> None:
    """--method fsdp shards stages one by one; they have most parameters of a deep model."""
    if name.startswith("tv_"):
        import_or_skip("torchvision")
    with torch.device("meta"):
        model = build_model(name, 0 if MODELS[name].text else 3, 10, None)
    blocks = list(find_blocks(model))
    if name in SHALLOW:
        assert blocks == []
        return
    inner = sum(count_elements(block.parameters()) for block in blocks)
    assert len(blocks) >= 3, "stages are nn.Sequential; list a network without stages in SHALLOW"
    assert inner > 0.8 * count_elements(model.parameters())
