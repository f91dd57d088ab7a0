"""Plain attributes of modules, `requires_grad`, modes, and the order of registration, across ranks."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from support.listings import find_all, list_codes, list_fields, list_names
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.live import check
from syncheck.messages import Note
from syncheck.testing import compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Finding, Report
    from syncheck.testing import Rank


@dataclasses.dataclass(slots=True)
class Slotted:
    """An object without a dictionary."""

    value: Any


class Lazy:
    """An object whose property must never run."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def loaded(self) -> Any:
        """Fail."""
        raise AssertionError("a property ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked up")


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


# Attributes that hold a value, and the name of the value in the note.
HELD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "itself": (lambda value: value, "state"),
    "list": (lambda value: [0, value], "state.1"),
    "tuple in a dict": (lambda value: {"a": (value,), 3: 1}, "state.a.0"),
    "deque": (lambda value: collections.deque([value]), "state.0"),
    "named tuple": (lambda value: Pair(value, 0), "state.0"),
    "object": (Lazy, "state.value"),
    "slots": (Slotted, "state.value"),
    "namespace": (lambda value: types.SimpleNamespace(inner=[value]), "state.inner.0"),
    "partial": (lambda value: functools.partial(print, value), "state.args.0"),
}


class Net(nn.Module):
    """A module with one plain attribute."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.state = state


def list_attributes(report: Report) -> dict[str, Any]:
    """Return the attributes that differ. The report must be in sync and name them in a note."""
    assert report.verdict == "in_sync"
    (group,) = report.groups
    result = dict(list_fields(find_all(group.values, kind="attribute"), "name", "by_rank"))
    assert not any(list_fields(group.values, "counts"))
    codes = set(list_codes(group.notes))
    assert (Note.ATTRIBUTES in codes or Note.METRICS in codes) == bool(result)
    return result


@pytest.mark.syncheck(ranks=2)
def test_a_tensor_in_a_plain_attribute_is_compared_and_named(syncheck_rank: Rank) -> None:
    """A tensor that differs in any container or object is named; an equal tensor is not."""
    for make, name in HELD.values():
        assert list(list_attributes(check(Net(make(torch.full((3,), float(syncheck_rank.rank))))))) == [name]
        assert list_attributes(check(Net(make(torch.ones(3))))) == {}


@pytest.mark.syncheck(ranks=2)
def test_numbers_and_texts_in_attributes_are_named_with_their_values(syncheck_rank: Rank) -> None:
    """Numbers, texts, bools and settings of torch's layers are compared; what names the rank or its device is not."""
    rank = syncheck_rank.rank
    for first, second in ((0.5, 0.25), (1, 2), (True, 1), ("a", "b"), (float("nan"), 0.0), ([1, 2], [1, 3])):
        result = list_attributes(check(Net(second if rank else first)))
        assert list(result) == ["state"]
        if not isinstance(first, list):
            assert repr(result["state"][0]) == repr(first)
    assert list_attributes(check(Net(float("nan")))) == {}
    assert list_attributes(check(Net({"local_rank": rank, "device": rank, "where": f"cuda:{rank}"}))) == {}
    own_values = Net(0)
    own_values._global_rank, own_values.device = rank, f"cuda:{rank}"
    assert list_attributes(check(own_values)) == {}
    assert list(list_attributes(check(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1 + rank / 10))))) == ["1.p"]


@pytest.mark.syncheck(ranks=2)
def test_attributes_that_cannot_be_read_are_named_with_their_class(syncheck_rank: Rank) -> None:
    """A note names iterators, functions, sparse tensors and endless containers that may hold a tensor."""
    rank = syncheck_rank.rank
    value = torch.full((3,), float(rank))
    endless: list[Any] = [value]
    endless.append(endless)
    unread = {
        "builtins.list_iterator": iter([value]),
        "builtins.function": lambda: value,
        "sparse": value.to_sparse(),
        "builtins.list": list(range(30_000 + rank)),
    }
    for text, state in unread.items():
        (note,) = check(Net(state)).groups[0].notes
        assert note.code is Note.NOT_READ_IN_FULL
        assert "state" in note.parameters["objects"]
        assert text in note.parameters["objects"]
    assert list(list_attributes(check(Net(endless)))) == ["state.0"]


