"""Broken and hostile torch.distributed.checkpoint folders: a one-line error with the location and the fault."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from dcp_folders import assemble, contents, metadata, save, write_metadata  # noqa: E402

from syncheck import api, readers  # noqa: E402
from syncheck.errors import CheckpointError, MalformedFile, RefusedFile, UnsupportedFormat  # noqa: E402
from syncheck.messages import Refusal  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from checkpoints import Done

HALVES = [((0, 0), (2, 4)), ((2, 0), (2, 4))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a 4 x 4 tensor `w` in two chunks by row, and a tensor `v` in one chunk."""
    return assemble(
        tmp_path / "run", {"w": (torch.arange(16.0).reshape(4, 4), HALVES), "v": (torch.ones(3), [((0,), (3,))])}
    )


def error(folder: Path, kind: type[CheckpointError] = MalformedFile) -> str:
    """Return the error of reading a folder."""
    with pytest.raises(kind) as caught:
        readers.read(str(folder))
    assert caught.value.path.startswith(str(folder))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Edit `.metadata` with torch's classes."""
    content = metadata(folder)
    edit(content)
    write_metadata(folder, content)


def test_missing_chunk_file(folder: Path, cli: Callable[..., Done]) -> None:
    """A missing file is reported with one of its tensors; comparing exits with 2."""
    (folder / "__1_0.distcp").unlink()
    text = error(folder)
    assert "__1_0.distcp, 'w' at [2, 0]: no such file or directory" in text
    assert "save or copy the folder again" in text.lower()
    done = cli("compare", folder)
    assert done.code == 2
    assert "__1_0.distcp" in done.out + done.err


@pytest.mark.parametrize("left", [0, 100, -1])
def test_truncated_chunk_file(folder: Path, left: int) -> None:
    """A truncated file is reported with the expected end of a chunk."""
    left %= _length(folder)
    os.truncate(folder / "__1_0.distcp", left)
    assert f"'w' at [2, 0]: ends at byte {_length(folder)}; needed at most {left}" in error(folder)


def _length(folder: Path) -> int:
    places = metadata(folder).storage_data
    return max(info.offset + info.length for info in places.values() if info.relative_path == "__1_0.distcp")


def test_file_truncated_during_the_comparison(tmp_path: Path) -> None:
    """A folder with a file that changes after opening is unreadable; the other folders are compared."""
    state = {"w": (torch.arange(16.0).reshape(4, 4), HALVES)}
    others = [assemble(tmp_path / name, state) for name in ("a", "b", "c")]
    found = api.find(*others)
    os.truncate(others[1] / "__1_0.distcp", 1000)
    report = api.judge(found)
    assert len(report.unreadable) == 1
    assert str(others[1]) in report.unreadable[0].path
    assert [replica.path for replica in report.groups[0].replicas] == [str(others[0]), str(others[2])]


def test_unfinished_save(folder: Path) -> None:
    """Chunks without `.metadata`, which is written last, are reported as an unfinished save."""
    (folder / ".metadata").unlink()
    assert "no .metadata; needed this file, which is written last" in error(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nothing of the kind", b"\x80\x04N."])
def test_invalid_metadata(folder: Path, content: bytes) -> None:
    """An empty, truncated or unrelated `.metadata` is reported."""
    (folder / ".metadata").write_bytes(content)
    assert ".metadata: " in error(folder)


@pytest.mark.parametrize(
    ("spans", "wrong"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], "no chunks contain element [3, 0]"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "2 chunks contain element [2, 0]"),
        ([((0, 0), (2, 4)), ((2, 0), (2, 5))], "the chunk of size [2, 5] at [2, 0] extends beyond the tensor"),
        ([((0, 0), (2, 4)), ((2,), (2,))], "a chunk of size (2,) at (2,)"),
        ([((0, 0), (1, 4)), ((1, 0), (3, 4))], "the record of its chunk at [1, 0] is not listed"),
        ([], "no chunks contain element [0, 0]"),
    ],
)
def test_chunks_that_do_not_cover_the_tensor(tmp_path: Path, spans: Any, wrong: str) -> None:
    """A gap, an overlap or an excess of chunks is reported with the element or the chunk."""
    tensor = torch.arange(16.0).reshape(4, 4)
    text = error(assemble(tmp_path / "run", {"w": (tensor, HALVES)}, listed={"w": spans}))
    assert f".metadata, 'w': {wrong}" in text


