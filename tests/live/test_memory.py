"""Snapshots of objects in memory have the names, kinds and values of a torch.save file."""

from __future__ import annotations

import copy
from collections import OrderedDict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.listings import find_all, list_fields, list_names, map_fields
from torch import nn

import syncheck
from syncheck.errors import UsageError
from syncheck.live.memory import snapshot
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.messages import Note
from syncheck.tensors.blocks import Files
from syncheck.tensors.kinds import classify_tensors
from syncheck.testing import OutOfSync, assert_in_sync, compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.snapshots import Snapshot


class Net(nn.Module):
    """A network with BatchNorm, a frozen layer, both kinds of buffers, and optionally tied weights."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4, momentum=0.3)
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.conv.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        if tied:
            self.head.weight = self.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.bn(self.conv(x)).mean((2, 3))))


def trained(optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, tied: bool = False, steps: int = 2) -> Any:
    """Return a network and its optimizer after a few steps; the same at every call."""
    torch.manual_seed(0)
    model = Net(tied)
    stepper = (optimizer or adamw)(model.parameters())
    for _ in range(steps):
        stepper.zero_grad()
        model(torch.randn(2, 3, 6, 6)).square().sum().backward()
        stepper.step()
    return model, stepper


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    listing = list(parameters)
    return torch.optim.SGD([{"params": listing[:3]}, {"params": listing[3:], "lr": 0.1}], lr=0.01, momentum=0.9)


def whole(snapshot: Snapshot) -> dict[str, tuple[Any, ...]]:
    """Return all fields of each tensor of a snapshot, with its bytes."""
    shapes = map_fields(snapshot.tensors, "shape")
    parameters = [name for name, tensor in snapshot.tensors.items() if tensor.parameter]
    kinds, guessed, _ = classify_tensors(shapes, snapshot.metadata, parameters=parameters)
    result: dict[str, tuple[Any, ...]] = {"guessed": (guessed,)}
    with Files() as files:
        for name, t in snapshot.tensors.items():
            data = None if t.refused else bytes(files.read(t, 0, t.numel, 0))
            result[name] = (t.name, kinds[name], None if t.refused else (t.dtype, t.shape), t.refused, data)
    return result


def plain() -> Any:
    return trained()[0].state_dict()


def nested() -> Any:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": None, "lr": [0.1, 2]}


def two_groups() -> Any:
    model, optimizer = trained(sgd)
    return {
        "state_dict": model.state_dict(),
        "optim": {"sgd": optimizer.state_dict()},
        "args": {"name": "x", "on": True},
    }


def tied() -> Any:
    model, optimizer = trained(tied=True)
    return {"net": model.state_dict(), "optimizer": optimizer.state_dict()}


def described() -> Any:
    model, optimizer = trained(sgd, tied=True)
    block = syncheck.metadata(run="r", rank=1, world_size=2, step=7, model=model, optimizer=optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncheck": block}


def with_helpers() -> Any:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return {
        "model_state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "shape": torch.Size((2, 3))},
        "numpy": {"a": np.arange(6.0).reshape(2, 3).T, "s": np.float64(3.5), "i": np.int32(4), "h": np.float16(1.5)},
        "ema": OrderedDict(a=torch.ones(2), deep=(torch.zeros(1), [torch.ones(1), {"x": 1}])),
        5: {"set": {3, 1, 2}, "bytes": b"ab", "inf": float("inf"), "complex": 1 + 2j},
    }


def dtypes() -> Any:
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 int64 int32 int16 int8 uint8 "
        "uint16 uint32 uint64 bool"
    )
    values = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    return {name: values.to(getattr(torch, name)) for name in names.split()}


def layouts() -> Any:
    base = torch.arange(24.0).reshape(2, 3, 4)

    def wave() -> torch.Tensor:  # torch.save allows one dtype per storage
        return torch.complex(base, -base)

    return {
        "transposed": base.transpose(0, 2),
        "sliced": base[:, ::2, 1:],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 4, generator=torch.manual_seed(1)).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "conjugated": wave().conj(),
        "negated": wave().conj().imag,
        "conjugated_slice": wave().conj()[:, 1],
        "parameter": nn.Parameter(torch.ones(3)),
        "needs_grad": torch.ones(3, requires_grad=True) * 2,
        "subclass": torch.ones(2).as_subclass(type("Named", (torch.Tensor,), {})),
    }


CHECKPOINTS = [plain, nested, two_groups, tied, described, with_helpers, dtypes, layouts]


@pytest.mark.parametrize("make", CHECKPOINTS, ids=attrgetter("__name__"))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_snapshot_equals_the_snapshot_of_the_file(make: Callable[[], Any], tmp_path: Path) -> None:
    """Names, order, kinds, dtypes, shapes, bytes and values equal the snapshot of the file."""
    tree = make()
    if make is layouts:
        tree["subclass"] = tree["subclass"].as_subclass(torch.Tensor)  # local classes cannot be pickled
        tree["needs_grad"] = tree["needs_grad"].detach()
    torch.save(tree, tmp_path / "checkpoint.pth")
    file, memory = syncheck.read(str(tmp_path / "checkpoint.pth")), snapshot(tree)
    assert whole(memory) == whole(file)
    assert list(memory.tensors) == list(file.tensors)
    values = memory.values
    assert values == file.values
    assert memory.metadata == file.metadata
    assert {k: type(v) for k, v in values.items()} == {k: type(v) for k, v in file.values.items()}


@pytest.mark.parametrize("make, with_tied", [(adamw, False), (sgd, True)])
def test_modules_equal_a_file_with_metadata(make: Any, with_tied: bool, tmp_path: Path) -> None:
    """A module and its optimizer have the names and kinds of a file with metadata, plus non-persistent buffers."""
    model, optimizer = trained(make, tied=with_tied)
    block = syncheck.metadata(run="r", rank=0, world_size=1, model=model, optimizer=optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncheck": block}
    torch.save(saved, tmp_path / "checkpoint.pth")
    file, memory = whole(syncheck.read(str(tmp_path / "checkpoint.pth"))), whole(snapshot(model, optimizer))
    assert memory.pop("mask")[1] == "buffer"
    assert memory == file
    assert whole(snapshot(model, optimizer, persistent=True)) == file
    assert snapshot(model, optimizer).values == syncheck.read(str(tmp_path / "checkpoint.pth")).values


def test_a_module_knows_its_kinds() -> None:
    """Buffers, frozen parameters and BatchNorm momentum are exact in any wrapper."""
    model, _ = trained()
    for wrapped in (model, nn.DataParallel(model), torch.compile(model), torch.compile(nn.DataParallel(model))):
        metadata = snapshot(wrapped).metadata
        assert metadata is not None
        assert metadata.buffers == ("scale", "mask", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
        assert metadata.frozen == ("conv.bias",)
        assert metadata.bn_momentum == {"bn": 0.3}


@pytest.mark.parametrize("name", ["rng", "random_state", "ema", "scaler", "optimizer"])
def test_a_submodule_may_have_any_name(name: str) -> None:
    """A layer named like a trainer's checkpoint key is compared as parameters and buffers."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.BatchNorm1d(2), "fc": nn.Linear(2, 2)})

    first, second = net(), net()
    with torch.no_grad():
        second[name].weight[0] += 1
    report = compare(first, second, only="params")
    assert list_fields(report.groups[0].tensors, "name", "kind", "status") == [
        (f"{name}.weight", "parameter", "different")
    ]
    assert compare(first, second).groups[0].kinds["bn_mean"].identical == 1


