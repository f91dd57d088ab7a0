"""Python values beside the tensors: which differences are only listed, and which make a group out of sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import compare_ranks, network, save_pth, save_safetensors
from support.listings import find_all, join_fields, list_codes, list_fields, list_names

import syncheck
from syncheck.messages import Note

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group

SCALER = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}


def training(**others: Any) -> dict[str, Any]:
    """Return a training checkpoint: model, optimizer with two parameter groups, gradient scaler and epoch."""
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
    """Return the only group of a comparison of these training checkpoints."""
    (group,) = compare_ranks(folder, *trees).groups
    return group


def with_groups(*changes: dict[str, Any], number: int = 2) -> dict[str, Any]:
    """Return a training checkpoint with changed parameter groups, or with fewer groups."""
    tree = training()
    created = zip(tree["optimizer"]["param_groups"], (*changes, {}, {}), strict=False)
    tree["optimizer"]["param_groups"] = [group | change for group, change in created][:number]
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
        (training(step=5), set()),  # the other files have no step
        (training(note="y"), set()),
    ],
)
def test_counted_values(tmp_path: Path, other: dict[str, Any], differing: set[str]) -> None:
    """A difference in a parameter group, the scaler or the epoch has a finding and makes the ranks out of sync."""
    group = group_of(tmp_path, training(), training(), other)
    assert set(list_names(find_all(group.values, counts=True))) == differing
    assert group.verdict == ("out_of_sync" if differing else "in_sync")
    covered = set(join_fields(group.findings, "values"))
    assert covered == differing


def test_other_values_are_listed_only(tmp_path: Path) -> None:
    """Differences in other numbers and strings are listed with each rank's value and fail nothing."""
    trees = [training(note=f"rank {rank}", best={"accuracy": 0.5 + rank}) for rank in range(2)]
    group = group_of(tmp_path, *trees)
    assert group.verdict == "in_sync"
    assert {value.name: dict(value.by_rank) for value in group.values} == {
        "note": {0: "rank 0", 1: "rank 1"},
        "best.accuracy": {0: 0.5, 1: 1.5},
    }


def test_equal_values_of_other_types_are_equal(tmp_path: Path) -> None:
    """1 and 1.0 are equal, as are two NaNs; a NaN on one rank only is a difference."""
    nan = float("nan")
    assert group_of(tmp_path, training(epoch=1, loss=nan), training(epoch=1.0, loss=nan)).values == ()
    group = group_of(tmp_path, with_groups({"lr": nan}), with_groups({"lr": 0.1}))
    assert list_names(find_all(group.values, counts=True)) == ["optimizer.param_groups.0.lr"]


def test_a_lost_parameter_group(tmp_path: Path) -> None:
    """If one rank lacks a whole parameter group, the ranks are out of sync, although all common values are equal."""
    group = group_of(tmp_path, with_groups(), with_groups(number=1))
    assert group.verdict == "out_of_sync"
    assert set(list_names(find_all(group.values, counts=True))) == {
        "optimizer.param_groups.1.lr",
        "optimizer.param_groups.1.betas",
        "optimizer.param_groups.1.foreach",
    }


def test_a_key_in_one_file_only_is_no_difference(tmp_path: Path) -> None:
    """If one parameter group lacks a key, the ranks are in sync, because versions of torch and schedulers add keys."""
    group = group_of(tmp_path, training(), with_groups({"initial_lr": 0.1}))
    assert group.verdict == "in_sync"
    assert list_names(group.values) == ["optimizer.param_groups.0.initial_lr"]


@pytest.mark.parametrize("lost", ["optimizer", "scaler", "lr_scheduler"])
@pytest.mark.parametrize("empty", [False, True])
def test_an_object_that_one_rank_lacks(tmp_path: Path, lost: str, empty: bool) -> None:
    """An optimizer, scaler or scheduler that one rank saved empty or not at all is SYN101 on this rank."""
    trees = [training(lr_scheduler={"last_epoch": 3, "_step_count": 4}) for _ in range(3)]
    for tree in trees:
        tree["optimizer"]["state"] = {}
    del trees[1][lost]
    if empty:
        trees[1][lost] = {}
    group = group_of(tmp_path, *trees)
    assert list_fields(group.findings, "code", "ranks") == [("SYN101", (1,))]
    assert all(value.lost == (1,) for value in group.values)
    options = syncheck.Options(exclude=(f"{lost}.*",))
    assert syncheck.compare(tmp_path, options=options).verdict == "in_sync"


