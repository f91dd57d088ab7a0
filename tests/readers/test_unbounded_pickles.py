"""Pickles with unbounded time, memory or stack, or with unprintable parts."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import struct
import time
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from malformed.opcodes import Part, called, listing, mapping, named, pickled, whole
from malformed.torch_files import doubled
from malformed.torch_parts import DATA, Member, saved, state, storage, tensor, torch_zip, zipped
from support.listings import find_texts

import syncheck
from syncheck.errors import MalformedFile
from syncheck.readers.pickles import tree
from syncheck.readers.pickles.limits import scan
from syncheck.readers.pickles.tree import Flat, flatten
from syncheck.readers.pickles.unpickle import unpickle
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LISTS = b"K\x01q\x00" + b"".join(b"0](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
CALLS = b"".join(b"h\xf0h%ch%c\x86q%cR0" % (i, i, i + 1) for i in range(2, 60))
COLLIDING = [k * (2**61 - 1) for k in range(5, 20_000)]
DIGITS = b"\x8b\x88\x13\0\0" + b"\x01" * 5000


def read_with(folder: Path, *pairs: tuple[Part, Part]) -> syncheck.Snapshot:
    """Read a state dict of a valid tensor and the given pairs, within seconds."""
    began = time.process_time()
    (folder / "a.pth").write_bytes(torch_zip(state(*pairs)))
    try:
        return syncheck.read(str(folder / "a.pth"))
    finally:
        assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "pair",
    [
        (named("x", "Y") + b"q\xf00K\x01q\x020" + CALLS + b"h\x3b", 1),
        ("v", b"(" + doubled(60) + b"\x91"),
        ("v", b"(" * 20_000 + b"K\x01" + b"\x91" * 20_000),
        ("v", called("collections", "OrderedDict", listing((doubled(60), 1)))),
        ("v", mapping(*[(k, None) for k in COLLIDING])),
        ("v", b"\x8f(" + b"".join(map(pickled, COLLIDING)) + b"\x90"),
        ("v", b"(" + b"K\x01" * 9_000 + b"tq\x010}(" + b"h\x01N" * 9_000 + b"u"),
        ("v", called("torch", "device", LISTS)),
    ],
    ids="call frozen nested pairs integers integers-in-set wide device".split(),
)
def test_keys_are_hashed_in_bounded_time(tmp_path: Path, pair: tuple[Part, Part]) -> None:
    """Nested and shared keys, and integers with equal hashes, are found before Python hashes them.

    `fixtures/hostile` has more of them.
    """
    with pytest.raises(MalformedFile):
        read_with(tmp_path, pair)


def tuples(pieces: Sequence[bytes], length: int, count: int) -> list[bytes]:
    """Return opcodes of `count` different tuples of a given length, of elements with equal hashes."""
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
    """Return the opcodes of a dictionary of `count` keys with equal hashes. wrap: converts the keys."""
    pieces, length = ONE_HASH[kind]
    before, behind = (b"(", wrap) if wrap == b"\x91" else (b"", wrap)
    keys = tuples(pieces, length, count)
    return b"}(" + b"".join(before + key + behind + b"N" for key in keys) + b"u"


@KINDS
@WRAPS
def test_tuples_of_one_hash(kind: str, wrap: bytes, tmp_path: Path) -> None:
    """Thousands of keys with equal hashes, which take quadratic time, are refused; a hundred are read."""
    with pytest.raises(MalformedFile, match="keys with equal hashes"):
        read_with(tmp_path, ("v", of_one_hash(kind, wrap, 5_000)))
    assert len(read_with(tmp_path, ("v", of_one_hash(kind, wrap, 100))).values) == 100


def test_equal_keys_stay_equal(tmp_path: Path) -> None:
    """Keys that are equal in Python are one key: frozensets of protocol 2, 1, 1.0 and True, and huge integers."""
    sets = mapping(*[(called("builtins", "frozenset", listing(i, 5)), 0) for i in (1, 2, 1)])
    assert list(read_with(tmp_path, ("v", sets)).values) == ["v.frozenset({1, 5})", "v.frozenset({2, 5})"]
    keys = [*tuples([b"K\x00", b"K\x02"], 14, 12_000), b"(NK\x01t", b"(N\x88t", b"(NG" + struct.pack(">d", 1.0) + b"t"]
    keys += [
        b"(" + pickled("a") + pickled(2**70) + b"t",
        b"(" + pickled("a") + b"G" + struct.pack(">d", 2.0**70) + b"t",
    ]
    result = read_with(tmp_path, ("v", b"}(" + b"".join(key + pickled(i) for i, key in enumerate(keys)) + b"u"))
    assert len(result.values) == 12_002
    assert (result.values["v.(None, 1)"], result.values[f"v.('a', {2**70})"]) == (12_002, 12_004)


def test_valid_keys_pass(tmp_path: Path) -> None:
    """Tuples, numbers, complex numbers, frozensets and huge integers can be keys, with their usual text."""
    keys: list[Part] = [(1, "k"), (1, (2, 3)), (1,), called("builtins", "complex", 1, 2), 2**70, DIGITS]
    result = read_with(tmp_path, *[(key, tensor()) for key in keys], (b"(K\x02K\x01\x91", tensor()))
    names = list(result.tensors)
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
    created = called("collections", "OrderedDict") + b"(" + pickled("t") + tensor() + b"u"
    result = read_with(tmp_path, ("v", created + mapping(("items", 1), ("get", 2), ("_metadata", 3)) + b"b"))
    assert list(result.tensors) == ["w", "v.t"]


def test_repeated_and_long_names(tmp_path: Path) -> None:
    """Ten thousand tensors with one name are numbered; a name of megabytes above thousands is an error."""
    first = mapping(("model", mapping(("w", tensor()))))
    result = read_with(tmp_path, ("a", listing(*[first + b"q\x01"] + [b"h\x01"] * 50)))
    assert list(result.tensors)[-1].endswith("w")
    assert len(result.tensors) == 52
    with pytest.raises(MalformedFile, match="unfold without end"):
        read_with(tmp_path, ("n" * 1_000_000, b"](" + b"N" * 1000 + b"e"))


def test_errors_stay_short(tmp_path: Path) -> None:
    """A name of a million characters or with a newline gives a short one-line error."""
    with pytest.raises(MalformedFile) as caught:
        read_with(tmp_path, ("n\n" * 500_000, tensor(offset=3)))
    assert len(str(caught.value)) < 2000
    assert caught.value.reason.isprintable()


def test_overlapping_zip_records(tmp_path: Path) -> None:
    """Overlapping records are malformed, because a thousand of them would be read a thousand times."""
    inner = Member(b"archive/data/1", DATA)
    blob = inner.local() + bytes(-len(inner.local()) % 4)
    views = [("v", tensor(storage("1"))), ("u", tensor(storage("0", len(blob) // 4)))]
    first, order, outer, version = saved(whole(mapping(*views)), data=blob)
    position = len(first.local()) + len(order.local()) + len(outer.local()) - len(blob)
    for offset in (None, position):
        (tmp_path / "a.pth").write_bytes(zipped(first, order, outer, replace(inner, offset=offset), version))
        if offset is None:
            assert len(syncheck.read(str(tmp_path / "a.pth")).tensors) == 2
    with pytest.raises(MalformedFile, match="within archive/data/0; needed separate records"):
        syncheck.read(str(tmp_path / "a.pth"))


# --- numbers, names and objects ---


HUGE = 10**5000  # more digits than Python turns into text


def read_bare_pickle(data: bytes) -> Flat:
    """Read a bare pickle as a checkpoint's."""
    return flatten(unpickle(data, "a.pth", "data.pkl")[0], "a.pth", len(data))


