"""Hugging Face folders: sharded weights with an index, other files, and every way to break them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_safetensors
from support.listings import list_codes, list_fields, list_names
from support.states import merge, pick, replace_in_names

import syncheck
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INDEX = "model.safetensors.index.json"


def write(folder: Path, state: dict[str, Any], files: int = 3, ending: str = "safetensors") -> Path:
    """Write a state dict in shards with an index; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    weight_map = {}
    for i in range(files):
        name = f"{stem}-{i + 1:05}-of-{files:05}.{ending}"
        part = pick(state, list(state)[i::files])
        save(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map, f"{stem}.{ending}.index.json")
    (folder / "config.json").write_text("{}")
    return folder


def write_index(folder: Path, weight_map: Any, name: str = INDEX) -> None:
    """Write an index."""
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def weight_map(folder: Path) -> dict[str, str]:
    """Return the weight map of the index."""
    result: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return result


def optimizer(step: int = 7) -> dict[str, Any]:
    """Return the optimizer state of two parameters."""
    state = {i: {"step": np.array(step, np.float32), "exp_avg": np.full(4, i, np.float32)} for i in range(2)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_folder_is_one_snapshot(tmp_path: Path, ending: str) -> None:
    """Each tensor comes from its file in the index; the folder is one replica, and its files are not replicas."""
    folder = write(tmp_path / "m", network(), ending=ending)
    snapshot = syncheck.read(str(folder))
    assert (snapshot.path, snapshot.format) == (str(folder), "huggingface")
    assert snapshot.tensors.keys() == network().keys()
    assert len(set(list_fields(snapshot.tensors.values(), "path"))) == 3
    assert snapshot.bytes == sum(file.stat().st_size for file in folder.iterdir() if file.name != "config.json")
    report = syncheck.compare(tmp_path)
    assert [list_fields(group.replicas, "path") for group in report.groups] == [[str(folder)]]
    assert (report.skipped, report.exit_code) == (1, 2)  # config.json


@pytest.mark.parametrize("files", [1, 2, 5])
def test_the_number_of_files_does_not_matter(tmp_path: Path, files: int) -> None:
    """Two folders with different numbers of files, and a folder and a file, are compared tensor by tensor."""
    remaining, right = write(tmp_path / "a", network(), 3), write(tmp_path / "b", network(), files)
    for second in (right, save(tmp_path / "c.pth", network())):
        report = syncheck.compare(remaining, second)
        assert (report.verdict, report.counts.identical) == ("in_sync", len(network()))
    write(right, changed(network(), "fc.bias"), files)
    (group,) = syncheck.compare(remaining, right).groups
    assert list_names(group.tensors) == ["fc.bias"]


def test_a_value_of_all_files_is_one_value(tmp_path: Path) -> None:
    """format = 'pt' in every safetensors shard is one value of the folder."""
    result = []
    for files in (1, 3):
        folder = write(tmp_path / str(files), {}, files=0)
        state = network()
        parts = {f"model-{i}.safetensors": dict(list(state.items())[i::files]) for i in range(files)}
        for name, part in parts.items():
            save_safetensors(folder / name, part, {"format": "pt", "part": name})
        write_index(folder, merge(dict.fromkeys(part, name) for name, part in parts.items()))
        result.append(syncheck.read(str(folder)).values)
    assert result[0] == {"format": "pt", "part": "model-0.safetensors"}
    remaining = {f"part#{i}": f"model-{i - 1}.safetensors" for i in (2, 3)}
    assert result[1] == result[0] | remaining


def listed(**changes: Any) -> Callable[[Path], None]:
    """Return a fault: other entries in the weight map, with `__` for dots in names; None removes an entry."""

    def plant(folder: Path) -> None:
        entries = weight_map(folder) | replace_in_names(changes, "__", ".")
        write_index(folder, {name: file for name, file in entries.items() if file is not None})

    return plant


def outside(name: str) -> Callable[[Path], None]:
    """Return a fault: an index with a file outside the folder."""

    def plant(folder: Path) -> None:
        save(folder.parent / "model.safetensors", {"fc.bias": network()["fc.bias"]})
        write_index(folder, {"fc.bias": name.format(folder.parent)})

    return plant


def text(index: str) -> Callable[[Path], Any]:
    """Return a fault: an index with any text."""
    return lambda folder: (folder / INDEX).write_text(index)


def replaced(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return a fault: something other than a file in place of the index."""

    def plant(folder: Path) -> None:
        (folder / INDEX).unlink()
        make(folder / INDEX)

    return plant


NOT_NAMES = "needed a file name for each tensor"


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (
            lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
            "tensor 'layer0.bn.weight': the file model-00002-of-00003.safetensors is missing",
        ),
        (
            lambda folder: os.truncate(folder / "model-00003-of-00003.safetensors", 1000),
            "model-00003-of-00003.safetensors: ",
        ),
        (listed(ghost="model-00001-of-00003.safetensors"), "'ghost': it is not in model-00001-of-00003.safetensors"),
        (listed(fc__bias=None), "tensor 'fc.bias': it is in model-00002-of-00003.safetensors, but the index does not"),
        (
            listed(layer0__conv__weight="model-00002-of-00003.safetensors"),
            "but the index assigns it to model-00002-of-00003.safetensors",
        ),
        *(
            (outside(name), "needed a file in the folder of the index")
            for name in ("{}/model.safetensors", "../model.safetensors", "x/../../model.safetensors", "")
        ),
        (lambda folder: write_index(folder, ["a"]), f"weight_map: ['a']; {NOT_NAMES}"),
        (lambda folder: write_index(folder, {"a": 3}), f"weight_map: {{'a': 3}}; {NOT_NAMES}"),
        (lambda folder: write_index(folder, {"x" * 10**6: "y" * 10**6}), "is missing"),
        (lambda folder: write_index(folder, {"w": "\ud800"}), "is missing"),
        (text("{"), "invalid JSON"),
        (text("[" * 100_000), "invalid JSON"),
        (text("[]"), "list; needed a JSON object"),
        (text('{"weight_map": {"a": "b", "a": "c"}}'), "a duplicate name"),
        (text('{"weight_map": {}, "weight_map": {"a": "b"}}'), "a duplicate name"),
        (replaced(os.mkfifo), f"{INDEX}: a pipe, socket or device"),
        (replaced(lambda path: path.symlink_to("gone")), f"{INDEX}: no such file or directory"),
    ],
)
def test_a_broken_folder_is_unreadable(tmp_path: Path, plant: Callable[[Path], Any], reason: str) -> None:
    """The fault is reported in one line with tensor and file; nothing outside the folder is read."""
    good, bad = write(tmp_path / "good", network()), write(tmp_path / "bad", network())
    plant(bad)
    report = syncheck.compare(good, bad)
    (unreadable,) = report.unreadable
    assert unreadable.path == str(bad)
    assert reason in unreadable.reason
    assert "\n" not in unreadable.reason
    assert len(unreadable.reason) < 3_000
    assert report.exit_code == 2


def test_files_besides_the_weights(tmp_path: Path) -> None:
    """Optimizer, scheduler, RNG states and step of a Trainer's folder are in the snapshot; settings are not."""
    folder = tmp_path / "run" / "checkpoint-500"
    save(folder / "model.safetensors", network())
    save(folder / "optimizer.pt", optimizer())
    save(folder / "scheduler.pt", {"last_epoch": 500})
    for rank in (0, 1):
        words = (3, tuple(range(rank, 625)), None)
        save(folder / f"rng_state_{rank}.pth", {"python": words, "cpu": np.zeros(8, np.int64)})
    save(folder / "training_args.bin", {"output_dir": "x"})
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": 1.5, "log_history": []}))
    snapshot = syncheck.read(str(folder))
    assert {"fc.weight", "optimizer.0.exp_avg", "rng_state.0.cpu", "rng_state.1.cpu"} <= snapshot.tensors.keys()
    values = {"global_step": 500, "epoch": 1.5, "scheduler.last_epoch": 500, "optimizer.param_groups.0.lr": 0.1}
    assert values.items() <= snapshot.values.items()
    assert len(snapshot.values) < 12  # not the words of Python's generator
    report = syncheck.compare(tmp_path)
    assert (len(report.groups), report.skipped) == (1, 1)


def test_a_folder_without_weights_is_compared_too(tmp_path: Path) -> None:
    """Trainer saves weights on the first node only: on other nodes they are reported as missing."""
    for node in range(2):
        folder = tmp_path / f"node{node}" / "checkpoint-5"
        save(folder / "optimizer.pt", optimizer())
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    save(tmp_path / "node0" / "checkpoint-5" / "model.safetensors", network())
    (group,) = syncheck.compare(tmp_path).groups
    assert list_fields(group.replicas, "rank", "format") == [(0, "huggingface"), (1, "huggingface")]
    assert list_fields(group.findings, "code", "ranks") == [("SYN101", (0, 1))]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_another_copy_of_the_weights_is_compared(tmp_path: Path, name: str) -> None:
    """Weights not loaded by transformers are a separate model, which every replica must have."""
    folders = [write(tmp_path / location, network()) for location in "abc"]
    save(folders[0] / name, network())
    save(folders[1] / name, network())
    report = syncheck.compare(*folders[:2])
    assert (report.verdict, report.counts.identical) == ("in_sync", 2 * len(network()))
    save(folders[1] / name, changed(network(), "fc.bias"))
    (group,) = syncheck.compare(*folders[:2]).groups
    assert [diff.name.endswith("fc.bias") for diff in group.tensors] == [True]
    report = syncheck.compare(folders[0], folders[2])
    assert list_codes(report.groups[0].findings) == ["SYN101"]
    (folders[1] / name).write_bytes(b"broken")
    assert syncheck.compare(*folders[:2]).exit_code == 2


@pytest.mark.parametrize("stray", ["model-00004-of-00003.safetensors", "pytorch_model-00001-of-00002.bin"])
@pytest.mark.parametrize("kept", [("fc.bias",), ("fc.bias", "fc.weight"), None])
def test_a_shard_left_from_an_earlier_save(tmp_path: Path, stray: str, kept: tuple[str, ...] | None) -> None:
    """If the index lists all tensors of a shard in other files, a note names the shard, and nothing is compared."""
    folders = [write(tmp_path / location, network()) for location in "ab"]
    old = changed(network(), "fc.bias")
    save(folders[1] / stray, {name: old[name] for name in kept or old})
    for report in (syncheck.compare(*folders), syncheck.diff(*folders), syncheck.diff(*folders[::-1])):
        assert (report.exit_code, report.counts.identical) == (0, len(network()))
    notes = syncheck.read(str(folders[1])).notes
    assert list_codes(notes) == [Note.STRAY_SHARD]

    # A tensor that the index does not list may belong to the model.
    save(folders[1] / stray, {"other.bias": old["fc.bias"]})
    assert list_codes(syncheck.diff(*folders).groups[-1].findings) == ["SYN101"]


def test_unrelated_files_stay_separate(tmp_path: Path) -> None:
    """A rank's file in a model's folder is a separate checkpoint, and is not ignored."""
    folder = write(tmp_path / "m", network())
    for rank in range(2):
        save(folder / f"probe_rank{rank}.pth", changed(network(), "fc.bias") if rank else network())
    report = syncheck.compare(tmp_path)
    assert sorted(len(group.replicas) for group in report.groups) == [1, 2]
    assert report.exit_code == 1


def test_a_folder_with_one_plain_file_is_an_ordinary_folder(tmp_path: Path) -> None:
    """A file called model.safetensors alone does not make a folder a Hugging Face folder."""
    save(tmp_path / "rank0" / "model.safetensors", network())
    save(tmp_path / "rank1" / "model.safetensors", network())
    (group,) = syncheck.compare(tmp_path).groups
    assert list_fields(group.replicas, "format", "rank") == [("safetensors", 0), ("safetensors", 1)]
