"""Synthetic data: its size, its bytes and training on it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.evaluated import scores
from support.scenarios import SMALL, run

from train.data import DataOptions, load_data
from train.engine import train
from train.launch import RankContext
from train.recorders.base import Recorder
from train.run import main
from train.settings import Settings

SMALL_DATA = Settings(data="synthetic", image_size=8, channels=1, classes=3, train_samples=256, width=4)


def test_sizes() -> None:
    """The default sizes equal CIFAR-10's, options change each size, and large data sets need no memory."""
    data = load_data("synthetic", None, None)
    assert (len(data.train), len(data.test), data.channels, data.classes, data.image_size) == (50_000, 5_000, 3, 10, 32)
    x, y = data.train[[0, 49_999, 12]]
    assert (x.dtype, x.shape, y.tolist()) == (torch.float32, (3, 3, 32, 32), [0, 9, 2])
    data = load_data("synthetic", None, None, DataOptions(500, 4, 1000, 2_000_000))
    assert data.train[[1_999_999]][0].shape == (1, 4, 500, 500)
    assert not data.train.enlarged  # a pattern per class would need a gigabyte
    assert (len(data.train), len(data.test), data.classes) == (2_000_000, 200_000, 1000)


def test_bytes_are_reproducible() -> None:
    """The bytes are the same on any machine, for any RNG state of torch and NumPy."""
    torch.manual_seed(hash(Path.cwd()))
    data = load_data("synthetic", None, None, DataOptions(seed=7))
    pixels, labels = data.train.take(torch.tensor([0, 1, 49_999]))
    assert pixels.dtype == torch.uint8
    digest = hashlib.sha256(pixels.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert digest.startswith("3667e797ad81bbe0")


def test_images_differ_and_are_normalized() -> None:
    """All training and test images differ; their mean is 0 and their deviation 1."""
    data = load_data("synthetic", None, None)
    x, y = data.train[:2000]
    test, labels = data.test[:500]
    assert len({image.numpy().tobytes() for image in torch.cat([x, test])}) == 2500
    assert x.mean().item() == pytest.approx(0, abs=0.1)
    assert x.std().item() == pytest.approx(1, abs=0.1)
    assert torch.bincount(y).tolist() == [200] * 10
    assert torch.bincount(labels).tolist() == [50] * 10
    limited = load_data("synthetic", None, 30).train
    assert torch.equal(limited[:][0], x[:30])


def test_a_network_learns_the_classes() -> None:
    """After a few steps a small network classifies nearly all test images, whose noise is not in the training set."""
    result = train(replace(SMALL_DATA, epochs=4), RankContext(), Recorder())
    assert result.test.accuracy > 0.9
    assert result.test.samples == 25


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--image-size", 8], "--image-size 8"),
        (["--train-samples", 8], "--train-samples 8"),
        (["--data", "synthetic", "--classes", 0], "--classes 0"),
        (["--data", "synthetic", "--data-dir", "."], "--data-dir ."),
        (["--data", "synthetic", "--image-size", 5000], "--image-size 5000 --channels 3"),
        (["--data", "synthetic", "--train-samples", 2**24 + 1], "--train-samples 16777217"),
        (["--data", "synthetic", "--classes", 2**17], "--classes 131072"),
        (["--data", "synthetic", "--download"], "--download"),
        (["--data", "synthetic", "--channels", 2, "--augment", "strong"], "--augment strong"),
        (["--data", "nothing"], "argument --data"),
    ],
)
def test_refuses_unsupported_sizes(arguments: list[object], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes of other data sets and sizes above the limits cause one line with the option, and exit code 2."""
    assert main([*map(str, arguments), "--progress", "none"]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"run.py: error: {option}: ")


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_a_run_on_synthetic_data_can_be_evaluated(ctx: RankContext, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The metadata records the sizes of data and model, and train.evaluate recreates both."""
    (out,) = set(ctx.gather(str(tmp_path_factory.mktemp("out")) if ctx.is_main else "")) - {""}
    settings = replace(
        SMALL, **{name: getattr(SMALL_DATA, name) for name in ("data", "image_size", "channels", "classes")},
        train_samples=256, model="pyramidnet", depth=8, alpha=6, sync_bn=True, out=Path(out),
    )  # fmt: skip
    result = run(ctx, settings)
    evaluation = scores(Path(out))
    assert [rank.own.samples for rank in evaluation.ranks] == [25, 25]
    assert [rank.own.accuracy for rank in evaluation.ranks] == [result.test.accuracy] * 2
    assert evaluation.replicas.settings.alpha == 6
