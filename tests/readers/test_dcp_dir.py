"""Folders written by torch.distributed.checkpoint: read without torch, bitwise equal to torch's result."""

from __future__ import annotations

import copy
import os
import shutil
from collections import OrderedDict
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import find_texts, list_fields

torch = pytest.importorskip("torch")

from support.dcp_folders import assemble, contents, expected, load, save, trained  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict  # noqa: E402

import syncheck  # noqa: E402
from syncheck.errors import MalformedFile, UnreadableFile  # noqa: E402
from syncheck.messages import Note  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def checkpoint(seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return a model and an optimizer under the names of torch's own functions."""
    model, optimizer = trained(seed)
    states, steps = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": states, "optim": steps, "step": 7, "epoch": 1}


def test_equals_dcp_load(tmp_path: Path) -> None:
    """Tensors of every dtype and layout are bitwise equal to dcp.load; values and names are equal too."""
    state: dict[str, Any] = {
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(7).bfloat16(),
        "tiny": torch.randn(6).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "count": torch.tensor(12),
        "mask": torch.tensor([True, False]),
        "turned": torch.randn(4, 3).t(),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.randn(10)[3:6],
        "empty": torch.ones(0, 3),
        "list": [torch.ones(2), torch.zeros(3)],
        "settings": {"name": "run", "sizes": (1, 2)},
    }
    folder = save(tmp_path / "step1", state)
    blank = {key: torch.zeros_like(t) for key, t in state.items() if isinstance(t, torch.Tensor)}
    loaded = load(folder, blank | {"list": [torch.zeros(2), torch.ones(3)]})
    first, second = loaded.pop("list")
    assert contents(folder) == expected(loaded | {"list.0": first, "list.1": second})
    values = syncheck.read(str(folder)).values
    assert values == {"settings.name": "run", "settings.sizes.0": 1, "settings.sizes.1": 2}


@pytest.mark.parametrize("flat", [False, True])
def test_names_equal_torch_save(tmp_path: Path, flat: bool) -> None:
    """A folder and a torch.save file of one state are in sync, including the optimizer's settings.

    flat: saved with flatten_optimizer_state_dict, as torchtitan does.
    """
    torch.save(checkpoint(), tmp_path / "one.pth")
    folder = save(tmp_path / "two", checkpoint(flatten_optimizer_state_dict=flat))
    report = syncheck.compare(tmp_path / "one.pth", folder)
    assert report.verdict == "in_sync"
    assert report.counts.identical == report.counts.tensors == 9 + 3 * 6
    assert report.groups[0].values == ()
    values = syncheck.read(str(folder)).values
    assert (values["step"], values["epoch"], values["optimizer.param_groups.0.lr"]) == (7, 1, 0.01)


def test_a_folder_equals_a_file(tmp_path: Path) -> None:
    """A folder has the names, tensors, values and metadata of a torch.save file.

    Saving converts the integer ids of optimizers to strings, does not store the empty state of plain SGD, and pickles
    tuples.
    """
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "pair": (torch.ones(3), OrderedDict(inner=torch.arange(4))),
        "syncheck": syncheck.metadata(run="night", step=3, rank=0, world_size=4, model=model),
    }
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    for name, content in (("adamw", state), ("sgd", state | {"optimizer": plain.state_dict()})):
        torch.save(content, tmp_path / f"{name}.pth")
        folder, file = save(tmp_path / name, content), tmp_path / f"{name}.pth"
        first = syncheck.read(str(folder))
        two = syncheck.read(str(file))
        assert contents(first) == contents(two)
        assert (first.values, first.metadata) == (two.values, two.metadata)
        assert ("optimizer.3.weight.exp_avg" in first.tensors) == (name == "adamw")


@pytest.mark.parametrize("name", ["meta.pt", "common.pt"])
def test_extra_files_belong_to_the_checkpoint(tmp_path: Path, name: str) -> None:
    """Lightning's meta.pt and Megatron-Core's common.pt with the step are part of the checkpoint."""
    folder = save(tmp_path / "folder", {"w": torch.ones(2)})
    torch.save({"iteration": 12, "rng_state": torch.zeros(3)}, folder / name)
    snapshot = syncheck.read(str(folder))
    assert (set(snapshot.tensors), snapshot.values) == ({"w", "rng_state"}, {"iteration": 12})
    report = syncheck.compare(tmp_path)
    assert [group.replicas[0].path for group in report.groups] == [str(folder)]


