"""Check that the files of one model are of one step of one run: by metadata, saved values, optimizer steps, and names.

The parts of two steps are no model. A map or a tolerance cannot help, so the result is an error and not a difference.
"""

from __future__ import annotations

import os
import re
import struct
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import DTYPES
from syncheck.errors import MalformedFile, brief
from syncheck.kernel.blocks import Files
from syncheck.layout.names import split_path
from syncheck.names import normalize_keys
from syncheck.value_kinds import make_value_classifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Snapshot, Tensor

_METADATA = ("run_id", "step", "epoch", "world_size")
_OPTIMIZER_STEP = re.compile(r"optimizer\..*\.step")
_NEXT_STEP = "pass the files of one step of one run"


def check_progress(snapshots: Sequence[Snapshot]) -> None:
    """Raise MalformedFile if two files are of different runs, steps, epochs or numbers of ranks.

    An adapter has its own training run, so its steps do not count.
    """
    parts = [snapshot for snapshot in snapshots if not is_adapter(snapshot)]
    metadata = [_read_metadata(snapshot) for snapshot in parts]
    _check_equal(parts, metadata, "metadata, ")
    progress = [_read_progress(snapshot) for snapshot in parts]
    _check_equal(parts, progress, "")
    if _is_proven(metadata) or _is_proven(progress):
        # Names and optimizer steps say less: a folder may be a copy, and a frozen stage makes fewer steps.
        return
    _check_equal(parts, [_read_step_in_path(snapshot) for snapshot in parts], "")
    _check_equal(parts, _read_optimizer_steps(parts), "")


def is_adapter(snapshot: Snapshot) -> bool:
    """Whether a checkpoint is an adapter of PEFT, which is passed together with its base model."""
    folder = snapshot.path
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return os.path.isfile(os.path.join(folder, "adapter_config.json"))


def _check_equal(parts: Sequence[Snapshot], values: Sequence[Mapping[str, Any]], place: str) -> None:
    """Raise MalformedFile if two files have different values of one name."""
    first: dict[str, tuple[Any, Snapshot]] = {}
    for snapshot, of_file in zip(parts, values, strict=True):
        for name, value in of_file.items():
            expected, source = first.setdefault(name, (value, snapshot))
            if value != expected:
                raise MalformedFile(
                    snapshot.path,
                    place=f"{place}{name}",
                    found=brief(value),
                    needed=f"{brief(expected)}, as in {source.path}",
                    next_step=_NEXT_STEP,
                )


def _is_proven(values: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all files store the same step or epoch."""
    names = [{*of_file} - {"run_id", "world_size"} for of_file in values]
    return bool(names) and bool(set.intersection(*names))


def _read_metadata(snapshot: Snapshot) -> dict[str, Any]:
    fields = {}
    for name in _METADATA:
        value = getattr(snapshot.metadata, name, None)
        if value is not None:
            fields[name] = value
    return fields


def _read_progress(snapshot: Snapshot) -> dict[str, Any]:
    """Return the saved steps and epochs by name, such as `global_step` and `loops.fit_loop.epoch_progress`."""
    kind_of = make_value_classifier(snapshot.values)
    numbers = {name: value for name, value in snapshot.values.items() if isinstance(value, (int, float))}
    # Other numbers, such as the learning rate, are compared as values.
    return {name: value for name, value in numbers.items() if kind_of(name) == "progress"}


def _read_step_in_path(snapshot: Snapshot) -> dict[str, Any]:
    """Return the last step or epoch in a path: the nearest to the name of the file."""
    numbers = split_path(snapshot.path)
    position = numbers.find("step")
    return {} if position is None else {"the step in the path": numbers.numbers[position]}


def _read_optimizer_steps(parts: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Return the largest step of the optimizer by file, of parameters that no other file has.

    Parameters in several files are copies, whose steps are compared. Some parameters make fewer steps, for example
    experts without tokens, so only the largest step counts.
    """
    counts: dict[str, int] = {}
    steps = [_list_optimizer_steps(snapshot) for snapshot in parts]
    for of_file in steps:
        for name in of_file:
            counts[name] = counts.get(name, 0) + 1
    largest: list[dict[str, Any]] = []
    with Files(jobs=1) as files:
        for of_file in steps:
            numbers = [_read_number(step, files) for name, step in of_file.items() if counts[name] == 1]
            read = [number for number in numbers if number is not None]
            largest.append({"the step of the optimizer": max(read)} if read else {})
    return largest


def _list_optimizer_steps(snapshot: Snapshot) -> dict[str, Tensor | float]:
    numbers = {name: value for name, value in snapshot.values.items() if isinstance(value, (int, float))}
    scalars = {name: tensor for name, tensor in normalize_keys(snapshot.tensors).items() if tensor.numel == 1}
    return {name: step for name, step in {**numbers, **scalars}.items() if _OPTIMIZER_STEP.fullmatch(name)}


def _read_number(step: Tensor | float, files: Files) -> float | None:
    if isinstance(step, (int, float)):
        return step
    if step.refused or step.digest is not None or step.dtype not in DTYPES:
        return None
    code = DTYPES[step.dtype].struct
    # Tensors on another rank are not fetched for this check.
    is_remote = step.data is not None and not isinstance(step.data, bytes)
    if is_remote or not code:
        return None
    number: float = struct.unpack(f"<{code}", bytes(files.read(step, 0, 1, 0)))[0]
    return number
