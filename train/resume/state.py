"""Collect and restore the state of one rank."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from train.checkpoints.saver import build_metadata_block
from train.errors import UserError
from train.mesh import is_dtensor, join_shards, local_part
from train.schedule import Position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.schedule import Plan
    from train.task import Task
    from train.trainer import Trainer


def collect_state(trainer: Trainer, plan: Plan, position: Position, run_id: str) -> dict[str, Any]:
    """Collect this rank's state without copying it; a collective, because the epoch's sums are added over all ranks.

    `StateSaver` adds `saved` and `also`. `epoch` is the current epoch, counted from 1; the metadata block counts
    completed epochs. Under fsdp tensors are DTensors.
    """
    settings, ctx, method = trainer.settings, trainer.ctx, trainer.method
    optimizer = find_local_optimizer(trainer)
    all_sums = position.metric_sums.sum_over_ranks(ctx)
    return {
        "run": settings.run,
        "run_id": run_id,
        "rank": ctx.rank,
        "world_size": ctx.world_size,
        "replicas": method.replicas,
        "step": position.step,
        "epoch": position.epoch,
        "steps_per_epoch": plan.steps_per_epoch,
        "config": settings.config(ctx.world_size),
        "position": {
            "in_epoch": position.in_epoch,
            # As numbers: syncheck would expect a tensor to be equal on all ranks.
            "sums": position.metric_sums.totals.tolist(),
            "sums_of_all_ranks": all_sums.tolist(),
        },
        "model": collect_tensors(method.module),
        "optimizer": optimizer.state_dict(),
        "optimizer_names": parameter_names(method.module, optimizer),
        "scaler": trainer.scaler_state,
        "ema": collect_average(trainer),
        "method": method.extra_state(),
        "rng": collect_rng_states(ctx.devices),
        "syncheck": build_metadata_block(trainer, optimizer, plan, run_id, position.step, ctx.rank, ctx.world_size),
    }


def collect_tensors(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict and its non-persistent buffers."""
    return module.state_dict() | dict(module.named_buffers(remove_duplicate=False))