@pytest.mark.syncheck(ranks=2)
def test_what_differs_by_design_is_no_difference(syncheck_rank: Rank) -> None:
    """Process groups, generators, hooks, wrappers and references to the model itself are not compared."""
    rank = syncheck_rank.rank
    net = Net({"group": torch.distributed.group.WORLD, "generator": torch.Generator().manual_seed(rank)})
    net.again, net.parts, net.flat = [net], [net.layer], list(net.parameters())
    net.register_forward_pre_hook(lambda *_: None)
    for model in (net, DistributedDataParallel(net), torch.compile(net)):
        assert list_attributes(check(model)) == {}
        assert check(model).groups[0].notes == ()
    net.state = torch.full((1,), float(rank))
    assert list(list_attributes(check(DistributedDataParallel(net)))) == ["state"]


@pytest.mark.syncheck(ranks=2)
def test_a_trained_parameter_in_a_list_counts(syncheck_rank: Rank) -> None:
    """A parameter that the given optimizer trains is compared like a registered one, wherever a module holds it."""
    net = Net(None)
    torch.manual_seed(syncheck_rank.rank)
    net.state = [nn.Linear(2, 2)]
    optimizer = torch.optim.SGD([*net.parameters(), *net.state[0].parameters()], lr=0.1)
    report = check(net, optimizer)
    assert report.verdict == "out_of_sync"
    assert set(list_names(report.groups[0].tensors)) == {"state.0.weight", "state.0.bias"}
    assert sorted(list_attributes(check(net))) == ["state.0.bias", "state.0.weight"]


def find_settings(report: Report) -> Finding:
    (finding,) = find_all(report.groups[0].findings, code="SYN107")
    return finding


class Rotary(nn.Module):
    """A module whose buffers are registered in an order that the caller chooses."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.register_buffer(name, torch.full((4,), float(ord(name))), persistent=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use everything."""
        return x * self.a * self.b * self.scale  # type: ignore[operator]


@pytest.mark.syncheck(ranks=3)
def test_another_order_of_registration_fails_before_and_after_the_wrapper(syncheck_rank: Rank) -> None:
    """The order counts before tensors differ; DDP then exchanges the buffers, which the same finding covers."""
    model = Rotary("ba" if syncheck_rank.rank == 1 else "ab")
    before = find_settings(check(model))
    assert (before.ranks, before.tensors, before.fails) == ((1,), (), True)
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(4)).sum().backward()
    report = check(ddp)
    assert list_codes(report.groups[0].findings) == ["SYN107"]
    assert (find_settings(report).ranks, set(find_settings(report).tensors)) == ((1,), {"a", "b"})
    assert compare(Rotary("ab"), Rotary("ba"), across_ranks=False).verdict == "in_sync"


@pytest.mark.syncheck(ranks=2)
def test_requires_grad_fails_and_modes_are_a_warning(syncheck_rank: Rank) -> None:
    """A parameter frozen on some ranks fails; a module in another mode is a warning beside the verdict in sync."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[0].weight.requires_grad_(syncheck_rank.rank == 0)
    finding = find_settings(check(model))
    assert (finding.values, finding.severity, finding.fails) == (("0.weight.requires_grad",), "error", True)
    model.requires_grad_()
    model[1].train(syncheck_rank.rank == 0)
    report = check(model)
    finding = find_settings(report)
    assert (report.verdict, finding.severity, finding.fails) == ("in_sync", "warning", False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + syncheck_rank.rank)
    assert find_settings(check(model, optimizer)).severity == "error"


def test_replicas_in_one_process() -> None:
    """Objects of one process are compared likewise, and options exclude attributes."""
    first, second = Net(1.5), Net(2.5)
    assert list(list_attributes(compare(first, second))) == ["state"]
    assert list_attributes(compare(first, second, exclude="state")) == {}
    assert list_attributes(compare(first, second.state_dict())) == {}
