"""Broken and hostile torch.distributed.checkpoint folders: a one-line error with the location and the fault."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts, list_fields, map_fields

torch = pytest.importorskip("torch")

from support.dcp_folders import assemble, contents, metadata, save, write_metadata  # noqa: E402

import syncheck  # noqa: E402
from syncheck import api  # noqa: E402
from syncheck.errors import CheckpointError, MalformedFile, RefusedFile, UnsupportedFormat  # noqa: E402
from syncheck.messages import Refusal  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
        syncheck.read(str(folder))
    assert caught.value.path.startswith(str(folder))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Edit `.metadata` with torch's classes."""
    content = metadata(folder)
    edit(content)
    write_metadata(folder, content)


def record_fields(**fields: Any) -> Callable[[Any], None]:
    """Return an edit of `.metadata` that sets fields of all records."""

    def edit(content: Any) -> None:
        for info in content.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return edit


def keys(paths: Any) -> Callable[[Any], None]:
    """Return an edit of `.metadata` that replaces the keys of the state dict by tensor name."""
    return lambda content: setattr(content, "planner_data", paths)


def one_record(content: Any) -> None:
    """Let all chunks refer to one record."""
    first = next(iter(content.storage_data.values()))
    content.storage_data.update(dict.fromkeys(content.storage_data, first))


def repeat_chunk(content: Any) -> None:
    """List a chunk 10,000 times, which takes a few bytes each."""
    content.state_dict_metadata["w"].chunks = content.state_dict_metadata["w"].chunks[:1] * 10_000


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        *(
            (record_fields(relative_path=path), "needed a file in the folder")
            for path in ("../other/__0_0.distcp", "/etc/passwd", "", "a//b", "a\0b", ".")
        ),
        (record_fields(relative_path="\ud800"), "an invalid file name"),
        *(
            (record_fields(offset=offset, length=length), ".metadata, '")
            for offset, length in ((-1, 10), (0, -5), (True, 10), ("0", 10))
        ),
        *((record_fields(offset=offset, length=2**62), "ends at byte") for offset in (0, 2**62)),
        *(
            (keys(paths), "keys")
            for paths in (
                {"w": ("v",), "v": ("v",)}, {"w": ("v", "w"), "v": ("v",)}, {"w": ()}, {"w": "w"}, {"w": ("a",) * 300},
                {"w": (10**5000,)},
            )
        ),
        # torch looks up tensors by the name made of their keys.
        (keys({"w": ("x",), "v": ("v",)}), ".metadata, 'w': keys ('x',); needed the segments of its name"),
        # A thousand names could refer to one long record.
        (one_record, "its record begins at byte 0; needed at least "),
        (repeat_chunk, "10000 chunks contain element [0, 0]"),
    ],
)  # fmt: skip
def test_damaged_metadata(folder: Path, edit: Callable[[Any], None], text: str) -> None:
    """Paths outside the folder, impossible offsets, conflicting keys and repeated records are reported."""
    change(folder, edit)
    assert text in error(folder)


def test_compressed_chunks_are_unsupported(folder: Path) -> None:
    """Chunks with a transformation such as zstd are not read, and its name is reported."""
    if not hasattr(next(iter(metadata(folder).storage_data.values())), "transform_descriptors"):
        pytest.skip("this torch has no extensions")
    change(folder, record_fields(transform_descriptors=["stream.zstd"]))
    assert "stream.zstd" in error(folder, UnsupportedFormat)


def test_without_keys_the_flat_names_are_used(folder: Path) -> None:
    """Without a planner's keys, flat names are used."""
    change(folder, keys(None))
    assert set(syncheck.read(str(folder)).tensors) == {"w", "v"}


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nothing of the kind", b"\x80\x04N."])
def test_invalid_metadata(folder: Path, content: bytes) -> None:
    """An empty, truncated or unrelated `.metadata` is reported."""
    (folder / ".metadata").write_bytes(content)
    assert ".metadata: " in error(folder)