def find_local_optimizer(trainer: Trainer) -> Optimizer:
    """Return the optimizer with this rank's state: under ZeRO, the inner optimizer."""
    return trainer.method.list_replicas(trainer.optimizer)[0].optimizer


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of the integer ids of its state dict."""
    names_by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    names: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # An injected fault may train parameters outside the module.
            names.append(names_by_id.get(id(parameter), f"({len(names)})"))
    return names


def collect_average(trainer: Trainer) -> dict[str, Tensor] | None:
    """Return the averaged parameters by name, and the number of averaged steps; None without --ema."""
    if trainer.average is None:
        return None
    return {**dict(trainer.average.module.named_parameters()), "n_averaged": trainer.average.n_averaged}


def check_shapes(state: Mapping[str, Any], trainer: Trainer, where: str) -> None:
    """Raise UserError if the saved tensors do not match this model, for example because the code changed.

    Checked before anything is restored, because a rank that fails halfway would leave the other ranks waiting.
    where: the state as named in the message.
    """
    current_tensors = {"model": collect_tensors(trainer.method.module)}
    average = collect_average(trainer)
    if average is not None:
        current_tensors["ema"] = average
    for part, current in current_tensors.items():
        saved = state[part] or {}
        for name in sorted(current.keys() | saved.keys()):
            saved_shape, current_shape = _describe_shape(saved, name), _describe_shape(current, name)
            if saved_shape != current_shape:
                raise UserError(
                    f"--resume: {where}: {part}: {name} is {saved_shape}; this program expects {current_shape}"
                )
    optimizer = find_local_optimizer(trainer)
    names = parameter_names(trainer.method.module, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        # Frozen parameters have no optimizer state.
        if parameter.requires_grad and name not in state["optimizer_names"]:
            raise UserError(f"--resume: {where}: the optimizer state lacks parameter {name}")


def _describe_shape(tensors: Mapping[str, Any], name: str) -> str:
    if name not in tensors:
        return "missing"
    value = tensors[name]
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return type(value).__name__


def restore_state(state: Mapping[str, Any], trainer: Trainer) -> None:
    """Restore the model, optimizer, scaler, average and method; under fsdp a collective.

    Tensors are this rank's, possibly DTensors. `StateSaver` restores RNG states afterwards.
    """
    method, optimizer = trainer.method, find_local_optimizer(trainer)
    module, saved = method.module, state["model"]
    current = module.state_dict()
    module.load_state_dict({name: distribute_like(saved[name], target) for name, target in current.items()})
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in current:
            buffer.copy_(saved[name])
    _restore_optimizer(state, module, optimizer)
    if trainer.scaler.is_enabled() and state["scaler"] is not None:
        trainer.scaler.load_state_dict(state["scaler"])
    if trainer.average is not None:
        _restore_average(trainer, state["ema"])
    method.load_extra_state(state["method"])


def _restore_optimizer(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    """Load optimizer states by parameter name, because under ZeRO a rank may now own other parameters."""
    saved = state["optimizer"]
    by_name = {state["optimizer_names"][index]: states for index, states in saved["state"].items()}
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    names, count = parameter_names(module, optimizer), 0
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        members = range(count, count + len(group["params"]))
        count += len(members)
        groups.append({**values, "params": list(members)})
        for index, parameter in zip(members, group["params"], strict=True):
            # A parameter without a gradient so far has no state.
            if (saved_states := by_name.get(names[index])) is not None:
                states[index] = {key: _place_state_value(value, parameter) for key, value in saved_states.items()}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _place_state_value(value: Any, parameter: Tensor) -> Any:
    """Give a value of the parameter's shape the parameter's layout; leave step counts unchanged."""
    # A DTensor's shape is the global shape.
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return distribute_like(value, parameter)
    return local_part(value)


def _restore_average(trainer: Trainer, saved: Mapping[str, Tensor]) -> None:
    averaged = collect_average(trainer)
    assert averaged is not None
    assert trainer.average is not None
    with torch.no_grad():
        for name, tensor in averaged.items():
            tensor.copy_(saved[name])
        # update_parameters() copies the model's buffers without averaging.
        for mine, theirs in zip(trainer.average.module.buffers(), trainer.method.module.buffers(), strict=True):
            mine.copy_(theirs)


def restore_position(state: Mapping[str, Any], ctx: RankContext, task: Task) -> Position:
    """Restore the position within the run.

    The epoch's sums are each rank's own. After a change of the number of ranks, rank 0 takes the sums of all ranks,
    because `MetricSums` adds them over all ranks at the end.
    """
    position, saved = Position(ctx.device, task), state["position"]
    position.step, position.epoch, position.in_epoch = state["step"], state["epoch"], saved["in_epoch"]
    if state["world_size"] == ctx.world_size:
        position.metric_sums.totals[:] = torch.tensor(saved["sums"], dtype=torch.float64)
    elif ctx.is_main:
        position.metric_sums.totals[:] = torch.tensor(saved["sums_of_all_ranks"], dtype=torch.float64)
    return position


def collect_rng_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Collect RNG states as tensors and numbers for torch.load(weights_only=True).

    Dropout draws from torch's generator, and image transforms may draw from Python's and numpy's. After restoring all
    of them, a resumed run draws the same numbers as an uninterrupted run. devices: GPUs of this rank.
    """
    version, words, python_gauss = random.getstate()
    kind, numpy_words, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_rest": [version, python_gauss],
        "numpy": torch.from_numpy(np.asarray(numpy_words).astype(np.int64)),
        "numpy_rest": [str(kind), int(position), int(has_gauss), float(numpy_gauss)],
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
    }


def restore_rng_states(states: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the collected RNG states."""
    torch.set_rng_state(states["torch"])
    version, python_gauss = states["python_rest"]
    random.setstate((version, tuple(states["python"].tolist()), python_gauss))
    kind, position, has_gauss, numpy_gauss = states["numpy_rest"]
    words = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, words, position, has_gauss, numpy_gauss))
    for device, state in zip(devices, states["cuda"], strict=False):  # a run on the CPU saved none
        torch.cuda.set_rng_state(state, device)


def reseed_generators(seed: int, step: int, stream: int) -> None:
    """Start new random streams, different on each rank, after the number of ranks has changed.

    step: of the resumed state, so that a second change leads to different streams.
    """
    words = np.random.SeedSequence((seed, step, stream)).generate_state(2)
    torch.manual_seed(int(words[0]))  # seeds CUDA too
    random.seed(int(words[1]))
    np.random.seed(int(words[1]))


def distribute_like(saved: Tensor, target: Tensor) -> Tensor:
    """Give a saved tensor of this rank, possibly a DTensor, the mesh of `target`.

    The mesh in a file has no process group, so a DTensor gets the current mesh.
    """
    local: Tensor = local_part(saved)
    if is_dtensor(target):
        local = join_shards(local.to(target.device), like=target)
    return local
