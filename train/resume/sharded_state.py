"""States of sharded methods in the format of torch.distributed.checkpoint, for another number of ranks.

Beside the file of each rank, a step has a folder `sharded` with the sharded tensors of the model and of the optimizer.
torch reads from it whatever a new rank needs for its shards. https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError
from train.mesh import is_dtensor
from train.resume.state import collect_tensors, find_local_optimizer, parameter_names
from train.resume.state_files import sharded_folder

if TYPE_CHECKING:
    from pathlib import Path

    from train.trainer import Trainer

# Prefixes of keys; an optimizer's key ends with the name of the state.
MODEL, OPTIMIZER = "model.", "optimizer."


def is_sharded(trainer: Trainer) -> bool:
    """Return whether this method shards the model or the optimizer so that torch can shard them again."""
    # torch does not know the whole model if ranks have different layers, experts or parts of layers.
    if max(trainer.ctx.mesh.size(name) for name in ("pipeline", "expert", "tensor")) > 1:
        return False
    tensors = collect_tensors(trainer.method.module).values()
    has_shards = any(is_dtensor(tensor) for tensor in tensors)
    return has_shards or bool(trainer.method.metadata_fields.get("optimizer_sharded"))


def save_shards(step_folder: Path, trainer: Trainer) -> None:
    """Save the sharded tensors of all ranks; a collective. Raises UserError on all ranks."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    optimizer = find_local_optimizer(trainer)
    names = parameter_names(trainer.method.module, optimizer)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in _model_shards(trainer).items()}
    for index, states in optimizer.state_dict()["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{names[index]}.{key}"] = value
    folder = sharded_folder(step_folder)
    try:
        save(tensors, checkpoint_id=folder)
    except CheckpointException as error:
        raise UserError(f"cannot write {folder}: {_first_failure(error)}") from error


def load_shards(step_folder: Path, trainer: Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with this rank's shards of model and optimizer; a collective. Raises UserError on all ranks.

    state: of any rank that saved it, with all that is not sharded.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = sharded_folder(step_folder)
    optimizer = find_local_optimizer(trainer)
    names = parameter_names(trainer.method.module, optimizer)
    parameters = dict(trainer.method.module.named_parameters())
    model = {name: torch.empty_like(tensor) for name, tensor in _model_shards(trainer).items()}
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.items()}
    optimizer_states: dict[int, dict[str, Any]] = {}
    try:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        for full_key, facts in saved.items():
            name, _, key = full_key.removeprefix(OPTIMIZER).rpartition(".")
            # Under zero another rank may have the optimizer state of a parameter.
            if full_key.startswith(OPTIMIZER) and name in names and isinstance(facts, TensorStorageMetadata):
                if facts.size == parameters[name].shape:
                    value = torch.empty_like(parameters[name])
                else:
                    value = torch.empty(facts.size, dtype=facts.properties.dtype)  # a count of steps
                tensors[full_key] = value
                optimizer_states.setdefault(names.index(name), {})[key] = value
        load(tensors, checkpoint_id=folder)
    except (CheckpointException, OSError) as error:
        raise UserError(f"--resume: cannot read {folder}: {_first_failure(error)}") from error
    groups = state["optimizer"]["param_groups"]
    return state | {
        "model": state["model"] | model,
        "optimizer": {"state": optimizer_states, "param_groups": groups},
        "optimizer_names": names,
    }


def _model_shards(trainer: Trainer) -> dict[str, Any]:
    tensors = collect_tensors(trainer.method.module)
    return {name: tensor.detach() for name, tensor in tensors.items() if is_dtensor(tensor)}


def _first_failure(error: BaseException) -> str:
    """Return the reason of the first rank that failed, in one line."""
    cause = error
    for failure, _ in getattr(error, "failures", {}).values():
        cause = failure
        break
    return getattr(cause, "strerror", None) or str(cause).strip().partition("\n")[0]
