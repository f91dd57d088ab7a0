"""Flattening of nested objects to names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import network, save_pth
from support.listings import find_all, list_names
from support.states import add_prefix

import syncheck
from syncheck.errors import MalformedFile
from syncheck.readers.pickles import tree as tree_module

if TYPE_CHECKING:
    from pathlib import Path

W = np.ones(2, np.float32)


def names(folder: Path, tree: Any) -> list[str]:
    """Return the tensor names of a checkpoint of this tree."""
    return list(syncheck.read(str(save_pth(folder / "a.pth", tree))).tensors)


def optimizer(state: dict[Any, Any], **group: Any) -> dict[str, Any]:
    """Return an optimizer's state dict with one group."""
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1], **group}]}


BY_NAME = {"state": {"w": {"exp_avg": W}}, "param_groups": [{"params": ["w"]}]}
ODD = np.ones(5, np.float32)


@pytest.mark.parametrize(
    "tree, expected",
    [
        ({"model": {"fc.w": W}, "epoch": 3}, ["fc.w"]),
        ({"state_dict": {"model.fc.w": W}}, ["model.fc.w"]),
        ({"model": {"state_dict": {"fc.w": W}}}, ["model.fc.w"]),
        ({"generator": {"w": W}, "discriminator": {"w": W}}, ["generator.w", "discriminator.w"]),
        ({"model": {"w": W}, "state_dict": {"w": W}}, ["model.w", "state_dict.w"]),
        ({"model": {"w": W}, "net": {"v": W}}, ["model.w", "net.v"]),
        ({"model": {"w": W}, "w": W}, ["model.w", "w"]),
        ({"model": {"w": W, "module": {"v": W}}}, ["w", "v"]),
        ({"model": {"w": W, "module": {"w": W}}}, ["model.w", "model.module.w"]),
        ([W, {"a": W}], ["0", "1.a"]),
        (W, ["tensor"]),
        ({1: W, (2, 3): W}, ["1", "(2, 3)"]),
        ({"": W, "model": {"": W}}, ["tensor", "model."]),
        ({}, []),
        # Two optimizers, as in a GAN. Ids are kept if the number or the shapes of the parameters differ.
        ({"opt_g": BY_NAME, "opt_d": BY_NAME}, ["optimizer.0.w.exp_avg", "optimizer.1.w.exp_avg"]),
        ({"model": {"a": W, "b": W}, "o": optimizer({0: {"exp_avg": ODD}})}, ["a", "b", "optimizer.0.exp_avg"]),
        ({"model": {"a": W}, "o": optimizer({0: {"exp_avg": W}})}, ["a", "optimizer.0.exp_avg"]),
    ],
    ids=repr,
)
def test_names(tmp_path: Path, tree: Any, expected: list[str]) -> None:
    """Container keys of state dicts are omitted from names, and no tensor is lost or hidden."""
    assert names(tmp_path, tree) == expected


A, B = {"w": W, "v": W}, {"w": W + 1}


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ({"model": A, "net": B}, {"net": B, "model": A}, 0),
        ({"model": A, "net": B}, {"net": A, "model": B}, 1),
        ({"model": A, "net": {"w": W + 1, "v": W}}, {"net": A, "model": {"w": W + 1, "v": W}}, 1),
        ({"model": A}, {"state_dict": A}, 0),
        ({"model": A}, {"net": B | {"v": W}}, 1),
        ({"model": B, "w": W}, {"w": W, "model": B}, 0),
        ({"model": B, "w": W}, {"w": W + 1, "model": {"w": W}}, 1),
        ({"model": {"u": W}, "net": {"v": W + 1}}, {"model": {"v": W + 1}, "net": {"u": W}}, 1),
        ({"model": A, "ema": {"model": B}}, {"ema": {"model": B}, "model": A}, 0),
    ],
)
def test_names_do_not_depend_on_the_order_of_keys(tmp_path: Path, first: Any, second: Any, code: int) -> None:
    """Containers in any order or under another key are equal; exchanged contents are not."""
    for rank, tree in enumerate((first, second)):
        save_pth(tmp_path / f"m_rank{rank}.pth", tree)
    assert syncheck.compare(tmp_path).exit_code == code


def test_settings_of_an_optimizer(tmp_path: Path) -> None:
    """Numbers and tuples of a group are values, and a learning rate in a tensor is a tensor."""
    tree = {"optimizer": optimizer({}, betas=(0.9, 0.99), weight=np.array(0.5, np.float32))}
    result = syncheck.read(str(save_pth(tmp_path / "a.pth", tree)))
    settings = {"lr": 0.1, "betas": "(0.9, 0.99)", "(positions)": "0, 1"}
    assert result.values == add_prefix(settings, "optimizer.param_groups.0.")
    assert list(result.tensors) == ["optimizer.param_groups.0.weight"]