def call(module: str, name: str, *arguments: Any) -> bytes:
    """Return a pickle that calls a global."""
    return b"\x80\x02c%b\n%b\n%bR." % (module.encode(), name.encode(), pickle.dumps(arguments, 2)[2:-1])


def nested_pairs(levels: int, leaf: Any, pair: type = list) -> Any:
    """Return an object with 2**levels leaves in a few bytes of pickle."""
    for _ in range(levels):
        leaf = pair((leaf, leaf))
    return leaf


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({HUGE: 1}, hex(HUGE)),
        ({"a": {HUGE, 1}}, "a.0"),
        ({"state": {HUGE: {"x": 1}}, "param_groups": []}, f"optimizer.{hex(HUGE)}.x"),
        ({"state": {}, "param_groups": [{"betas": (HUGE, 1)}]}, "optimizer.param_groups.0.betas"),
        ({(1, "b"): 1, None: 2}, "(1, 'b')"),
    ],
)
def test_keys_and_values_of_any_size(state: Any, name: str) -> None:
    """An integer of 5,000 digits can be a key, a member of a set or a setting, and is printable."""
    assert name in read_bare_pickle(pickle.dumps(state, 2)).values


def test_keys_that_are_objects_have_one_name_everywhere() -> None:
    """A key of an unknown class is printed as its class and plain arguments, without an address."""
    names = read_bare_pickle(pickle.dumps({PurePosixPath("x"): 1, "s": {PurePosixPath("y")}}, 2)).values
    assert list(names) == [f"<{PurePosixPath.__module__}.PurePosixPath('x')>", "s.0.0"]  # Python 3.13 moved it