def test_chunk_of_another_size_or_dtype_than_recorded(tmp_path: Path) -> None:
    """The record of a chunk must have the shape and dtype in the metadata."""
    tensor = torch.arange(16.0).reshape(4, 4)
    swapped = [((0, 0), (1, 4)), ((1, 0), (1, 4)), ((2, 0), (2, 4))]
    folder = assemble(tmp_path / "a", {"w": (tensor, [*HALVES, ((1, 0), (1, 4))])}, listed={"w": swapped})
    assert "the record contains float32 [2, 4]; needed float32 [1, 4]" in error(folder)
    folder = assemble(tmp_path / "b", {"w": (tensor, HALVES)})
    change(folder, lambda content: setattr(content.state_dict_metadata["w"].properties, "dtype", torch.float64))
    assert "the record contains float32 [2, 4]; needed float64 [2, 4]" in error(folder)


@pytest.mark.parametrize("place", ["../other/__0_0.distcp", "/etc/passwd", "", "a//b", "a\0b", "."])
def test_chunk_outside_the_folder(folder: Path, place: str) -> None:
    """A path outside the folder is refused and not opened."""

    def edit(content: Any) -> None:
        for info in content.storage_data.values():
            info.relative_path = place

    change(folder, edit)
    assert "needed a file in the folder" in error(folder)


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (0, 10**30), (2**62, 2**62), (0, -5), (True, 10), ("0", 10)])
def test_impossible_offsets_and_lengths(folder: Path, offset: Any, length: Any) -> None:
    """Impossible offsets and lengths are reported before anything is read or allocated."""

    def edit(content: Any) -> None:
        for info in content.storage_data.values():
            info.offset, info.length = offset, length

    change(folder, edit)
    assert "'w'" in error(folder) or "'v'" in error(folder)


def test_compressed_chunks_are_unsupported(folder: Path) -> None:
    """Chunks with a transformation such as zstd are not read, and its name is reported."""
    if "transform_descriptors" not in {f.name for f in dataclasses.fields(_an_info(folder))}:
        pytest.skip("this torch has no extensions")

    def edit(content: Any) -> None:
        for info in content.storage_data.values():
            info.transform_descriptors = ["stream.zstd"]

    change(folder, edit)
    assert "stream.zstd" in error(folder, UnsupportedFormat)


def _an_info(folder: Path) -> Any:
    return next(iter(metadata(folder).storage_data.values()))


def test_metadata_that_executes_code_is_refused(folder: Path, tmp_path: Path) -> None:
    """A `.metadata` that calls a system function is refused, and nothing is executed."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (folder / ".metadata").write_bytes(pickle.dumps({"storage_data": Bomb()}))
    assert "runs code" in error(folder, RefusedFile)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "paths",
    [
        {"w": ("v",), "v": ("v",)},
        {"w": ("v", "w"), "v": ("v",)},
        {"w": ()},
        {"w": "w"},
        {"w": ("a",) * 300},
        {"w": (10**5000,)},
    ],
)
def test_conflicting_keys(folder: Path, paths: Any) -> None:
    """Keys shared by two tensors, or keys that are not a path, are an error."""
    change(folder, lambda content: setattr(content, "planner_data", paths))
    assert "keys" in error(folder)


def test_a_name_that_is_not_its_keys_is_malformed(folder: Path) -> None:
    """torch looks up tensors by the name made of their keys, so another name is malformed."""
    change(folder, lambda content: setattr(content, "planner_data", {"w": ("x",), "v": ("v",)}))
    assert ".metadata, 'w': keys ('x',); needed the segments of its name" in error(folder)


def test_a_huge_metadata_is_not_read(folder: Path) -> None:
    """A sparse `.metadata` of 1 TB is refused before memory is allocated."""
    os.truncate(folder / ".metadata", 10**12)
    assert "1000000000000 bytes; needed at most 1000000000" in error(folder)


def test_overlapping_records(folder: Path) -> None:
    """Overlapping records are an error, because a thousand names could refer to one long record."""

    def edit(content: Any) -> None:
        one = next(iter(content.storage_data.values()))
        for index in content.storage_data:
            content.storage_data[index] = one

    change(folder, edit)
    assert "its record begins at byte 0; needed at least " in error(folder)


def test_a_chunk_listed_many_times(folder: Path) -> None:
    """A chunk that is listed a million times, which takes a few bytes each, is refused quickly."""

    def edit(content: Any) -> None:
        chunks = content.state_dict_metadata["w"].chunks
        content.state_dict_metadata["w"].chunks = chunks[:1] * 10_000

    change(folder, edit)
    assert "10000 chunks contain element [0, 0]" in error(folder)


def test_a_file_name_with_a_lone_surrogate(folder: Path) -> None:
    """A name that UTF-8 cannot encode is an invalid file name."""

    def edit(content: Any) -> None:
        for info in content.storage_data.values():
            info.relative_path = "\ud800"

    change(folder, edit)
    assert "an invalid file name" in error(folder)


def test_without_keys_the_flat_names_are_used(folder: Path) -> None:
    """Without a planner's keys, flat names are used."""
    change(folder, lambda content: setattr(content, "planner_data", None))
    assert set(readers.read(str(folder)).tensors) == {"w", "v"}