def test_wrappers_are_taken_off_before_comparing() -> None:
    """A compiled data-parallel module is in sync with the plain module, with kinds and optimizer states."""
    model, optimizer = trained()
    wrapped = torch.compile(nn.DataParallel(copy.deepcopy(model)))
    second = adamw(wrapped.parameters())
    second.load_state_dict(optimizer.state_dict())
    report = assert_in_sync((model, optimizer), (wrapped, second))
    kinds = report.groups[0].kinds
    assert kinds["buffer"].identical == 2
    assert kinds["optimizer"].identical == 2 * 6  # exp_avg and exp_avg_sq of all parameters but the frozen bias
    assert not find_all(report.groups[0].notes, code=Note.KINDS_GUESSED)


@pytest.mark.parametrize("name", ["conv.bias", "bn.running_mean", "scale", "mask", "head.weight"])
def test_any_changed_bit_of_a_module_is_found(name: str) -> None:
    """A flipped bit in any parameter or buffer is the only difference."""
    model, _ = trained()
    second = copy.deepcopy(model)
    assert_in_sync(model, second)
    tensor = dict([*second.named_parameters(), *second.named_buffers()])[name]
    tensor.detach().view(torch.int32).flatten()[1] ^= 1
    with pytest.raises(OutOfSync) as caught:
        assert_in_sync(model, second)
    assert list_names(caught.value.report.groups[0].tensors) == [name]


