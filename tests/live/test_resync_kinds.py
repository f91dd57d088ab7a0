"""`resync` of all kinds of models: dtypes, strides, ties, wrappers, shards, fp32 masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import Net, all_pass, all_raise, each_rank, flip, needs_fsdp2, on_all, trained
from support.healing import bits, healed
from support.listings import list_names
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.live import resync

if TYPE_CHECKING:
    from collections.abc import Callable


def holding(**tensors: torch.Tensor) -> nn.Module:
    """Return a module with some tensors: parameters if trainable, otherwise buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            setattr(module, name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module


def kinds() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "bfloat": torch.randn(5).to(torch.bfloat16),
        "eighth": torch.randn(5).to(torch.float8_e4m3fn),
        "imaginary": torch.randn(3, dtype=torch.complex64),
        "whole": torch.arange(6),
        "truth": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "gaps": torch.randn(6, 4)[::2, 1:3],
        "single": torch.arange(6.0)[::2][:1],
        "corner": torch.arange(16.0).reshape(4, 4)[1::2, 1::2][:1, :1],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }


@pytest.mark.syncheck(ranks=3)
def test_every_dtype_and_layout_is_repaired(syncheck_rank: Any) -> None:
    """bfloat16, float8, complex, bool, NaN, 0-dim, empty, channels_last, transposed, sliced: repaired bit by bit."""
    tensors = kinds()
    if syncheck_rank.rank == 1:
        for tensor in tensors.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    model = holding(**tensors)
    strides = {name: tensor.stride() for name, tensor in model.state_dict().items()}
    done = healed(model, bad=(1,), source=0)
    assert set(list_names(done.copied)) == tensors.keys() - {"empty"}
    assert {name: tensor.stride() for name, tensor in model.state_dict().items()} == strides
    assert done.bytes == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.syncheck(ranks=3)
def test_tied_weights_stay_tied(syncheck_rank: Any) -> None:
    """A repaired tensor with two names remains one tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    if syncheck_rank.rank == 0:
        flip(model[0].weight)
    healed(model, bad=(0,), source=1)
    assert model[1].weight is model[0].weight


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # never called, so never compiled


def both(model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model))


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, compiled, both])
def test_wrapped_models_are_repaired(syncheck_rank: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Under DDP, torch.compile or both, names are the model's, and lost state finds its parameter."""
    torch.manual_seed(0)
    inner = Net()
    model = wrap(inner)
    optimizer = torch.optim.Adagrad(inner.parameters())
    if syncheck_rank.rank == 2:
        flip(inner.fc.weight)
        optimizer.state.pop(inner.head.weight)
    done = healed(model, optimizer, bad=(2,), source=0)
    assert set(list_names(done.copied)) == {
        "fc.weight", "optimizer.head.weight.step", "optimizer.head.weight.sum",
    }  # fmt: skip


class Mixed(torch.optim.Optimizer):
    """fp32 masters of half-precision parameters, saved like Megatron."""

    def __init__(self, model: nn.Module) -> None:
        self.model = list(model.parameters())
        self.masters = [p.detach().float() for p in self.model]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-2)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self) -> None:  # type: ignore[override]
        for master, p in zip(self.masters, self.model, strict=True):
            master.grad = p.grad.float()
        self.inner.step()
        for master, p in zip(self.masters, self.model, strict=True):
            p.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.inner.state_dict(), "fp32_from_fp16_params": [self.masters]}


@pytest.mark.syncheck(ranks=3)
def test_masters_are_repaired(syncheck_rank: Any) -> None:
    """A bit of an fp32 master, and a moment and lr of the inner optimizer are repaired."""
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    optimizer = Mixed(model)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    if syncheck_rank.rank == 1:
        flip(optimizer.masters[0])
        flip(optimizer.state[optimizer.masters[1]]["exp_avg"])
        optimizer.param_groups[0]["lr"] = 0.5
    done = healed(model, optimizer, bad=(1,), source=0)
    assert len(done.copied) == 2
    assert done.copied[0].name == "optimizer.fp32_from_fp16_params.0.0"
    assert optimizer.inner.param_groups[0]["lr"] == 1e-2


