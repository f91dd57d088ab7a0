"""`syncheck show --shards`: which rank and file hold which part of each tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from support.dtensors import save_ranks
from support.listings import index_by, list_fields

from syncheck.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

W = np.arange(24, dtype=np.float32).reshape(8, 3)


def test_parts_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies of two halves, a plain tensor and partial sums; a missing file leaves a hole, which is no error."""
    parts = {0: W[:4], 1: W[4:], 2: W[:4], 3: W[4:]}
    plain = dict.fromkeys(range(3), W[0])
    files = list(map(str, save_ranks(tmp_path, parts, ["R", "S(0)"], [2, 2], plain=plain)))
    assert main(["show", "--shards", str(tmp_path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = index_by(document["tensors"], "name")
    assert (document["files"], rows["w"]["shape"], rows["plain"]["dtype"]) == (4, [8, 3], "float32")
    assert rows["w"]["boxes"] == [
        {"start": [0, 0], "shape": [4, 3], "ranks": [0, 2], "files": [files[0], files[2]]},
        {"start": [4, 0], "shape": [4, 3], "ranks": [1, 3], "files": [files[1], files[3]]},
    ]
    assert rows["plain"]["boxes"] == [{"start": [0], "shape": [3], "ranks": [0, 1, 2], "files": files[:3]}]
    assert main(["show", "--shards", ",".join(files[::2])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines if "w " in line] == [["w", "float32", "8x3", "[0:4,"]]
    save_ranks(tmp_path, dict.fromkeys(range(4), W), ["R", "P(sum)"], [2, 2])
    assert main(["show", "--shards", str(tmp_path), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    assert list_fields(row["boxes"], "start", "ranks") == [(None, [rank]) for rank in range(4)]


def test_several_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of two runs are not one model: one line, exit code 2."""
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        save_ranks(tmp_path / run, {0: W[:4], 1: W[4:]}, ["S(0)"], [2], more={0: W, 1: W})
    assert main(["show", "--shards", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
