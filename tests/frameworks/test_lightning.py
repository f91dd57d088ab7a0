"""Checkpoints of Lightning on two gloo ranks."""

from __future__ import annotations

import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
from support.libraries import need, train
from support.listings import find_all, find_texts, index_by, list_fields

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with best-rank<r>.ckpt and last-rank<r>.ckpt."""
    need("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    train("lightning_ranks.py", folder)
    return folder


def group_of(folder: Path, pattern: str = "last-rank*.ckpt") -> Any:
    """Compare the ranks' files and return their group."""
    (group,) = syncheck.compare(folder / pattern).groups
    return group


def test_ranks_of_lightning(trained: Path) -> None:
    """Files of two ranks are one group with the finding of default DDP; optimizer state has names."""
    report = syncheck.compare(trained)
    assert [(group.run, list_fields(group.replicas, "rank")) for group in report.groups] == [
        ("best", [0, 1]),
        ("last", [0, 1]),
    ]
    group = group_of(trained)
    assert {f.code: sorted(f.tensors) for f in group.findings} == {
        "SYN201": ["net.1.running_mean", "net.1.running_var"]
    }
    names = set(syncheck.read(str(trained / "last-rank0.ckpt")).tensors)
    assert {"net.0.weight", "optimizer.net.0.weight.exp_avg", "optimizer.net.2.bias.step"} <= names


def test_callbacks_are_listed(trained: Path) -> None:
    """A different best score of a callback is listed as a value, and is not a failure."""
    group = group_of(trained)
    listing = index_by(group.values, "name")
    scores = find_texts(listing, "best_model_score", start="callbacks.ModelCheckpoint")
    assert len(scores) == 1
    assert not any(list_fields(listing.values(), "counts"))
    assert all(isinstance(value, float) for value in listing[scores[0]].by_rank.values())
    assert not [diff for diff in group.tensors if diff.name.startswith("callbacks.")]
    assert syncheck.compare(trained / "last-rank*.ckpt", options=syncheck.Options(allow=("SYN201",))).exit_code == 0


def test_unknown_classes_are_inert(trained: Path) -> None:
    """An object in the hyperparameters is listed as not compared; the tensor in it is compared."""
    snapshot = syncheck.read(str(trained / "last-rank0.ckpt"))
    assert find_texts(snapshot.stubs, end=".Preprocessing")
    assert "hyper_parameters.preprocessing.scale" in snapshot.tensors
    assert any("Preprocessing" in str(note) for note in group_of(trained).notes)


def test_a_changed_weight(trained: Path, tmp_path: Path) -> None:
    """A changed weight in a copy is reported with its element."""
    for rank in (0, 1):
        shutil.copy(trained / "last-rank0.ckpt", tmp_path / f"last-rank{rank}.ckpt")
    tensor = syncheck.read(str(tmp_path / "last-rank1.ckpt")).tensors["net.2.weight"]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset + 4 * 11)
        file.write(struct.pack("<f", 7.0))
    group = group_of(tmp_path)
    assert list_fields(find_all(group.tensors, out_of_sync=True), "name", "index", "mismatched") == [
        ("net.2.weight", (1, 3), 1)
    ]
