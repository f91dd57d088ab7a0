"""The checkpoints that one run has left, one per rank: which belong together, and what is in them.

syncheck sorts the files by their metadata blocks and compares them; here they are only checked for being whole models
that this trainer can build, and loaded.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from syncheck import Options, compare, read
from train.checkpoints.formats import FORMATS
from train.data import DATASETS, MAX_SAMPLES
from train.errors import UserError
from train.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from syncheck import Group, Replica, Snapshot

# What torch.load and safetensors raise for a file that is no checkpoint, or not one of theirs.
BROKEN = (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, AttributeError, pickle.UnpicklingError)
STATISTICS = frozenset({"bn_mean", "bn_var"})  # kinds of tensors in syncheck's report
MOST = 65_536  # of width, depth and the like; far above any, and few enough to multiply without overflow
LOADED = ("torch-zip", "torch-legacy", "safetensors")  # formats that `load_weights` takes


@dataclass(frozen=True)
class Task:
    """What a run trained on what, as its metadata says; the names are those of Settings."""

    model: str
    data: str
    width: int | None = None
    depth: int | None = None
    alpha: int | None = None
    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    train_samples: int | None = None


# Those of its fields that are numbers.
NUMBERS = tuple(field.name for field in fields(Task) if field.name not in ("model", "data"))


@dataclass(frozen=True)
class Replicas:
    """The files of one run after one step, lowest rank first, and what they say of the model.

    world_size: how many replicas the run had; maybe more than there are files. parameters_differ,
    statistics_differ: whether any parameter, or any running mean or variance of BatchNorm, is not the same in all.
    """

    run: str
    step: int | None
    task: Task
    world_size: int
    files: tuple[Replica, ...]
    parameters_differ: bool
    statistics_differ: bool


def find(paths: Sequence[str]) -> tuple[list[Replicas], list[str]]:
    """Sort the checkpoints under the paths into runs and steps. Raises SyncheckError for a path without any.

    paths: files, folders or globs. Returns what can be evaluated, and for all else the reason in one line.
    """
    report = compare(*paths, options=Options(only=("params", "buffers")))
    found, refused = [], [f"{file.path}: {file.reason}" for file in report.unreadable]
    for group in report.groups:
        try:
            found.append(_checked(group))
        except UserError as error:
            refused.append(str(error))
    return found, refused


def _checked(group: Group) -> Replicas:
    """Refuse what is not whole models of one kind, on two ranks or more. Raises UserError."""
    first, *others = group.replicas
    snapshot = read(first.path)
    task = _task(snapshot)
    for replica in group.replicas:
        _check_whole(read(replica.path))
    for replica in others:
        if _task(read(replica.path)) != task:
            raise UserError(f"{replica.path}: of another model or data than {first.path}; name files of one run")
    assert snapshot.metadata is not None  # _task has looked
    world_size = snapshot.metadata.world_size or len(group.replicas)
    if not others:
        mend = "one replica has no other to differ from; train with --spawn 2"
        if world_size > 1:
            mend = f"the run had {world_size} ranks; name the files of the others too"
        raise UserError(f"{first.path}: rank {first.rank} alone; {mend}")
    different = {diff.kind for diff in group.tensors if diff.status != "equal"}
    return Replicas(
        run=group.run,
        step=group.step,
        task=task,
        world_size=world_size,
        files=tuple(sorted(group.replicas, key=lambda replica: replica.rank)),
        parameters_differ="parameter" in different,
        statistics_differ=bool(STATISTICS & different),
    )


def _task(snapshot: Snapshot) -> Task:
    """Read from the metadata block which model it is of, and for which data. Raises UserError."""
    path = snapshot.path
    config = snapshot.metadata.config if snapshot.metadata is not None else {}
    if "model" not in config or "data" not in config:
        raise UserError(f"{path}: does not say which model it is of; needs a file that train/run.py has saved")
    model, data = config["model"], config["data"]
    if not isinstance(model, str) or model not in MODELS:
        raise UserError(f"{path}: model {model!r} is unknown; there are {', '.join(MODELS)}")
    if not isinstance(data, str) or data not in DATASETS:
        raise UserError(f"{path}: data {data!r} is unknown; there are {', '.join(DATASETS)}")
    numbers = {name: config.get(name) for name in NUMBERS}
    for name, number in numbers.items():
        most = MAX_SAMPLES if name == "train_samples" else MOST
        if number is not None and not (isinstance(number, int) and 1 <= number <= most):
            mend = "none for the model's own" if name in ("width", "depth", "alpha") else "none for the data's own"
            raise UserError(f"{path}: {name} {number!r}; needs 1 to {most}, or {mend}")
    return Task(model, data, **numbers)


def _check_whole(snapshot: Snapshot) -> None:
    """Refuse a file that holds a part of the model, or digests in its place. Raises UserError."""
    if snapshot.format not in LOADED:
        found = f"{snapshot.path}: of the format {snapshot.format}, which has no weights that a rank could load"
        raise UserError(f"{found}; needs {' or '.join(FORMATS)}, one file per rank")
    parts = [name for name, tensor in snapshot.tensors.items() if tensor.sharding and not name.startswith("optimizer.")]
    if parts:
        found = f"{snapshot.path}: holds a part of each of {len(parts)} tensors, {parts[0]} first (FSDP or HSDP)"
        raise UserError(f"{found}: a shard cannot be evaluated alone; train with --method ddp, zero or localsgd")


def load_weights(replica: Replica) -> dict[str, Tensor]:
    """Load the model's tensors of one rank on the CPU; nothing in the file is run. Raises UserError."""
    try:
        return _load_safetensors(replica.path) if replica.format == "safetensors" else _load_pth(replica.path)
    except BROKEN as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{replica.path}: cannot be loaded: {reason[0]}; save or copy it again") from error


def _load_pth(path: str) -> dict[str, Tensor]:
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
        raise UserError(f"{path}: has no tensors under 'model'; needs a file that train/run.py has saved")
    return model


def _load_safetensors(path: str) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError(f"{path}: safetensors is not installed; pip install -e '.[train]'") from error
    # Flat, so the optimizer's tensors lie beside the model's.
    return {name: tensor for name, tensor in load_file(path).items() if not name.startswith("optimizer.")}
