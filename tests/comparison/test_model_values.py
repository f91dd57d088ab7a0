"""Plain values that belong to the model count: scales, layouts, numbers in a state dict, extra states, attributes."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from collections import OrderedDict
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.checkpoints import save_safetensors
from support.listings import find_all, find_first, list_codes, list_fields, list_names, list_rank_files
from support.states import pick

import syncheck
from syncheck.messages import Note
from syncheck.options import DiffOptions
from syncheck.readers.fingerprints import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

W = torch.arange(9.0).reshape(3, 3)
INTEGERS = torch.ones(3, 3, dtype=torch.int8)
pytestmark = pytest.mark.filterwarnings("ignore")


class Box:
    """An object with an attribute."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Mode(Enum):
    """Members of an enum."""

    FAST = "fast"
    EXACT = "exact"


class OtherBox(Box):
    """An object of another class."""


class Attributed(torch.nn.Module):
    """A module with an attribute that is no tensor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.factor = factor


def pickled(content: Any) -> io.BytesIO:
    """Return a buffer with an object, as extra states of Transformer Engine contain."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer


def quantized(scale: float = 0.1, zero: int = 0) -> torch.Tensor:
    """Return integers with one scale."""
    return torch._make_per_tensor_quantized_tensor(INTEGERS, scale, zero)


def by_channel(scale: float = 0.1, zero: int = 0, axis: int = 0) -> torch.Tensor:
    """Return integers with a scale for each row or column."""
    scales, zeros = torch.tensor([0.1, 0.1, scale]), torch.tensor([0, 0, zero])
    return torch._make_per_channel_quantized_tensor(INTEGERS, scales, zeros, axis)


def parameter(**attributes: Any) -> torch.nn.Parameter:
    """Return a parameter with attributes."""
    weight = torch.nn.Parameter(W.clone())
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


class Block(torch.nn.Module):
    """A module with submodules, which it registers in the order of its arguments."""

    def __init__(self, **submodules: torch.nn.Module | None) -> None:
        super().__init__()
        self.weight = parameter()
        for name, submodule in submodules.items():
            self.add_module(name, submodule)


class Numbered(torch.nn.Sequential):
    """A class that computes in the order of its submodules, like its base class."""


def layers(names: str, kind: Callable[[Any], torch.nn.Module] = torch.nn.Sequential) -> torch.nn.Module:
    """Return a container with layers: `a` and `b` with weights of their own, and `r` for ReLU."""
    created: dict[str, torch.nn.Module] = {"r": torch.nn.ReLU()}
    for number, name in enumerate("ab"):
        created[name] = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.constant_(created[name].weight, number)
    return kind(OrderedDict((name, created[name]) for name in names))


def renumbered(numbers: Any) -> torch.nn.Module:
    """Return a module of a class derived from Sequential, whose submodules are in this order."""
    module = Numbered(torch.nn.Tanh(), torch.nn.ReLU())
    module.weight = parameter()
    module._modules = pick(module._modules, numbers)
    return module


