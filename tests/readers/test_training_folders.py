"""Folders of Accelerate, DeepSpeed and Megatron-LM, complete and with missing or damaged parts."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_pth
from support.listings import find_all, list_codes, list_fields, list_names, list_starts

import syncheck
from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.messages import Grouping, Note
from syncheck.readers import safetensors_file, untrusted
from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report


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
    remaining, right = accelerate(tmp_path / "a"), accelerate(tmp_path / "b", value=2.0)
    snapshot = syncheck.read(str(remaining))
    names = {"fc.weight", "model_1.head.weight", "optimizer.0.0.exp_avg", "optimizer.1.0.exp_avg"}
    assert snapshot.format == "accelerate"
    assert names | {"custom_checkpoint.0.average", "random_states.1.torch_manual_seed"} <= snapshot.tensors.keys()
    values = {"scaler.scale": 1024.0, "sampler.epoch": 1, "scheduler.last_epoch": 3, "random_states.0.step": 9}
    assert values.items() <= snapshot.values.items()
    report = syncheck.compare(remaining, right)
    (group,) = report.groups
    assert list_names(find_all(group.tensors, out_of_sync=True)) == ["model_1.head.weight", "optimizer.1.0.exp_avg"]
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
    listing = [{"lr": 0.1, "params": [0, 1]}] if groups == 1 else [{"lr": 0.1, "params": [i]} for i in (0, 1)]
    save_pth(tmp_path / "optimizer.bin", {"state": state, "param_groups": listing})
    snapshot = syncheck.read(str(tmp_path))
    assert name in snapshot.tensors
    assert all(tensor.name == key for key, tensor in snapshot.tensors.items())


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_deepspeed(tmp_path: Path, prefix: str) -> None:
    """Two tag folders are two replicas; ZeRO partitions are compared between folders, not with each other."""
    remaining = deepspeed(tmp_path / "a" / "global_step500", prefix=prefix)
    right = deepspeed(tmp_path / "b" / "global_step500", prefix=prefix)
    report = syncheck.compare(remaining, right)
    (group,) = report.groups
    assert list_fields(group.replicas, "format") == ["deepspeed", "deepspeed"]
    assert (report.verdict, group.step) == ("in_sync", 500)
    # A model, and of two ranks a flat partition, a moment and a step.
    assert group.counts.identical == len(network()) + 2 * 3
    assert group.kinds["optimizer"].identical == 4
    assert group.evidence.stores_progress
    deepspeed(right, value=1.0, prefix=prefix)
    (group,) = syncheck.compare(remaining, right).groups
    assert sorted(list_names(group.tensors)) == [
        "optimizer.zero_pp_rank_1_mp_rank_00.0.exp_avg",
        "optimizer.zero_pp_rank_1_mp_rank_00.single_partition_of_fp32_groups.0",
    ]


def test_deepspeed_parts_of_the_model(tmp_path: Path) -> None:
    """Files of two model-parallel ranks are different parts, and their tensors get different names."""
    remaining = deepspeed(tmp_path / "a" / "global_step500", model_parallel=2)
    right = deepspeed(tmp_path / "b" / "global_step500", model_parallel=2)
    snapshot = syncheck.read(str(remaining))
    assert {"mp_rank_00.fc.weight", "mp_rank_01.fc.weight"} <= snapshot.tensors.keys()
    assert snapshot.values["global_steps"] == 500
    report = syncheck.compare(remaining, right)
    assert report.verdict == "in_sync"
    assert report.groups[0].kinds["bn_mean"].identical == 4


def test_partitions_named_by_file_are_no_replicas(tmp_path: Path) -> None:
    """ZeRO optimizer files passed one by one are disjoint: not compared, and no false alarm."""
    folder = deepspeed(tmp_path / "global_step500")
    report = syncheck.compare(*sorted(folder.glob("zero*.pt")))
    assert (report.verdict, report.exit_code) == ("undecided", 2)
    assert set(list_fields(report.groups, "grouping")) == {(Grouping.SHARDS_ALONE(),)}


def test_a_single_deepspeed_run(tmp_path: Path) -> None:
    """A DeepSpeed run with two tags gives two snapshots without replicas; `latest` is skipped and counted."""
    for step in (500, 1000):
        deepspeed(tmp_path / "run" / f"global_step{step}")
    report = syncheck.compare(tmp_path / "run")
    assert list_fields(report.groups, "step", "verdict") == [(500, "alone"), (1000, "alone")]
    assert (report.skipped, report.exit_code) == (1, 2)


@pytest.mark.parametrize("parts", [("mp_rank_00",), ("mp_rank_00", "mp_rank_01"), ("mp_rank_00_000", "mp_rank_00_001")])
def test_megatron(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """An iteration is one snapshot of several parts, and a difference is reported with its part."""
    remaining = megatron(tmp_path / "a" / "iter_0000500", parts)
    right = megatron(tmp_path / "b" / "iter_0000500", parts)
    report = syncheck.compare(remaining, right)
    (group,) = report.groups
    assert (report.verdict, group.step, group.replicas[0].format) == ("in_sync", 500, "megatron")
    assert group.counts.identical == len(parts) * (len(network()) + 2)
    assert syncheck.read(str(remaining)).values["iteration"] == 500
    megatron(right, parts, value=1.0)
    (group,) = syncheck.compare(remaining, right).groups
    assert list_names(group.tensors) == ["fc.bias" if len(parts) == 1 else f"{parts[-1]}.fc.bias"]


def test_megatron_optimizer_in_its_own_file(tmp_path: Path) -> None:
    """The distributed optimizer's file contains only optimizer state."""
    folder = megatron(tmp_path / "iter_0000500", ("mp_rank_00",))
    save_pth(folder / "mp_rank_00" / "distrib_optim.pt", {"0": {"param": np.ones(4, np.float32)}})
    snapshot = syncheck.read(str(folder))
    assert "optimizer.0.param" in snapshot.tensors
    report = syncheck.compare(tmp_path)
    assert [group.replicas[0].path for group in report.groups] == [str(folder)]


