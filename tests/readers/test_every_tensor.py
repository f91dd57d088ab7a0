"""Every tensor restored by torch.load gets a name, at any location in the file."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.checkpoints import Call, Global, save_pth
from support.dtensors import dtensor, mesh_of_2_6
from support.listings import find_all, list_fields

import syncheck
from syncheck.readers.pickles.tree import LOST

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

W = torch.ones(3)


class Box:
    """An object with attributes."""


class Named(dict):  # type: ignore[type-arg]
    """A dictionary with attributes."""


class Slotted:
    """An object with slots."""

    __slots__ = ("w",)


@dataclass(frozen=True, slots=True)
class Row:
    """A dataclass with slots."""

    w: Any


class Sub(torch.Tensor):
    """A tensor subclass."""


def given(made: Any, **attributes: Any) -> Any:
    """Return an object with the given attributes."""
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def masked(odd: torch.Tensor) -> Any:
    """Return an array of objects with one tensor."""
    created = np.empty(2, dtype=object)
    created[:] = [odd, None]
    return created


# Objects that contain a tensor, with the tensor's name; the rest of the file is `w`.
PLACES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "attribute of a tensor": (lambda odd: given(W.clone(), scale=odd), "x.scale"),
    "attribute of a parameter": (lambda odd: given(torch.nn.Parameter(W.clone()), scale=odd), "x.scale"),
    "attribute of a subclass": (lambda odd: given(W.clone().as_subclass(Sub), scale=odd), "x.scale"),
    "attribute of an attribute": (lambda odd: given(W.clone(), a=given(W.clone(), b=odd)), "x.a.b"),
    "list in an attribute": (lambda odd: given(W.clone(), parts=[odd, 1]), "x.parts.0"),
    "attribute of a state dict": (lambda odd: given(OrderedDict(a=W.clone()), extra=odd), "x.extra"),
    "attribute that has a key's name": (lambda odd: given(OrderedDict(a=W.clone()), a=odd), "x.a#2"),
    "metadata of a state dict": (lambda odd: given(OrderedDict(a=W.clone()), _metadata={"a": {"t": odd}}), LOST),
    "attribute of a dict subclass": (lambda odd: given(Named(a=W.clone()), extra=odd), "x.extra"),
    "defaultdict": (lambda odd: defaultdict(dict, {"a": {"b": odd}}), "x.a.b"),
    "namespace": (lambda odd: SimpleNamespace(a=odd), "x.a"),
    "object": (lambda odd: given(Box(), a=odd), "x.a"),
    "slots": (lambda odd: given(Slotted(), w=odd), "x.0.1.w"),
    "dataclass with slots": (lambda odd: Row(odd), "x.0.0"),
    "array of objects": (masked, "x.elements.0"),
    "key of a dictionary": (lambda odd: {odd: 1}, LOST),
    "key in a tuple": (lambda odd: {("a", odd): 1}, LOST),
    "set": (lambda odd: {odd}, "x.0"),
    "metadata block": (lambda odd: odd, "x"),
    "optimizer's own parameters": (lambda odd: {"state": {}, "param_groups": [{"params": [odd], "lr": 1.0}]},
                                   "optimizer.param_groups.0.params.0"),
    "optimizer's state by parameter": (lambda odd: {"state": {odd: {"n": W.clone()}}, "param_groups": []}, LOST),
    "a group that is a tensor": (lambda odd: {"state": {}, "param_groups": [odd]}, "optimizer.param_groups.0"),
    "state with attributes": (lambda odd: {"state": {0: {"m": given(W.clone(), s=odd)}}, "param_groups": []},
                              "optimizer.0.m.s"),
    "sparse": (lambda odd: torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), odd, (3,)), "x.values"),
}  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("where", PLACES)
def test_a_tensor_in_an_odd_place_is_compared(tmp_path: Path, where: str, legacy: bool) -> None:
    """A changed element on one rank is found, and the tensor has its own name."""
    make, name = PLACES[where]
    for rank, values in enumerate(([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 4.0])):
        tree = {"w": W.clone(), "x": make(torch.tensor(values))}
        torch.save(tree, tmp_path / f"m_rank{rank}.pth", _use_new_zipfile_serialization=not legacy)
    assert syncheck.compare(tmp_path / "m_rank0.pth", tmp_path / "m_rank1.pth").exit_code == 0
    (group,) = syncheck.compare(tmp_path).groups
    different = find_all(group.tensors, status="different")
    assert list_fields(different, "name", "minority") == [(name, (2,))]


def test_tensors_outside_the_tree_are_named(tmp_path: Path) -> None:
    """Rebuilt tensors without a reference, in a metadata block or in a dropped argument, get names."""
    ignored = Call(Global("numpy", "ndarray"), (np.ones(2, np.float32),))
    block = {**syncheck.metadata(run="a", rank=0, world_size=2), "kept": np.ones(4, np.float32)}
    result = syncheck.read(
        str(save_pth(tmp_path / "a.pth", {"w": np.ones(3, np.float32), "x": ignored, "syncheck": block}))
    )
    assert sorted(tensor.shape for name, tensor in result.tensors.items() if name.startswith(LOST)) == [(2,), (4,)]


def test_tensors_of_a_set_have_no_order(tmp_path: Path) -> None:
    """Several tensors of equal shape in a set cannot be matched, so they are undecided; other tensors are compared."""
    is_same = [torch.full((2,), float(i)) for i in range(3)]
    torch.save({"w": W, "x": {*is_same, torch.ones(5)}}, tmp_path / "a_rank0.pth")
    torch.save({"w": W, "x": {*is_same[::-1], torch.ones(5)}}, tmp_path / "a_rank1.pth")
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, report.counts.identical, report.counts.not_compared) == (2, 2, 3)


def test_parts_of_a_dtensor_have_no_names(tmp_path: Path) -> None:
    """The local tensor and the mesh of a DTensor get no names, but its attributes do."""
    mesh = mesh_of_2_6([0, 1], [0])
    part = np.ones((4, 3), np.float32)
    known_values, outlier = dtensor(part, ["S(0)"], mesh), dtensor(part, ["S(0)", "R"], mesh)
    known_values.arguments[3][1]["scale"] = np.ones(2, np.float32)
    result = syncheck.read(str(save_pth(tmp_path / "a.pth", {"known": known_values, "odd": outlier})))
    assert set(result.tensors) == {"known", "known.scale", "odd"}


def test_a_wrapper_of_tensors_is_counted_and_its_parts_are_compared(tmp_path: Path) -> None:
    """A quantized weight of torchao is refused, but the tensors in its state are compared."""
    kind = Global("torchao.dtypes", "AffineQuantizedTensor")
    for rank in range(2):
        state = {"int_data": np.ones(4, np.int64) + rank, "scale": np.ones(2, np.float32)}
        arguments = (kind, Global("torch", "float32"), (4,), (1,), 0, None, None, False)
        rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
        created = Call(Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, kind, arguments, state))
        save_pth(tmp_path / f"a_rank{rank}.pth", {"w": created})
    (group,) = syncheck.compare(tmp_path).groups
    assert dict(list_fields(group.tensors, "name", "status")) == {"w": "not_compared", "w.int_data": "different"}
    assert group.counts.identical == 1


def test_a_repeated_tensor_is_named_each_time(tmp_path: Path) -> None:
    """A tensor used as key and value, or with two names, is neither lost nor counted as lost."""
    torch.save({"a": W, "b": [W, W], "c": {W: 1}}, tmp_path / "a.pth")
    assert list(syncheck.read(str(tmp_path / "a.pth")).tensors) == ["a", "b.0", "b.1"]


def test_pickle_protocols(tmp_path: Path) -> None:
    """All pickle protocols of torch.save give the same names."""
    tree = {
        "m": given(OrderedDict(a=W.clone()), extra=W.clone()),
        "n": np.arange(3.0),
        "p": given(W.clone(), s=W.clone()),
    }
    names = []
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        torch.save(tree, tmp_path / "a.pth", pickle_protocol=protocol)
        names.append(list(syncheck.read(str(tmp_path / "a.pth")).tensors))
    assert names == [["m.a", "m.extra", "n", "p", "p.s"]] * len(names)


@pytest.mark.parametrize("protocol", [2, 5])
def test_numpy_records_and_times_are_compared_as_bytes(tmp_path: Path, protocol: int) -> None:
    """Structured arrays and times have no torch dtype: their bytes are compared, and the array is counted."""
    for rank in range(3):
        rows = np.array([(1, 2.0 + (rank == 2))], dtype=[("a", "i4"), ("b", "f4")])
        times = np.array(["2026-01-01", f"2026-01-0{2 + (rank == 2)}"], dtype="datetime64[D]")
        torch.save({"w": W, "rows": rows, "times": times}, tmp_path / f"m_rank{rank}.pth", pickle_protocol=protocol)
    assert syncheck.compare(tmp_path / "m_rank0.pth", tmp_path / "m_rank1.pth").exit_code == 0
    (group,) = syncheck.compare(tmp_path).groups
    different = dict(list_fields(find_all(group.tensors, status="different"), "name", "minority"))
    assert different == {"rows.bytes": (2,), "times.bytes": (2,)}