# A file with a value, two values, and the exit code of their comparison.
CASES: dict[str, tuple[Callable[[Any], Any], Any, Any, int]] = {
    "scale": (lambda x: {"w": quantized(x)}, 0.1, 0.2, 1),
    "zero point": (lambda x: {"w": quantized(zero=x)}, 0, 5, 1),
    "scale of a row": (lambda x: {"w": by_channel(x)}, 0.1, 0.2, 1),
    "zero point of a row": (lambda x: {"w": by_channel(zero=x)}, 0, 5, 1),
    "axis": (lambda x: {"w": by_channel(0.2, axis=x)}, 0, 1, 1),
    "quantized, in an optimizer": (
        lambda x: {"w": W, "optimizer": {"state": {0: {"m": quantized(x)}}, "param_groups": [{"params": [0]}]}},
        0.1, 0.2, 1,
    ),
    "strides of a quantized tensor": (lambda x: {"w": x}, quantized(), quantized().t(), 0),
    "layout": (lambda x: {"w": x}, torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc(), 1),
    "size of a sparse tensor": (
        lambda x: {"w": torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (x, 3))}, 3, 4, 1,
    ),
    "order of a nested tensor": (lambda x: {"w": torch.nested.nested_tensor(x)}, [W, W[:1]], [W[:1], W], 1),
    "conjugated": (lambda x: {"w": x}, W * 1j, (W * 1j).conj(), 1),
    "conjugated and resolved": (lambda x: {"w": x}, (W * 1j).conj(), (W * 1j).conj().resolve_conj(), 0),
    "negated": (lambda x: {"w": x}, W + 1, torch._neg_view(W + 1), 1),
    "memory format": (lambda x: {"w": x}, W, W.t().contiguous().t(), 0),
    "number": (lambda x: {"model": {"w": W, "n": x}}, 0.5, 0.7, 1),
    "not a number": (lambda x: {"model": {"w": W, "n": x}}, float("nan"), float("nan"), 0),
    "huge number": (lambda x: {"model": {"w": W, "n": x}}, 10**500, 10**500 + 1, 1),
    "text": (lambda x: {"state_dict": {"w": W, "mode": x}}, "relu", "gelu", 1),
    "bytes": (lambda x: {"model": {"w": W, "b": x}}, b"12", b"13", 1),
    "tuple": (lambda x: {"model": {"w": W, "t": (1, x)}}, 2, 3, 1),
    "nested dictionary": (lambda x: {"model": {"w": W, "a": {"b": {"c": x}}}}, 2, 3, 1),
    "dtype": (lambda x: {"model": {"w": W, "dtype": x}}, torch.float16, torch.bfloat16, 1),
    "function": (lambda x: {"model": {"w": W, "act": x}}, torch.nn.functional.relu, torch.nn.functional.gelu, 1),
    "object": (lambda x: {"model": {"w": W, "box": Box(x)}}, 1, 2, 1),
    "class of an object": (lambda x: {"model": {"w": W, "box": x(1)}}, Box, OtherBox, 1),
    "numpy dtype": (lambda x: {"model": {"w": W, "dtype": x}}, np.dtype("f4"), np.dtype("f8"), 1),
    "equal numpy dtypes": (lambda x: {"model": {"w": W, "dtype": x}}, np.dtype("f4"), np.dtype("float32"), 0),
    "byte order": (lambda x: {"w": W, "_extra_state": {"dtype": x}}, np.dtype("<f4"), np.dtype(">f4"), 1),
    "field of a record": (lambda x: {"model": {"w": W, "dtype": np.dtype([(x, "f4")])}}, "a", "b", 1),
    "dtype of a field": (lambda x: {"model": {"w": W, "dtype": np.dtype([("a", x)])}}, "f4", "i4", 1),
    "unit of a time": (lambda x: {"model": {"w": W, "t": np.datetime64(1, x)}}, "s", "D", 1),
    "unit of an array": (lambda x: {"model": {"w": W, "t": np.array([1], f"M8[{x}]")}}, "s", "D", 1),
    "numpy dtype beside a model": (lambda x: {"model": {"w": W}, "dtype": np.dtype(x)}, "f4", "f8", 0),
    "storage class": (lambda x: {"model": {"w": W, "s": x}}, torch.FloatStorage, torch.UntypedStorage, 1),
    "container class": (lambda x: {"model": {"w": W, "c": x}}, OrderedDict, set, 1),
    "another container class": (lambda x: {"model": {"w": W, "c": x}}, frozenset, set, 1),
    "equal container classes": (lambda x: {"model": {"w": W, "c": x}}, OrderedDict, OrderedDict, 0),
    "member of an enum as a key": (lambda x: {"model": {"w": W, "m": {x: 1}}}, Mode.FAST, Mode.EXACT, 1),
    "path as a key": (lambda x: {"model": {"w": W, "m": {(PurePath(x), 0): 1}}}, "a", "b", 1),
    "date": (lambda x: {"model": {"w": W, "d": date(2026, 1, x)}}, 1, 2, 1),
    "decimal": (lambda x: {"model": {"w": W, "d": Decimal(x)}}, "1.5", "1.6", 1),
    "slice": (lambda x: {"model": {"w": W, "d": slice(x)}}, 1, 2, 1),
    "size": (lambda x: {"model": {"w": W, "d": torch.Size(x)}}, (1,), (2,), 1),
    "partial function": (lambda x: {"model": {"w": W, "d": partial(torch.relu, x)}}, 1, 2, 1),
    "member of an enum": (lambda x: {"model": {"w": W, "d": x}}, Mode.FAST, Mode.EXACT, 1),
    "missing": (lambda x: {"model": {"w": W, **x}}, {}, {"n": 1}, 1),
    "number beside tensors that one file lacks": (lambda x: {"w": W, **x}, {"scale": 2.0}, {}, 1),
    "text beside tensors that one file lacks": (lambda x: {"w": W, **x}, {}, {"mode": "relu"}, 1),
    "shorter tuple beside tensors": (lambda x: {"w": W, "t": x}, (1, 2), (1,), 1),
    "nothing beside tensors that one file lacks": (lambda x: {"w": W, **x}, {}, {"scale": None}, 0),
    "epoch that one file lacks": (lambda x: {"w": W, **x}, {}, {"epoch": 3, "global_step": 5}, 0),
    "loss that one file lacks": (lambda x: {"w": W, **x}, {}, {"val_loss": 3.0, "note": "x"}, 0),
    "configuration that one file lacks": (lambda x: {"w": W, **x}, {}, {"cfg": {"scale": 3.0}}, 0),
    "rank that one file lacks": (lambda x: {"w": W, **x}, {}, {"rank": 3}, 0),
    "number beside a model and a tensor that one file lacks": (
        lambda x: {"model": {"w": W}, "mask": W, **x}, {}, {"scale": 2.0}, 0,
    ),
    "beside parts of a model": (lambda x: {"model": {"a": {"w": W}, "b": {"w": W}, "n": x}}, 0.5, 0.7, 1),
    "another container": (lambda x: {"generator": {"w": W, "n": x}, "critic": {"w": W}}, 0.5, 0.7, 1),
    "no container": (lambda x: {"layer.weight": W, "temperature": x}, 0.5, 0.7, 1),
    "extra state": (lambda x: OrderedDict([("a.weight", W), ("a._extra_state", x)]), {"s": 0.5}, {"s": 0.7}, 1),
    "extra state in a buffer": (lambda x: {"model": {"w": W, "_extra_state": pickled(x)}}, 1, 2, 1),
    "equal extra state": (lambda x: {"model": {"w": W, "_extra_state": pickled(x)}}, 1, 1, 0),
    "attribute of a parameter": (lambda x: {"model": {"w": parameter(scale=x)}}, 0.1, 0.2, 1),
    "attribute of a library": (lambda x: {"model": {"w": parameter(**x)}}, {}, {"_has_been_cloned": True}, 0),
    "attribute of a module": (Attributed, 0.1, 0.2, 1),
    "order in a Sequential": (layers, "ab", "ba", 1),
    "order in a Sequential of a checkpoint": (lambda x: {"model": layers(x), "epoch": 1}, "ab", "ba", 1),
    "order in a nested ModuleDict": (lambda x: Block(d=layers(x, torch.nn.ModuleDict)), "ab", "ba", 1),
    "order in both replicas": (lambda x: torch.nn.DataParallel(layers(x)), "ab", "ba", 1),
    "order in a subclass of Sequential": (renumbered, "01", "10", 1),
    "order in another module": (lambda x: layers(x, lambda named: Block(**named)), "ab", "ba", 0),
    "ReLU that one Sequential lacks": (layers, "ar", "a", 1),
    "ReLU that one module lacks": (lambda x: Block(**x), {"act": torch.nn.ReLU()}, {}, 1),
    "None instead of a module": (lambda x: Block(act=x), torch.nn.ReLU(), None, 1),
    "None that one module lacks": (lambda x: Block(**x), {"act": None}, {}, 0),
    "training flag": (lambda x: Attributed(1.0).train(x), True, False, 0),
    "run beside a model and a tensor": (
        lambda x: {"model": {"w": W}, "rng_state": W, "mask": W, "temperature": x, "note": str(x)}, 0.5, 0.6, 0,
    ),
    "run beside an optimizer": (
        lambda x: {"rng_state": W, "w": W, "opt": {"state": {}, "param_groups": []}, "best": x}, 0.5, 0.6, 0,
    ),
    "loss": (lambda x: {"model": {"w": W}, "loss": x, "best": x, "time": x}, 0.5, 0.6, 0),
    "loss beside tensors": (lambda x: {"w": W, "val_loss": x, "best_acc": x, "time": x, "note": str(x)}, 0.5, 0.6, 0),
    "arguments": (lambda x: {"model": {"w": W}, "args": {"output": x}}, "a", "b", 0),
    "device": (lambda x: {"model": {"w": W, "device": x}}, "cuda:0", "cuda:1", 0),
    "device that one file lacks": (lambda x: {"model": {"w": W, "device": x}}, "cuda:0", None, 0),
    "device of an extra state": (
        lambda x: {"w": W, "_extra_state": {"device": torch.device("cuda", x)}}, 0, 1, 0,
    ),
    "time in a model": (lambda x: {"model": {"w": W, "time": x}}, 1.0, 2.0, 1),
    "number named device": (lambda x: {"model": {"w": W, "head": {"device_id": x}}}, 3, 4, 1),
    "rank and time in an extra state": (lambda x: {"model": {"w": W, "_extra_state": {"rank": 0, "time": x}}}, 1, 2, 1),
    "rank of an adapter that one file lacks": (lambda x: {"model": {"w": W, **x}}, {"rank": 8}, {}, 1),
    "step that one model lacks": (lambda x: {"model": {"w": W, **x}}, {"step": 8}, {}, 1),
    "RNG state in an extra state": (lambda x: {"model": {"w": W, "_extra_state": {"rng_state": x}}}, 1, 2, 0),
    "rank of a process": (lambda x: {"model": {"w": W}, "rank": x, "time": x}, 1, 2, 0),
    "rank beside tensors": (lambda x: {"w": W, "rank": x}, 1, 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_of_the_model(tmp_path: Path, name: str) -> None:
    """Another value is a difference, for `diff` and for `compare`; values of the run are not."""
    make, first, second, expected = CASES[name]
    paths = []
    for rank, value in enumerate((first, second)):
        paths.append(tmp_path / f"a_rank{rank}.pt")
        torch.save(make(value), paths[rank])
    assert syncheck.diff(*paths).exit_code == expected
    assert syncheck.compare(*paths).exit_code == expected
    copy = shutil.copyfile(paths[0], tmp_path / "copy.pt")
    assert syncheck.diff(paths[0], copy).exit_code == 0


def test_names_of_ranks_in_a_model(tmp_path: Path) -> None:
    """In a state dict and an extra state, values named after ranks and times are in a finding."""
    trees = [{"model": {"w": W, "time": i, "device": f"cuda:{i}", "_extra_state": {"rank": i}}} for i in range(2)]
    for rank, tree in enumerate(trees):
        torch.save(tree, tmp_path / f"a_rank{rank}.pt")
    (group,) = syncheck.compare(tmp_path).groups
    assert list_fields(group.findings, "code", "values") == [("SYN299", ("time", "_extra_state.rank"))]
    assert {value.name: (value.kind, value.counts) for value in group.values} == {
        "time": ("model", True), "_extra_state.rank": ("model", True), "device": ("other", False),
    }  # fmt: skip


def test_objects_of_a_model_are_values(tmp_path: Path) -> None:
    """The content of a dtype has names of its own, so that a finding shows which part differs."""
    for rank, size in enumerate((4, 8)):
        records = np.dtype([("a", f"f{size}")])
        torch.save({"model": {"w": W, "d": np.dtype(f"f{size}"), "r": records}}, tmp_path / f"a_rank{rank}.pt")
    (group,) = syncheck.compare(tmp_path).groups
    (finding,) = group.findings
    assert (finding.code, finding.values) == ("SYN299", ("d.name", "r.name", "r.fields.a.0.name", "r.itemsize"))


def test_a_number_beside_tensors_is_missing(tmp_path: Path) -> None:
    """A number beside tensors that one file of the same format lacks is SYN101, also in a subset and a fingerprint."""
    for rank, tree in enumerate(({"w": W, "scale": 2.0, "epoch": 1}, {"w": W})):
        torch.save(tree, tmp_path / f"a_rank{rank}.pt")
        (tmp_path / f"a_rank{rank}.json").write_text(fingerprint(syncheck.read(str(tmp_path / f"a_rank{rank}.pt"))))
    for ending in ("pt", "json"):
        paths = list_rank_files(tmp_path, f"a_rank{{}}.{ending}", 2)
        for options in (DiffOptions(), DiffOptions(subset=True)):
            (finding,) = syncheck.diff(*paths, options=options).groups[-1].findings
            assert (finding.code, finding.values) == ("SYN101", ("scale",))


def test_values_of_pipeline_stages(tmp_path: Path) -> None:
    """A number that only a later pipeline stage of each model has is compared."""
    for side, number in (("a", 1), ("b", 2)):
        (tmp_path / side).mkdir()
        for rank in range(2):
            model = {f"layers.{rank}.w": W, f"layers.{rank}.n": rank * number}
            block = {"schema": 1, "rank": rank, "world_size": 2, "mesh": {"pp": rank}}
            torch.save({"model": model, "syncheck": block}, tmp_path / side / f"m_rank{rank}.pt")
    report = syncheck.diff(tmp_path / "a", tmp_path / "b")
    assert list_names(find_all(report.groups[-1].values, counts=True)) == ["layers.1.n"]
    assert syncheck.diff(tmp_path / "a", tmp_path / "a").exit_code == 0


def test_submodules_of_a_module(tmp_path: Path) -> None:
    """The submodules of a pickled module are one value: in their order if the module computes in this order."""
    paths = []
    for rank, names in enumerate(("abr", "bra", "ba")):
        paths.append(tmp_path / f"a_rank{rank}.pt")
        torch.save(Block(s=layers(names), m=layers(names, lambda named: Block(**named))), paths[rank])
    moved = syncheck.compare(*paths[:2]).groups[-1]
    removed = syncheck.compare(*paths[1:]).groups[-1]
    for group, code, names in (
        (moved, "SYN299", {"s.(modules)": ("a, b, r", "b, r, a")}),
        (removed, "SYN299", {"s.(modules)": ("b, r, a", "b, a"), "m.(modules)": ("a, b, r", "a, b")}),
    ):
        (finding,) = find_all(group.findings, counts=True)
        assert (finding.code, finding.values) == (code, tuple(names))
        assert {value.name: tuple(value.by_rank.values()) for value in group.values if value.counts} == names


def test_rank_of_a_module(tmp_path: Path) -> None:
    """An attribute of a pickled module that is named after the rank belongs to the rank."""
    for name, code in (("rank", 0), ("device_id", 0), ("pid", 0), ("groups", 1)):
        for rank in range(2):
            module = Attributed(1.0)
            setattr(module, name, rank)
            torch.save(module, tmp_path / f"a_rank{rank}.pt")
        assert syncheck.compare(tmp_path).exit_code == code


class Scheduled(torch.nn.Module):
    """A module whose attributes have the names of a setting, of progress and of the state of a loss scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.lr, self.step, self.scale, self.growth_factor = 0.1, 5, 2.0, 2.0


@pytest.mark.parametrize("create", [lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(16)), Scheduled])
def test_attributes_that_a_state_dict_lacks(tmp_path: Path, create: Callable[[], torch.nn.Module]) -> None:
    """A module equals its state dict in either order, whatever its attributes are named; a note counts them all."""
    torch.manual_seed(0)
    module = create()
    paths = tmp_path / "module.pt", tmp_path / "state.pt"
    torch.save(module, paths[0])
    torch.save(module.state_dict(), paths[1])
    options = DiffOptions(accept_inferred=True)
    reports = [syncheck.diff(*order, options=options) for order in (paths, paths[::-1])]
    assert [report.exit_code for report in reports] == [0, 0]
    counts = [
        find_first(report.groups[0].notes, code=Note.MODEL_VALUES_ABSENT).parameters["count"] for report in reports
    ]
    assert counts[0] == counts[1]


def test_other_formats(tmp_path: Path) -> None:
    """A number that safetensors cannot store is undecided, unless it is excluded: a subset has the whole model."""
    model = {"w": W, "_extra_state": 3}
    torch.save({"model": model}, tmp_path / "extra.pt")
    torch.save({"model": model | {"n": 0.5}}, tmp_path / "number.pt")
    copy = save_safetensors(tmp_path / "b.safetensors", {"w": W.numpy()})
    torch.save({"w": W, "scale": 2.0}, tmp_path / "beside.pt")
    assert syncheck.diff(tmp_path / "extra.pt", copy).exit_code == 0
    assert syncheck.diff(tmp_path / "beside.pt", copy).exit_code == 0
    assert syncheck.diff(tmp_path / "number.pt", copy).exit_code == 2
    for options, code in ((DiffOptions(exclude=("n",)), 0), (DiffOptions(subset=True), 2)):
        assert syncheck.diff(tmp_path / "number.pt", copy, options=options).exit_code == code


def test_fingerprints(tmp_path: Path) -> None:
    """A fingerprint has the values of the model, with the digest of bytes."""
    for i, n in enumerate((1, 2)):
        torch.save({"model": {"w": W, "n": n, "_extra_state": pickled(n)}}, tmp_path / f"{i}.pt")
        (tmp_path / f"{i}.json").write_text(fingerprint(syncheck.read(str(tmp_path / f"{i}.pt"))))
    assert syncheck.diff(tmp_path / "0.pt", tmp_path / "0.json").exit_code == 0
    report = syncheck.diff(tmp_path / "0.pt", tmp_path / "1.json")
    assert list_names(find_all(report.groups[-1].values, counts=True)) == ["n", "_extra_state.0.0"]


class Subtract(torch.nn.Module):
    """A module with a tensor that tracing turns into a constant, and a number that it writes into the code."""

    def __init__(self, mean: float, power: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.mean, self.power = torch.full((3,), mean), power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        return self.linear(torch.sub(x, self.mean, alpha=self.power))


def script(path: Path, mean: float = 1.0, power: int = 2, *, frozen: bool = False) -> Path:
    """Write a TorchScript archive."""
    torch.manual_seed(0)
    module: Any = Subtract(mean, power).eval()
    traced = torch.jit.trace(module, torch.zeros(1, 3))
    torch.jit.save(torch.jit.freeze(traced) if frozen else traced, str(path))
    return path


def test_constants_of_torchscript(tmp_path: Path) -> None:
    """Constants of traced and frozen modules are tensors, and other code is undecided."""
    base = script(tmp_path / "a.pt")
    assert syncheck.diff(base, script(tmp_path / "copy.pt")).exit_code == 0
    report = syncheck.diff(base, script(tmp_path / "mean.pt", mean=2.0))
    assert (report.exit_code, list_names(report.groups[-1].tensors)) == (1, ["CONSTANTS.c0"])
    assert syncheck.diff(base, script(tmp_path / "code.pt", power=3)).exit_code == 2
    frozen = script(tmp_path / "f.pt", frozen=True)
    assert len(syncheck.read(str(frozen)).tensors) == 3
    assert syncheck.diff(frozen, script(tmp_path / "f2.pt", frozen=True)).exit_code == 0
    assert syncheck.diff(frozen, script(tmp_path / "f3.pt", mean=2.0, frozen=True)).exit_code == 1


def test_damaged_code_is_one_line(tmp_path: Path) -> None:
    """A damaged record of the code is an error of the file."""
    path = script(tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(".py"))
    start = info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))
    data[start : start + 10] = b"\xff" * 10
    path.write_bytes(data)
    with pytest.raises(syncheck.CheckpointError):
        syncheck.read(str(path))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("container", ["model", ""])
@pytest.mark.parametrize("other", [2.0, 3.0])
def test_values_of_a_wrapped_model(tmp_path: Path, prefix: str, container: str, other: float) -> None:
    """Names of values lose the prefix of a wrapper, as names of tensors do."""
    states = {}
    for start, number in ((prefix, 2.0), ("", other)):
        model = {f"{start}fc.weight": W, f"{start}fc.temperature": number, f"{start}fc._extra_state": {"scale": number}}
        states[start] = {container: model, "epoch": 1} if container else model
    for rank, state in enumerate(states.values()):
        torch.save(state, tmp_path / f"rank{rank}.pth")
    paths = list_rank_files(tmp_path, "rank{}.pth", 2)
    exit_code = 0 if other == 2.0 else 1
    assert syncheck.diff(*paths).exit_code == exit_code
    report = syncheck.compare(*paths)
    assert report.exit_code == exit_code
    assert "SYN101" not in list_codes(report.groups[0].findings)
