"""Folders that are checkpoints, at any depth: each is one checkpoint, and its files are not read twice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save, save_pth
from support.listings import list_fields

import syncheck
from syncheck.api import holds_checkpoint
from syncheck.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def checkpoint(folder: Path, step: int = 5) -> Path:
    """Write a Trainer's checkpoint folder with settings, notes and a README."""
    save(folder / "model.safetensors", network())
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_pth(folder / "training_args.bin", {"learning_rate": 0.1})
    (folder / "README.md").write_text("a model")
    return folder


def test_runs_and_steps_below_the_folder_given(tmp_path: Path) -> None:
    """Ranks and steps come from folder names at any depth, as from file names."""
    for rank in (0, 1):
        for step in (5, 10):
            checkpoint(tmp_path / "runs" / f"rank{rank}" / f"checkpoint-{step}", step)
    report = syncheck.compare(tmp_path)
    assert [(group.step, list_fields(group.replicas, "rank")) for group in report.groups] == [(5, [0, 1]), (10, [0, 1])]
    assert report.verdict == "in_sync"
    assert report.skipped == 4 * 2  # settings and README of each


def test_copies_of_a_run_are_compared_path_by_path(tmp_path: Path) -> None:
    """Folders with the same checkpoint folders are copies, compared path by path."""
    for copy in ("old", "new"):
        for step in (5, 10):
            checkpoint(tmp_path / copy / f"checkpoint-{step}", step)
    save(tmp_path / "new" / "checkpoint-10" / "model.safetensors", changed(network(), "fc.bias"))
    report = syncheck.compare(tmp_path / "old", tmp_path / "new")
    assert dict(list_fields(report.groups, "name", "verdict")) == {
        "checkpoint-5": "in_sync",
        "checkpoint-10": "out_of_sync",
    }


def test_a_checkpoint_in_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint folder may contain another: DeepSpeed's tag in a Trainer's folder. Copies are compared."""
    for copy in ("a", "b"):
        folder = checkpoint(tmp_path / copy / "checkpoint-5")
        state = {"module": changed(network(), "fc.bias") if copy == "b" else network()}
        save_pth(folder / "global_step5" / "mp_rank_00_model_states.pt", state)
    report = syncheck.compare(tmp_path / "a" / "checkpoint-5", tmp_path / "b" / "checkpoint-5")
    result = [(group.replicas[0].format, len(group.replicas), group.verdict) for group in report.groups]
    assert sorted(result) == [("deepspeed", 2, "out_of_sync"), ("huggingface", 2, "in_sync")]


def test_a_folder_and_its_files_are_taken_once(tmp_path: Path) -> None:
    """A shard passed beside its folder is not a second replica, nor is the folder with another spelling."""
    folder = checkpoint(tmp_path / "m")
    report = syncheck.compare(folder, f"{folder}/", f"{tmp_path}/./m", folder / "model.safetensors")
    assert [len(group.replicas) for group in report.groups] == [1]


def test_links_to_folders(tmp_path: Path) -> None:
    """A link to a checkpoint folder below the given folder is ignored."""
    checkpoint(tmp_path / "runs" / "checkpoint-5")
    (tmp_path / "runs" / "latest").symlink_to("checkpoint-5")
    report = syncheck.compare(tmp_path / "runs")
    assert [list_fields(group.replicas, "path") for group in report.groups] == [[str(tmp_path / "runs/checkpoint-5")]]


def test_a_folder_of_settings_holds_no_checkpoint(tmp_path: Path) -> None:
    """Settings with a checkpoint's extension are skipped, but read if passed by the user."""
    save_pth(tmp_path / "training_args.bin", {"learning_rate": 0.1})
    with pytest.raises(syncheck.UsageError, match="no checkpoint in this folder"):
        syncheck.compare(tmp_path)
    assert not holds_checkpoint(tmp_path)
    assert len(syncheck.compare(tmp_path / "training_args.bin").groups) == 1
    checkpoint(tmp_path / "m")
    assert holds_checkpoint(tmp_path)


def test_the_command_line_accepts_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compare` and `show` accept a folder like a file, and print its path as given."""
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        checkpoint(tmp_path / f"rank{rank}")
    assert main(["compare", "rank0", "rank1/"]) == 0
    assert "rank 1: rank1 (huggingface, 14 tensors" in capsys.readouterr().out
    assert main(["show", "rank0"]) == 0
    assert capsys.readouterr().out.startswith("rank0: huggingface, 14 tensors")
    (tmp_path / "rank1" / "model.safetensors").write_bytes(b"")
    assert main(["compare", "rank0", "rank1"]) == 2
    assert "rank1: model.safetensors: the file is empty" in capsys.readouterr().err
