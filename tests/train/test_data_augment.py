"""Augmentation: the changes of each kind, and their dependence on seed, epoch and index."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from support.imports import import_or_skip
from support.scenarios import SMALL, trained
from support.states import list_differing
from torch.utils.data import DataLoader

from train.data import DataOptions, DistributedBatchSampler, load_data
from train.data.augment import (
    TIMM_STREAM,
    BasicAugment,
    StrongAugment,
    build_augment,
    keep_generators,
    seed_generators,
)
from train.data.dataset import Images, Normalize
from train.data.mixup import Mixup
from train.errors import UserError
from train.launch import RankContext
from train.seeds import mixed, mixed_each, scrambled
from train.settings import Settings

KINDS = ("basic", "strong", "timm")
PLAIN = Normalize((0.0,), (1 / 255,))  # keeps all values


def make_images(samples: int = 24) -> Images:
    """Return random color images."""
    pixels = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (samples, 3, 32, 32)).astype(np.uint8))
    return Images(pixels, torch.arange(samples), PLAIN)


def augmented(kind: str, seed: int = 5, samples: int = 24) -> Images:
    """Return the same images, with augmentation."""
    if kind != "basic":
        import_or_skip("timm" if kind == "timm" else "torchvision")
    images = make_images(samples)
    # With both kinds of random numbers, an image still depends on nothing else.
    images.mixup = Mixup(seed, samples, alpha=0.2, smoothing=0.1) if kind == "timm" else None
    images.augment = build_augment(DataOptions(augment=kind, seed=seed), 3, flip=True)
    return images


def load_epoch(images: Images, ranks: int, workers: int, *, skip: int = 0, epoch: int = 3) -> dict[int, bytes]:
    """Return the bytes of the images and labels of one epoch by index, loaded on this number of ranks."""
    contents: dict[int, bytes] = {}
    for rank in range(ranks):
        sampler = DistributedBatchSampler(len(images), 8, rank, ranks, shuffle=True, seed=0)
        sampler.set_epoch(epoch, skip)
        images.set_epoch(epoch)
        loaded = DataLoader(images, sampler=sampler, batch_size=None, num_workers=workers)
        for indices, (x, y) in zip(sampler, loaded, strict=True):
            rows = zip(indices, x, y, strict=True)
            contents |= {index: image.numpy().tobytes() + label.numpy().tobytes() for index, image, label in rows}
    return contents


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_depends_on_seed_epoch_and_index_only(kind: str) -> None:
    """Images are bitwise equal for any number of ranks and workers, after a resume, and in a spawned worker."""
    images = augmented(kind)
    complete = load_epoch(images, 1, 0)
    assert len(complete) == 24
    assert load_epoch(images, 3, 0) == complete
    assert load_epoch(images, 1, 2) == complete
    remainder = load_epoch(images, 2, 0, skip=1)
    assert len(remainder) == 16
    assert remainder.items() <= complete.items()
    copied = pickle.loads(pickle.dumps(images))  # as for a worker that is not forked; the copy keeps the epoch
    assert torch.equal(copied[:][0], images[:][0])


@pytest.mark.parametrize("kind", KINDS)
def test_each_seed_epoch_and_index_changes_images(kind: str) -> None:
    """Another epoch, seed or index augments an image differently, without a change of global RNG states."""
    images = augmented(kind)
    torch.manual_seed(1)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = images[:][0]
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpys
    images.set_epoch(1)
    assert (first != images[:][0]).flatten(1).any(1).float().mean() > 0.9
    images.set_epoch(0)
    assert torch.equal(images[:][0], first)
    assert not torch.equal(augmented(kind, seed=6)[:][0], first)
    images.images = images.images[:1].expand(24, -1, -1, -1)
    assert len({image.numpy().tobytes() for image in images[:][0]}) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_indexing(kind: str) -> None:
    """An image is the same alone, from the end, in a slice, in a batch and in a prefix."""
    images = augmented(kind)
    batch, labels = images[[3, 5, 4]]
    assert torch.equal(labels, images[:][1][[3, 5, 4]])
    for is_same in (images[5][0], images[5 - 24][0], (images.first(6)[5][0] if kind != "timm" else images[5][0])):
        assert torch.equal(is_same, batch[1])
    assert torch.equal(images[4:5][0][0], batch[2])
    with pytest.raises(IndexError):
        _ = images[24]


@pytest.mark.parametrize("flip", [False, True])
def test_basic_is_a_window_of_the_padded_image(flip: bool) -> None:
    """Each image is one of the 81 windows of its copy with 4 black pixels around, and may be mirrored."""
    images = make_images(150)
    moved = BasicAugment(0, flip=flip).shift_and_flip(images.images, torch.arange(150), 0)
    padded = torch.nn.functional.pad(images.images, (4, 4, 4, 4))
    offsets, mirrored = set(), 0
    for before, after in zip(padded, moved, strict=True):
        matches = [
            (top, remaining, mirror)
            for top in range(9)
            for remaining in range(9)
            for mirror in (False, True)
            if torch.equal(after.flip(2) if mirror else after, before[:, top : top + 32, remaining : remaining + 32])
        ]
        ((top, remaining, mirror),) = matches
        offsets.add((top, remaining))
        mirrored += mirror
    assert len(offsets) > 60  # of 81
    assert 50 < mirrored < 100 if flip else mirrored == 0


def test_small_images_are_shifted_less() -> None:
    """Digits of 8x8 move by at most one pixel, because the padding is an eighth of the image."""
    pixels = torch.zeros(50, 1, 8, 8, dtype=torch.uint8)
    pixels[:, :, 4, 4] = 9
    moved = BasicAugment(0, flip=False).shift_and_flip(pixels, torch.arange(50), 0)
    positions = {tuple(index[2:]) for index in moved.nonzero().tolist()}
    assert positions == set(product((3, 4, 5), repeat=2))


def test_the_test_set_is_never_augmented() -> None:
    """Only training images are augmented, and their labels are not."""
    for name in ("digits", "synthetic"):
        plain = load_data(name, None, None)
        changed = load_data(name, None, None, DataOptions(augment="basic"))
        assert torch.equal(plain.test[:50][0], changed.test[:50][0])
        assert not torch.equal(plain.train[:50][0], changed.train[:50][0])
        assert torch.equal(plain.train[:50][1], changed.train[:50][1])


def test_augmented_digits() -> None:
    """The bytes of augmented digits are within half a step of 1/255 of the original floats."""
    plain = load_data("digits", None, None).train
    train = load_data("digits", None, None, DataOptions(augment="basic")).train
    assert train.normalize is not None
    assert (train.normalize(train.images) - plain[:][0]).abs().max() <= 0.5 / 255 / 0.3759 + 1e-6
    with pytest.raises(UserError, match=r"^--augment weak: .*none, basic, strong, timm$"):
        load_data("digits", None, None, DataOptions(augment="weak"))


@pytest.mark.parametrize("channels", [1, 3])
def test_strong_erases_a_quarter_of_the_images(channels: int) -> None:
    """In about a quarter of the images a rectangle of 2 % to a third is normal noise; other values are bytes."""
    import_or_skip("torchvision")
    augment = build_augment(DataOptions(augment="strong"), channels, flip=False)
    assert augment is not None
    pixels = torch.full((400, channels, 32, 32), 100, dtype=torch.uint8)
    out = augment(pixels, torch.arange(400), 0, PLAIN)
    noise = (out != out.round()).any(1)  # noise has a fraction
    erased = noise.flatten(1).float().mean(1)
    assert 70 <= (erased > 0).sum() <= 130
    selected = erased[erased > 0]
    assert selected.min() > 0.01
    assert selected.max() < 0.36
    values = out[noise[:, None].expand_as(out)]
    assert values.mean().abs() < 0.1
    assert abs(values.std() - 1) < 0.1


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_fills_with_the_mean_color(channels: int) -> None:
    """RandAugment changes most images; pixels outside of a moved image get the mean color of the data set."""
    import_or_skip("torchvision")
    augment = build_augment(DataOptions(augment="strong"), channels, flip=False)
    assert isinstance(augment, StrongAugment)
    augment.change = augment.erase = torch.nn.Identity()
    means = (0.2, 0.4, 0.6)[:channels]
    pixels = torch.full((300, channels, 32, 32), 200, dtype=torch.uint8)
    out = augment(pixels, torch.arange(300), 0, Normalize(means, (1.0,) * channels))
    fill = torch.tensor([round(255 * mean) / 255 - mean for mean in means]).view(-1, 1, 1)
    filled = ((out - fill).abs() < 1e-6).all(1).flatten(1).any(1)
    assert 0.2 < filled.float().mean() < 0.7  # five of fourteen operations move an image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_timm_equals_create_transform(channels: int, flip: bool) -> None:
    """An image is bitwise that of timm's create_transform from the same random numbers; grayscale has equal colors."""
    import_or_skip("timm")
    from timm.data import create_transform

    augment = build_augment(DataOptions(augment="timm", seed=5), channels, flip=flip)
    assert augment is not None
    pixels = make_images(40).images[:, :channels].contiguous()
    normalize = Normalize((0.3, 0.4, 0.5)[:channels], (0.2, 0.3, 0.4)[:channels])
    out = augment(pixels, torch.arange(40), 2, normalize)
    mean, std = (numbers * (3 // channels) for numbers in (normalize.mean, normalize.std))
    transform = create_transform(
        (32, 32), is_training=True, auto_augment="rand-m9-mstd0.5-mmax9-inc1", interpolation="bicubic", re_prob=0.25,
        re_mode="pixel", hflip=0.5 if flip else 0.0, mean=mean, std=std,
    )  # fmt: skip
    keys = mixed_each(mixed(5, 2, TIMM_STREAM), np.arange(40)).tolist()
    for image, key, result in zip(pixels, keys, out, strict=True):
        picture = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
        with keep_generators():
            seed_generators(key)
            expected = transform(picture)
        assert torch.equal(result, expected[:channels])


def test_timm_crops_up_to_a_twelfth() -> None:
    """A crop has 8 % to 100 % of the area; half of the images are mirrored, unless mirroring changes the class."""
    import_or_skip("timm")
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(300, 1, 32, 32).contiguous()  # grows to the right
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.data.augment.TIMM_RECIPE", {"is_training": True, "interpolation": "bicubic"})
        for flip in (False, True):
            augment = build_augment(DataOptions(augment="timm"), 1, flip=flip)
            assert augment is not None
            out = 255 * augment(ramp, torch.arange(300), 0, Normalize((0.0,), (1.0,)))
            assert out.shape == ramp.shape
            widths = (out[:, 0, 16, -1] - out[:, 0, 16, 0]) / 8 + 1  # in columns; negative if mirrored
            assert widths.abs().max() > 0.9 * 32
            assert (widths < 0).sum() > 100 if flip else (widths < 0).sum() < 20


def test_timm_does_not_mix() -> None:
    """--augment timm keeps images and labels apart; --mixup and --label-smoothing work with any augmentation."""
    import_or_skip("timm")
    alone = load_data("digits", None, None, DataOptions(augment="timm")).train
    assert alone[:8][1].dtype == torch.int64
    smooth = load_data("digits", None, None, DataOptions(label_smoothing=0.2)).train
    labels = smooth[:8][1]
    assert labels.shape == (8, 10)
    assert torch.equal(labels.argmax(1), alone[:8][1])
    assert labels.max(1).values.tolist() == pytest.approx([0.82] * 8)
    assert torch.equal(smooth[:8][0], load_data("digits", None, None).train[:8][0])
    mixed_images = load_data("digits", None, None, DataOptions(mixup=0.4)).train
    assert not torch.equal(mixed_images[:8][0], smooth[:8][0])
    assert mixed_images[:200][1].max(1).values.min() < 0.9


def test_timm_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without timm, the error names the command that installs it."""
    monkeypatch.setitem(sys.modules, "timm.data.transforms_factory", None)
    with pytest.raises(UserError, match=r"^--augment timm: timm is not installed; run pip install timm$"):
        load_data("digits", None, None, DataOptions(augment="timm"))


def test_mixup_is_the_weighted_mean_of_two_samples() -> None:
    """An image and its label are mixed with a partner from the whole set, by a weight of Beta(0.2, 0.2) each."""
    images = make_images(400)
    images.mixup = Mixup(3, 400, alpha=0.2, smoothing=0.1)
    partners, weights = images.mixup.draw(torch.arange(400), 7, 400)
    assert len(partners.unique()) > 200
    # Beta(0.2, 0.2) has the mean 1/2 and the variance 1/4 / 1.4, near the ends.
    assert abs(weights.mean() - 0.5) < 0.06
    assert abs(weights.var() - 0.25 / 1.4) < 0.03
    plain = make_images(400)[:][0]
    images.set_epoch(7)
    x, y = images[100:104]
    assert y.sum(1).tolist() == pytest.approx([1.0] * 4, rel=1e-5)
    for row in range(4):
        index, partner, weight = 100 + row, int(partners[100 + row]), weights[100 + row]
        assert torch.allclose(x[row], weight * plain[index] + (1 - weight) * plain[partner], atol=1e-3)
        expected = torch.full((400,), 0.1 / 400)
        expected[index] += 0.9 * weight
        expected[partner] += 0.9 * (1 - weight)
        assert torch.allclose(y[row], expected, atol=1e-6)
    assert int(images.first(9)[:][1].argmax(1).max()) < 9  # --limit-train: partners are training samples too
    assert not torch.equal(images.mixup.draw(torch.arange(400), 8, 400)[1], weights)


def test_augmented_runs_are_reproducible() -> None:
    """Two runs with one seed end bitwise equal, and differ from a run without augmentation."""
    settings = replace(SMALL, method="single", augment="basic", save_per_rank=False, max_steps=10)
    first = trained(RankContext(), settings).method.module.state_dict()
    again = trained(RankContext(), settings).method.module.state_dict()
    plain = trained(RankContext(), replace(settings, augment="none")).method.module.state_dict()
    assert not list_differing(first, again)
    assert not torch.equal(first["fc.weight"], plain["fc.weight"])


def test_the_engine_sets_the_epoch() -> None:
    """The epoch of the training set is the last trained epoch, counted from 0."""
    job = trained(RankContext(), Settings(augment="basic", limit_train=64, epochs=3, width=4))
    assert job.loaders.dataset.epoch == 2


def test_seeds_are_scattered() -> None:
    """SplitMix64 has its published outputs; seeds of several numbers depend on their order and differ."""
    # The state increases by a constant.
    states = np.array([(1234567 + 0x9E3779B97F4A7C15 * n) % 2**64 for n in range(3)], np.uint64)
    # The first outputs for the seed 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64.
    assert scrambled(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seeds = {mixed(seed, rank) for seed, rank in product(range(30), range(30))}
    assert len(seeds) == 900
    assert mixed(1, 2) != mixed(2, 1)
    assert len(set(mixed_each(mixed(0, 0), np.arange(1000)).tolist())) == 1000