@pytest.mark.parametrize("place", [".metadata", "__0_0.distcp, 'callback'"])
def test_a_pickle_that_executes_code_is_refused(tmp_path: Path, place: str) -> None:
    """A `.metadata` or a pickled object with a call of a system function is refused, and nothing is executed."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    folder = save(tmp_path / "folder", {"w": torch.ones(2), "callback": Bomb()})
    if place == ".metadata":
        (folder / place).write_bytes(pickle.dumps({"storage_data": Bomb()}))
    text = error(folder, RefusedFile)
    assert place in text
    assert "mkdir, which runs code" in text
    assert not (tmp_path / "made").exists()


def replace_by_pipe(path: Path) -> None:
    """Replace a file by a pipe, which would block a reader."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        (".metadata", os.unlink, "no .metadata; needed this file, which is written last"),
        (".metadata", lambda path: os.truncate(path, 10**12), "1000000000000 bytes; needed at most 1000000000"),
        ("__0_0.distcp", replace_by_pipe, "needed a file"),
        ("__1_0.distcp", lambda path: os.truncate(path, 0), "'w' at [2, 0]: ends at byte "),
        ("__1_0.distcp", lambda path: os.truncate(path, path.stat().st_size - 1), "'w' at [2, 0]: ends at byte "),
    ],
    ids=["unfinished save", "sparse file of 1 TB", "pipe", "empty chunk file", "truncated chunk file"],
)
def test_damaged_files(folder: Path, name: str, damage: Callable[[Path], None], text: str) -> None:
    """A missing, truncated, huge or blocking file is reported before memory is allocated."""
    damage(folder / name)
    assert text in error(folder)


def test_missing_chunk_file(folder: Path) -> None:
    """A missing file is reported with a tensor of the file; comparing exits with 2."""
    (folder / "__1_0.distcp").unlink()
    text = error(folder)
    assert "__1_0.distcp, 'w' at [2, 0]: no such file or directory" in text
    assert "save or copy the folder again" in text.lower()
    assert syncheck.compare(folder).exit_code == 2


def test_file_truncated_during_the_comparison(tmp_path: Path) -> None:
    """If a file changes after opening, its folder is unreadable; the other folders are compared."""
    state = {"w": (torch.arange(16.0).reshape(4, 4), HALVES)}
    remaining = [assemble(tmp_path / name, state) for name in ("a", "b", "c")]
    findings = api.find(*remaining)
    os.truncate(remaining[1] / "__1_0.distcp", 1000)
    report = api.judge(findings)
    assert len(report.unreadable) == 1
    assert str(remaining[1]) in report.unreadable[0].path
    assert list_fields(report.groups[0].replicas, "path") == [str(remaining[0]), str(remaining[2])]


