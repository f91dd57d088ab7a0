"""The embedded digits, and the shares of a global batch on each rank."""

from __future__ import annotations

import hashlib
import shutil
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support.listings import list_fields, measure_width
from torch.utils.data import DistributedSampler

from train.data import DistributedBatchSampler, load_data, smallest_share
from train.data.digits import FILE, FOLDER
from train.errors import UserError
from train.parts import load
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank
    from train.launch import RankContext


def shares(samples: int, batch: int, world_size: int, epoch: int = 0, *, shuffle: bool = True) -> list[list[list[int]]]:
    """Return the batches of every rank."""
    result = []
    for rank in range(world_size):
        sampler = DistributedBatchSampler(samples, batch, rank, world_size, shuffle=shuffle, seed=3)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
        assert len(result[-1]) == len(sampler)
    return result


def test_digits_match_their_source() -> None:
    """The file has the checksum of SOURCE.md, and training and test set together have its labels."""
    digest = hashlib.sha256((FOLDER / FILE).read_bytes()).hexdigest()
    assert digest in (FOLDER / "SOURCE.md").read_text()
    data = load_data("digits", None, None)
    assert (len(data.train), len(data.test), data.channels, data.classes) == (1437, 360, 1, 10)
    x, y = data.train[:]
    assert (x.dtype, x.shape, y.dtype) == (torch.float32, (1437, 1, 8, 8), torch.int64)
    assert x.mean().item() == pytest.approx(0, abs=1e-3)
    assert x.std().item() == pytest.approx(1, abs=1e-3)
    assert torch.bincount(y).min() > 100
    assert torch.bincount(data.test[:][1]).min() > 20
    with np.load(FOLDER / FILE) as archive:
        labels = torch.cat([y, data.test[:][1]]).numpy()
        assert np.array_equal(np.bincount(labels), np.bincount(archive["labels"]))


def test_limit_keeps_the_first_samples() -> None:
    """--limit-train takes from the training samples only, and cannot exceed their number."""
    complete, limited = load_data("digits", None, None), load_data("digits", None, 50)
    assert (len(limited.train), len(limited.test)) == (50, 360)
    assert torch.equal(limited.train[7][0], complete.train[7][0])
    with pytest.raises(UserError, match=r"^--limit-train 1438: .* 1437 "):
        load_data("digits", None, 1438)


def test_missing_or_damaged_digits(tmp_path: Path) -> None:
    """A missing, truncated or damaged file, and a file with other arrays, cause one line with the reason."""
    path = tmp_path / FILE
    with pytest.raises(UserError, match=rf"^{path}: .*--data-dir"):
        load_data("digits", tmp_path, None)
    shutil.copy(FOLDER / FILE, path)
    assert len(load_data("digits", tmp_path, None).train) == 1437
    complete = path.read_bytes()
    for broken in (complete[:1000], b"", b"not a zip", complete[:20000] + b"\0" * 1000 + complete[21000:]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=f"^{path}: ") as info:
            load_data("digits", tmp_path, None)
        assert "\n" not in str(info.value)
    np.savez(path, images=np.zeros((3, 8, 8)), labels=np.zeros(3))
    with pytest.raises(UserError, match=r"images \(3, 8, 8\), labels \(3,\); .*\(1797, 8, 8\)"):
        load_data("digits", tmp_path, None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shares_make_up_the_global_batch(world_size: int) -> None:
    """Every sample of a global batch is on exactly one rank, shares differ by one at most, and steps are equal."""
    (complete,) = shares(103, 10, 1)
    split = shares(103, 10, world_size)
    assert {len(batches) for batches in split} == {10}
    for step, batch in enumerate(complete):
        parts = [batches[step] for batches in split]
        assert sorted(chain(*parts)) == sorted(batch)
        assert measure_width(parts) - min(map(len, parts)) <= 1
    assert len(set(chain.from_iterable(complete))) == 100


def test_shares_equal_distributed_sampler() -> None:
    """If a batch splits evenly, a rank has the samples of torch's DistributedSampler."""
    for epoch in range(3):
        for rank, batches in enumerate(shares(100, 10, 2, epoch)):
            torch_sampler = DistributedSampler(range(100), num_replicas=2, rank=rank, seed=3)
            torch_sampler.set_epoch(epoch)
            assert list(chain(*batches)) == list(torch_sampler)


def test_order_changes_with_the_epoch_only() -> None:
    """Each epoch has its own reproducible order; without shuffling, all epochs have the same order."""
    assert shares(50, 10, 1, 0) == shares(50, 10, 1, 0)
    assert shares(50, 10, 1, 0) != shares(50, 10, 1, 1)
    assert shares(50, 10, 2, 1, shuffle=False) == shares(50, 10, 2, 0, shuffle=False)
    assert shares(4, 4, 2, shuffle=False) == [[[0, 2]], [[1, 3]]]


def test_smallest_share() -> None:
    """`smallest_share` matches the sampler, tensor_split and chunk for all small sizes."""
    for samples, world_size, parts, replicas in product(range(1, 30), range(1, 4), range(1, 4), range(1, 5)):
        if samples < world_size * parts:
            continue
        ranks = [torch.arange(samples)[rank::world_size] for rank in range(world_size)]
        pieces = [piece for share in ranks for part in share.tensor_split(parts) for piece in part.chunk(replicas)]
        assert smallest_share(samples, world_size, parts, replicas) == min(map(len, pieces))
    assert smallest_share(0, 2, 1, 1) == 0


@pytest.mark.parametrize(("keep_last", "sizes"), [(False, [32, 32]), (True, [32, 32, 6])])
def test_the_remainder_is_a_batch_only_if_kept(*, keep_last: bool, sizes: list[int]) -> None:
    """With keep_last, the last 6 of 70 samples form a batch; otherwise, they are skipped."""
    samplers = [
        DistributedBatchSampler(70, 32, rank, 2, shuffle=True, seed=0, keep_last=keep_last) for rank in range(2)
    ]
    assert list_fields(samplers, "sizes") == [sizes] * 2
    batches = [a + b for a, b in zip(*map(list, samplers), strict=True)]
    assert [len(batch) for batch in batches] == sizes
    assert len(set(chain.from_iterable(batches))) == sum(sizes)


@pytest.mark.syncheck(ranks=2)
def test_one_rank_downloads_and_all_ranks_fail(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 downloads; if the download fails, both ranks raise the same error."""
    folder = syncheck_rank.shared / "data"
    settings = Settings(method="ddp", data="mnist", data_dir=folder, download=True)
    downloads = []

    def broken(name: str, into: Path) -> None:
        downloads.append(name)
        raise UserError(f"{into}: no network")

    monkeypatch.setattr("train.parts.download", broken)
    with pytest.raises(UserError, match=f"rank 0: {folder}: no network"):
        load(settings, ctx)
    monkeypatch.setattr("train.parts.download", lambda _, into: into.mkdir())
    monkeypatch.setattr("train.parts.load_task_data", lambda _, settings: settings.data_dir.is_dir())
    assert load(settings, ctx) is True
    assert ctx.gather(len(downloads)) == [1, 0]
