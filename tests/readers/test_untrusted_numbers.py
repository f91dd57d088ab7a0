"""Numbers, names and objects that would take unbounded time or memory, or cannot be printed."""

from __future__ import annotations

import contextlib
import pickle
import time
from pathlib import PurePosixPath
from typing import Any

import pytest

from syncheck.errors import MalformedFile, brief
from syncheck.readers.pickles import tree
from syncheck.readers.pickles.tree import Flat, flatten
from syncheck.readers.pickles.unpickle import unpickle

HUGE = 10**5000  # more digits than Python turns into text


def read_bare_pickle(data: bytes) -> Flat:
    """Read a bare pickle as a checkpoint's."""
    return flatten(unpickle(data, "a.pth", "data.pkl")[0], "a.pth", len(data))


def call(module: str, name: str, *arguments: Any) -> bytes:
    """A pickle that calls a global."""
    return b"\x80\x02c%b\n%b\n%bR." % (module.encode(), name.encode(), pickle.dumps(arguments, 2)[2:-1])


def doubled(levels: int, leaf: Any, pair: type = list) -> Any:
    """An object with 2**levels leaves in a few bytes of pickle."""
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
    """A key of an unknown class is printed as its class, without an address."""
    names = read_bare_pickle(pickle.dumps({PurePosixPath("x"): 1, "s": {PurePosixPath("y")}}, 2)).values
    assert list(names) == [f"<{PurePosixPath.__module__}.PurePosixPath>", "s.0.0"]  # Python 3.13 moved it


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
        call("torch", "device", doubled(60, 1)),
        call("numpy", "dtype", doubled(60, 1)),
        call("torch._tensor", "_rebuild_from_type_v2", 0, doubled(60, 1), (), None),
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nK\x00cx\nT.DTensor\n)%btR."
        % pickle.dumps(doubled(60, {"a": 1}, tuple), 2)[2:-1].join((b"", b"")),
    ],
    ids=["device", "dtype", "subclass", "state"],
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
    """Parameter ids that cannot be dictionary keys get no names."""
    state = {"state": {0: {"step": 3}}, "param_groups": [{"params": params, "param_names": ["a"]}]}
    values = read_bare_pickle(pickle.dumps(state, 2)).values
    assert values["optimizer.0.step"] == 3
    assert not any(name.endswith(".params") for name in values)
