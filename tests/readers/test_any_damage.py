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
from malformed.opcodes import PROTOCOL, mapping, named, pickled, whole
from malformed.torch_parts import (
    INTACT,
    MAGIC,
    legacy_state,
    saved,
    state,
    storage,
    tensor,
    torch_legacy,
    torch_zip,
    with_zip64,
    zipped,
)  # fmt: skip
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


def check_reading(path: Path) -> None:
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


def check_contents(strategy: Any, examples: int, file: Path, checkpoint: Path | None = None) -> None:
    """Write random contents to a file, and read it or the folder that it belongs to."""

    def check(raw: bytes) -> None:
        file.write_bytes(raw)
        check_reading(checkpoint or file)

    for_all(strategy, check, examples)


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
    path = save_header(tmp_path / "w_rank0.safetensors", HEADER, bytes(32))
    check_contents(damaged(path.read_bytes()), examples, path)
    headers = edited(HEADER).map(lambda raw: struct.pack("<Q", len(raw)) + raw + bytes(32))
    check_contents(headers, examples, path)


@EXAMPLES
def test_fingerprints(tmp_path: Path, examples: int) -> None:
    """A fingerprint with damage anywhere, or with edited JSON."""
    whole = fingerprint(readers.read(str(save_header(tmp_path / "w.safetensors", HEADER, bytes(32)))))
    document = json.loads(whole)
    document["tensors"]["w"]["sharding"] = {
        "mesh": [2], "ranks": [0, 1], "placements": ["S(0)"], "shape": [4, 3], "names": ["dp"], "coordinate": [1],
    }  # fmt: skip
    for strategy in (damaged(whole.encode()), edited(document)):
        check_contents(strategy, examples, tmp_path / "w_rank0.fingerprint.json")


@EXAMPLES
def test_indexes(tmp_path: Path, examples: int) -> None:
    """An index of weights with damage anywhere, or with edited JSON."""
    for name, file in (("w", "a"), ("v", "b")):
        save_safetensors(tmp_path / file, {name: np.ones(2, np.float32)})
    document = {"metadata": {"total_size": 16}, "weight_map": {"w": "a", "v": "b"}}
    for strategy in (damaged(json.dumps(document).encode()), edited(document)):
        check_contents(strategy, examples, tmp_path / "model.safetensors.index.json", tmp_path)


@EXAMPLES
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_dcp_folders(tmp_path: Path, name: str, examples: int) -> None:
    """A torch.distributed.checkpoint folder with damage anywhere in one file."""
    from dcp_folders import assemble

    folder = assemble(tmp_path / "run", {"w": (torch.arange(4.0), [((0,), (2,)), ((2,), (2,))])})
    check_contents(damaged((folder / name).read_bytes()), examples, folder / name, folder)


# Elements of random opcode streams: opcodes that push or pop, and calls of names from real files.
PUSHES = [
    pickled(None), pickled(True), pickled(0), pickled(-5), pickled(2**70), pickled("w"), pickled("\ud800"), pickled(()),
    b"]", b"}", b"\x8f", b"C\x01a", b"G\x7f\xf8\0\0\0\0\0\0", b"F1.5\n", b"I01\n", b"L5L\n", b"S'a'\n", b"V\\u0041\n",
    named("torch._utils", "_rebuild_tensor_v2"), named("collections", "OrderedDict"), named("builtins", "set"),
    named("builtins", "frozenset"), named("torch", "Size"), named("torch", "FloatStorage"), named("x", "Y"),
    named("numpy", "dtype"), named("numpy.core.multiarray", "_reconstruct"), named("torch", "device"), storage(),
    storage("0", 6, None, None), storage("0", 6, None, ("1", 1, 4)), tensor(), tensor(storage("0", 6, None, None)),
    pickled((1, (2, 3))), pickled("state") + b"}", pickled("syncheck") + b"}", pickled(("storage",)),
    named("torch._tensor", "_rebuild_from_type_v2"), named("builtins", "complex"), named("copyreg", "_reconstructor"),
]  # fmt: skip
TAKES = [
    b"0", b"1", b"2", b"(", b"t", b"\x85", b"\x86", b"\x87", b"l", b"d", b"s", b"u", b"a", b"e", b"\x90", b"\x91", b"R",
    b"b", b"o", b"\x81", b"\x92", b"\x93", b"Q", b"q\x01", b"h\x01", b"q\x02", b"h\x02", b"\x94", b"p3\n", b"g3\n",
    b"Pa\n", b"ix\nY\n", b"\x80\x04", b"\x97", b"\x82\x01", b".",
]  # fmt: skip
STREAMS = st.lists(st.one_of(st.sampled_from(PUSHES), st.sampled_from(TAKES), st.binary(max_size=2)), max_size=30)