def test_two_folders_are_replicas(tmp_path: Path) -> None:
    """Two equal folders are in sync, with a note about the format's limits."""
    first = save(tmp_path / "a", checkpoint())
    shutil.copytree(first, tmp_path / "b")
    report = syncheck.compare(first, tmp_path / "b")
    assert report.exit_code == 0
    assert report.groups[0].notes.count(Note.ONE_COPY()) == 1


def test_chunks_equal_a_file(tmp_path: Path) -> None:
    """Chunks by row, by column and in a grid are assembled; a flip is found at its index in the full tensor."""
    a, b = torch.randn(5, 4), torch.randn(6, 6, 2)
    torch.save({"a": a, "b": b}, tmp_path / "whole.pth")
    chunks: dict[str, Any] = {
        "a": (a, [((0, 0), (5, 3)), ((0, 3), (5, 1))]),
        "b": (b, [((i, j, 0), (3, 2, 2)) for i, j in product((0, 3), (0, 2, 4))]),
    }
    folder = assemble(tmp_path / "chunks", chunks)
    assert torch.equal(load(folder, {"b": torch.zeros(6, 6, 2)})["b"], b)  # torch takes the folder for one of its own
    assert contents(folder) == expected({"a": a, "b": b})
    assert syncheck.compare(tmp_path / "whole.pth", folder).verdict == "in_sync"
    b[4, 3, 1] += 1
    report = syncheck.compare(tmp_path / "whole.pth", assemble(tmp_path / "other", chunks))
    (diff,) = report.groups[0].tensors
    assert (diff.name, diff.index, diff.mismatched) == ("b", (4, 3, 1), 1)


def test_objects_of_unknown_classes_are_listed(tmp_path: Path) -> None:
    """Objects of unknown classes are listed as not compared, but their tensors are compared."""
    state = {"w": torch.ones(2), "rate": _Rate(torch.ones(3))}
    snapshot = syncheck.read(str(save(tmp_path / "folder", copy.copy(state))))
    assert find_texts(snapshot.stubs, end="_Rate")
    assert expected({"w": torch.ones(2), "rate.tensor": torch.ones(3)}) == contents(snapshot)


class _Rate:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


# --- files besides the chunks ---


def one_tensor(path: Path) -> Path:
    """Write a folder with one tensor, `w`."""
    return assemble(path, {"w": (torch.ones(3), [((0,), (3,))])})


@pytest.mark.parametrize("name", ["meta.pt", "common.pt"])
def test_a_name_in_both_files_is_kept_twice(tmp_path: Path, name: str) -> None:
    """Folders whose extra files differ in a tensor with the name of a chunk's tensor are out of sync."""
    two = [one_tensor(tmp_path / side) for side in "ab"]
    for i, first in enumerate(two):
        save_pth(first / name, {"w": np.full(3, i, np.float32), "step": 5})
    (group,) = syncheck.compare(*two).groups
    assert list_fields(group.tensors, "name", "status") == [("w#2", "different")]
    save_pth(two[1] / name, {"w": np.zeros(3, np.float32), "step": 6})
    assert syncheck.compare(*two).exit_code == 1


def test_extra_files_of_two_steps(tmp_path: Path) -> None:
    """A folder with metadata blocks of steps 5 and 6 is malformed."""
    first = one_tensor(tmp_path / "a")
    for step, name in ((5, "meta.pt"), (6, "common.pt")):
        block = syncheck.metadata(run="r", rank=0, world_size=1, step=step)
        save_pth(first / name, {f"of_{step}": np.ones(3, np.float32), "syncheck": block})
    with pytest.raises(MalformedFile, match=r"common\.pt: metadata, step: 6; needed 5, as in the other files"):
        syncheck.read(str(first))


@pytest.mark.parametrize("how", ["pipe", "dangling"])
def test_an_unreadable_extra_file(tmp_path: Path, how: str) -> None:
    """An extra file that is not a checkpoint makes the folder unreadable."""
    first = one_tensor(tmp_path / "a")
    if how == "pipe":
        os.mkfifo(first / "meta.pt")
    else:
        (first / "meta.pt").symlink_to("nowhere")
    with pytest.raises(UnreadableFile, match=r"meta\.pt: "):
        syncheck.read(str(first))


def test_chunks_of_another_save_are_counted(tmp_path: Path) -> None:
    """Chunk files missing in `.metadata`, as of another save, are reported as not compared."""
    first = one_tensor(tmp_path / "a")
    (before,) = syncheck.read(str(first)).notes
    for rank in (3, 4):
        (first / f"__{rank}_0.distcp").write_bytes(b"of an earlier save")
    assert syncheck.read(str(first)).notes == (
        before,
        Note.UNLISTED_FILES(count=2, names=("__3_0.distcp", "__4_0.distcp")),
    )
