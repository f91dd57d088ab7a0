"""Files besides the chunks of a torch.distributed.checkpoint folder are compared or reported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import save_pth

torch = pytest.importorskip("torch")

from dcp_folders import assemble  # noqa: E402

import syncheck  # noqa: E402
from syncheck.errors import MalformedFile, UnreadableFile  # noqa: E402
from syncheck.messages import Note  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def folder(path: Path) -> Path:
    """Write a folder with one tensor, `w`."""
    return assemble(path, {"w": (torch.ones(3), [((0,), (3,))])})


@pytest.mark.parametrize("name", ["meta.pt", "common.pt"])
def test_a_name_in_both_files_is_kept_twice(tmp_path: Path, name: str) -> None:
    """Folders whose extra files differ in a tensor that has the name of a chunk's tensor are out of sync."""
    two = [folder(tmp_path / side) for side in "ab"]
    for i, one in enumerate(two):
        save_pth(one / name, {"w": np.full(3, i, np.float32), "step": 5})
    (group,) = syncheck.compare(*two).groups
    assert [(diff.name, diff.status) for diff in group.tensors] == [("w#2", "different")]
    save_pth(two[1] / name, {"w": np.zeros(3, np.float32), "step": 6})
    assert syncheck.compare(*two).exit_code == 1


def test_extra_files_of_two_steps(tmp_path: Path) -> None:
    """A folder with metadata blocks of steps 5 and 6 is malformed."""
    one = folder(tmp_path / "a")
    for step, name in ((5, "meta.pt"), (6, "common.pt")):
        block = syncheck.metadata(run="r", rank=0, world_size=1, step=step)
        save_pth(one / name, {f"of_{step}": np.ones(3, np.float32), "syncheck": block})
    with pytest.raises(MalformedFile, match=r"common\.pt: metadata, step: 6; needed 5, as in the other files"):
        syncheck.read(str(one))


@pytest.mark.parametrize("how", ["pipe", "dangling"])
def test_an_unreadable_extra_file(tmp_path: Path, how: str) -> None:
    """An extra file that is not a checkpoint makes the folder unreadable."""
    one = folder(tmp_path / "a")
    if how == "pipe":
        os.mkfifo(one / "meta.pt")
    else:
        (one / "meta.pt").symlink_to("nowhere")
    with pytest.raises(UnreadableFile, match=r"meta\.pt: "):
        syncheck.read(str(one))


def test_chunks_of_another_save_are_counted(tmp_path: Path) -> None:
    """Chunk files that `.metadata` does not list, as of another save, are reported as not compared."""
    one = folder(tmp_path / "a")
    (before,) = syncheck.read(str(one)).notes
    for rank in (3, 4):
        (one / f"__{rank}_0.distcp").write_bytes(b"of an earlier save")
    assert syncheck.read(str(one)).notes == (
        before,
        Note.UNLISTED_FILES(count=2, names=("__3_0.distcp", "__4_0.distcp")),
    )
