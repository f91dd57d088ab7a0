"""Files whose pickles are equal: the pickle is read once, everything else from each file."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth, save_records
from support.listings import list_fields

import syncheck
from syncheck.readers import torch_zip
from syncheck.readers.find import open_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def save_state(path: Path, *, fill: float = 1.0) -> Path:
    """Save a state dict; its values are the only difference of two files."""
    weight, bias = np.full((3, 4), fill, np.float32), np.full(3, fill, np.float32)
    return save_pth(path, {"w": weight, "step": 7, "b": bias})


def save_replicas(folder: Path, *fills: float) -> list[str]:
    """Save one file per rank, each with its own values, and return their paths."""
    paths = []
    for rank, fill in enumerate(fills):
        paths.append(str(save_state(folder / f"a_rank{rank}.pth", fill=fill)))
    return paths


def change_record(path: Path, ending: str, change: Callable[[bytes], bytes | None]) -> None:
    """Write a zip again with another content of one record; without it for None."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            new_content: bytes | None = content
            if name.endswith(ending):
                new_content = change(content)
            if new_content is not None:
                archive.writestr(name, new_content)


def test_each_file_has_its_own_location_and_checksums(tmp_path: Path) -> None:
    """Opened together, files have the same snapshots as opened alone."""
    paths = save_replicas(tmp_path, 0, 1, 2)
    opened = open_checkpoints(paths)
    assert opened.snapshots == list(map(syncheck.read, paths))
    checksums = {snapshot.tensors["w"].crc32 for snapshot in opened.snapshots}
    assert len(checksums) == 3


def test_a_pickle_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three equal pickles are flattened once while files are opened, and again for a file that is read alone."""
    paths = save_replicas(tmp_path, 0, 1, 2)
    flattened = []

    def flatten(tree: object, path: str, size: int, rebuilt: list[torch_zip.Flat]) -> torch_zip.Flat:
        flattened.append(path)
        return original(tree, path, size, rebuilt)

    original = torch_zip.flatten
    monkeypatch.setattr(torch_zip, "flatten", flatten)
    open_checkpoints(paths)
    assert flattened == paths[:1]
    syncheck.read(paths[1])
    assert flattened == paths[:2]


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("data/0", lambda data: data[:-4]),
        ("data/0", lambda data: None),
        ("byteorder", lambda data: b"middle"),
        ("data.pkl", lambda data: b""),
        ("data.pkl", lambda data: data[:-1]),
    ],
    ids=["short record", "no record", "byte order", "empty pickle", "pickle without its end"],
)
def test_damage_beside_an_equal_pickle(ending: str, change: Callable[[bytes], bytes | None], tmp_path: Path) -> None:
    """A damaged file is unreadable after a whole one, too, and before it."""
    whole, damaged = save_state(tmp_path / "a_rank0.pth"), save_state(tmp_path / "a_rank1.pth")
    change_record(damaged, ending, change)
    for paths in ([whole, damaged], [damaged, whole]):
        opened = open_checkpoints([str(path) for path in paths])
        assert list_fields(opened.snapshots, "path") == [str(whole)]
        assert list_fields(opened.unreadable, "path") == [str(damaged)]


def test_byte_order_of_each_file(tmp_path: Path) -> None:
    """Files of equal pickles in two byte orders have their own."""
    little, big = save_state(tmp_path / "a_rank0.pth"), save_state(tmp_path / "a_rank1.pth")
    change_record(big, "byteorder", lambda data: b"big")
    opened = open_checkpoints([str(little), str(big)])
    assert [snapshot.tensors["w"].big_endian for snapshot in opened.snapshots] == [False, True]


def test_an_empty_pickle_is_malformed(tmp_path: Path) -> None:
    """The first file of all has no pickle to be equal to."""
    path = save_records(tmp_path / "a_rank0.pth", b"")
    assert list_fields(open_checkpoints([str(path)]).unreadable, "path") == [str(path)]


def test_values_are_not_shared(tmp_path: Path) -> None:
    """A change of the values of one snapshot leaves the others."""
    paths = save_replicas(tmp_path, 1, 1)
    first, second = open_checkpoints(paths).snapshots
    dict.__setitem__(first.values, "step", 8)  # type: ignore[arg-type]
    assert second.values["step"] == 7
