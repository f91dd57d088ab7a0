"""The safetensors reader gives the library's result, and reports every fault of a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_header, save_safetensors
from support.listings import find_all, list_fields, list_names

import syncheck
from syncheck.errors import CheckpointError, MalformedFile
from syncheck.messages import Detail, Refusal

if TYPE_CHECKING:
    from pathlib import Path


def test_unknown_dtype_is_counted(tmp_path: Path) -> None:
    """A tensor of an unknown dtype is compared by its bytes."""
    for rank in range(2):
        header = {
            "odd": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
            "plain": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
        }
        save_header(tmp_path / f"rank{rank}.safetensors", header, bytes(6))
    (group,) = syncheck.compare(tmp_path).groups
    assert list_fields(group.tensors, "name", "status", "detail") == [
        ("odd", "not_compared", Detail.REFUSED(refusal=Refusal.IN_PARTS(refusal=Refusal.DTYPE(name="F4"))))
    ]
    assert group.verdict == "in_sync"
    save_header(tmp_path / "rank1.safetensors", header, b"\0\1" + bytes(4))
    (group,) = syncheck.compare(tmp_path).groups
    assert list_names(find_all(group.tensors, out_of_sync=True)) == ["odd.bytes"]


def test_metadata_block(tmp_path: Path) -> None:
    """The metadata block is read from the header's strings."""
    block = json.dumps(syncheck.metadata(run="ddp", rank=1, world_size=2, step=5))
    path = save_safetensors(tmp_path / "a.safetensors", {"w": np.ones(2, np.float32)}, {"syncheck": block})
    result = syncheck.read(str(path)).metadata
    assert result is not None
    assert (result.run, result.rank, result.world_size, result.step) == ("ddp", 1, 2, 5)


def entry(start: int = 0, stop: int = 8, **changes: Any) -> dict[str, Any]:
    """Return a header's entry for two floats."""
    return {"dtype": "F32", "shape": [2], "data_offsets": [start, stop]} | changes


DEFECTS: list[tuple[str, Any, bytes, int | None, str]] = [
    ("length_too_big", {"a": entry()}, bytes(8), 200, "a length of 200 bytes"),
    ("length_too_small", {"a": entry()}, bytes(8), 20, "invalid JSON"),
    ("no_json", b"{'a': 1}", b"", None, "invalid JSON"),
    ("no_utf8", b'{"\xff": 1}', b"", None, "invalid JSON"),
    ("entry_no_object", {"a": 1}, b"", None, "an incomplete entry"),
    ("entry_incomplete", {"a": {"dtype": "F32", "shape": [2]}}, b"", None, "an incomplete entry"),
    ("shape_negative", {"a": entry(shape=[-2])}, bytes(8), None, "needed a dtype, sizes and two offsets"),
    ("shape_of_bool", {"a": entry(shape=[True])}, bytes(8), None, "needed a dtype, sizes and two offsets"),
    ("shape_no_list", {"a": entry(shape="2")}, bytes(8), None, "needed a dtype, sizes and two offsets"),
    ("one_offset", {"a": entry(data_offsets=[0])}, bytes(8), None, "needed a dtype, sizes and two offsets"),
    ("dtype_no_text", {"a": entry(dtype=3)}, bytes(8), None, "needed a dtype, sizes and two offsets"),
    ("wrong_size", {"a": entry(0, 4)}, bytes(4), None, "4 bytes; needed 8"),
    ("reversed", {"a": entry(8, 0)}, bytes(8), None, "needed a dtype, sizes and two offsets in order"),
    ("unread_overflows", {"a": entry(dtype="F77", shape=[2**62] * 2)}, bytes(8), None, "at most"),
    ("offset_of_many_digits", {"a": entry(0, 10**4000)}, bytes(8), None, "two offsets in order"),
    ("number_too_long", b'{"a": ' + b"9" * 5000 + b"}", b"", None, "invalid JSON"),
    ("lone_surrogate", b'{"\xed\xa0\x80": 1}', b"", None, "invalid JSON"),
    ("hole", {"a": entry(), "b": entry(12, 20)}, bytes(20), None, "starts at byte 12 of the data; needed 8"),
    ("overlap", {"a": entry(), "b": entry(4, 12)}, bytes(12), None, "starts at byte 4 of the data; needed 8"),
    ("hole_first", {"a": entry(8, 16)}, bytes(16), None, "starts at byte 8 of the data; needed 0"),
    ("trailing", {"a": entry()}, bytes(9), None, "9 bytes; needed 8, the end of the last tensor"),
    ("strings_no_text", {"__metadata__": {"a": 1}, "a": entry()}, bytes(8), None, "values that are not strings"),
    ("block_no_json", {"__metadata__": {"syncheck": "{"}, "a": entry()}, bytes(8), None, "invalid JSON"),
    ("block_wrong", {"__metadata__": {"syncheck": '{"rank": "x"}'}, "a": entry()}, bytes(8), None, "metadata block"),
]


@pytest.mark.parametrize("name, header, data, length, message", DEFECTS, ids=list_fields(DEFECTS, 0))
def test_every_defect_has_a_line(
    tmp_path: Path, name: str, header: Any, data: bytes, length: int | None, message: str
) -> None:
    """A broken header is malformed, with a one-line error with file, location and expectation."""
    path = save_header(tmp_path / f"{name}.safetensors", header, data, length)
    with pytest.raises(MalformedFile) as caught:
        syncheck.read(str(path))
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 600


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """A file cut at any byte is never read as a smaller model."""
    complete = save_safetensors(tmp_path / "a.safetensors", {"w": np.arange(5, dtype=np.float32)}).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(complete)):
        cut.write_bytes(complete[:length])
        with pytest.raises(CheckpointError):
            syncheck.read(str(cut))


def test_empty_header_has_no_tensors(tmp_path: Path) -> None:
    """Files without tensors are read, and never in sync because nothing was compared."""
    for rank in range(2):
        save_header(tmp_path / f"rank{rank}.safetensors", {})
    assert syncheck.compare(tmp_path).exit_code == 2
