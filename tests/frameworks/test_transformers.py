"""Folders of transformers: checkpoints of two runs of the Trainer with one seed, and a sharded model."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support.libraries import need, train
from support.listings import find_first, list_codes

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with node<r>/run/checkpoint-<step> and node<r>/sharded.

    The nodes run separately, because Trainer writes the weights only on the first node of a run.
    """
    need("transformers")
    need("accelerate")
    folder = tmp_path_factory.mktemp("transformers")
    train("transformers_run.py", folder, "node0", "node1", ranks=1)
    return folder


def test_two_runs_are_replicas(trained: Path) -> None:
    """The runs' checkpoints of a step are compared with each other, never with checkpoints of another step."""
    report = syncheck.compare(trained)
    result = [
        (group.step, [(r.rank, r.format, r.path.removeprefix(f"{trained}/")) for r in group.replicas])
        for group in report.groups
    ]
    assert sorted(result, key=str) == [
        (2, [(r, "huggingface", f"node{r}/run/checkpoint-2") for r in (0, 1)]),
        (4, [(r, "huggingface", f"node{r}/run/checkpoint-4") for r in (0, 1)]),
        (None, [(r, "huggingface", f"node{r}/sharded") for r in (0, 1)]),
    ]
    assert report.verdict == "in_sync"
    group = find_first(report.groups, step=4)
    assert group.counts.tensors == group.counts.identical + group.kinds["rng"].not_compared
    assert group.kinds["optimizer"].identical == 2 * group.kinds["parameter"].identical > 0


def test_the_folder_records_its_step(trained: Path) -> None:
    """trainer_state.json has the step: checkpoints of two steps are SYN106 if they are one group."""
    snapshot = syncheck.read(str(trained / "node0" / "run" / "checkpoint-4"))
    assert (snapshot.values["global_step"], snapshot.values["scheduler.last_epoch"]) == (4, 4)
    report = syncheck.compare(trained / "node0/run/checkpoint-2", trained / "node0/run/checkpoint-4")
    assert report.exit_code == 2  # moments of one replica
    options = syncheck.Options(group_by="run")
    report = syncheck.compare(trained / "node0/run/checkpoint-2", trained / "node0/run/checkpoint-4", options=options)
    assert "SYN106" in list_codes(report.groups[0].findings)


def test_shards_are_one_model(trained: Path) -> None:
    """A sharded model equals the same model in one file."""
    sharded, first = trained / "node0" / "sharded", trained / "node0" / "run" / "checkpoint-4"
    assert len(list(sharded.glob("*.safetensors"))) > 2
    report = syncheck.compare(sharded, first, options=syncheck.Options(only=("params",)))
    assert (report.verdict, report.groups[0].counts.identical) == ("in_sync", 41)


def test_a_flipped_byte(trained: Path, tmp_path: Path) -> None:
    """A flipped byte in one shard is reported with its tensor and element."""
    for name in ("left", "right"):
        shutil.copytree(trained / "node0" / "sharded", tmp_path / name)
    snapshot = syncheck.read(str(tmp_path / "right"))
    tensor = snapshot.tensors["bert.pooler.dense.weight"]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset + 4 * 7)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    report = syncheck.compare(tmp_path / "left", tmp_path / "right")
    (diff,) = report.groups[0].tensors
    assert (diff.name, diff.index, diff.mismatched) == ("bert.pooler.dense.weight", (0, 7), 1)
