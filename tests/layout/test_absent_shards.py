"""Shards that the meshes of the files describe and no file contains: the others do not show a model in sync."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.dtensors import dtensor, mesh_of_2_6, save_ranks

import syncheck
from syncheck.report.undecided import undecided_reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Report

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def compare(
    folder: Path, ranks_of_files: dict[int, int], placements: Sequence[str], mesh: Sequence[int], rows: int = 8
) -> Report:
    """Compare files of DTensors.

    ranks_of_files: the rank whose shard is in a file, by the rank in the name of the file.
    rows: of the whole tensor.
    """
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    for file_rank, rank in ranks_of_files.items():
        coordinate = [int(index) for index in np.unravel_index(rank, tuple(mesh))]
        part = ROWS[:rows]
        for placement, count, index in zip(placements, mesh, coordinate, strict=True):
            if placement == "S(0)":
                start, size = len(part) * index // count, len(part) // count
                # One row in two shards is the first shard.
                part = part[start : start + size] if size else part[: 1 - index]
            elif placement == "S(1)":
                part = part[:, [index]]
        content = {"w": dtensor(part, placements, mesh_of_2_6(ranks, coordinate), (rows, 3))}
        save_pth(folder / f"m_rank{file_rank}.pth", content | {"bias": ROWS[0]})
    return syncheck.compare(folder)


@pytest.mark.parametrize(
    ("ranks_of_files", "placements", "mesh", "absent"),
    [
        pytest.param({0: 0, 1: 0}, ["S(0)"], (2,), "w, at mesh coordinate (1), is in no file", id="fsdp"),
        pytest.param({0: 1, 1: 1}, ["S(0)"], (2,), "mesh coordinate (0)", id="first shard"),
        pytest.param({0: 0, 1: 1, 2: 2, 3: 0}, ["S(0)"], (4,), "mesh coordinate (3)", id="one of four"),
        pytest.param({0: 0, 2: 2}, ["R", "S(0)"], (2, 2), "mesh coordinate (1)", id="hsdp without files"),
        pytest.param({0: 0, 1: 0, 2: 2, 3: 2}, ["R", "S(0)"], (2, 2), "mesh coordinate (1)", id="hsdp with copies"),
        pytest.param({0: 0, 1: 1, 2: 2, 3: 0}, ["S(0)", "P(sum)"], (2, 2), "mesh coordinate (1, 1)", id="sums"),
        pytest.param({0: 0, 1: 1, 2: 0, 3: 1}, ["S(0)", "S(0)"], (2, 2), "(1, 0), (1, 1), are in no file", id="2d"),
    ],
)
def test_absent_shards_leave_the_verdict_open(
    tmp_path: Path, ranks_of_files: dict[int, int], placements: list[str], mesh: tuple[int, ...], absent: str
) -> None:
    """If several files hold one shard and no file holds another, exit code 2 and the absent shard."""
    report = compare(tmp_path, ranks_of_files, placements, mesh)
    assert report.exit_code == 2
    assert absent in str(report.groups[0].evidence.absent_shards)
    assert absent in str(undecided_reason(report))


def test_the_file_with_the_shard_of_another_rank_is_named(tmp_path: Path) -> None:
    """A copy of rank 0's file under the name of rank 1 contradicts its name; files from 1 on have other numbers."""
    report = compare(tmp_path / "copied", {0: 0, 1: 0}, ["S(0)"], (2,))
    assert "m_rank1.pth holds the shard of rank 0, and" in str(report.groups[0].evidence.absent_shards)
    report = compare(tmp_path / "from one", {1: 0, 2: 1, 3: 2}, ["R", "S(0)"], (2, 2))
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("ranks_of_files", "placements", "mesh", "rows"),
    [
        pytest.param({0: 0, 1: 1, 2: 2, 3: 3}, ["R", "S(0)"], (2, 2), 8, id="hsdp"),
        pytest.param({0: 0, 1: 1, 2: 2}, ["R", "S(0)"], (2, 2), 8, id="one copy of a shard"),
        pytest.param({0: 0, 2: 2}, ["R", "S(0)"], (2, 2), 1, id="a shard without elements"),
        pytest.param({0: 0, 1: 1}, ["S(0)"], (2,), 8, id="shards without copies"),
    ],
)
def test_whole_models_are_in_sync(
    tmp_path: Path, ranks_of_files: dict[int, int], placements: list[str], mesh: tuple[int, ...], rows: int
) -> None:
    """If every shard with elements is in a file, equal copies are in sync."""
    assert compare(tmp_path, ranks_of_files, placements, mesh, rows).exit_code == 0


def test_differences_precede_absent_shards(tmp_path: Path) -> None:
    """Copies of a shard that differ are out of sync, although another shard is absent."""
    save_ranks(tmp_path, {0: ROWS[:4], 2: ROWS[:4] + 1}, ["R", "S(0)"], (2, 2))
    assert syncheck.compare(tmp_path).exit_code == 1