@pytest.mark.parametrize(
    ("spans", "wrong"),
    [
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


def test_objects_that_torch_did_not_save_are_listed(folder: Path) -> None:
    """Bytes of a custom planner are counted as not compared, and the rest is read."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    (folder / "own.distcp").write_bytes(b"my own format")

    def edit(content: Any) -> None:
        content.state_dict_metadata["note"] = BytesStorageMetadata()
        content.storage_data[MetadataIndex("note")] = _StorageInfo("own.distcp", 0, 13)

    change(folder, edit)
    tensors = syncheck.read(str(folder)).tensors
    assert map_fields(tensors, "refused") == {
        "w": None,
        "v": None,
        "note": Refusal.UNKNOWN_RECORD(),
    }
    shutil.copytree(folder, folder.with_name("copy"))
    report = syncheck.compare(folder, folder.with_name("copy"))
    assert (report.exit_code, report.counts.identical, report.counts.not_compared) == (2, 2, 1)


@pytest.mark.parametrize(("damaged", "code"), [(4, 2), (None, 1)], ids=["its beginning", "all of it"])
def test_a_damaged_object_is_reported(tmp_path: Path, damaged: int | None, code: int) -> None:
    """If an object is intact in only one folder, this is an error or a difference, never just a note."""
    remaining = save(tmp_path / "rank_0", {"w": torch.ones(2), "epoch": 3})
    right = save(tmp_path / "rank_1", {"w": torch.ones(2), "epoch": 3})
    assert syncheck.compare(remaining, right).exit_code == 0
    record = next(info for index, info in metadata(right).storage_data.items() if index.fqn == "epoch")
    with (right / record.relative_path).open("r+b") as file:
        file.seek(record.offset)
        file.write(bytes(damaged or record.length))
    report = syncheck.compare(remaining, right)
    assert report.exit_code == code
    texts = list_fields(report.unreadable, "reason") + [repr(group.findings) for group in report.groups]
    assert find_texts(texts, "epoch")


# --- cuts and flipped bits anywhere, beside an intact folder ---

FILES = (".metadata", "__0_0.distcp")
STATE = {"w": torch.arange(6.0).reshape(2, 3), "bn": {"running_mean": torch.ones(2)}, "epoch": 3}
# Every so many bytes are damaged.
STEPS = [101, pytest.param(17, marks=pytest.mark.slow)]


def outcome(left: Path, right: Path) -> int:
    """Compare; a folder in sync contains equal tensors, and an unreadable folder has a one-line error."""
    report = syncheck.compare(left, right)
    if report.exit_code == 0:
        assert contents(left) == contents(right)
        assert report.groups[0].counts.identical == 2
    for file in report.unreadable:
        assert len(file.reason.splitlines()) == 1
    assert bool(report.unreadable) == (report.exit_code == 2)
    return report.exit_code


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FILES)
def test_cut_anywhere(tmp_path: Path, name: str, step: int) -> None:
    """A truncated `.metadata` or chunk file gives an undecided result."""
    remaining = save(tmp_path / "rank_0", STATE)
    right = save(tmp_path / "rank_1", STATE)
    complete = (right / name).read_bytes()
    for length in range(0, len(complete), step):
        (right / name).write_bytes(complete[:length])
        assert outcome(remaining, right) == 2, length
    (right / name).write_bytes(complete)
    assert outcome(remaining, right) == 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_in_any_byte(tmp_path: Path, name: str, step: int) -> None:
    """A flipped bit gives out of sync or a one-line error, unless no compared byte changed."""
    remaining = save(tmp_path / "rank_0", STATE)
    right = save(tmp_path / "rank_1", STATE)
    complete = (right / name).read_bytes()
    draw, observed = random.Random(step), Counter[int]()
    for position in range(draw.randrange(step), len(complete), step):
        damaged = bytearray(complete)
        damaged[position] ^= 1 << draw.randrange(8)
        (right / name).write_bytes(damaged)
        observed[outcome(remaining, right)] += 1
    assert observed.keys() <= {0, 1, 2}
    assert observed[2]


def test_flipped_bit_in_tensor_bytes(tmp_path: Path) -> None:
    """A flipped bit in a tensor's bytes is out of sync."""
    remaining = save(tmp_path / "rank_0", STATE)
    right = save(tmp_path / "rank_1", STATE)
    path = right / "__0_0.distcp"
    complete = path.read_bytes()
    places = {index.fqn: info for index, info in metadata(right).storage_data.items()}
    raw = {"w": STATE["w"], "bn.running_mean": STATE["bn"]["running_mean"]}
    flipped = 0
    for name, tensor in raw.items():
        data = tensor.numpy().tobytes()
        start = complete.index(data, places[name].offset)
        assert start + len(data) <= places[name].offset + places[name].length
        for position in range(start, start + len(data)):
            damaged = bytearray(complete)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            assert outcome(remaining, right) == 1, (name, position - start)
            flipped += 1
    assert flipped == 8 * 4
