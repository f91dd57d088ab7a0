"""Incomplete, inconsistent and hostile files: one line, exit code 2, and bounded time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.dtensors import dtensor, mesh_of_2_6, mesh_of_2_15, save_ranks
from support.listings import list_fields
from support.marks import slow

import syncheck
from syncheck.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

W = np.arange(24, dtype=np.float32).reshape(8, 3)
HALVES = {0: W[:4], 1: W[4:]}


def step_block(rank: int, step: int, world_size: int = 2) -> dict[str, Any]:
    """Return a metadata block."""
    return dict(syncheck.metadata(run="m", rank=rank, step=step, world_size=world_size))


def lose_a_rank(folder: Path) -> None:
    """No file holds the second half."""
    save_ranks(folder, HALVES, ["S(0)"], [2])
    (folder / "m_rank1.pth").unlink()


def mix_steps(folder: Path) -> None:
    """The shards are of two steps."""
    save_ranks(folder, HALVES, ["S(0)"], [2], syncheck={0: step_block(0, 10), 1: step_block(1, 11)})


def mix_worlds(folder: Path) -> None:
    """The files are of runs with different numbers of ranks."""
    save_ranks(folder, HALVES, ["S(0)"], [2], syncheck={0: step_block(0, 10), 1: step_block(1, 10, 4)})


def overlap(folder: Path) -> None:
    """One rank's layout has two parts, the other rank's three."""
    save_pth(folder / "m_rank0.pth", {"w": dtensor(W[:4], ["S(0)"], mesh_of_2_6([0, 1], [0]))})
    save_pth(folder / "m_rank1.pth", {"w": dtensor(W[3:6], ["S(0)"], mesh_of_2_6([0, 1, 2], [1]))})


def contradict(folder: Path) -> None:
    """A part has another shape than its layout."""
    save_ranks(folder, {0: W[:4], 1: W[5:]}, ["S(0)"], [2])


def claim_a_huge_tensor(folder: Path) -> None:
    """The layout is of a tensor of exabytes."""
    for rank in range(2):
        local = dtensor(HALVES[rank], ["S(0)"], mesh_of_2_6([0, 1], [rank]), (1 << 40, 1 << 20))
        save_pth(folder / f"m_rank{rank}.pth", {"w": local})


def claim_many_stripes(folder: Path) -> None:
    """The split factor is a billion."""
    save_ranks(folder, HALVES, ["_S(0, 1000000000)"], [2])


def claim_many_dimensions(folder: Path) -> None:
    """Each of many tensors is cut in more boxes than a rank may hold."""
    shape = (64,) * 3
    local = np.zeros((32, 32, 32), np.float32)
    mesh = mesh_of_2_6(np.arange(8).reshape(2, 2, 2), [0, 0, 0])
    strided = ["_S(0, 32)", "_S(1, 32)", "_S(2, 32)"]
    save_pth(folder / "m_rank0.pth", {f"w{i}": dtensor(local, strided, mesh, shape) for i in range(20)})


def claim_many_boxes(folder: Path) -> None:
    """Strided shards without elements divide a dimension into a billion stripes."""
    local = dtensor(W[:, :0], ["_S(0, 1024)"] * 3, mesh_of_2_6(np.arange(8).reshape(2, 2, 2), [0, 0, 0]), (1 << 20, 0))
    save_pth(folder / "m_rank0.pth", {"w": local, "v": W})


def claim_many_ranks(folder: Path) -> None:
    """Each of many tensors is on a mesh of more ranks than any run has."""
    mesh = mesh_of_2_15((1 << 18,), (1,), 1 << 18, [0])
    save_pth(folder / "m_rank0.pth", {f"w{i}": dtensor(W[:1], ["S(0)"], mesh) for i in range(20)})


def claim_many_mesh_dimensions(folder: Path) -> None:
    """The mesh has a thousand dimensions of size 1."""
    mesh = mesh_of_2_15((2,) + (1,) * 999, (1,) * 1000, 2, [0] * 1000)
    save_pth(folder / "m_rank0.pth", {"w": dtensor(W[:4], ["_S(0, 1024)"] * 1000, mesh), "v": W})


def split_another_dimension(folder: Path) -> None:
    """The placement is of a dimension that the tensor lacks."""
    save_ranks(folder, HALVES, ["S(7)"], [2])


def sum_parts(folder: Path) -> None:
    """The ranks hold partial sums."""
    save_ranks(folder, {0: W, 1: W}, ["P(sum)"], [2])


def number_layers_by_stage(folder: Path) -> None:
    """Two pipeline stages hold different tensors of one name."""
    for rank in range(2):
        save_pth(folder / f"m_pp{rank}.pth", {"layers.0.weight": W + rank})


def mix_whole_and_unknown(folder: Path) -> None:
    """One rank holds the whole tensor, the others partial sums, which may be another tensor."""
    save_ranks(folder, {0: W, 1: W + 1}, ["P(sum)"], [2])
    save_pth(folder / "m_rank2.pth", {"w": W})


ONE_LINE = [lose_a_rank, mix_steps, mix_worlds, overlap, contradict, claim_a_huge_tensor]
NOT_COMPARED = [
    claim_many_stripes,
    claim_many_dimensions,
    claim_many_boxes,
    claim_many_ranks,
    claim_many_mesh_dimensions,
    split_another_dimension,
    sum_parts,
    number_layers_by_stage,
    mix_whole_and_unknown,
]


@pytest.mark.parametrize("damage", ONE_LINE)
def test_one_line(damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files do not form a model: one line, whichever side they are on."""
    (tmp_path / "ranks").mkdir()
    damage(tmp_path / "ranks")
    save_pth(tmp_path / "full.pth", {"w": W})
    sides = [str(tmp_path / "ranks"), str(tmp_path / "full.pth")]
    start = time.process_time()
    for a, b in (sides, sides[::-1]):
        assert main(["diff", a, b, "--no-config"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
    assert time.process_time() - start < 5


@pytest.mark.parametrize("damage", NOT_COMPARED)
def test_parts_without_position(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """The files do not show the position of parts: the tensor is not compared, and the verdict is undecided."""
    (tmp_path / "ranks").mkdir()
    damage(tmp_path / "ranks")
    tensors = syncheck.read(str(next((tmp_path / "ranks").iterdir()))).tensors
    full = {name: np.resize(W, t.full_shape) for name, t in tensors.items()}
    save_pth(tmp_path / "full.pth", full)
    start = time.process_time()
    for second in ("ranks", "full.pth"):
        report = syncheck.diff(tmp_path / "ranks", tmp_path / second)
        assert (report.exit_code, report.verdict) == (2, "undecided"), second
        assert "not_compared" in list_fields(report.tensors, "status")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "spans",
    [
        [((-1, 0), (9, 3))],
        [((0, 0), (1 << 60, 3))],
        [((0, 0), (5, 3)), ((4, 0), (4, 3))],
        *slow([((0, 0), (1, 1))] * 100_000, [((i, 0), (1, 3)) for i in range(100_000)]),
    ],
    ids=["negative", "huge", "overlap", "copies", "many"],
)
def test_chunks_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], spans: Any) -> None:
    """The metadata of a folder lists chunks that do not form the tensor: one line."""
    torch = pytest.importorskip("torch")
    from support.dcp_folders import assemble

    complete = (torch.from_numpy(W), [((0, 0), (8, 3))])
    assemble(tmp_path / "folder", {"w": complete}, listed={"w": spans})
    save_pth(tmp_path / "full.pth", {"w": W})
    start = time.process_time()
    assert main(["diff", str(tmp_path / "full.pth"), str(tmp_path / "folder"), "--no-config"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert time.process_time() - start < 5
