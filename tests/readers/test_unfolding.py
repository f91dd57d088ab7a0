"""Nesting, repetition and equal hashes that would take unbounded time or stack are refused quickly."""

from __future__ import annotations

import itertools
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from malformed.opcodes import Part, called, listing, mapping, named, pickled, whole
from malformed.torch_files import doubled
from malformed.torch_parts import DATA, Member, saved, state, storage, tensor, torch_zip, zipped

import syncheck
from syncheck.errors import MalformedFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LISTS = b"K\x01q\x00" + b"".join(b"0](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
CALLS = b"".join(b"h\xf0h%ch%c\x86q%cR0" % (i, i, i + 1) for i in range(2, 60))
COLLIDING = [k * (2**61 - 1) for k in range(5, 20_000)]
DIGITS = b"\x8b\x88\x13\0\0" + b"\x01" * 5000


def read(folder: Path, *pairs: tuple[Part, Part]) -> syncheck.Snapshot:
    """Read a state dict of a valid tensor and these pairs, within seconds."""
    began = time.monotonic()
    (folder / "a.pth").write_bytes(torch_zip(state(*pairs)))
    try:
        return syncheck.read(str(folder / "a.pth"))
    finally:
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "pair",
    [
        (doubled(60), 1),
        (b")" + b"\x85" * 20_000, 1),
        (named("x", "Y") + b"q\xf00K\x01q\x020" + CALLS + b"h\x3b", 1),
        ("v", b"(" + doubled(60) + b"\x91"),
        ("v", b"(" * 20_000 + b"K\x01" + b"\x91" * 20_000),
        ("v", called("builtins", "set", listing(doubled(60)))),
        ("v", called("collections", "OrderedDict", listing((doubled(60), 1)))),
        ("v", mapping(*[(k, None) for k in COLLIDING])),
        ("v", b"\x8f(" + b"".join(map(pickled, COLLIDING)) + b"\x90"),
        ("v", b"(" + b"K\x01" * 9_000 + b"tq\x010}(" + b"h\x01N" * 9_000 + b"u"),
        ("v", called("torch", "device", LISTS)),
    ],
    ids="key deep call frozen nested set pairs integers integers-in-set wide device".split(),
)
def test_keys_are_hashed_in_bounded_time(tmp_path: Path, pair: tuple[Part, Part]) -> None:
    """Nested and shared tuples, and integers with equal hashes, are found before Python hashes them."""
    with pytest.raises(MalformedFile):
        read(tmp_path, pair)


def tuples(pieces: Sequence[bytes], length: int, count: int) -> list[bytes]:
    """Return opcodes of that many different tuples of this length, of elements with equal hashes."""
    return [
        b"(" + b"".join(parts) + b"t" for parts in itertools.islice(itertools.product(pieces, repeat=length), count)
    ]


ONE_HASH = {
    "negative": ([pickled(-1), pickled(-2)], 15),
    "large": ([pickled(1 + i * (2**61 - 1)) for i in range(4)], 8),
    "floats": ([b"G" + struct.pack(">d", 2.0**i) for i in (0, 61, 122, 183)], 8),
}


KINDS = pytest.mark.parametrize("kind", ONE_HASH)
WRAPS = pytest.mark.parametrize("wrap", [b"", b"\x85", b"\x91"], ids=["tuples", "nested", "frozen"])


def of_one_hash(kind: str, wrap: bytes, count: int) -> bytes:
    """Return the opcodes of a dictionary with that many keys with equal hashes. wrap: converts the keys."""
    pieces, length = ONE_HASH[kind]
    before, behind = (b"(", wrap) if wrap == b"\x91" else (b"", wrap)
    keys = tuples(pieces, length, count)
    return b"}(" + b"".join(before + key + behind + b"N" for key in keys) + b"u"


@KINDS
@WRAPS
def test_tuples_of_one_hash(kind: str, wrap: bytes, tmp_path: Path) -> None:
    """Thirty thousand keys with equal hashes, a minute of quadratic time, are refused; a hundred are read."""
    with pytest.raises(MalformedFile, match="keys with equal hashes"):
        read(tmp_path, ("v", of_one_hash(kind, wrap, 30_000)))
    assert len(read(tmp_path, ("v", of_one_hash(kind, wrap, 100))).values) == 100


def test_frozen_sets_of_protocol_2(tmp_path: Path) -> None:
    """Frozensets made by a call have unpredictable hashes; equal sets remain one key."""
    keys = [called("builtins", "frozenset", listing(i, 5)) for i in (1, 2, 1)]
    assert list(read(tmp_path, ("v", mapping(*[(key, 0) for key in keys]))).values) == [
        "v.frozenset({1, 5})",
        "v.frozenset({2, 5})",
    ]