# --- parts that are missing, renumbered, of another run, or not files: reported, never ignored ---

BLOCK = {"run": "a", "run_id": "one", "step": 5}


def both(folder: Path, make: Callable[..., Path], name: str, plant: Callable[[Path], Any]) -> Report:
    """Compare two folders after the same damage to both."""
    created = [make(folder / side / name) for side in ("a", "b")]
    for first in created:
        plant(first)
    return syncheck.compare(*created)


def replaced(relative: str, how: str) -> Callable[[Path], None]:
    """Return a function that replaces a file by something unreadable."""

    def plant(folder: Path) -> None:
        path = folder / relative
        path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
        elif how == "half a file":
            save_pth(path, {"model": network()})
            os.truncate(path, path.stat().st_size - 30)
        elif how == "a file for the folder":
            path.parent.rmdir()
            path.parent.touch()
        elif how != "nothing":
            path.symlink_to({"loop": path.name, "dangling": "nowhere", "device": "/dev/zero"}[how])

    return plant


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("pipe", "mp_rank_01/model_optim_rng.pt: a pipe, socket or device; needed a file"),
        ("device", "mp_rank_01/model_optim_rng.pt: a pipe, socket or device; needed a file"),
        ("folder", "mp_rank_01/model_optim_rng.pt: a folder; needed a file, or a folder that is one checkpoint"),
        ("loop", "mp_rank_01/model_optim_rng.pt: too many levels of symbolic links"),
        ("dangling", "mp_rank_01/model_optim_rng.pt: no such file or directory. "),
        ("half a file", "mp_rank_01/model_optim_rng.pt: zip directory: "),
        ("nothing", "mp_rank_01: no file of this rank; needed one of model_optim_rng.pt, "),
        ("a file for the folder", "mp_rank_01: not a directory"),
    ],
)
def test_the_same_part_is_unreadable_in_both(tmp_path: Path, how: str, reason: str) -> None:
    """Two Megatron folders with the same unreadable part are unreadable, not in sync by their other part."""
    report = both(tmp_path, megatron, "iter_0000500", replaced("mp_rank_01/model_optim_rng.pt", how))
    assert (report.verdict, report.exit_code) == ("undecided", 2)
    assert [file.reason.startswith(reason) for file in report.unreadable] == [True, True]