# Elements of random persistent ids: the elements of a storage, and others.
PARTS = [
    "storage", "module", "0", "1", "cpu", 0, 6, -1, 2**70, None, (), ("1", 1, 4), ("1", 9, 9), ("0", 0, 6), (1, 2, 3),
]  # fmt: skip
PERSISTENT = st.one_of(
    st.lists(st.sampled_from([*PARTS, named("torch", "FloatStorage"), b"]"]), max_size=7).map(tuple),
    st.tuples(
        st.just("storage"), st.just(named("torch", "FloatStorage")), st.sampled_from(["0", "1", 0]),
        st.sampled_from(["cpu", "", None]), st.sampled_from([6, 5, 0, -1]),
    ).flatmap(lambda five: st.lists(st.sampled_from(PARTS), max_size=2).map(lambda more: (*five, *more))),
)  # fmt: skip


def trees(form: str) -> st.SearchStrategy[bytes]:
    """Return a strategy for containers with the tensors and storages of a format."""
    of = storage() if form == "torch-zip" else storage("0", 6, None, None)
    return st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.just(tensor(of)), st.just(of)).map(pickled),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda parts: pickled(tuple(parts))),
            st.lists(st.tuples(inner, inner), max_size=4).map(lambda pairs: mapping(*pairs)),
        ),
        max_leaves=20,
    )


# Random pickles by kind, for each format: with damage before the checksum is computed, so that the unpickler reads
# them; opcodes in random order; storages with random elements in their persistent id; and random containers.
PICKLES = {
    "damage": lambda form: damaged(state() if form == "torch-zip" else legacy_state()),
    "opcodes": lambda _: STREAMS.map(lambda parts: PROTOCOL + b"".join(parts) + b"."),
    "persistent ids": lambda _: PERSISTENT.map(lambda parts: whole(mapping(("w", tensor(pickled(parts) + b"Q"))))),
    "trees": lambda form: trees(form).map(whole),
}


@EXAMPLES
@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("form", sorted(INTACT))
def test_pickles(tmp_path: Path, form: str, kind: str, examples: int) -> None:
    """An intact torch file around a random pickle."""
    around = torch_zip if form == "torch-zip" else torch_legacy
    check_contents(PICKLES[kind](form).map(around), examples, tmp_path / "a.pth")


@EXAMPLES
@pytest.mark.parametrize("form", sorted(INTACT))
def test_torch_files(tmp_path: Path, form: str, examples: int) -> None:
    """A torch file with damage anywhere, or with random bytes after the magic number."""
    magic = b"PK\x03\x04" if form == "torch-zip" else MAGIC
    check_contents(damaged(INTACT[form]), examples, tmp_path / "a.pth")
    check_contents(st.binary(max_size=200).map(lambda tail: magic + tail), examples, tmp_path / "a.pth")


@EXAMPLES
def test_ends_of_zip_directories(tmp_path: Path, examples: int) -> None:
    """Random numbers in the end records of a zip, with and without zip64."""
    numbers = st.one_of(st.sampled_from([0, 1, 3, 4, 5, 44, 100, 65535]), st.integers(0, 65535))
    old = st.fixed_dictionaries({}, optional=dict.fromkeys(("count", "here", "disk", "shift", "size"), numbers))
    names = ("count", "here", "length", "shift", "disk", "disks", "place")
    new = st.fixed_dictionaries({}, optional=dict.fromkeys(names, numbers))
    plain = old.map(lambda stated: zipped(*saved(state()), **stated))
    check_contents(plain, examples, tmp_path / "a.pth")
    check_contents(st.builds(lambda data, stated: with_zip64(data, **stated), plain, new), examples, tmp_path / "a.pth")