def test_a_loss_scale_on_one_rank_only(tmp_path: Path) -> None:
    """A loss scale within another object's state, as in fairseq, must be on all ranks or on no rank."""
    trees = [training(), training()]
    trees[1]["optimizer"]["loss_scale"] = 4.0
    group = group_of(tmp_path, *trees)
    assert group.verdict == "out_of_sync"
    assert list_names(find_all(group.values, counts=True)) == ["optimizer.loss_scale"]


def test_another_class_of_scheduler(tmp_path: Path) -> None:
    """If each of two schedulers has keys that the other lacks, the finding is SYN107; extra keys on one side pass."""
    plain = {"last_epoch": 3, "_step_count": 4, "gamma": 0.5}
    step = plain | {"step_size": 7}
    cosine = plain | {"T_max": 100}
    assert group_of(tmp_path / "a", training(scheduler=plain), training(scheduler=step)).verdict == "in_sync"
    group = group_of(tmp_path / "b", training(scheduler=cosine), training(scheduler=step))
    assert list_codes(group.findings) == ["SYN107"]


def test_formats_without_values(tmp_path: Path) -> None:
    """A safetensors file without step, epoch and settings is compared with a .pth file by its tensors only."""
    save_pth(tmp_path / "rank0.pth", {"model": network(), "epoch": 3, "scaler": SCALER})
    save_safetensors(tmp_path / "rank1.safetensors", network())
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, group.counts.identical) == ("in_sync", len(network()))


def test_values_that_some_files_lack_are_noted(tmp_path: Path) -> None:
    """Values that only some files contain are noted as not compared: three notes of five names, and a count."""
    trees = [training(note=1), training()]
    assert Note.VALUES_ABSENT(ranks=(1,), names=("note",)) in group_of(tmp_path, *trees).notes
    trees = [training(**{f"own{rank}_{i}_{'x' * 200}": i for i in range(7)}) for rank in range(5)]
    notes = group_of(tmp_path, *trees).notes
    first, *remaining = find_all(notes, code=Note.VALUES_ABSENT)
    assert (first.parameters["ranks"], len(first.parameters["names"]), len(remaining)) == ((1, 2, 3, 4), 7, 2)
    assert str(first).count("own0_") == 5
    assert Note.MORE_VALUES_ABSENT(count=14) in notes
    assert all(len(str(note)) < 600 for note in notes)


