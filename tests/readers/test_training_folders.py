"""Folders of Accelerate, DeepSpeed and Megatron-LM, with the documented file names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import changed, network, save, save_pth

import syncheck
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from pathlib import Path


def adam(value: float = 1.0) -> dict[str, Any]:
    """Return the state dict of an optimizer with one parameter."""
    state = {0: {"step": np.array(7, np.float32), "exp_avg": np.full(6, value, np.float32)}}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}


def accelerate(folder: Path, value: float = 1.0) -> Path:
    """Write a `save_state` folder of two models, two ranks and a custom object."""
    save(folder / "model.safetensors", network())
    save(folder / "model_1.safetensors", {"head.weight": np.full(3, value, np.float32)})
    save_pth(folder / "optimizer.bin", adam())
    save_pth(folder / "optimizer_1.bin", adam(value))
    save_pth(folder / "scheduler.bin", {"last_epoch": 3})
    save_pth(folder / "scaler.pt", {"scale": 1024.0, "_growth_tracker": 0})
    save_pth(folder / "sampler.bin", {"epoch": 1})
    save_pth(folder / "custom_checkpoint_0.pkl", {"average": np.ones(2, np.float32)})
    for rank in range(2):
        state = {"step": 9, "random_state": (3, tuple(range(625)), None), "torch_manual_seed": np.full(4, rank)}
        save_pth(folder / f"random_states_{rank}.pkl", state)
    return folder


def zero_part(partition: float, stage: int = 2) -> dict[str, Any]:
    """Return one rank's ZeRO partition of the optimizer, as DeepSpeed saves it."""
    flat = np.full(8, partition, np.float32)
    inner = {"base_optimizer_state": adam(partition), "single_partition_of_fp32_groups": [flat], "zero_stage": stage}
    return {"optimizer_state_dict": inner, "ds_version": "0.17"}


def deepspeed(folder: Path, ranks: int = 2, model_parallel: int = 1, value: float = 0.0, prefix: str = "") -> Path:
    """Write a tag folder. value: added to the last partition."""
    for part in range(model_parallel):
        model = {"module": network(part), "global_steps": 500, "dp_world_size": ranks, "mp_world_size": model_parallel}
        save_pth(folder / f"mp_rank_{part:02}_model_states.pt", model)
        for rank in range(ranks):
            last = rank == ranks - 1 and part == model_parallel - 1
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02}_optim_states.pt"
            save_pth(folder / name, zero_part(10 * part + rank + (value if last else 0)))
    (folder.parent / "latest").write_text(folder.name)
    return folder


def megatron(folder: Path, parts: tuple[str, ...] = ("mp_rank_00", "mp_rank_01"), value: float = 0.0) -> Path:
    """Write one iteration. value: added to the last part's last tensor."""
    for i, part in enumerate(parts):
        model = changed(network(i), "fc.bias", by=value if i == len(parts) - 1 else 0.0)
        tree = {"iteration": 500, "checkpoint_version": 3.0, "model": model, "optimizer": {"optimizer": adam(i)}}
        save_pth(folder / part / "model_optim_rng.pt", tree)
    return folder


def test_accelerate(tmp_path: Path) -> None:
    """A `save_state` folder is one snapshot; models, optimizers and RNG states have separate names."""
    left, right = accelerate(tmp_path / "a"), accelerate(tmp_path / "b", value=2.0)
    snapshot = syncheck.read(str(left))
    names = {"fc.weight", "model_1.head.weight", "optimizer.0.0.exp_avg", "optimizer.1.0.exp_avg"}
    assert snapshot.format == "accelerate"
    assert names | {"custom_checkpoint.0.average", "random_states.1.torch_manual_seed"} <= snapshot.tensors.keys()
    values = {"scaler.scale": 1024.0, "sampler.epoch": 1, "scheduler.last_epoch": 3, "random_states.0.step": 9}
    assert values.items() <= snapshot.values.items()
    report = syncheck.compare(left, right)
    (group,) = report.groups
    assert [diff.name for diff in group.tensors if diff.out_of_sync] == ["model_1.head.weight", "optimizer.1.0.exp_avg"]
    assert (group.kinds["rng"].not_compared, report.skipped) == (2, 0)


