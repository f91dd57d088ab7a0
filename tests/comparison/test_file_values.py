"""Python values beside the tensors: which are listed where they differ, and which make a group out of sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import network, save_pth, save_safetensors

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group

SCALER = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}


def training(**others: Any) -> dict[str, Any]:
    """Return a training checkpoint: a model, an optimizer of two parameter groups, a scaler, and how far it is."""
    groups = [{"lr": lr, "betas": (0.9, 0.99), "foreach": None, "params": [i]} for i, lr in enumerate((0.1, 0.2))]
    state = {i: {"exp_avg": np.ones(3, np.float32)} for i in range(2)}
    tree = {
        "model": network(),
        "optimizer": {"state": state, "param_groups": groups},
        "scaler": dict(SCALER),
        "epoch": 1,
    }
    return tree | others


def group_of(folder: Path, *trees: dict[str, Any]) -> Group:
    """Compare training checkpoints as ranks of one run."""
    for rank, tree in enumerate(trees):
        save_pth(folder / f"rank{rank}.pth", tree)
    (group,) = syncheck.compare(folder).groups
    return group


def with_groups(*changes: dict[str, Any], number: int = 2) -> dict[str, Any]:
    """Return a training checkpoint whose parameter groups hold other values, or are fewer."""
    tree = training()
    made = zip(tree["optimizer"]["param_groups"], (*changes, {}, {}), strict=False)
    tree["optimizer"]["param_groups"] = [group | change for group, change in made][:number]
    return tree


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (with_groups({"lr": 0.3}), {"optimizer.param_groups.0.lr"}),
        (with_groups({}, {"betas": (0.8, 0.99)}), {"optimizer.param_groups.1.betas"}),
        (with_groups({"foreach": True}), {"optimizer.param_groups.0.foreach"}),
        (training(scaler=SCALER | {"scale": 1.0}), {"scaler.scale"}),
        (training(scaler=SCALER | {"_growth_tracker": 4}), {"scaler._growth_tracker"}),
        (training(epoch=2), {"epoch"}),
        (training(step=5), set()),  # the others do not say
        (training(note="y"), set()),
    ],
)
def test_what_counts(tmp_path: Path, other: dict[str, Any], differing: set[str]) -> None:
    """A value of a parameter group or the scaler, or another epoch, is out of sync on the rank that has it."""
    group = group_of(tmp_path, training(), training(), other)
    assert {value.name for value in group.values if value.counts} == differing
    assert group.verdict == ("out_of_sync" if differing else "in_sync")
    covered = {name for finding in group.findings for name in finding.values}
    assert covered == differing


def test_what_is_listed_only(tmp_path: Path) -> None:
    """Other numbers and strings that differ are listed with each rank's value, and fail nothing."""
    trees = [training(note=f"rank {rank}", best={"accuracy": 0.5 + rank}) for rank in range(2)]
    group = group_of(tmp_path, *trees)
    assert group.verdict == "in_sync"
    assert {value.name: dict(value.by_rank) for value in group.values} == {
        "note": {0: "rank 0", 1: "rank 1"},
        "best.accuracy": {0: 0.5, 1: 1.5},
    }


def test_equal_values_of_other_types_are_equal(tmp_path: Path) -> None:
    """1 and 1.0 are one value, and so are two NaNs; a NaN on one rank only is a difference."""
    nan = float("nan")
    assert group_of(tmp_path, training(epoch=1, loss=nan), training(epoch=1.0, loss=nan)).values == ()
    group = group_of(tmp_path, with_groups({"lr": nan}), with_groups({"lr": 0.1}))
    assert [value.name for value in group.values if value.counts] == ["optimizer.param_groups.0.lr"]


def test_a_parameter_group_that_is_lost(tmp_path: Path) -> None:
    """A whole parameter group that one rank lacks is out of sync, though no value of it differs from another one."""
    group = group_of(tmp_path, with_groups(), with_groups(number=1))
    assert group.verdict == "out_of_sync"
    assert {value.name for value in group.values if value.counts} == {
        "optimizer.param_groups.1.lr",
        "optimizer.param_groups.1.betas",
        "optimizer.param_groups.1.foreach",
    }


def test_what_a_file_does_not_hold_is_no_difference(tmp_path: Path) -> None:
    """A single key, which versions of torch add, and a scaler that one file does not hold at all, count for nothing."""
    other = with_groups({"initial_lr": 0.1})
    del other["scaler"]
    group = group_of(tmp_path, training(), other)
    assert group.verdict == "in_sync"
    assert {value.name for value in group.values} == {"optimizer.param_groups.0.initial_lr"} | {
        f"scaler.{name}" for name in SCALER
    }


def test_formats_that_hold_no_values(tmp_path: Path) -> None:
    """A safetensors file has no step, epoch or learning rate to differ in; its tensors are compared."""
    save_pth(tmp_path / "rank0.pth", {"model": network(), "epoch": 3, "scaler": SCALER})
    save_safetensors(tmp_path / "rank1.safetensors", network())
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, group.counts.identical) == ("in_sync", len(network()))


def test_what_some_files_lack_is_told(tmp_path: Path) -> None:
    """Values that not all files of one format hold are named as not compared, five a line and in a few lines."""
    trees = [training(), training()]
    del trees[1]["scaler"]
    assert "not on rank 1, and so not compared: scaler" in group_of(tmp_path, *trees).notes
    trees = [training(**{f"own{rank}_{i}_{'x' * 200}": i for i in range(7)}) for rank in range(5)]
    told = [note for note in group_of(tmp_path, *trees).notes if "compared" in note]
    assert len(told) == 4
    assert told[0].startswith("not on ranks 1, 2, 3, 4, and so not compared: own0_0_x")
    assert told[0].endswith("xxx and 2 more")
    assert told[3] == "nor compared: 14 more values that not all ranks have"
    assert all(len(note) < 600 for note in told)