def test_optimizer_states_are_named_by_identity() -> None:
    """States of an optimizer over some parameters in any order have the parameters' names."""
    model, _ = trained()
    chosen = [model.head.weight, model.bn.weight]
    optimizer = torch.optim.SGD(chosen, lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    optimizer.step()
    names = set(snapshot(model, optimizer).tensors)
    assert {"optimizer.head.weight.momentum_buffer", "optimizer.bn.weight.momentum_buffer"} <= names


class Wrapping:
    """An optimizer in another object, which passes its state on, as Accelerate does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        """The state of the inner optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        """The groups of the inner optimizer."""
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        """Return the state of the inner optimizer."""
        return self.optimizer.state_dict()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("removed", ["parameter", "group"])
def test_states_of_parameters_that_left_an_optimizer(removed: str, wraps: bool) -> None:
    """A script freezes a layer by taking it out of the optimizer, which keeps the state: torch's state dict fails."""
    model, _ = trained()
    optimizer = torch.optim.AdamW([{"params": [model.bn.weight]}, {"params": [model.fc.weight, model.fc.bias]}])
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    optimizer.step()
    if removed == "group":
        optimizer.param_groups.pop(0)
    else:
        optimizer.param_groups[1]["params"].pop(0)
    with pytest.raises(KeyError):
        optimizer.state_dict()
    names = set(snapshot(model, Wrapping(optimizer) if wraps else optimizer).tensors)
    left = {"group": "bn.weight", "parameter": "fc.weight"}[removed]
    assert f"optimizer.{left}.exp_avg" not in names
    assert "optimizer.fc.bias.exp_avg" in names
    # The optimizer of the script is not changed.
    assert len(optimizer.state) == 3


def test_several_modules_and_optimizers() -> None:
    """Two models with an optimizer each are named by position, and states by their own model's parameters."""
    (first, single), (second, two) = trained(), trained(sgd)
    busy = snapshot(first, second, single, two)
    assert {"model.0.fc.weight", "model.1.fc.weight", "optimizer.0.model.0.fc.weight.exp_avg"} <= set(busy.tensors)
    assert "optimizer.1.model.1.fc.weight.momentum_buffer" in busy.tensors
    assert busy.values["optimizer.1.param_groups.1.lr"] == 0.1
    names = set(snapshot({"student": first, "teacher": second, "opt": single}).tensors)
    assert {"student.fc.weight", "teacher.mask", "optimizer.student.fc.weight.exp_avg"} <= names


def test_schedulers_and_scalers() -> None:
    """A scheduler and a scaler have the values that a trainer would save."""
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    values = snapshot(model, optimizer, scheduler, scaler, {"step": 4}).values
    assert (values["scaler.scale"], values["lr_scheduler.step_size"], values["step"]) == (8.0, 3, 4)
    assert values["optimizer.param_groups.0.lr"] == 1e-3


def test_a_snapshot_copies_nothing_and_changes_nothing() -> None:
    """A contiguous tensor is read in place; model and RNG state do not change."""
    model, optimizer = trained()
    before = copy.deepcopy((model, optimizer))
    rng = torch.get_rng_state()
    contents = snapshot(model, optimizer).tensors["fc.weight"].data
    assert isinstance(contents, TensorBytes)
    first = contents[0:4]
    with torch.no_grad():
        model.fc.weight[0, 0] += 1
    assert contents[0:4] != first  # a view of the parameter, not a copy
    with torch.no_grad():
        model.fc.weight[0, 0] -= 1
    assert_in_sync((model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_module_is_compared_with_its_file(tmp_path: Path) -> None:
    """A module agrees with the file of its state dict, which lacks non-persistent buffers."""
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    assert_in_sync(model, tmp_path / "model.pth")
    with torch.no_grad():
        model.bn.running_mean[0] += 1
        model.bn.running_var[0] *= 2
    with pytest.raises(OutOfSync, match="SYN201"):
        assert_in_sync(model, tmp_path / "model.pth")


def test_errors_of_a_single_module() -> None:
    """A single module outside a process group, and a module beside its optimizer, are errors with a solution."""
    model, optimizer = trained()
    with pytest.raises(UsageError, match="one object to compare"):
        assert_in_sync(model)
    with pytest.raises(UsageError, match="pass tuples"):
        assert_in_sync(model, optimizer)
    with pytest.raises(UsageError, match="class type cannot be compared"):
        assert_in_sync(nn.Linear, nn.Linear)


def test_a_buffer_on_one_replica_only_is_a_buffer() -> None:
    """A buffer of the second module only is reported as a buffer, not as a parameter."""
    first, second = trained()[0], trained()[0]
    second.register_buffer("late", torch.ones(1))
    [diff] = compare(first, second).groups[0].tensors
    assert (diff.name, diff.kind, diff.reason) == ("late", "buffer", "missing")


def test_bytes_of_odd_views_are_read_as_they_are() -> None:
    """A strided single element and damaged booleans are read bit by bit."""
    first = torch.arange(4.0)[::2][:1]
    assert TensorBytes(first)[0:4] == bytes(4)
    damaged = torch.tensor([[1, 0], [77, 1]], dtype=torch.uint8).view(torch.bool).t()
    assert TensorBytes(damaged)[0:4] == bytes([1, 77, 0, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_device_are_compared() -> None:
    """A module on the GPU is in sync with its CPU copy, and a change is found."""
    model, _ = trained()
    second = copy.deepcopy(model).cuda()
    assert_in_sync(model, second)
    with torch.no_grad():
        second.fc.weight[0, 0] += 1
    assert compare(model, second).counts.different == 1


def test_a_parameter_that_an_optimizer_has_updated_is_not_frozen() -> None:
    """A GAN freezes one model while the other one trains; a backbone that has never trained stays frozen."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[1].requires_grad_(requires_grad=False)
    metadata = snapshot(model, optimizer).metadata
    assert metadata is not None
    assert metadata.frozen == ("0.weight",)
