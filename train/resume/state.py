"""What one rank must save to go on later as if it had not been interrupted, and how it takes that back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.block import metadata_block
from train.errors import UserError
from train.position import Position
from train.resume.generators import generator_states
from train.resume.shards import placed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.position import Plan
    from train.step import Step


def collect(trainer: Step, plan: Plan, position: Position, run_id: str) -> dict[str, Any]:
    """Collect this rank's state, not copied; a collective, for the sums of the epoch are added up over all ranks.

    Keys: see `train.resume.files.FIELDS`; the keeper adds what it knows of others. `epoch` is the one that the run is
    in, counted from 1, where it goes on; that of the metadata block counts those that are done, as in every file.
    Under fsdp tensors are DTensors, which say themselves which part of what they are.
    """
    settings, ctx, method = trainer.settings, trainer.ctx, trainer.method
    optimizer = held(trainer)
    all_sums = ctx.sum_over_ranks(position.meter.sums.clone())
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
            "sums": position.meter.sums.tolist(),  # numbers: of a tensor syncheck would think that ranks shall agree
            "sums_of_all_ranks": all_sums.tolist(),
        },
        "model": tensors_of(method.module),
        "optimizer": optimizer.state_dict(),
        "optimizer_names": parameter_names(method.module, optimizer),
        "scaler": trainer.scaler.state_dict() if trainer.scaler.is_enabled() else None,
        "ema": None if trainer.average is None else average_of(trainer),
        "method": method.extra_state(),
        "rng": generator_states(ctx.devices),
        "syncheck": metadata_block(trainer, optimizer, plan, run_id, position.step, ctx.rank, ctx.world_size),
    }


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Give the module's state dict and also the buffers that it leaves out (persistent=False)."""
    return module.state_dict() | dict(module.named_buffers(remove_duplicate=False))


def held(trainer: Step) -> Optimizer:
    """Give the optimizer that holds this rank's state: under ZeRO the one inside."""
    return trainer.method.state(trainer.optimizer)[0].optimizer


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Name the optimizer's parameters, in the order of the integer ids of its state dict."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A planted desync may train what the module does not know.
    return [names.get(id(parameter), f"({index})") for index, parameter in enumerate(ordered)]


def average_of(trainer: Step) -> dict[str, Tensor]:
    """Give the averages by name, and how many steps they are of."""
    assert trainer.average is not None
    return {**trainer.average.parameters, "n_averaged": trainer.average.copy.n_averaged}


def check_fits(state: Mapping[str, Any], trainer: Step, where: str) -> None:
    """Refuse a state whose tensors are not those of this model: the program has changed. where: names it.

    Before anything is restored, for a rank that fails in the middle leaves the others waiting. Raises UserError.
    """
    pairs = [("model", tensors_of(trainer.method.module), state["model"])]
    if trainer.average is not None:
        pairs.append(("ema", average_of(trainer), state["ema"] or {}))
    for part, mine, theirs in pairs:
        for name in sorted(mine.keys() | theirs.keys()):
            found, needed = (_shape(tensors[name]) if name in tensors else "no" for tensors in (theirs, mine))
            if found != needed:
                raise UserError(f"--resume: {where}: {part}: {found} tensor {name}, and this program has {needed}")
    optimizer = held(trainer)
    names, known = parameter_names(trainer.method.module, optimizer), state["optimizer_names"]
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # What is frozen has no state.
    lacking = [n for n, parameter in zip(names, ordered, strict=True) if n not in known and parameter.requires_grad]
    if lacking:
        raise UserError(f"--resume: {where}: the optimizer's state has no parameter {lacking[0]}")


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def restore(state: Mapping[str, Any], trainer: Step) -> None:
    """Give the model, optimizer, scaler, average and method what they held; under fsdp a collective.

    Tensors of the state are parts as this rank holds them, or whole where they were put together from the files of
    another number of ranks: see `train.resume.shards`. Random states come after it: see `Keeper`.
    """
    method, optimizer = trainer.method, held(trainer)
    module, saved = method.module, state["model"]
    own = module.state_dict()
    module.load_state_dict({name: placed(saved[name], target) for name, target in own.items()})
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in own:
            buffer.copy_(saved[name])
    _restore_optimizer(state, module, optimizer)
    if trainer.scaler.is_enabled() and state["scaler"] is not None:
        trainer.scaler.load_state_dict(state["scaler"])
    if trainer.average is not None:
        _restore_average(trainer, state["ema"])
    method.load_extra_state(state["method"])


def _restore_optimizer(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    """Load the states by the names of their parameters: under ZeRO others may be this rank's own now."""
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
            # No state yet: a parameter that has not had a gradient.
            if (found := by_name.get(names[index])) is not None:
                states[index] = {key: _like(value, parameter) for key, value in found.items()}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _like(value: Any, parameter: Tensor) -> Any:
    """Place what has the parameter's shape as the parameter lies; counts of steps are plain numbers everywhere."""
    # The shape of a DTensor is that of the whole.
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return placed(value, parameter)
    return value


def _restore_average(trainer: Step, saved: Mapping[str, Tensor]) -> None:
    assert trainer.average is not None
    copy = trainer.average.copy
    with torch.no_grad():
        for name, tensor in average_of(trainer).items():
            tensor.copy_(saved[name])
        # Each update takes the model's buffers over as they are.
        for mine, theirs in zip(copy.module.buffers(), trainer.method.module.buffers(), strict=True):
            mine.copy_(theirs)


def restored_position(state: Mapping[str, Any], ctx: RankContext) -> Position:
    """Make the position that was saved.

    The sums of the epoch are each rank's own, or with another number of ranks all rank 0's: they are added up in the
    end.
    """
    position, saved = Position(ctx.device), state["position"]
    position.step, position.epoch, position.in_epoch = state["step"], state["epoch"], saved["in_epoch"]
    if state["world_size"] == ctx.world_size:
        position.meter.sums[:] = torch.tensor(saved["sums"], dtype=torch.float64)
    elif ctx.is_main:
        position.meter.sums[:] = torch.tensor(saved["sums_of_all_ranks"], dtype=torch.float64)
    return position