class Stepper(torch.optim.Optimizer):
    """An optimizer whose state has numbers and nested tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1, "nested": {"decay": 0.5}})
        for p in model.parameters():
            self.state[p] = {"step": 3, "history": [torch.ones(2), torch.zeros(2)]}


@pytest.mark.syncheck(ranks=3)
def test_numbers_and_nested_state_are_repaired(syncheck_rank: Any) -> None:
    """A numeric step, a tensor in a list, and a value in a dict of a parameter group are set."""
    model = Net()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    optimizer = Stepper(model)
    if syncheck_rank.rank == 1:
        optimizer.state[model.fc.bias]["step"] = 4
        flip(optimizer.state[model.fc.bias]["history"][1])
        optimizer.param_groups[0]["nested"] = {"decay": 0.25}
    done = healed(model, optimizer, bad=(1,), source=0)
    assert list_names(done.copied) == ["optimizer.fc.bias.history.1"]
    assert set(list_names(done.values)) == {
        "optimizer.fc.bias.step",
        "optimizer.param_groups.0.nested.decay",
    }


def by_lbfgs() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    step(model, optimizer)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).reshape(3, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("fault", ["lost", "fewer", "more"])
def test_lists_of_an_optimizer_are_repaired(syncheck_rank: Any, fault: str) -> None:
    """Missing, short and long history lists of LBFGS are replaced by the source's, and training continues."""
    model, optimizer = by_lbfgs()
    state = optimizer.state[model.fc.weight]
    if syncheck_rank.rank == 1:
        if fault == "lost":
            optimizer.state.clear()
        for name in ("old_dirs", "old_stps", "ro") if fault != "lost" else ():
            state[name] = state[name][1:] if fault == "fewer" else [*state[name], state[name][0].clone()]
    healed(model, optimizer, bad=(1,), source=0)
    step(model, optimizer)  # no step skipped or repeated, and no error
    contents = on_all(bits(model, optimizer))
    assert contents[0] == contents[1] == contents[2]


class Helper:
    """Keeps plain values in containers, with a state dict, like a scheduler."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


FULL = {"steps": [1, 2, 3], "deep": [(1, "a"), [2.5, [None, True]]], "named": {"a": {"b": [7]}}}
LESS: dict[str, Any] = {"steps": [1], "deep": [], "named": {}}


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize(("right", "wrong"), [(FULL, LESS), (LESS, FULL)])
def test_lists_of_values_are_repaired(syncheck_rank: Any, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Nested, longer and shorter lists in a state dict are replaced by the source's."""
    helper = Helper(wrong if syncheck_rank.rank == 2 else right)
    all_pass(each_rank(resync, (holding(ones=torch.ones(2)), helper)))
    assert helper.values == right


