"""Folders of Accelerate's `save_state` on two nodes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support.libraries import need, train
from support.listings import find_all, list_codes, map_fields

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the states of one training, saved with both kinds of weights' files."""
    need("accelerate")
    folder = tmp_path_factory.mktemp("accelerate")
    train("accelerate_ranks.py", folder, "safetensors", "bin")
    return folder


@pytest.fixture(params=["safetensors", "bin"])
def trained(endings: Path, request: pytest.FixtureRequest) -> Path:
    """Return the folder with node0/ and node1/, each the state that its node saved."""
    return endings / str(request.param)


def test_nodes_are_replicas(trained: Path) -> None:
    """Each folder is one snapshot of model, optimizer, schedule and RNG states; only local statistics differ."""
    report = syncheck.compare(trained)
    (group,) = report.groups
    assert [(r.format, r.rank, r.path.rpartition("/")[2]) for r in group.replicas] == [
        ("accelerate", 0, "node0"),
        ("accelerate", 1, "node1"),
    ]
    assert set(list_codes(group.findings)) == {"SYN201"}
    kinds = map_fields(group.kinds, "tensors")
    assert (kinds["parameter"], kinds["bn_mean"], kinds["optimizer"], kinds["optimizer_step"]) == (6, 1, 12, 6)
    assert group.kinds["rng"].not_compared == kinds["rng"] > 0
    snapshot = syncheck.read(str(trained / "node0"))
    files = [file for file in (trained / "node0").iterdir() if file.suffix != ".txt"]
    assert snapshot.bytes == sum(file.stat().st_size for file in files)
    assert "scheduler.last_epoch" in snapshot.values


def test_a_changed_moment(trained: Path, tmp_path: Path) -> None:
    """Only the changed moment of a copied folder is reported, with its element."""
    import torch

    for name in ("left", "right"):
        shutil.copytree(trained / "node0", tmp_path / name)
    state = torch.load(tmp_path / "right" / "optimizer.bin", weights_only=True)
    state["state"][3]["exp_avg"][5] += 1
    torch.save(state, tmp_path / "right" / "optimizer.bin")
    report = syncheck.compare(tmp_path / "left", tmp_path / "right")
    (group,) = report.groups
    (diff,) = find_all(group.tensors, out_of_sync=True)
    # States have names only if the file has the model's order; safetensors is sorted by name.
    parameter = "1.bias" if (trained / "node0" / "pytorch_model.bin").exists() else "3"
    assert (diff.name, diff.index) == (f"optimizer.{parameter}.exp_avg", (5,))
    assert report.exit_code == 1
