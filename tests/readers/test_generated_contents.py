"""Generated files are refused in one line or read correctly, as the fuzz targets require.

`tests/test_fuzz_targets.py` damages valid files of each format.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from malformed.opcodes import PROTOCOL, mapping, named, pickled, whole
from malformed.torch_parts import INTACT, saved, state, storage, tensor, torch_legacy, torch_zip, with_zip64, zipped
from support.checkpoints import save_header
from support.strategies import EXAMPLES, for_all

import syncheck
from fuzz.judge import RANKS, check_copies
from fuzz.targets import TARGETS
from syncheck.readers.fingerprints import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

numbers = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**4000]), st.floats())
words = st.one_of(st.sampled_from(["w", "F32", "float32", "F77", "syncheck", "R", "S(0)", "S(9)"]), st.text(max_size=3))
plain = st.one_of(st.none(), st.booleans(), numbers, words)
anything = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)), max_leaves=6
)


def check(folder: Path) -> Callable[[bytes], object]:
    """Return a function that checks the property for the contents of a file of any format."""
    return lambda data: TARGETS["zip"].check(data, folder)


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
    """A safetensors file with an edited header."""
    headers = edited(HEADER).map(lambda raw: struct.pack("<Q", len(raw)) + raw + bytes(32))
    for_all(headers, check(tmp_path), examples)


@EXAMPLES
def test_fingerprints(tmp_path: Path, examples: int) -> None:
    """A fingerprint with edited JSON."""
    document = json.loads(fingerprint(syncheck.read(str(save_header(tmp_path / "w.safetensors", HEADER, bytes(32))))))
    document["tensors"]["w"]["sharding"] = {
        "mesh": [2], "ranks": [0, 1], "placements": ["S(0)"], "shape": [4, 3], "names": ["dp"], "coordinate": [1],
    }  # fmt: skip
    for_all(edited(document), check(tmp_path), examples)


@EXAMPLES
def test_indexes(tmp_path: Path, examples: int) -> None:
    """An index of weights with edited JSON."""
    document = {"metadata": {"total_size": 16}, "weight_map": {"w": "a", "v": "b"}}
    for rank in RANKS:
        for name, file in document["weight_map"].items():
            entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
            save_header(tmp_path / rank / file, {name: entry}, bytes(8))

    def check_index(raw: bytes) -> None:
        for rank in RANKS:
            (tmp_path / rank / "model.safetensors.index.json").write_bytes(raw)
        check_copies(syncheck.read, tmp_path)

    for_all(edited(document), check_index, examples)


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

# Elements of random persistent ids: the elements of a storage, and unrelated elements.
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
    source_value = storage() if form == "torch-zip" else storage("0", 6, None, None)
    return st.recursive(
        st.one_of(
            st.none(), st.integers(), st.text(max_size=5), st.just(tensor(source_value)), st.just(source_value)
        ).map(pickled),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda parts: pickled(tuple(parts))),
            st.lists(st.tuples(inner, inner), max_size=4).map(lambda pairs: mapping(*pairs)),
        ),
        max_leaves=20,
    )


# Random pickles by kind and for every format: opcodes in random order, random persistent ids, and random containers.
PICKLES = {
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
    for_all(PICKLES[kind](form).map(around), check(tmp_path), examples)


@EXAMPLES
def test_ends_of_zip_directories(tmp_path: Path, examples: int) -> None:
    """Random numbers in the end records of a zip, with and without zip64."""
    numbers = st.one_of(st.sampled_from([0, 1, 3, 4, 5, 44, 100, 65535]), st.integers(0, 65535))
    old = st.fixed_dictionaries({}, optional=dict.fromkeys(("count", "here", "disk", "shift", "size"), numbers))
    names = ("count", "here", "length", "shift", "disk", "disks", "place")
    new = st.fixed_dictionaries({}, optional=dict.fromkeys(names, numbers))
    plain = old.map(lambda stated: zipped(*saved(state()), **stated))
    for_all(plain, check(tmp_path), examples)
    for_all(st.builds(lambda data, stated: with_zip64(data, **stated), plain, new), check(tmp_path), examples)