# Counted values under the keys of several trainers: key, two values, finding.
KEPT = [
    ("scaler_state_dict", SCALER, SCALER | {"scale": 1.0}, "SYN216"),
    ("grad_scaler", SCALER, SCALER | {"_growth_tracker": 1}, "SYN216"),
    ("amp", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}},
     {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}}, "SYN216"),
    ("native_amp_scaling_state", SCALER, SCALER | {"scale": 1.0}, "SYN216"),
    ("MixedPrecision", SCALER, SCALER | {"scale": 1.0}, "SYN216"),
    ("state", {"plugin": {"deep": SCALER}}, {"plugin": {"deep": SCALER | {"scale": 1.0}}}, "SYN216"),
    ("trainer", {"_trainer": {"grad_scaler": SCALER}}, {"_trainer": {"grad_scaler": SCALER | {"scale": 1.0}}},
     "SYN216"),
    ("skipped_steps", 0, 1, "SYN216"),
    ("lr_schedulers", [{"last_epoch": 3, "_last_lr": [0.1]}], [{"last_epoch": 3, "_last_lr": [0.2]}], "SYN107"),
    ("sched", {"best": 0.5, "num_bad_epochs": 0}, {"best": 0.5, "num_bad_epochs": 2}, "SYN107"),
    ("opt_param_scheduler", {"max_lr": 0.1, "num_steps": 5}, {"max_lr": 0.1, "num_steps": 6}, "SYN107"),
    ("warm", {"last_epoch": 3, "_step_count": 4, "T_max": 9}, {"last_epoch": 3, "_step_count": 4, "T_max": 8},
     "SYN107"),
    ("config", {"learning_rate": 0.1}, {"learning_rate": 0.2}, "SYN107"),
    ("iter_num", 100, 101, "SYN106"),
    ("current_epoch", 1, 2, "SYN106"),
    ("optimizer_history", [{"num_updates": 7}], [{"num_updates": 8}], "SYN106"),
    ("extra_state", {"train_iterator": {"epoch": 2}}, {"train_iterator": {"epoch": 3}}, "SYN106"),
    ("train_state", {"step": 5}, {"step": 6}, "SYN106"),
    ("meta", {"iter": 5}, {"iter": 6}, "SYN106"),
    ("loops", {"fit_loop": {"epoch_progress": {"current": {"completed": 5}}}},
     {"fit_loop": {"epoch_progress": {"current": {"completed": 6}}}}, "SYN106"),
    ("loops", {"optim_progress": {"optimizer": {"step": {"total": {"ready": 5}}}}},
     {"optim_progress": {"optimizer": {"step": {"total": {"ready": 6}}}}}, "SYN106"),
    ("ema", {"num_updates": 5, "decay": 0.9}, {"num_updates": 6, "decay": 0.9}, "SYN299"),
]  # fmt: skip
# Values that differ between ranks in sync.
OWN = {
    "loss": 0.5, "best_loss": 0.4, "best_epoch": 3, "metric": 71.2, "metrics": {"train": {"step": 4, "loss": 0.3}},
    "callbacks": {"EarlyStopping": {"wait_count": 2, "best_score": 0.4}},
    "args": {"local_rank": 0, "gpu": 1, "epochs": 7},
    "hyper_parameters": {"device": "cuda:0", "out": "/out/0"}, "rng_state": {"seed": 3}, "timestamp": 1.5, "date": "a",
    "dataloader": {"step": 3, "num_yielded": 17}, "sampler": {"epoch": 3}, "host": "a", "scheduler": {"rank": 0},
    "random_states": {"step": 5}, "log_history": [{"step": 1, "loss": 0.1}], "tokens_seen": 5, "eval_time": 3.0,
    "extra_state": {"previous_training_time": 12.5, "metrics": {"default": [{"updates": 3}]}}, "version": "2.1",
    "message_hub": {"log_scalars": {"iter": 3}}, "validate_loop": {"epoch_progress": {"current": {"completed": 3}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "other", "code"), KEPT, ids=lambda part: part if isinstance(part, str) else ""
)
def test_counted_values_under_the_keys_of_trainers(tmp_path: Path, key: str, value: Any, other: Any, code: str) -> None:
    """Scalers, schedulers and progress are recognized under every trainer's key, by name or by structure."""
    group = group_of(tmp_path, *(training(**{key: first}) for first in (value, value, other)))
    assert list_fields(group.findings, "code", "ranks") == [(code, (2,))]
    assert len(group.values) >= 1


def test_values_of_single_ranks_do_not_count(tmp_path: Path) -> None:
    """Losses, metrics, callbacks, data positions, times, hosts and RNG states differ by design and are only listed."""

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: other(source_value) for key, source_value in value.items()}
        return [other(source_value) for source_value in value] if isinstance(value, list) else value * 2 or 1

    group = group_of(tmp_path, training(**OWN), training(**other(OWN)))
    assert (group.verdict, group.findings) == ("in_sync", ())
    assert len(group.values) > 30


MEMBERS = [
    ([[0], [1]], [[1], [0]], 1),
    ([[0], [1]], [[0, 1], []], 1),
    ([["a", "b"], ["c"]], [["b", "a"], ["c"]], 0),
    ([["a", "b"], ["c"]], [["a", "c"], ["b"]], 1),
    ([["module.a"], ["module.b"]], [["a"], ["b"]], 0),
]


@pytest.mark.parametrize(("members", "others", "code"), MEMBERS)
def test_members_of_parameter_groups(tmp_path: Path, members: Any, others: Any, code: int) -> None:
    """Members swapped between groups with different weight decay are SYN107; the order within a group is ignored."""
    trees = []
    for groups in (members, others):
        listing = [{"lr": 0.1, "weight_decay": 0.1 * i, "params": group} for i, group in enumerate(groups)]
        trees.append({"model": network(), "optimizer": {"state": {}, "param_groups": listing}})
    report = compare_ranks(tmp_path, *trees)
    assert report.exit_code == code
    assert list_codes(report.groups[0].findings) == ["SYN107"] * code


HUGE = [10**309, 10**400, -(10**400), 10**5000]


@pytest.mark.parametrize("number", HUGE, ids=["309", "400", "negative", "5000"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_integers_beyond_the_range_of_floats(tmp_path: Path, number: int, ranks: tuple[int, ...]) -> None:
    """An integer beyond float64 in a setting, step, scale or progress is exit code 2; other values are compared."""
    huge = {"lr": number, "step": number, "scaler": SCALER | {"scale": number}, "lr_scheduler": {"last_epoch": number}}
    for i, (key, value) in enumerate(huge.items()):
        trees = [training(**({key: value} if rank in ranks else {})) for rank in range(2)]
        report = compare_ranks(tmp_path / str(i), *trees)
        assert report.exit_code == 2
        assert len(report.unreadable) == len(ranks)
    trees = [training(modulus=number if rank in ranks else 3) for rank in range(2)]
    assert group_of(tmp_path / "note", *trees).verdict == "in_sync"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, None, "0.1" * 10**5, 2**1000, -0.5])
