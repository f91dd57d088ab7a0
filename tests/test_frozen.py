"""A class with `record` behaves as a frozen dataclass with slots."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, astuple, dataclass, field, fields, is_dataclass, replace

import pytest

from syncheck.frozen import mutable_record, record


@record
class Point:
    """A record with every kind of field."""

    x: int
    y: float = 0.0
    labels: list[str] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict, hash=False)


@record
class Named(Point):
    """A record with inherited fields."""

    name: str = ""

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("must not be negative")


@record
class Text:
    """A record with methods of its own."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.text.lower() == other.text.lower()

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Reference:
    """The dataclass that Point replaces."""

    x: int
    y: float = 0.0
    labels: list[str] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict, hash=False)


def test_a_record_is_a_dataclass() -> None:
    """The functions of `dataclasses` return the same for a record as for a dataclass."""
    point, reference = Point(1, labels=["a"]), Reference(1, labels=["a"])
    assert is_dataclass(Point)
    assert [(item.name, item.type) for item in fields(Point)] == [(item.name, item.type) for item in fields(Reference)]
    assert (asdict(point), astuple(point)) == (asdict(reference), astuple(reference))
    assert (Point.__slots__, Point.__match_args__) == (Reference.__slots__, Reference.__match_args__)  # type: ignore[attr-defined]
    assert list(inspect.signature(Point).parameters) == list(inspect.signature(Reference).parameters)
    assert repr(point) == repr(reference).replace("Reference", "Point")
    assert astuple(replace(point, x=2)) == astuple(replace(reference, x=2))


def test_records_with_equal_fields_are_equal() -> None:
    """Records are equal and have the same hash if their class and fields are equal; other classes are unequal."""
    nan = float("nan")
    assert Point(1, nan) == Point(1, nan)
    assert Point(1) != Point(2)
    assert Point(1) != Named(1)
    assert Point(1) != (1, 0.0, [], {})
    assert hash(Point(1, labels=(), options={"a": 1})) == hash(Point(1, labels=(), options={}))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))


def test_default_values_are_not_shared() -> None:
    """Each record gets its own value of a `default_factory`."""
    Point(1).labels.append("a")
    assert Point(1).labels == []


def test_records_cannot_change() -> None:
    """Fields can be neither assigned nor deleted, and there are no other attributes."""
    point = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: setattr(point, "z", 2), lambda: delattr(point, "x")):
        with pytest.raises(FrozenInstanceError):
            change()
    assert not hasattr(point, "__dict__")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_records_are_pickled_and_copied(protocol: int) -> None:
    """A record survives pickle and copy, also with inherited fields."""
    named = Named(1, 2.0, ["a"], {"b": 1}, "name")
    assert pickle.loads(pickle.dumps(named, protocol)) == named
    assert copy.deepcopy(named) == copy.copy(named) == named


def test_wrong_arguments_name_the_class() -> None:
    """A missing or unknown argument is a TypeError with the name of the class; `__post_init__` is called."""
    with pytest.raises(TypeError, match=r"Named\.__init__\(\) missing 1 required positional argument: 'x'"):
        Named()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Point(1, z=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        Named(-1)


def test_own_methods_are_kept() -> None:
    """Methods that a record defines replace the shared methods."""
    assert repr(Text("a")) == "a"
    assert Text("a") == Text("A")
    assert hash(Text("a")) == 0


def test_a_field_without_a_default_cannot_follow_one_with_a_default() -> None:
    """The class is refused, as by `dataclass`."""

    class Wrong:
        x: int = 0
        y: int

    with pytest.raises(TypeError, match=r"Wrong\.y"):
        record(Wrong)


@mutable_record
class Counter:
    """A mutable record."""

    name: str
    count: int = 0
    labels: list[str] = field(default_factory=list)


def test_a_mutable_record_can_change() -> None:
    """Its fields can change, and it has no hash; otherwise it behaves as a record."""
    counter, other = Counter("a"), Counter("a")
    assert (counter == other, counter.labels is other.labels) == (True, False)
    counter.count += 1
    assert repr(counter) == "Counter(name='a', count=1, labels=[])"
    assert counter != other
    assert pickle.loads(pickle.dumps(counter)) == replace(other, count=1) == counter
    with pytest.raises(AttributeError):
        counter.total = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="unhashable"):
        hash(counter)


def test_the_first_use_of_a_record_may_be_through_a_subclass() -> None:
    """Each class has a constructor of its own, whichever is used first."""

    @record
    class Base:
        x: int

    @record
    class Derived(Base):
        y: int = 2

    class Plain(Base):
        def __init__(self) -> None:
            super().__init__(5)

    assert (Plain().x, astuple(Derived(1)), astuple(Base(3))) == (5, (1, 2), (3,))
    assert list(inspect.signature(Derived).parameters) == ["x", "y"]
