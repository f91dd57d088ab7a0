"""Tensors of up to 64 dimensions are compared correctly, also with numpy before version 2, whose limit is 32."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import save_header

import syncheck
from syncheck.snapshots import Shard, Tensor, contiguous_strides
from syncheck.tensors.blocks import Files

sys.path.append(str(Path(__file__).resolve().parents[2] / "fixtures"))

from malformed.torch_parts import mapping, named, storage, tensor, torch_legacy, torch_zip, whole

SIX = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)


def write_zip(path: Path, shape: tuple[int, ...], strides: tuple[int, ...], data: bytes, kind: str = "Float") -> None:
    """Write a torch file of one tensor `w` around its data."""
    source_value = storage("0", len(data) // (4 if kind == "Float" else 1), named("torch", f"{kind}Storage"))
    path.write_bytes(torch_zip(whole(mapping(("w", tensor(source_value, 0, shape, strides)))), data=data))


def write_tensor(path: Path, form: str, dimensions: int, values: tuple[float, ...]) -> None:
    """Write a tensor of sizes 1, ..., 1, 2, 3 and the given values, or a transposed tensor of sizes 1, ..., 3, 2."""
    ones, data = (1,) * (dimensions - 2), struct.pack("<6f", *values)
    if form == "safetensors":
        save_header(path, {"w": {"dtype": "F32", "shape": [*ones, 2, 3], "data_offsets": [0, 24]}}, data)
    elif form == "legacy":
        pickled = whole(mapping(("w", tensor(storage("0", 6, None, None), 0, (*ones, 2, 3), (*ones, 3, 1)))))
        path.write_bytes(torch_legacy(pickled, stored=struct.pack("<q", 6) + data))
    else:
        sizes, steps = ((2, 3), (3, 1)) if form == "zip" else ((3, 2), (1, 3))
        write_zip(path, (*ones, *sizes), (*ones, *steps), data)


@pytest.mark.parametrize("dimensions", [33, 64])
@pytest.mark.parametrize("form", ["zip", "transposed", "legacy", "safetensors"])
def test_files_of_many_dimensions(form: str, dimensions: int, tmp_path: Path) -> None:
    """Equal files are in sync; a changed element is reported with its index and difference."""
    for rank in range(2):
        write_tensor(tmp_path / f"m_rank{rank}.pth", form, dimensions, SIX)
    assert syncheck.compare(tmp_path).counts.identical == 1
    write_tensor(tmp_path / "m_rank1.pth", form, dimensions, (0.0, 1.0, 2.0, 9.0, 4.0, 5.0))
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    changed = (0, 1) if form == "transposed" else (1, 0)
    assert (diff.index, diff.max_abs) == ((0,) * (dimensions - 2) + changed, 6.0)


@pytest.mark.parametrize("dimensions", [33, 36])
def test_huge_overlapping_views(dimensions: int, tmp_path: Path) -> None:
    """Any range of elements of an overlapping view with at least 2**33 elements is read according to its strides."""
    strides = tuple(1 + i % 3 for i in range(dimensions))
    data = bytes(np.random.default_rng(0).integers(0, 256, 1 + sum(strides), np.uint8))
    write_zip(tmp_path / "m_rank0.pth", (2,) * dimensions, strides, data, "Byte")
    result = syncheck.read(str(tmp_path / "m_rank0.pth")).tensors["w"]
    assert not result.refused
    for start, count in ((0, 5000), (2**32 - 77, 5001), (2**dimensions - 4096, 4096), (12345, 1)):
        position = np.arange(start, start + count, dtype=np.int64)
        offsets = sum((position >> (dimensions - 1 - i) & 1) * stride for i, stride in enumerate(strides))
        with Files() as files:
            assert bytes(files.read(result, start, count, 0)) == np.frombuffer(data, np.uint8)[offsets].tobytes()


@pytest.mark.parametrize("dimensions", [33, 64])
def test_shards_of_many_dimensions(dimensions: int) -> None:
    """A tensor in two shards, split along the last dimension, is assembled in C order."""
    ones = (1,) * (dimensions - 2)

    def part(values: list[float], start: int) -> Shard:
        shape, data = (*ones, 2, len(values) // 2), struct.pack(f"<{len(values)}f", *values)
        return Shard(
            Tensor("w", "float32", shape, contiguous_strides(shape), "", 0, data=data),
            (0,) * (dimensions - 1) + (start,),
        )

    shape: Any = (*ones, 2, 3)
    parts = (part([0.0, 1.0, 3.0, 4.0], 0), part([2.0, 5.0], 2))
    with Files() as files:
        data = files.read(Tensor("w", "float32", shape, contiguous_strides(shape), "", 0, shards=parts), 0, 6, 0)
    assert bytes(data) == struct.pack("<6f", *SIX)
