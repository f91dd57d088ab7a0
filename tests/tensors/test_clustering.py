"""Clusters of equal bytes and the verdict on one tensor, over any number of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save

import syncheck
from syncheck.tensors.blocks import BLOCK, Files
from syncheck.tensors.clustering import cluster_replicas

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, arrays: list[np.ndarray[Any, Any]], suffix: str = ".pth") -> list[Path]:
    """Write one file per replica, each with a single tensor w."""
    return [save(folder / f"rank{i}{suffix}", {"w": array}) for i, array in enumerate(arrays)]


def clusters_of(folder: Path, arrays: list[np.ndarray[Any, Any]]) -> tuple[tuple[int, ...], ...]:
    """Write arrays as replicas, and return their clusters."""
    tensors = [syncheck.read(str(path)).tensors["w"] for path in write(folder, arrays)]
    with Files() as files:
        return cluster_replicas(tensors, files)


A, B, C, D = (np.full(5, value, np.float32) for value in (1, 2, 3, 4))


@pytest.mark.parametrize(
    "arrays, expected",
    [
        ([A, A], ((0, 1),)),
        ([A, B], ((0,), (1,))),
        ([A, B, A, A], ((0, 2, 3), (1,))),
        ([B, A, A, A], ((1, 2, 3), (0,))),
        ([A, A, B, B], ((0, 1), (2, 3))),
        ([A, B, B, A, C], ((0, 3), (1, 2), (4,))),
        ([A, B, C, D], ((0,), (1,), (2,), (3,))),
        ([A, B, B, C, C, C], ((3, 4, 5), (1, 2), (0,))),
    ],
)
def test_clusters(tmp_path: Path, arrays: list[Any], expected: Any) -> None:
    """Clusters have equal bytes; the largest cluster comes first, and then the cluster with the lowest rank."""
    assert clusters_of(tmp_path, arrays) == expected


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("at", [0, BLOCK // 4 - 1, BLOCK // 4, BLOCK // 2 + 1, -1])
def test_flipped_bit_in_a_large_tensor(tmp_path: Path, suffix: str, at: int) -> None:
    """One flipped bit is found at any position relative to block borders, including the last element."""
    first = np.arange(BLOCK // 2 + 77, dtype=np.float32)
    second = first.copy()
    second.view(np.uint32)[at] ^= 1
    paths = write(tmp_path, [first, second, first], suffix)
    (diff,) = syncheck.compare(*paths).groups[0].tensors
    assert diff.status == "different"
    assert diff.clusters == ((0, 2), (1,))
    assert (diff.mismatched, diff.extent, diff.max_ulp) == (1, "one", 1)
    assert diff.index == (at % first.size,)


def test_differences_in_different_blocks_split_further(tmp_path: Path) -> None:
    """Replicas that differ only in a later block are in different clusters."""
    base = np.zeros(BLOCK // 4 * 3, np.float32)
    arrays = [base.copy() for _ in range(4)]
    arrays[1][5] = 1
    arrays[2][5] = 1
    arrays[2][-1] = 1
    arrays[3][BLOCK // 4 + 1] = 1
    assert clusters_of(tmp_path, arrays) == ((0,), (1,), (2,), (3,))
    assert clusters_of(tmp_path, [*arrays, arrays[2]]) == ((2, 4), (0,), (1,), (3,))


def test_memory_layouts_may_differ(tmp_path: Path) -> None:
    """Replicas with equal values and different memory layouts are identical, and one changed element is found."""
    torch = pytest.importorskip("torch")
    value = torch.arange(1_200_000, dtype=torch.float32).reshape(1200, 1000)
    torch.save({"w": value}, tmp_path / "rank0.pth")
    torch.save({"w": value.t().contiguous().t()}, tmp_path / "rank1.pth")
    assert syncheck.compare(tmp_path).exit_code == 0
    second = value.t().contiguous().t()
    second[1199, 999] += 1
    torch.save({"w": second}, tmp_path / "rank1.pth")
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.index, diff.mismatched, diff.max_abs) == ((1199, 999), 1, 1.0)


def test_more_replicas_than_open_files(tmp_path: Path) -> None:
    """The clusters are correct if the number of replicas exceeds the limit of open files."""
    tensors = [syncheck.read(str(path)).tensors["w"] for path in write(tmp_path, [A, B, A, A, B, C, A])]
    with Files(limit=2) as files:
        assert cluster_replicas(tensors, files) == ((0, 2, 3, 6), (1, 4), (5,))