class Key:
    """An object with arguments, as a key."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return Key, self.arguments


def test_keys_with_much_content_have_the_name_of_their_class() -> None:
    """A key with containers or many arguments is printed as its class, because it may have parts without end."""
    for key in (Key([1]), Key(*range(200)), Key(Key()), Key((1, (2,)))):
        (name,) = read_bare_pickle(pickle.dumps({key: 1}, 2)).values
        assert name == f"<{__name__}.Key>"


def test_an_error_has_no_address() -> None:
    """Errors about objects of unknown classes are equal for every copy of the file."""
    for data, said in (
        (b"\x80\x02cfoo\nBar\n)RQ.", "<foo.Bar>"),
        (b"\x80\x02cnumpy._core.multiarray\n_reconstruct\n)RQ.", "<_NumpyArray>"),
        (b"\x80\x02ctorch\nSize\nQ.", "<StandIn>"),
    ):
        with pytest.raises(MalformedFile, match=f"persistent id {said} is not a storage"):
            unpickle(data, "a.pth", "data.pkl")


def test_sets_have_one_text() -> None:
    """A set has the same text for any insertion order; a large set is counted."""
    assert brief({"b", 1, None}) == "set({'b', 1, None})"
    assert brief(frozenset({"b", (1,), "a"})) == "frozenset({'a', 'b', (1,)})"
    assert brief({*range(7), "a"}) == "<set of 8>"
    assert brief({3, 1, 2}) == "{1, 2, 3}"


@pytest.mark.parametrize(
    "data",
    [
        call("numpy", "dtype", nested_pairs(60, 1)),
        call("torch._tensor", "_rebuild_from_type_v2", 0, nested_pairs(60, 1), (), None),
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nK\x00cx\nT.DTensor\n)%btR."
        % pickle.dumps(nested_pairs(60, {"a": 1}, tuple), 2)[2:-1].join((b"", b"")),
    ],
    ids=["dtype", "subclass", "state"],
)
def test_exponential_objects_are_not_printed(data: bytes) -> None:
    """A name or state with 2**60 parts in 500 bytes of pickle is cut off."""
    started = time.process_time()
    with contextlib.suppress(MalformedFile):
        unpickle(data, "a.pth", "data.pkl")
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "state",
    [
        {"a" * 20_000: [None] * 200},
        {
            "state": {i: {"a": 1} for i in range(200)},
            "param_groups": [{"params": list(range(200)), "param_names": ["a" * 20_000] * 200}],
        },
    ],
    ids=["tree", "optimizer"],
)
def test_names_that_take_all_memory(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long key above many others, 4 MB of names from 30 kB with a limit of 1 MB, is refused."""
    monkeypatch.setattr(tree, "MAX_LETTERS", 1 << 20)
    with pytest.raises(MalformedFile, match="without end"):
        read_bare_pickle(pickle.dumps(state, 2))


