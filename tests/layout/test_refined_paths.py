"""Roles of numbers that only the other paths, or the steps in the files, determine; and texts among checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import list_fields

import syncheck
from syncheck.errors import SyncheckError

if TYPE_CHECKING:
    from pathlib import Path

ONES = np.ones((4, 3), np.float32)


def save(folder: Path, names: list[str], **content: Any) -> list[Path]:
    """Save equal checkpoints."""
    return [save_pth(folder / name, {"model": {"w": ONES}, **content}) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        ["exp_r3/a.pt", "exp_r3/b.pt"],
        ["exp_rank3/a.pt", "exp_rank3/b.pt"],
        ["x_r2d2_a.pt", "x_r2d2_b.pt"],
        ["tp2_run/local.pt", "tp2_run/remote.pt"],
        ["lora_r8/seed/old.pt", "lora_r8/seed/new.pt"],
        ["run_r3/first/a.pt", "run_r3/second/a.pt"],
    ],
)
def test_a_shared_number_is_no_rank(tmp_path: Path, names: list[str]) -> None:
    """A number that all paths share does not separate the files, and a bit between them is found."""
    files = save(tmp_path, names)
    assert syncheck.compare(*files).exit_code == 0
    save_pth(files[1], {"model": {"w": ONES + np.float32(1)}})
    report = syncheck.compare(*files)
    assert (report.exit_code, len(report.groups)) == (1, 1)


def test_parts_of_one_rank_are_no_replicas(tmp_path: Path) -> None:
    """Files of one rank without a common tensor are different parts, and ranks in names still count."""
    for name, tensor in (("model", "w"), ("optimizer", "m")):
        save_pth(tmp_path / "rank_0" / f"{name}.pth", {tensor: ONES})
    assert syncheck.compare(tmp_path / "rank_0").exit_code == 2
    assert syncheck.compare(*save(tmp_path / "ranks_r3", ["rank0_a.pth", "rank0_b.pth"])).exit_code == 2
    groups = syncheck.compare(*save(tmp_path / "exp_r3", ["m_rank0.pth", "m_rank1.pth"])).groups
    assert [tuple(list_fields(group.replicas, "rank")) for group in groups] == [(0, 1)]


@pytest.mark.parametrize("key", ["step", "global_step", "epoch", "iteration"])
@pytest.mark.parametrize("name", ["s{step}_rank{rank}.pt", "{step}_r{rank}.pt", "m{step}/rank{rank}.pt"])
def test_saved_steps_are_steps_of_one_run(tmp_path: Path, key: str, name: str) -> None:
    """A number in the name that equals the saved step is the step of the run."""
    for step in (100, 200):
        save(tmp_path, [name.format(step=step, rank=rank) for rank in (0, 1)], **{key: step})
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, len(set(list_fields(report.groups, "run")))) == (0, 1)
    assert list_fields(report.groups, "step") == [100, 200]


def test_numbers_other_than_the_step(tmp_path: Path) -> None:
    """Runs whose number is no step stay separate, and steps of one rank are no replicas."""
    for seed in (3, 4):
        save(tmp_path / "seeds", [f"s{seed}_rank{rank}.pt" for rank in (0, 1)], step=100)
    assert len(set(list_fields(syncheck.compare(tmp_path / "seeds").groups, "run"))) == 2
    for step in (100, 200):
        save(tmp_path / "steps", [f"s{step}.pt"], step=step)
    assert syncheck.compare(tmp_path / "steps").exit_code == 2
    save(tmp_path / "ranks", ["m0.pt", "m1.pt"], step=1)
    assert syncheck.compare(tmp_path / "ranks").exit_code == 0


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ("7", True),
        ("avg_train_loss: 0.1\noptimizer_step: 20\nstep: 5\n", True),
        ("# yamllint disable\nWER: 3.2e-1\nend-of-epoch: true\n", True),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", False),
        ("<!DOCTYPE html><html></html>", False),
        ("Entry not found", False),
        ('{"error": "no such file"}', False),
        ("", False),
        ("\0\1\2", False),
    ],
    ids=["number", "settings", "comment", "pointer", "page", "message", "json", "empty", "binary"],
)
def test_texts_named_like_checkpoints(tmp_path: Path, text: str, skipped: bool) -> None:
    """Numbers and settings of a trainer are skipped in a folder; a text in place of a checkpoint is an error."""
    for rank in (0, 1):
        folder = tmp_path / f"rank{rank}" / "CKPT+epoch_1"
        save(folder, ["model.ckpt"])
        (folder / "counter.ckpt").write_text(text)
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, report.skipped) == ((0, 2) if skipped else (2, 0))
    # A file that the user passes must be a checkpoint, and so must a file named like the others.
    assert syncheck.compare(folder / "model.ckpt", folder / "counter.ckpt").exit_code == 2
    (folder / "model.ckpt").write_text(text)
    try:
        assert syncheck.compare(tmp_path).exit_code == 2
    except SyncheckError:
        assert not skipped
