"""Random damage of a file: reading gives a checkpoint or a one-line error, never anything else."""

from __future__ import annotations

import json
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import save_header, save_safetensors
from hypothesis import strategies as st
from strategies import EXAMPLES, for_all, torch

from syncheck import readers
from syncheck.errors import CheckpointError
from syncheck.fingerprint import fingerprint
from syncheck.kernel.blocks import Files, ranges
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 5  # CPU time, with files of some hundred bytes

numbers = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**4000]), st.floats())
words = st.one_of(st.sampled_from(["w", "F32", "float32", "F77", "syncheck", "R", "S(0)", "S(9)"]), st.text(max_size=3))
plain = st.one_of(st.none(), st.booleans(), numbers, words)
anything = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)), max_leaves=6
)


def is_read_or_refused(path: Path) -> None:
    """Read a checkpoint with all its tensors, or get a one-line error, in bounded time."""
    began = time.process_time()
    try:
        snapshot = readers.read(str(path))
        assert isinstance(snapshot, Snapshot)
        with Files() as files:
            for tensor in snapshot.tensors.values():
                if not tensor.refused and tensor.digest is None:
                    for start, count in ranges([tensor]):
                        files.read(tensor, start, count, slot=0)
    except CheckpointError as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        assert text.isprintable()
        assert len(text) < 4_000
    assert time.process_time() - began < SECONDS


@st.composite
def damaged(draw: Any, whole: bytes) -> bytes:
    """Cut, flip, splice, repeat or zero bytes of a file, a few times."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 12))
        how = draw(st.sampled_from("cut flip insert remove repeat zero swap".split()))
        if how == "cut":
            del data[at:]
        elif how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif how == "remove":
            del data[at : at + length]
        elif how == "repeat":
            data[at:at] = data[at : at + length]
        elif how == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        else:
            data[at : at + 2 * length] = data[at + length : at + 2 * length] + data[at : at + length]
    return bytes(data)


@st.composite
def edited(draw: Any, document: Any) -> bytes:
    """Replace some parts of a JSON document by random values."""
    top = {"": json.loads(json.dumps(document))}
    for _ in range(draw(st.integers(1, 2))):
        node: Any = top
        key: Any = ""
        while isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 3)):
            node = node[key]
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[key] = draw(anything)
    return json.dumps(top[""]).encode()


HEADER = {
    "__metadata__": {"epoch": "3", "syncheck": json.dumps({"run": "r", "rank": 0, "world_size": 2, "mesh": {"dp": 0}})},
    "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "z": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@EXAMPLES
def test_safetensors(tmp_path: Path, examples: int) -> None:
    """A safetensors file with damage anywhere, or with an edited header."""
    path = tmp_path / "w_rank0.safetensors"
    whole = save_header(path, HEADER, bytes(32)).read_bytes()

    def check(raw: bytes) -> None:
        path.write_bytes(raw)
        is_read_or_refused(path)

    for_all(damaged(whole), check, examples)
    for_all(edited(HEADER).map(lambda raw: struct.pack("<Q", len(raw)) + raw + bytes(32)), check, examples)


@EXAMPLES
def test_fingerprints(tmp_path: Path, examples: int) -> None:
    """A fingerprint with damage anywhere, or with edited JSON."""
    path = tmp_path / "w_rank0.fingerprint.json"
    whole = fingerprint(readers.read(str(save_header(tmp_path / "w.safetensors", HEADER, bytes(32)))))
    document = json.loads(whole)
    document["tensors"]["w"]["sharding"] = {
        "mesh": [2], "ranks": [0, 1], "placements": ["S(0)"], "shape": [4, 3], "names": ["dp"], "coordinate": [1],
    }  # fmt: skip

    def check(raw: bytes) -> None:
        path.write_bytes(raw)
        is_read_or_refused(path)

    for_all(damaged(whole.encode()), check, examples)
    for_all(edited(document), check, examples)


@EXAMPLES
def test_indexes(tmp_path: Path, examples: int) -> None:
    """An index of weights with damage anywhere, or with edited JSON."""
    save_safetensors(tmp_path / "a", {"w": np.ones(2, np.float32)})
    save_safetensors(tmp_path / "b", {"v": np.ones(2, np.float32)})
    document = {"metadata": {"total_size": 16}, "weight_map": {"w": "a", "v": "b"}}

    def check(raw: bytes) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(raw)
        is_read_or_refused(tmp_path)

    for_all(damaged(json.dumps(document).encode()), check, examples)
    for_all(edited(document), check, examples)


@EXAMPLES
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_dcp_folders(tmp_path: Path, name: str, examples: int) -> None:
    """A torch.distributed.checkpoint folder with damage anywhere in one file."""
    from dcp_folders import assemble

    folder = assemble(tmp_path / "run", {"w": (torch.arange(4.0), [((0,), (2,)), ((2,), (2,))])})
    whole = (folder / name).read_bytes()

    def check(raw: bytes) -> None:
        (folder / name).write_bytes(raw)
        is_read_or_refused(folder)

    for_all(damaged(whole), check, examples)