@pytest.mark.parametrize(
    ("ending", "groups", "first", "name"),
    [
        ("bin", 1, (3, 2), "optimizer.a.weight.exp_avg"),
        ("safetensors", 1, (3, 2), "optimizer.0.exp_avg"),  # sorted by name, so the order is not the model's
        ("bin", 2, (3, 2), "optimizer.0.exp_avg"),  # ids follow the groups
        ("bin", 1, (2, 3), "optimizer.0.exp_avg"),  # of another shape
    ],
)
def test_names_of_an_optimizer_in_its_own_file(
    tmp_path: Path, ending: str, groups: int, first: tuple[int, ...], name: str
) -> None:
    """Ids become names if the order and shapes of the weights determine them."""
    name_of_weights = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    save(tmp_path / name_of_weights, {"a.weight": np.ones((3, 2), np.float32), "a.bias": np.ones(3, np.float32)})
    state = {i: {"exp_avg": np.zeros(shape, np.float32)} for i, shape in enumerate((first, (3,)))}
    listed = [{"lr": 0.1, "params": [0, 1]}] if groups == 1 else [{"lr": 0.1, "params": [i]} for i in (0, 1)]
    save_pth(tmp_path / "optimizer.bin", {"state": state, "param_groups": listed})
    snapshot = syncheck.read(str(tmp_path))
    assert name in snapshot.tensors
    assert all(tensor.name == key for key, tensor in snapshot.tensors.items())


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_deepspeed(tmp_path: Path, prefix: str) -> None:
    """Two tag folders are two replicas; ZeRO partitions are compared between folders, not with each other."""
    left, right = (deepspeed(tmp_path / name / "global_step500", prefix=prefix) for name in "ab")
    report = syncheck.compare(left, right)
    (group,) = report.groups
    assert [r.format for r in group.replicas] == ["deepspeed", "deepspeed"]
    assert (report.verdict, group.step) == ("in_sync", 500)
    # A model, and of two ranks a flat partition, a moment and a step.
    assert group.counts.identical == len(network()) + 2 * 3
    assert group.kinds["optimizer"].identical == 4
    assert group.evidence.stores_progress
    deepspeed(right, value=1.0, prefix=prefix)
    (group,) = syncheck.compare(left, right).groups
    assert sorted(diff.name for diff in group.tensors) == [
        "optimizer.zero_pp_rank_1_mp_rank_00.0.exp_avg",
        "optimizer.zero_pp_rank_1_mp_rank_00.single_partition_of_fp32_groups.0",
    ]


def test_deepspeed_parts_of_the_model(tmp_path: Path) -> None:
    """Files of two model-parallel ranks are different parts, and their tensors get different names."""
    left, right = (deepspeed(tmp_path / name / "global_step500", model_parallel=2) for name in "ab")
    snapshot = syncheck.read(str(left))
    assert {"mp_rank_00.fc.weight", "mp_rank_01.fc.weight"} <= snapshot.tensors.keys()
    assert snapshot.values["global_steps"] == 500
    report = syncheck.compare(left, right)
    assert report.verdict == "in_sync"
    assert report.groups[0].kinds["bn_mean"].identical == 4


def test_partitions_named_by_file_are_no_replicas(tmp_path: Path) -> None:
    """ZeRO optimizer files that are passed one by one are disjoint: not compared, and no false alarm."""
    folder = deepspeed(tmp_path / "global_step500")
    report = syncheck.compare(*sorted(folder.glob("zero*.pt")))
    assert (report.verdict, report.exit_code) == ("undecided", 2)
    assert {group.grouping for group in report.groups} == {(Grouping.SHARDS_ALONE(),)}


def test_a_single_deepspeed_run(tmp_path: Path) -> None:
    """A DeepSpeed run with two tags gives two snapshots without replicas; `latest` is skipped and counted."""
    for step in (500, 1000):
        deepspeed(tmp_path / "run" / f"global_step{step}")
    report = syncheck.compare(tmp_path / "run")
    assert [(group.step, group.verdict) for group in report.groups] == [(500, "alone"), (1000, "alone")]
    assert (report.skipped, report.exit_code) == (1, 2)


@pytest.mark.parametrize("parts", [("mp_rank_00",), ("mp_rank_00", "mp_rank_01"), ("mp_rank_00_000", "mp_rank_00_001")])
def test_megatron(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """An iteration is one snapshot of several parts, and a difference is reported with its part."""
    left, right = (megatron(tmp_path / name / "iter_0000500", parts) for name in "ab")
    report = syncheck.compare(left, right)
    (group,) = report.groups
    assert (report.verdict, group.step, group.replicas[0].format) == ("in_sync", 500, "megatron")
    assert group.counts.identical == len(parts) * (len(network()) + 2)
    assert syncheck.read(str(left)).values["iteration"] == 500
    megatron(right, parts, value=1.0)
    (group,) = syncheck.compare(left, right).groups
    assert [diff.name for diff in group.tensors] == ["fc.bias" if len(parts) == 1 else f"{parts[-1]}.fc.bias"]


def test_megatron_optimizer_in_its_own_file(tmp_path: Path) -> None:
    """The distributed optimizer's file contains only optimizer state."""
    folder = megatron(tmp_path / "iter_0000500", ("mp_rank_00",))
    save_pth(folder / "mp_rank_00" / "distrib_optim.pt", {"0": {"param": np.ones(4, np.float32)}})
    snapshot = syncheck.read(str(folder))
    assert "optimizer.0.param" in snapshot.tensors
    report = syncheck.compare(tmp_path)
    assert [group.replicas[0].path for group in report.groups] == [str(folder)]


def test_a_broken_part(tmp_path: Path) -> None:
    """A truncated part makes the folder unreadable, and the part is reported."""
    left, right = (megatron(tmp_path / name / "iter_0000500") for name in "ab")
    part = right / "mp_rank_01" / "model_optim_rng.pt"
    part.write_bytes(part.read_bytes()[:-30])
    report = syncheck.compare(left, right)
    (unreadable,) = report.unreadable
    assert unreadable.path == str(right)
    assert unreadable.reason.startswith("mp_rank_01/model_optim_rng.pt: zip directory: ")