def test_another_part_alone_is_not_the_first(tmp_path: Path) -> None:
    """A single second part is not compared with the other folder's first part, although they are equal."""
    tree = {"model": network(), "optimizer": adam()}
    zero = {"optimizer_state_dict": {"base_optimizer_state": adam()}}
    for side, rank in (("a", 0), ("b", 1)):
        save_pth(tmp_path / "megatron" / side / f"mp_rank_0{rank}" / "model_optim_rng.pt", tree)
        save_pth(tmp_path / "tag" / side / f"mp_rank_0{rank}_model_states.pt", {"module": network()})
        save_pth(tmp_path / "zero" / side / "mp_rank_00_model_states.pt", {"module": network()})
        save_pth(tmp_path / "zero" / side / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", zero)
        number = f"_{rank}" if rank else ""
        save(tmp_path / "model" / side / f"model{number}.safetensors", network())
        save_pth(tmp_path / "model" / side / "random_states_0.pkl", {"step": 1})
        save(tmp_path / "optimizer" / side / "model.safetensors", network())
        save_pth(tmp_path / "optimizer" / side / f"optimizer{number}.bin", adam())
    for kind in ("megatron", "tag", "zero", "model", "optimizer"):
        report = syncheck.compare(tmp_path / kind / "a", tmp_path / kind / "b")
        # Two nodes may each have saved their own partition, and the number of partitions is unknown.
        expected = (2, Reason.AMBIGUOUS) if kind == "zero" else (1, Reason.MISSING)
        reasons = set(list_fields(report.tensors, "reason"))
        assert (kind, report.exit_code, reasons) == (kind, expected[0], {expected[1]})


def test_rng_states_of_any_rank_share_a_name(tmp_path: Path) -> None:
    """Each node's folder has its own rank's RNG states, under one name and not compared."""
    for rank in range(2):
        save(tmp_path / f"node{rank}" / "model.safetensors", network())
        save_pth(tmp_path / f"node{rank}" / f"random_states_{rank}.pkl", {"torch_manual_seed": np.full(4, rank)})
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, group.kinds["rng"].tensors, group.kinds["rng"].not_compared) == ("in_sync", 1, 1)


@pytest.mark.parametrize("format_name", ["megatron", "deepspeed"])
def test_a_part_of_another_step(tmp_path: Path, format_name: str) -> None:
    """A part of another iteration makes its folder unreadable, although its tensors are equal."""
    if format_name == "megatron":
        remaining = megatron(tmp_path / "a" / "iter_0000500")
        right = megatron(tmp_path / "b" / "iter_0000500")
        tree = {"iteration": 499, "checkpoint_version": 3.0, "model": network(1), "optimizer": {"optimizer": adam(1)}}
        save_pth(right / "mp_rank_01" / "model_optim_rng.pt", tree)
        reason = "mp_rank_01/model_optim_rng.pt: iteration: 499; needed 500, as in mp_rank_00/model_optim_rng.pt. Its"
    else:
        remaining = deepspeed(tmp_path / "a" / "global_step500", model_parallel=2)
        right = deepspeed(tmp_path / "b" / "global_step500", model_parallel=2)
        tree = {"module": network(1), "global_steps": 499, "dp_world_size": 2, "mp_world_size": 2}
        save_pth(right / "mp_rank_01_model_states.pt", tree)
        reason = "mp_rank_01_model_states.pt: global_steps: 499; needed 500, as in mp_rank_00_model_states.pt. Its"
    report = syncheck.compare(remaining, right)
    assert report.exit_code == 2
    (unreadable,) = report.unreadable
    assert unreadable.path == str(right)
    assert unreadable.reason.startswith(reason)


@pytest.mark.parametrize("change", [{"run_id": "two"}, {"step": 6}])
def test_a_part_of_another_run(tmp_path: Path, change: dict[str, Any]) -> None:
    """Parts with metadata of two runs or steps are malformed."""
    folder = megatron(tmp_path / "iter_0000500")
    for rank, block in enumerate((BLOCK, BLOCK | change)):
        save_pth(folder / f"mp_rank_0{rank}" / "model_optim_rng.pt", {"model": network(), "syncheck": block})
    (name,) = change
    with pytest.raises(
        MalformedFile, match=f"mp_rank_01/model_optim_rng.pt: metadata, {name}: .* as in the other files"
    ):
        syncheck.read(str(folder))
    save_pth(folder / "mp_rank_01" / "model_optim_rng.pt", {"model": network(), "syncheck": BLOCK | {"rank": 1}})
    assert syncheck.read(str(folder)).metadata is not None