@pytest.mark.parametrize("kind", ["tree", "optimizer"])
def test_repeated_names_take_linear_time(kind: str) -> None:
    """20,000 tensors with one name are numbered in linear time."""
    many = 20_000
    names = {"params": list(range(many)), "param_names": ["w"] * many}
    state = {"state": {i: {"a": i} for i in range(many)}, "param_groups": [names]}
    data = pickle.dumps(state, 2)
    if kind == "tree":
        data = b"\x80\x02cfoo\nBar\n)R" + b"}X\x01\x00\x00\x00aK\x01sa" * many + b"."
    started = time.process_time()
    values = [name for name in read_bare_pickle(data).values if not name.endswith(".params")]
    assert len(values) == many
    assert values[-1].endswith(f"#{many}")
    assert time.process_time() - started < 2


@pytest.mark.parametrize("params", [[[1]], [{}]])
def test_unhashable_parameter_ids(params: Any) -> None:
    """Unhashable parameter ids get no names."""
    state = {"state": {0: {"step": 3}}, "param_groups": [{"params": params, "param_names": ["a"]}]}
    values = read_bare_pickle(pickle.dumps(state, 2)).values
    assert values["optimizer.0.step"] == 3
    assert not find_texts(values, end=".params")


# --- memo indexes: Python allocates all lower indexes, so ten bytes could request 32 GB ---


FAR_INDEX = b"r" + struct.pack("<I", 2**31 - 1)
# Texts and bytes that contain the bytes of the opcode.
TREE_OF_OPCODES: Any = {
    "running_var": [b"r\xff\xff\xff\x7f" * 60, "p999999999\n", 2**80, 1.5, None, True, {3, 4}, ("r", ("r",))],
    "r" * 300: bytearray(b"r...."),
}


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_python_pass(protocol: int) -> None:
    """In no protocol is a string, number or set mistaken for the opcode; an added opcode is found."""
    written = pickle.dumps([TREE_OF_OPCODES] * 3 + [list(range(3000)), [str(i) for i in range(3000)]], protocol)
    assert scan(written).fault == ""
    assert scan(written[:-1] + FAR_INDEX + b".").fault == f"it stores object {2**31 - 1} after {len(written) - 1} bytes"
    assert scan(b"xyz" + written[:-1] + FAR_INDEX + b".", 3) == scan(written[:-1] + FAR_INDEX + b".")


@pytest.mark.parametrize("stored", [FAR_INDEX, b"p2000000000\n", b"p 2_000_000_000\n", b"p+2000000000\n"])
@pytest.mark.parametrize(
    "before", [b"\x80\x02N", b"(lp0\n", b"\x80\x04\x95" + struct.pack("<Q", 9) + b"N", b"X\x01\0\0\0a"]
)
def test_a_disproportionate_index_is_found(before: bytes, stored: bytes) -> None:
    """A large index is found in all its encodings, after any opcodes."""
    assert "it stores object" in scan(before + stored + b".").fault


@pytest.mark.parametrize("data", [b"", b"N", b"X\xff\xff\xff\x7fa", b"\xff", b"r"])
def test_broken_pickles_are_left_to_the_unpickler(data: bytes) -> None:
    """A pickle without an end or with an invalid opcode ends the scan."""
    assert scan(data).fault == ""


@pytest.mark.parametrize("data", [b"B\xff\xff\xff\x7fa", b"p5", b"px\n.", b"p" + b"9" * 5000 + b"\n."])
def test_lengths_and_numbers_beyond_the_end(data: bytes) -> None:
    """Bytes longer than the pickle, and invalid or unterminated numbers, are found before loading."""
    assert scan(b"N" + data).fault


@pytest.mark.parametrize("opcode", [b"q\x05", b"r\x05\0\0\0", b"p5\n", b"\x94", b"0N"])
def test_long_runs_of_opcodes(opcode: bytes) -> None:
    """After a run of a thousand opcodes the scan continues, and small indexes pass."""
    for count in range(990, 1010):
        assert scan(b"N" * count + opcode + b"K\x01" * 2000 + b".")[:2] == ("", False)
        assert "it stores" in scan(b"N" * count + opcode + FAR_INDEX + b".").fault