def test_a_pipe_is_not_opened(folder: Path) -> None:
    """A pipe, which would block, is refused."""
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    assert "needed a file" in error(folder)


def test_objects_that_torch_did_not_save_are_listed(folder: Path, cli: Callable[..., Done]) -> None:
    """Bytes of a custom planner are counted as not compared, and the rest is read."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    (folder / "own.distcp").write_bytes(b"my own format")

    def edit(content: Any) -> None:
        content.state_dict_metadata["note"] = BytesStorageMetadata()
        content.storage_data[MetadataIndex("note")] = _StorageInfo("own.distcp", 0, 13)

    change(folder, edit)
    tensors = readers.read(str(folder)).tensors
    assert {name: tensor.refused for name, tensor in tensors.items()} == {
        "w": None,
        "v": None,
        "note": Refusal.UNKNOWN_RECORD(),
    }
    shutil.copytree(folder, folder.with_name("copy"))
    done = cli("compare", folder, folder.with_name("copy"))
    assert str(Refusal.UNKNOWN_RECORD()) in done.out
    assert (done.code, done.lines[-1]) == (0, "3 tensors: 2 identical, 0 close, 0 different, 1 not compared")


@pytest.mark.parametrize(
    ("damaged", "code", "reason"),
    [
        (slice(0, 4), 2, "__0_0.distcp, 'epoch': archive/data.pkl: no record at the offset in the directory"),
        (slice(0, None), 1, "epoch"),
    ],
    ids=["its beginning", "all of it"],
)
def test_a_damaged_object_is_reported(
    tmp_path: Path, cli: Callable[..., Done], damaged: slice, code: int, reason: str
) -> None:
    """An object that is intact in only one folder is an error or a difference, never just a note."""
    left, right = (save(tmp_path / f"rank_{rank}", {"w": torch.ones(2), "epoch": 3}) for rank in range(2))
    assert cli("compare", left, right).code == 0
    place = next(info for index, info in metadata(right).storage_data.items() if index.fqn == "epoch")
    data = bytearray((right / place.relative_path).read_bytes())
    record = data[place.offset : place.offset + place.length]
    record[damaged] = bytes(len(record[damaged]))
    data[place.offset : place.offset + place.length] = record
    (right / place.relative_path).write_bytes(data)
    done = cli("compare", left, right)
    assert done.code == code
    assert reason in done.out + done.err


def test_damage_anywhere_is_one_line_or_harmless(folder: Path) -> None:
    """With bytes changed, lost or added anywhere, a folder is read or refused with a one-line error."""
    draw = random.Random(0)
    lines = []
    for _ in range(300):
        file = folder / draw.choice([".metadata", "__0_0.distcp", "__1_0.distcp"])
        good = file.read_bytes()
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            at, length = draw.randrange(len(damaged)), draw.randrange(9)
            damaged[at : at + draw.choice([length, 1])] = draw.randbytes(draw.choice([length, 1]))
        file.write_bytes(damaged)
        try:
            contents(folder)
            lines.append(0)
        except CheckpointError as refused:
            lines.append(len(str(refused).splitlines()))
        file.write_bytes(good)
    assert set(lines) == {0, 1}