def test_equal_keys_stay_equal(tmp_path: Path) -> None:
    """Keys that are equal in Python are one key: 1, 1.0 and True, and integers of any size."""
    keys = [*tuples([b"K\x00", b"K\x02"], 14, 12_000), b"(NK\x01t", b"(N\x88t", b"(NG" + struct.pack(">d", 1.0) + b"t"]
    keys += [
        b"(" + pickled("a") + pickled(2**70) + b"t",
        b"(" + pickled("a") + b"G" + struct.pack(">d", 2.0**70) + b"t",
    ]
    found = read(tmp_path, ("v", b"}(" + b"".join(key + pickled(i) for i, key in enumerate(keys)) + b"u"))
    assert len(found.values) == 12_002
    assert (found.values["v.(None, 1)"], found.values[f"v.('a', {2**70})"]) == (12_002, 12_004)


def test_valid_keys_pass(tmp_path: Path) -> None:
    """Tuples, numbers, complex numbers, frozensets and huge integers can be keys, with their usual text."""
    keys: list[Part] = [(1, "k"), (1, (2, 3)), (1,), called("builtins", "complex", 1, 2), 2**70, DIGITS]
    found = read(tmp_path, *[(key, tensor()) for key in keys], (b"(K\x02K\x01\x91", tensor()))
    names = list(found.tensors)
    assert names[:6] == ["w", "(1, 'k')", "(1, (2, 3))", "(1,)", "(1+2j)", str(2**70)]
    assert names[6].startswith("0x1010101")
    assert names[7] == "frozenset({1, 2})"


def test_values_of_thousands_of_digits(tmp_path: Path) -> None:
    """Integers with more digits than Python prints are compared, and printed in hexadecimal."""
    for rank, digits in enumerate((DIGITS, DIGITS.replace(b"\x01", b"\x02"))):
        (tmp_path / f"m_rank{rank}.pth").write_bytes(torch_zip(state(("note", digits))))
    report = syncheck.compare(tmp_path)
    (diff,) = report.groups[0].values
    assert diff.name == "note"
    assert all(value.startswith("0x") for value in diff.by_rank.values())


def test_a_dictionary_keeps_its_methods(tmp_path: Path) -> None:
    """BUILD on an OrderedDict, where torch stores `_metadata`, cannot replace `items`."""
    made = called("collections", "OrderedDict") + b"(" + pickled("t") + tensor() + b"u"
    found = read(tmp_path, ("v", made + mapping(("items", 1), ("get", 2), ("_metadata", 3)) + b"b"))
    assert list(found.tensors) == ["w", "v.t"]


def test_repeated_and_long_names(tmp_path: Path) -> None:
    """Ten thousand tensors with one name are numbered; a name of megabytes above thousands is an error."""
    one = mapping(("model", mapping(("w", tensor()))))
    found = read(tmp_path, ("a", listing(*[one + b"q\x01"] + [b"h\x01"] * 50)))
    assert list(found.tensors)[-1].endswith("w")
    assert len(found.tensors) == 52
    with pytest.raises(MalformedFile, match="unfold without end"):
        read(tmp_path, ("n" * 1_000_000, b"](" + b"N" * 1000 + b"e"))


def test_errors_stay_short(tmp_path: Path) -> None:
    """A name of a million characters or with a newline gives a short one-line error."""
    with pytest.raises(MalformedFile) as caught:
        read(tmp_path, ("n\n" * 500_000, tensor(offset=3)))
    assert len(str(caught.value)) < 2000
    assert caught.value.reason.isprintable()


def test_overlapping_zip_records(tmp_path: Path) -> None:
    """Overlapping records are malformed, because a thousand of them would be read a thousand times."""
    inner = Member(b"archive/data/1", DATA)
    blob = inner.local() + bytes(-len(inner.local()) % 4)
    views = [("v", tensor(storage("1"))), ("u", tensor(storage("0", len(blob) // 4)))]
    first, order, outer, version = saved(whole(mapping(*views)), data=blob)
    at = len(first.local()) + len(order.local()) + len(outer.local()) - len(blob)
    for offset in (None, at):
        (tmp_path / "a.pth").write_bytes(zipped(first, order, outer, replace(inner, offset=offset), version))
        if offset is None:
            assert len(syncheck.read(str(tmp_path / "a.pth")).tensors) == 2
    with pytest.raises(MalformedFile, match="within data/0; needed separate records"):
        syncheck.read(str(tmp_path / "a.pth"))