def test_other_content_of_an_optimizer(tmp_path: Path) -> None:
    """Slow weights besides the state, including nested optimizers, get names and are compared."""
    for rank in range(2):
        inner = {"state": {0: {"exp_avg": W + rank}}, "param_groups": [{"params": [0]}]}
        created = {**optimizer({"a": {"base": inner}, "mean": W + rank, "k": 5}), "slow": {"a": W + rank}}
        tree = {"model": {"a": W, "b": W}, "optimizer": created}
        path = save_pth(tmp_path / f"rank{rank}.pth", tree)
    named = ["optimizer.a.base.state.0.exp_avg", "optimizer.mean", "optimizer.slow.a"]
    read = syncheck.read(str(path))
    assert list(read.tensors)[2:] == named
    assert read.values["optimizer.k"] == 5
    (group,) = syncheck.compare(tmp_path).groups
    assert list_names(group.tensors) == named


@pytest.mark.parametrize("inside", [True, False], ids=["in its state", "beside it"])
def test_a_repeated_optimizer(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """A list that refers to one optimizer many times is an error, wherever its thousand counters are."""
    monkeypatch.setattr(tree_module, "MAX_NODES", 5_000)
    counters = dict.fromkeys(map(str, range(1_000)), 1)
    created = {"state": counters if inside else {}, "param_groups": [], **({} if inside else counters)}
    with pytest.raises(MalformedFile, match="containers unfold without end"):
        tree_module.flatten([created] * 100, "a.pth", size=0)


# --- bookkeeping of Lightning and of hand-written loops ---

KEY = "ModelCheckpoint{'monitor': 'loss'}"


def lightning(folder: Path, rank: int, callback: dict[str, Any]) -> Path:
    """Write a rank's file with the state of one callback."""
    optimizer = {"state": {0: {"exp_avg": np.zeros(2, np.float32)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = {"global_step": 3, "state_dict": {"w": np.ones(2, np.float32)}, "loops": {}, "callbacks": {KEY: callback}}
    return save_pth(folder / f"last_rank{rank}.ckpt", {**tree, "optimizer_states": [optimizer]})


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 0.5), (np.float64, 0.25), (np.int64, -3)])
def test_scalars_of_callbacks_are_values(tmp_path: Path, dtype: Any, value: float) -> None:
    """A callback's best score in a 0-d tensor is listed if it differs, and the files stay in sync."""
    files = [lightning(tmp_path, rank, {"best_model_score": np.array(value + rank, dtype)}) for rank in range(2)]
    snapshot = syncheck.read(str(files[0]))
    assert snapshot.values[f"callbacks.{KEY}.best_model_score"] == value
    report = syncheck.compare(*files)
    assert (report.verdict, report.groups[0].counts.tensors) == ("in_sync", 2)
    (diff,) = report.groups[0].values
    assert (dict(diff.by_rank), diff.counts) == ({0: value, 1: value + 1}, False)


def test_weights_of_callbacks_are_tensors(tmp_path: Path) -> None:
    """Averaged weights in a callback are compared like other tensors."""
    files = [lightning(tmp_path, rank, {"weights": np.full(2, rank, np.float32)}) for rank in range(2)]
    (group,) = syncheck.compare(*files).groups
    assert list_names(find_all(group.tensors, out_of_sync=True)) == [f"callbacks.{KEY}.weights"]


def test_tensors_of_callbacks_are_not_parameters(tmp_path: Path) -> None:
    """Optimizer states get their parameters' names although a callback has tensors too."""
    file = lightning(tmp_path, 0, {"best": np.array(1.0, np.float32), "weights": np.ones(3, np.float32)})
    assert "optimizer.w.exp_avg" in syncheck.read(str(file)).tensors


def test_words_of_rng_states_are_not_listed(tmp_path: Path) -> None:
    """Python's RNG state of 625 numbers differs by design and is not listed."""
    for rank in range(2):
        random = {"python": (3, tuple(range(rank, 625 + rank)), None), "seed": 7 + rank}
        save_pth(tmp_path / f"rank{rank}.pth", {"model": network(), "rng_state": random, "milestones": [rank, 5]})
    (group,) = syncheck.compare(tmp_path).groups
    assert set(list_names(group.values)) == {"rng_state.seed", "milestones.0"}