@pytest.mark.syncheck(ranks=3)
def test_two_optimizers(syncheck_rank: Any) -> None:
    """With the optimizers of a generator and a discriminator, the faulty optimizer is repaired."""
    torch.manual_seed(0)
    models = Net(), Net()
    optimizers = tuple(torch.optim.Adagrad(model.parameters()) for model in models)
    if syncheck_rank.rank == 2:
        optimizers[1].param_groups[0]["lr"] = 0.5
        del optimizers[1].state[models[1].fc.bias]
    done: Any = all_pass(each_rank(resync, models, optimizers))
    assert on_all(bits(*models, *optimizers)) == [bits(*models, *optimizers)] * 3
    assert set(list_names((*done.values, *done.created))) == {
        "optimizer.1.param_groups.0.lr", "optimizer.1.model.1.fc.bias.sum", "optimizer.1.model.1.fc.bias.step",
    }  # fmt: skip


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_resync_in_torch_modes(syncheck_rank: Any, mode: Callable[[], Any]) -> None:
    """The repair is the same in no_grad, inference mode and autocast, and created state can be trained.

    Tensors created in inference mode are overwritten in each mode.
    """
    model, optimizer = trained()
    with torch.inference_mode():
        made_there = holding(row=torch.arange(6.0), column=torch.arange(6.0).view(2, 3).t())
    if syncheck_rank.rank == 2:
        flip(model.module.fc.weight)
        optimizer.state.clear()
        with torch.inference_mode():
            made_there.row += 1
            made_there.column += 1
    with mode():
        healed(model, optimizer, bad=(2,), source=0)
        healed(made_there, bad=(2,), source=0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert len({str(contents) for contents in on_all(bits(model, optimizer))}) == 1


@pytest.mark.syncheck(ranks=3)
def test_a_tensor_learning_rate_is_repaired(syncheck_rank: Any) -> None:
    """A tensor lr is overwritten in place, and a float lr on the bad rank becomes a tensor."""
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": [model.fc.weight], "lr": torch.tensor(0.1)}, {"params": [model.head.weight], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, capturable=False, foreach=False)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.2)
    first = optimizer.param_groups[0]["lr"]
    if syncheck_rank.rank == 2:
        first.fill_(0.5)
        optimizer.param_groups[1]["lr"] = 0.2
    done = healed(model, optimizer, bad=(2,), source=0)
    assert optimizer.param_groups[0]["lr"] is first
    assert list_names(done.created) == ["optimizer.param_groups.1.lr"]


@pytest.mark.syncheck(ranks=3)
def test_gradients_and_rng_states_do_not_change(syncheck_rank: Any) -> None:
    """RNG states, the next batch and gradients do not change."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    torch.manual_seed(syncheck_rank.rank)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    healed(model, optimizer, bad=(1,), source=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@needs_fsdp2
@pytest.mark.syncheck(ranks=2)
def test_shards_do_not_change(syncheck_rank: Any) -> None:
    """Under FSDP2 shards do not change; a replicated buffer and learning rate come from the source.

    Lost state of a shard exists on no other rank, so resync refuses.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = Net(norm=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (syncheck_rank.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    shards = {name: p.to_local().clone() for name, p in model.named_parameters()}
    states = {p: dict(state) for p, state in optimizer.state.items()}
    model.norm.running_mean += syncheck_rank.rank
    optimizer.param_groups[0]["lr"] = 0.1 + syncheck_rank.rank
    done: Any = all_pass(each_rank(resync, model, optimizer, source=1))
    assert list_names(done.copied) == ["norm.running_mean"]
    assert optimizer.param_groups[0]["lr"] == 1.1
    assert all(torch.equal(p.to_local(), shards[name]) for name, p in model.named_parameters())
    assert all(optimizer.state[p][key] is states[p][key] for p in states for key in states[p])
    if syncheck_rank.rank == 1:
        optimizer.state.clear()
    outcome = all_raise(each_rank(resync, model, optimizer, source=1), "UsageError")
    assert "no other rank has a copy of optimizer." in outcome.text


@pytest.mark.syncheck(ranks=3)
def test_replicated_dtensors_are_repaired(syncheck_rank: Any) -> None:
    """A replicated DTensor parameter is repaired by its local tensor; its lost state is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (3,))
    local = torch.arange(8.0)
    model: Any = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    optimizer = torch.optim.Adagrad(model.parameters())
    if syncheck_rank.rank == 1:
        flip(local)
    done: Any = all_pass(each_rank(resync, model, optimizer))
    assert list_names(done.copied) == ["weight"]
    assert torch.equal(model.weight.to_local(), torch.arange(8.0))
    if syncheck_rank.rank == 1:
        optimizer.state.clear()
    outcome = all_raise(each_rank(resync, model, optimizer), "UsageError")
    assert "optimizer.weight.step differs, but resync cannot set it" in outcome.text