def test_parts_missing_in_both_are_counted(tmp_path: Path) -> None:
    """If part numbers have a gap, the present parts are in sync, with a note about the gap."""
    report = both(tmp_path / "megatron", megatron, "iter_0000500", lambda folder: shutil.rmtree(folder / "mp_rank_00"))
    (group,) = report.groups
    assert Note.PARTS_ABSENT(absent="1", total="2", what="model-parallel parts") in group.notes
    lost = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    report = both(
        tmp_path / "deepspeed",
        lambda path: deepspeed(path, model_parallel=2),
        "global_step500",
        lambda folder: (folder / lost).unlink(),
    )
    (group,) = report.groups
    assert Note.PARTS_ABSENT(absent="1", total="4", what="ZeRO parts") in group.notes
    number = "9" * 200
    folder = megatron(tmp_path / "huge" / "iter_0000500", ("mp_rank_00", f"mp_rank_{number}"))
    (note,) = syncheck.read(str(folder)).notes
    assert (note.code, note.parameters["what"]) == (Note.PARTS_ABSENT, "model-parallel parts")
    folder = megatron(tmp_path / "mixed" / "iter_0000500", ("mp_rank_00", "mp_rank_01_000"))
    assert syncheck.read(str(folder)).notes == ()


def test_a_scaler_that_one_folder_lacks(tmp_path: Path) -> None:
    """A `save_state` folder without scaler and scheduler is out of sync, because a resume needs both."""
    remaining, right = accelerate(tmp_path / "a"), accelerate(tmp_path / "b")
    assert Note.VALUES_ABSENT not in list_codes(syncheck.compare(remaining, right).groups[0].notes)
    (right / "scaler.pt").unlink()
    (right / "scheduler.bin").unlink()
    (group,) = syncheck.compare(remaining, right).groups
    assert list_codes(group.findings) == ["SYN101"]
    assert set(list_starts(group.findings[0].values, ".")) == {"scaler", "scheduler"}


def test_the_models_index_precedes_a_variants_index(tmp_path: Path) -> None:
    """The model's own index is used, although the index of a variant sorts before it."""
    for name, value in (("model.safetensors.index.json", 1.0), ("model.safetensors.index.fp16.json", 2.0)):
        part = f"model-{value:05.0f}-of-00002.safetensors"
        save(tmp_path / part, {f"w{value:.0f}": np.full(3, value, np.float32)})
        (tmp_path / name).write_text(f'{{"weight_map": {{"w{value:.0f}": "{part}"}}}}')
    assert set(syncheck.read(str(tmp_path)).tensors) == {"w1", "model-00002-of-00002.safetensors.w2"}


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", ".metadata"])
def test_kernel_files_are_not_read(tmp_path: Path, name: str) -> None:
    """A link to /proc/kmsg, which would block, is not read because its size is 0."""
    source = "/proc/self/status"  # has bytes, as it too denies
    if not os.path.exists(source):
        pytest.skip("no /proc here")
    (tmp_path / name).symlink_to(source)
    (tmp_path / "config.json").touch()
    with pytest.raises(MalformedFile, match=r"(the file is empty|invalid JSON: Expecting value|\.metadata: )"):
        syncheck.read(str(tmp_path))


def test_a_file_replaced_by_a_pipe_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file replaced by a pipe is refused without waiting for a writer."""
    os.mkfifo(tmp_path / "pipe")
    before = os.stat(__file__)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda *_, **__: before)
        with pytest.raises(UnreadableFile, match="a pipe, socket or device; needed a file"):
            untrusted.open_regular_file(str(tmp_path / "pipe"))


def test_a_file_truncated_after_detection(tmp_path: Path) -> None:
    """A safetensors file truncated to zero bytes after the detection of its format is malformed."""
    (tmp_path / "a.safetensors").write_bytes(b"\x10\0")
    with pytest.raises(MalformedFile, match="header: 2 bytes; needed at least 8"):
        safetensors_file.read(str(tmp_path / "a.safetensors"))
