"""Random torch files: reading gives a snapshot or a one-line error, in bounded time."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import syncheck
from syncheck.errors import CheckpointError
from syncheck.snapshots import Snapshot

sys.path.append(str(Path(__file__).resolve().parents[2] / "fixtures"))

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
)

set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), "syncheck-hypothesis"))
SLOW = (pytest.mark.slow, pytest.mark.timeout(600))
EXAMPLES = pytest.mark.parametrize("examples", [40, pytest.param(500, marks=SLOW)])
FORMATS = pytest.mark.parametrize("form", sorted(INTACT))

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
    "storage",
    "module",
    "0",
    "1",
    "cpu",
    0,
    6,
    -1,
    2**70,
    None,
    (),
    ("1", 1, 4),
    ("1", 9, 9),
    ("0", 0, 6),
    (1, 2, 3),
]
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


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """Return a damaged copy: flipped, cut or zeroed bytes, and spliced, repeated or swapped pieces."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), at + draw(st.integers(1, 40)))
        kind = draw(st.sampled_from("fcsdwz"))
        if kind == "f":
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :] if data else data
        elif kind == "c":
            data = data[:at] + data[end:]
        elif kind == "s":
            data = data[:at] + draw(st.binary(max_size=20)) + data[at:]
        elif kind == "d":
            data = data[:end] + data[at:end] + data[end:]
        elif kind == "w":
            middle = (at + end) // 2
            data = data[:at] + data[middle:end] + data[at:middle] + data[end:]
        else:
            data = data[:at] + bytes(end - at) + data[end:]
    return data


def read(data: bytes) -> None:
    """Read a file with these bytes; only a snapshot or a one-line error is allowed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.pth")
        Path(path).write_bytes(data)
        found: Snapshot | CheckpointError
        try:
            found = syncheck.read(path)
        except CheckpointError as error:
            found = error
    if isinstance(found, CheckpointError):
        assert str(found).isprintable()
        assert found.reason.isprintable()
        assert len(found.reason) < 2000
    else:
        assert isinstance(found, Snapshot)
    assert time.monotonic() - began < 5


def for_all(strategy: st.SearchStrategy[bytes], examples: int) -> None:
    """Run a test on this many examples, the same in each run."""

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def one(data: bytes) -> None:
        read(data)

    one()


def around(form: str, pickle: bytes) -> bytes:
    """Return a file of a format that contains a pickle."""
    return torch_zip(pickle) if form == "torch-zip" else torch_legacy(pickle)


@EXAMPLES
@FORMATS
def test_any_damage(form: str, examples: int) -> None:
    """A file with up to three kinds of damage."""
    for_all(damages(INTACT[form]), examples)


@EXAMPLES
@FORMATS
def test_any_damage_of_the_pickle(form: str, examples: int) -> None:
    """A pickle that was damaged before its checksum was computed, so that the unpickler reads it."""
    whole_one = state() if form == "torch-zip" else legacy_state()
    for_all(damages(whole_one).map(lambda pickle: around(form, pickle)), examples)


@EXAMPLES
@FORMATS
def test_any_stream_of_opcodes(form: str, examples: int) -> None:
    """Opcodes in random order, with names from real files."""
    for_all(STREAMS.map(lambda parts: around(form, PROTOCOL + b"".join(parts) + b".")), examples)


@EXAMPLES
@FORMATS
def test_any_persistent_id(form: str, examples: int) -> None:
    """Storages with random elements in their persistent id, more or fewer than torch expects."""
    for_all(PERSISTENT.map(lambda parts: around(form, whole(mapping(("w", tensor(pickled(parts) + b"Q")))))), examples)


@EXAMPLES
def test_any_end_of_a_directory(examples: int) -> None:
    """Random numbers in the end records of a zip, with and without zip64."""
    numbers = st.one_of(st.sampled_from([0, 1, 3, 4, 5, 44, 100, 65535]), st.integers(0, 65535))
    old = st.fixed_dictionaries({}, optional=dict.fromkeys(("count", "here", "disk", "shift", "size"), numbers))
    names = ("count", "here", "length", "shift", "disk", "disks", "place")
    new = st.fixed_dictionaries({}, optional=dict.fromkeys(names, numbers))
    both = st.tuples(old, st.none() | new)
    made = both.map(lambda said: (zipped(*saved(state()), **said[0]), said[1]))
    for_all(made.map(lambda one: one[0] if one[1] is None else with_zip64(one[0], **one[1])), examples)


@EXAMPLES
@FORMATS
def test_any_tree(form: str, examples: int) -> None:
    """Random containers with random keys."""
    for_all(trees(form).map(lambda tree: around(form, whole(tree))), examples)


@EXAMPLES
def test_random_bytes_after_the_magic_number(examples: int) -> None:
    """Random bytes after the magic number of each format."""
    for_all(st.tuples(st.sampled_from([b"PK\x03\x04", MAGIC]), st.binary(max_size=200)).map(b"".join), examples)
