"""Finds and loads the checkpoints of a run, one per rank.

syncheck groups the files by their metadata blocks and compares them. This module checks that they contain complete
models of this trainer, and loads them.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.checkpoints.checkpoint_files import FORMATS
from train.data import DATASETS, MAX_SAMPLES
from train.errors import UserError, first_line, refuse
from train.mesh import local_part
from train.models import MODELS
from train.optional import Options, compare, read
from train.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from syncheck import Group, Replica, Snapshot

# Exceptions of torch.load and safetensors for files in other formats, and damaged files.
LOAD_ERRORS = (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, AttributeError, pickle.UnpicklingError)
# Kinds of tensors in syncheck's report.
STATISTICS = frozenset({"bn_mean", "bn_var"})
# The limit of width, depth etc.; far above useful sizes, but products do not overflow.
MAX_SIZE = 65_536
# Formats that `load_weights` supports.
LOADABLE = ("torch-zip", "torch-legacy", "safetensors")
METHODS_ADVICE = "train with --method ddp, zero, localsgd, diloco or replicate"  # whose files have complete models
NUMERIC_FIELDS = ("width", "depth", "alpha", "image_size", "channels", "classes", "train_samples")


@dataclass(frozen=True)
class Replicas:
    """The files of a run after one step, sorted by rank.

    settings: model and data of the run, or its task, from its metadata; other fields have defaults. world_size: number
    of replicas in the run, possibly more than files. parameters_differ, statistics_differ: whether any parameter, or
    any running mean or variance of BatchNorm, differs between the files.
    """

    run: str
    step: int | None
    settings: Settings
    world_size: int
    files: tuple[Replica, ...]
    parameters_differ: bool
    statistics_differ: bool


def find_replicas(paths: Sequence[str], task: str | None = None) -> tuple[list[Replicas], list[str]]:
    """Group the checkpoints in files, folders and globs by run and step.

    task: of --task, because a file must not decide which code is imported. Returns the replicas to evaluate, and a line
    with a reason for every refused file or group. Raises SyncheckError for a path without checkpoints.
    """
    report = compare(*paths, options=Options(only=("params", "buffers")))
    accepted, refused = [], [f"{file.path}: {file.reason}" for file in report.unreadable]
    for group in report.groups:
        try:
            accepted.append(_check_group(group, task))
        except UserError as error:
            refused.append(str(error))
    return accepted, refused


def _check_group(group: Group, task: str | None) -> Replicas:
    """Check that the group has complete models of one kind on at least two ranks. Raises UserError."""
    first, *other_runs = group.replicas
    snapshots = [read(replica.path) for replica in group.replicas]
    settings = _read_settings(snapshots[0], task)
    for snapshot in snapshots:
        _check_complete(snapshot)
        if _read_settings(snapshot, task) != settings:
            raise UserError(f"{snapshot.path}: model or data differ from {first.path}; pass files of a single run")
    metadata = snapshots[0].metadata
    world_size = (metadata and metadata.world_size) or len(snapshots)
    if not other_runs:
        advice = "train with at least 2 ranks (--spawn 2)"
        if world_size > 1:
            advice = f"pass the files of all {world_size} ranks of the run"
        raise UserError(f"{first.path}: rank {first.rank} has no other replica; {advice}")
    different = {diff.kind for diff in group.tensors if diff.status != "equal"}
    return Replicas(
        run=group.run,
        step=group.step,
        settings=settings,
        world_size=world_size,
        files=tuple(sorted(group.replicas, key=lambda replica: replica.rank)),
        parameters_differ="parameter" in different,
        statistics_differ=bool(STATISTICS & different),
    )


def _read_settings(snapshot: Snapshot, task: str | None) -> Settings:
    """Read model and data, or the task, from the metadata block. Raises UserError."""
    path = snapshot.path
    config: Mapping[str, Any] = {}
    if snapshot.metadata is not None:
        config = snapshot.metadata.config
    saved_task = config.get("task")
    trained = f"--task {saved_task}" if saved_task else "built-in model and data"
    refuse(
        (
            saved_task != task,
            f"{path}: trained with {trained}, found --task {task or 'omitted'}; pass the task of the run",
        )
    )
    if task is not None:
        return Settings(task=task)
    model: Any = config.get("model")
    data: Any = config.get("data")
    refuse(
        (
            not {"model", "data"} <= config.keys(),
            f"{path}: no model and data in its metadata; pass a file that train/run.py saved",
        ),
        # The values are untrusted, and may have any type.
        (model not in list(MODELS), f"{path}: model {model!r} is unknown; supported: {', '.join(MODELS)}"),
        (data not in list(DATASETS), f"{path}: data {data!r} is unknown; supported: {', '.join(DATASETS)}"),
    )
    numbers: dict[str, Any] = {}
    for name in NUMERIC_FIELDS:
        numbers[name] = number = config.get(name)
        largest = MAX_SAMPLES if name == "train_samples" else MAX_SIZE
        is_valid = number is None or (isinstance(number, int) and 1 <= number <= largest)
        refuse((not is_valid, f"{path}: {name} {number!r} in its metadata: must be 1 to {largest}, or null"))
    return Settings(model=model, data=data, **numbers)


def _check_complete(snapshot: Snapshot) -> None:
    """Refuse files with shards, or without weights (fingerprints). Raises UserError."""
    if snapshot.format not in LOADABLE:
        advice = f"pass one {' or '.join(FORMATS)} file per rank"
        raise UserError(f"{snapshot.path}: the format {snapshot.format} cannot be loaded as a model; {advice}")
    for dimension, part in (("pipeline", "layers of a rank's pipeline stages"), ("expert", "experts of a rank")):
        if snapshot.metadata is not None and dimension in snapshot.metadata.mesh:
            raise UserError(f"{snapshot.path}: has only the {part}; {METHODS_ADVICE}")
    model = {name: tensor for name, tensor in snapshot.tensors.items() if not name.startswith("optimizer.")}
    shards = [name for name, tensor in model.items() if _is_shard(tensor.sharding)]
    if shards:
        problem = f"{len(shards)} of {len(model)} tensors are shards (of fsdp, hsdp, tp or a combination)"
        reason = f"first {shards[0]}, and a shard cannot be evaluated alone"
        raise UserError(f"{snapshot.path}: {problem}, {reason}; {METHODS_ADVICE}")


def _is_shard(sharding: Any) -> bool:
    """Return whether a rank has a part of a tensor: any DTensor except one with a copy on every rank."""
    return sharding is not None and any(
        placement != "R" and size > 1 for placement, size in zip(sharding.placements, sharding.mesh, strict=True)
    )


def load_weights(replica: Replica) -> dict[str, Tensor]:
    """Load a rank's model tensors on the CPU without executing code in the file. Raises UserError."""
    # torch.load needs this import for the files of --method replicate.
    import torch.distributed.tensor

    # Otherwise torch warns that this process has no process group.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    path = replica.path
    try:
        if replica.format == "safetensors":
            from safetensors.torch import load_file

            # safetensors files are flat and also contain optimizer tensors.
            return {name: tensor for name, tensor in load_file(path).items() if not name.startswith("optimizer.")}
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise UserError(f"{path}: safetensors is not installed; run pip install -e '.[train]'") from error
    except LOAD_ERRORS as error:
        raise UserError(f"{path}: cannot be loaded: {first_line(error)}; save or copy the file again") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
        raise UserError(f"{path}: no tensors under 'model'; pass a file that train/run.py saved")
    return {name: local_part(tensor) for name, tensor in model.items()}