def test_odd_settings(tmp_path: Path, value: Any) -> None:
    """Every value of a setting is equal to itself and differs from another value."""
    assert group_of(tmp_path / "a", with_groups({"lr": value}), with_groups({"lr": value})).verdict == "in_sync"
    assert group_of(tmp_path / "b", with_groups({"lr": value}), with_groups({"lr": 0.25})).verdict == "out_of_sync"


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "a number and a dict": (3, {"a": 1}),
    "a number and a tuple": (3, (1, 2)),
    "a number and a list": (3, [3]),
    "a text and a dict": ("resnet", {"name": "resnet"}),
    "a number and a dict of a dict": (3, {"a": {"b": 1}}),
    "a number and a tensor": (2.0, np.ones(2, np.float32)),
    "None and a tensor": (None, np.ones(2, np.float32)),
    "a number and a dict with a tensor": (3, {"a": np.ones(2, np.float32)}),
    "a tensor and a dict with a tensor": (np.ones(2, np.float32), {"a": np.ones(2, np.float32)}),
}


@pytest.mark.parametrize("key", ["step", "note", "config.width"])
@pytest.mark.parametrize("what", STRUCTURES)
def test_another_structure_counts(tmp_path: Path, what: str, key: str) -> None:
    """A value that is a dict, list or tensor on another rank is SYN101, whatever its kind, and also between models."""
    outer, _, inner = key.partition(".")
    trees = [training(**{outer: {inner: value} if inner else value}) for value in STRUCTURES[what]]
    group = group_of(tmp_path, *trees)
    assert group.verdict == "out_of_sync"
    (finding,) = group.findings
    assert finding.code == "SYN101"
    assert all(name == key or name.startswith(f"{key}.") for name in (*finding.tensors, *finding.values))
    paths = [tmp_path / f"m_rank{rank}.pth" for rank in range(2)]
    assert syncheck.diff(paths[0], paths[1]).exit_code == 1
    assert syncheck.diff(paths[1], paths[0]).exit_code == 1


def test_another_structure_beside_different_numbers(tmp_path: Path) -> None:
    """Of three ranks, the only rank with another structure is the suspect, and the names show both structures."""
    group = group_of(tmp_path, training(step=3), training(step=3), training(step={"a": 1}))
    (finding,) = group.findings
    assert (finding.code, finding.values) == ("SYN101", ("step", "step.a"))
    assert {value.name: value.lost for value in group.values} == {"step": (2,), "step.a": (0, 1)}


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        # None stands for an object that the rank does not have.
        ({"best": None}, {"best": {"accuracy": 0.5}}, {}),
        # The host of a rank may be any value.
        ({"host": "a"}, {"host": ["a", "b"]}, {"exclude": ("host.*",)}),
        ({"step": 3}, {"step": {"a": 1}}, {"exclude": ("step*",)}),
        ({"note": "y"}, {"note": ["y"]}, {"only": ("params",)}),
    ],
)
def test_another_structure_that_does_not_count(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], options: dict[str, Any]
) -> None:
    """None has no structure, values of the rank may have any, and options exclude values as usual."""
    report = compare_ranks(tmp_path, training(**first), training(**second), **options)
    assert report.verdict == "in_sync"


def test_none_in_place_of_an_object_is_noted(tmp_path: Path) -> None:
    """A rank with None in place of an object that is only listed has a note, like a rank without it."""
    group = group_of(tmp_path, training(best={"accuracy": 0.5}), training(best=None))
    assert group.verdict == "in_sync"
    assert Note.VALUES_ABSENT(ranks=(1,), names=("best",)) in group.notes


def test_another_structure_in_another_format(tmp_path: Path) -> None:
    """Files of several formats store values differently, so a structure of another format is only listed."""
    save_pth(tmp_path / "m_rank0.pth", network() | {"note": {"a": "x"}})
    save_safetensors(tmp_path / "m_rank1.safetensors", network())
    assert syncheck.compare(tmp_path / "m_rank0.pth", tmp_path / "m_rank1.safetensors").exit_code == 0
