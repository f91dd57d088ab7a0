"""torch.distributed.checkpoint folders with a cut or a flipped bit at any byte, beside an intact folder."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from dcp_folders import contents, metadata, save  # noqa: E402

import syncheck  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

FILES = (".metadata", "__0_0.distcp")
STATE = {"w": torch.arange(6.0).reshape(2, 3), "bn": {"running_mean": torch.ones(2)}, "epoch": 3}
# Every so many bytes are damaged.
STEPS = [101, pytest.param(17, marks=pytest.mark.slow)]


def outcome(left: Path, right: Path) -> int:
    """Compare; a folder in sync contains equal tensors, and an unreadable folder has a one-line error."""
    report = syncheck.compare(left, right)
    if report.exit_code == 0:
        assert contents(left) == contents(right)
        assert report.groups[0].counts.identical == 2
    for file in report.unreadable:
        assert len(file.reason.splitlines()) == 1
    assert bool(report.unreadable) == (report.exit_code == 2)
    return report.exit_code


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FILES)
def test_cut_anywhere(tmp_path: Path, name: str, step: int) -> None:
    """A truncated `.metadata` or chunk file gives "could not tell"."""
    left, right = (save(tmp_path / f"rank_{rank}", STATE) for rank in range(2))
    whole = (right / name).read_bytes()
    for length in range(0, len(whole), step):
        (right / name).write_bytes(whole[:length])
        assert outcome(left, right) == 2, length
    (right / name).write_bytes(whole)
    assert outcome(left, right) == 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_in_any_byte(tmp_path: Path, name: str, step: int) -> None:
    """A flipped bit gives out of sync or a one-line error, unless no compared byte changed."""
    left, right = (save(tmp_path / f"rank_{rank}", STATE) for rank in range(2))
    whole = (right / name).read_bytes()
    draw, seen = random.Random(step), Counter[int]()
    for at in range(draw.randrange(step), len(whole), step):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        (right / name).write_bytes(damaged)
        seen[outcome(left, right)] += 1
    assert seen.keys() <= {0, 1, 2}
    assert seen[2]


def test_flipped_bit_in_tensor_bytes(tmp_path: Path) -> None:
    """A flipped bit in a tensor's bytes is out of sync."""
    left, right = (save(tmp_path / f"rank_{rank}", STATE) for rank in range(2))
    path = right / "__0_0.distcp"
    whole = path.read_bytes()
    places = {index.fqn: info for index, info in metadata(right).storage_data.items()}
    raw = {"w": STATE["w"], "bn.running_mean": STATE["bn"]["running_mean"]}
    flipped = 0
    for name, tensor in raw.items():
        data = tensor.numpy().tobytes()
        start = whole.index(data, places[name].offset)
        assert start + len(data) <= places[name].offset + places[name].length
        for at in range(start, start + len(data)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            path.write_bytes(damaged)
            assert outcome(left, right) == 1, (name, at - start)
            flipped += 1
    assert flipped == 8 * 4
