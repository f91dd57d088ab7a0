"""Tensors in objects of any class are compared, or counted as not compared with a note about the class."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from support.listings import find_all
from torch import nn

from syncheck.live.memory import snapshot
from syncheck.messages import Note, Refusal
from syncheck.testing import compare

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Slotted:
    w: Any
    lr: float = 0.1


@dataclass(slots=True)
class Derived(Slotted):
    more: Any = None


@dataclass
class Plain:
    w: Any
    more: list[Any] = field(default_factory=list)


class Private:
    __slots__ = ("__w", "unset")

    def __init__(self, w: Any) -> None:
        self.__w = w


class Both(Private):
    """Slots of a base class, and a `__dict__`."""


class Pair(NamedTuple):
    w: Any
    n: int


class Listed(list[Any]):
    pass


class Named(collections.OrderedDict[str, Any]):
    pass


class Number(float):
    pass


class Scaled(torch.Tensor):
    pass


def with_attribute(thing: Any, value: Any) -> Any:
    thing.scale = value
    return thing


def closure(w: Any) -> Callable[[], Any]:
    return lambda: w


def generator(w: Any) -> Any:
    yield w
    yield w


def started(w: Any) -> Any:
    created = generator(w)
    next(created)
    return created


class Counter:
    def __init__(self, w: Any) -> None:
        self.w = w

    def count(self) -> Any:
        return self.w


class Holder(enum.Enum):
    """Attributes of any type."""

    ONE = 1


KEPT: list[Any] = []


def weak(w: Any) -> Any:
    KEPT.append(w)
    return weakref.ref(w)


COMPARED: dict[str, Callable[[Any], Any]] = {
    "slots": Slotted,
    "derived slots": lambda w: Derived(1, more=w),
    "slots in slots": lambda w: Slotted(Slotted(w)),
    "private slots": Private,
    "slots and dict": lambda w: with_attribute(Both(w), 1),
    "dataclass": lambda w: Plain(1, [w]),
    "namespace": lambda w: types.SimpleNamespace(a={"w": w}),
    "named tuple": lambda w: Pair(w, 1),
    "deque": lambda w: collections.deque([w], maxlen=2),
    "list subclass": lambda w: Listed([w]),
    "mapping": lambda w: types.MappingProxyType({"w": w}),
    "chain map": lambda w: collections.ChainMap({}, {"w": w}),
    "user dict": lambda w: collections.UserDict(w=w),
    "user list": lambda w: collections.UserList([w]),
    "default dict": lambda w: collections.defaultdict(list, w=[w]),
    "weak values": lambda w: (KEPT.append(w), weakref.WeakValueDictionary({"w": w}))[1],
    "module in an object": lambda w: Plain(nn.ParameterList([nn.Parameter(w)])),
    "storage": lambda w: w.untyped_storage(),
    "tensor subclass": lambda w: w.as_subclass(Scaled),
    "bound state": lambda w: Plain(types.SimpleNamespace(state_dict=lambda: {"w": w})),
}
COUNTED: dict[str, Callable[[Any], Any]] = {
    "set": lambda w: {w, 1},
    "frozenset": lambda w: frozenset([w]),
    "set of tuples": lambda w: {("a", w)},
    "key": lambda w: {w: 1},
    "key of a tuple": lambda w: {("a", w): 1},
    "weak set": lambda w: (KEPT.append(w), weakref.WeakSet([w]))[1],
    "weak reference": weak,
    "closure": closure,
    "default": lambda w: lambda x=w: x,
    "attribute of a function": lambda w: with_attribute(lambda: None, w),
    "bound method": lambda w: Counter(w).count,
    "partial": lambda w: functools.partial(torch.add, w),
    "partial keyword": lambda w: functools.partial(torch.add, other=w),
    "generator": started,
    "generator not started": generator,
    "iterator": lambda w: iter([w]),
    "map": lambda w: map(torch.neg, [w]),
    "values": lambda w: {"w": w}.values(),
    "attribute of a list": lambda w: with_attribute(Listed([1]), w),
    "attribute of a mapping": lambda w: with_attribute(Named(a=1), w),
    "attribute of a number": lambda w: with_attribute(Number(1), w),
    "attribute of a tensor": lambda w: with_attribute(torch.ones(2), w),
    "attribute of a subclass": lambda w: with_attribute(torch.ones(2).as_subclass(Scaled), [w]),
    "attribute of a parameter": lambda w: with_attribute(nn.Parameter(torch.ones(2)), {"w": w}),
    "mask": lambda w: np.ma.MaskedArray(np.ones(2), mask=(w[:2] > 0).numpy()),
    "array of objects": lambda w: np.array([w, None], dtype=object),
    "exception": lambda w: ValueError(w),
    "property of a slice": lambda w: slice(w, None),
}


def states(make: Callable[[Any], Any], where: str) -> tuple[Any, Any]:
    """Return two states that differ only in one tensor inside an object."""
    wrap: dict[str, Callable[[Any], Any]] = {
        "top": lambda made: {"obj": made, "same": torch.zeros(1)},
        "deep": lambda made: {"model": {"same": torch.zeros(1)}, "extra": [({"obj": [made]},)]},
        "in an object": lambda made: {"same": torch.zeros(1), "outer": Plain(made)},
        "in slots": lambda made: {"same": torch.zeros(1), "outer": Slotted(made)},
    }
    first = wrap[where](make(torch.tensor([0.0, 1.0, 2.0])))
    second = wrap[where](make(torch.tensor([1.0, 1.0, 2.0])))
    return first, second


PLACES = ["top", "deep", "in an object", "in slots"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("what", COMPARED)
def test_a_tensor_in_an_object_is_compared(what: str, where: str) -> None:
    """In any container a different tensor is found, and equal tensors are in sync."""
    first, second = states(COMPARED[what], where)
    report = compare(first, second)
    assert report.verdict == "out_of_sync", report.groups[0].notes
    assert report.counts.different == 1
    again = compare(first, states(COMPARED[what], where)[0])
    assert (again.verdict, again.counts.not_compared) == ("in_sync", 0)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("what", COUNTED)
def test_a_tensor_that_cannot_be_read_is_counted(what: str, where: str) -> None:
    """The tensor is counted as not compared, and no note claims otherwise."""
    report = compare(*states(COUNTED[what], where))
    assert report.counts.not_compared == 1, report.groups[0].notes
    [hidden] = find_all(report.groups[0].tensors, status="not_compared")
    assert hidden.detail
    notes = report.groups[0].notes
    if what != "array of objects":  # refused because of its dtype
        refusal = hidden.detail.parameters["refusal"]
        assert refusal.code is Refusal.IN_UNREAD_OBJECT
        kind = refusal.parameters["name"]
        assert any(note.code is Note.NOT_READ_IN_FULL and kind in note.parameters["objects"] for note in notes)
        assert not any(note.code is Note.UNKNOWN_CLASSES and kind in note.parameters["classes"] for note in notes)


def plain_objects() -> dict[str, Any]:
    import datetime as dt
    import decimal
    import fractions
    import pathlib
    import threading
    import uuid

    return {
        "path": pathlib.Path("a/b"),
        "decimal": decimal.Decimal(1),
        "fraction": fractions.Fraction(1, 2),
        "date": dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        "uuid": uuid.uuid4(),
        "lock": threading.Lock(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "member": Holder.ONE,
        "function": closure(1),
        "partial": functools.partial(print, 1),
        "slots": Slotted(1),
        "set": {1, ("a", 2)},
        "iterator": iter([1]),
        "bound": Counter(1).count,
        "ordered": collections.OrderedDict(a=1),
        "generator": torch.Generator(),
        "class": Plain,
        "module": torch,
        "logger": __import__("logging").getLogger("x"),
    }


@pytest.mark.parametrize("name", plain_objects())
def test_objects_without_tensors_are_not_counted(name: str) -> None:
    """Objects without tensors appear in no count and no difference."""
    report = compare(*({"w": torch.ones(1), "obj": plain_objects()[name]} for _ in range(2)))
    assert report.verdict == "in_sync"
    assert (report.counts.identical, report.counts.not_compared) == (1, 0)


def test_a_tensor_that_is_compared_elsewhere_is_not_counted() -> None:
    """An object that refers to a tensor of the same state hides nothing."""
    w = torch.ones(2)
    model = nn.Sequential(nn.Linear(2, 2))
    again = functools.partial(torch.add, w), {w}, closure(model[0]), closure(model[0].bias), closure([model])
    state = {"again": again, "w": w, "module": model}
    assert not [tensor for tensor in snapshot(state).tensors.values() if tensor.refused]


def test_a_snapshot_of_a_training_counts_nothing() -> None:
    """A snapshot of modules, optimizers, schedulers and their state dicts reports no hidden tensors."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    for items in (
        (model, optimizer, scheduler),
        ({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},),
    ):
        busy = snapshot(*items)
        assert not busy.notes
        assert not busy.stubs
        assert not [tensor for tensor in busy.tensors.values() if tensor.refused]


def test_tensors_in_attributes_of_modules_and_parameters_are_named() -> None:
    """Plain attributes of modules are read; tensors in attributes of parameters are not, and a note names them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not snapshot(model).notes
    model[1].same = model[1].running_mean
    assert not snapshot(model).notes
    model[1].cache = torch.ones(1)
    model[0].weight.main_grad = torch.ones(2)
    busy = snapshot(model, attributes=True)
    [note] = busy.notes
    assert "Parameter.main_grad" in note.parameters["objects"]
    assert busy.attributes is not None
    assert busy.attributes["1.cache"].startswith("float32 [1] ")


def test_buffers_that_are_not_saved_are_compared_in_modules_of_objects() -> None:
    """Non-persistent buffers of a module inside an object are compared, unless one side is a file or state dict."""

    def net(value: float) -> Any:
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        model.register_buffer("mask", torch.full((1,), value), persistent=False)
        return Plain(1, [Slotted(model)])

    assert compare({"s": net(0)}, {"s": net(0)}).verdict == "in_sync"
    assert compare({"s": net(0)}, {"s": net(1)}).verdict == "out_of_sync"
