"""Check that the files of one model are of one step of one run: by metadata, saved values, optimizer steps, and names.

The parts of two steps are no model. A map or a tolerance cannot help, so the result is an error and not a difference.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter, defaultdict
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.layout.path_numbers import split_path
from syncheck.snapshots import Tensor
from syncheck.tensors.blocks import Files
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import normalize_keys
from syncheck.tensors.value_kinds import make_value_classifier
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.snapshots import Snapshot

_METADATA = ("run_id", "step", "epoch", "world_size")
# The step of a parameter. `optimizer.step` of a module called optimizer has no parameter.
_OPTIMIZER_STEP = re.compile(r"optimizer\..*\.step")


def check_progress(snapshots: Iterable[Snapshot]) -> None:
    """Raise MalformedFile if two files are of different runs, steps, epochs or numbers of ranks.

    An adapter has its own training run, so its steps do not count.
    """
    parts = [snapshot for snapshot in snapshots if not is_adapter(snapshot)]
    metadata = _Moments()
    progress = _Moments()
    paths = _Moments()
    for part in parts:
        for name in _METADATA:
            metadata.add(f"metadata, {name}", getattr(part.metadata, name, None), part)

        for name, value in _list_progress(part).items():
            progress.add(name, value, part)

        paths.add("the step in the path", _find_step_in_path(part.path), part)

    metadata.check()
    progress.check()
    # Names and optimizer steps say less: a folder may be a copy, and a frozen stage makes fewer steps.
    is_proven = len(parts) in (metadata.count_files("metadata, step"), progress.count_most_files())
    if not is_proven:
        paths.check()
        _check_optimizer_steps(parts)


def is_adapter(snapshot: Snapshot) -> bool:
    """Whether a checkpoint is an adapter of PEFT, which is passed together with its base model."""
    folder = snapshot.path
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder)

    return os.path.isfile(os.path.join(folder, "adapter_config.json"))


class _Moments:
    """The steps and epochs of files.

    by_name: each value of a name with its file.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, list[tuple[Any, Snapshot]]] = defaultdict(list)

    def add(self, name: str, value: object, snapshot: Snapshot) -> None:
        """Add a value of a file. None means that the file does not store it."""
        if value is not None:
            self.by_name[name].append((value, snapshot))

    def count_files(self, name: str) -> int:
        """Return the number of files with a value of a name."""
        return len(self.by_name[name])

    def count_most_files(self) -> int:
        """Return the number of files with a value of the most frequent name."""
        return max(map(len, self.by_name.values()), default=0)

    def check(self) -> None:
        """Raise MalformedFile if two files have different values of one name."""
        for name, values in self.by_name.items():
            expected, source = values[0]
            for value, snapshot in values:
                if value == expected:
                    continue

                raise MalformedFile(
                    snapshot.path,
                    place=name,
                    found=brief(value),
                    needed=f"{brief(expected)}, as in {source.path}",
                    next_step="pass the files of one step of one run",
                )


def _list_progress(snapshot: Snapshot) -> dict[str, Any]:
    """Return the saved steps and epochs by name, like `global_step` and `loops.fit_loop.epoch_progress`."""
    kind_of = make_value_classifier(snapshot.values)
    # Other numbers, like the learning rate, are compared as values.
    return {name: value for name, value in snapshot.values.items() if kind_of(name) == "progress"}


def _find_step_in_path(path: str) -> int | None:
    """Return the last step or epoch in a path: the nearest to the name of the file."""
    numbers = split_path(path)
    position = numbers.find("step")
    if position is None:
        return None

    return numbers.numbers[position]


def _check_optimizer_steps(parts: Sequence[Snapshot]) -> None:
    """Raise MalformedFile if the optimizers of two files made different numbers of steps.

    Parameters in several files are copies, whose steps are compared as tensors. Some parameters make fewer steps, such
    as experts without tokens, so only the largest step of the other parameters counts.
    """
    steps = [_list_optimizer_steps(part) for part in parts]
    # The number of files with a step, by the name of the step.
    counts = Counter(chain.from_iterable(steps))
    largest = _Moments()
    with Files(jobs=1) as files:
        for part, of_file in zip(parts, steps, strict=True):
            numbers: list[float] = []
            for name, step in of_file.items():
                if counts[name] == 1:
                    numbers.append(_read_number(step, files))

            largest.add("the step of the optimizer", max(numbers, default=None), part)

    largest.check()


def _list_optimizer_steps(snapshot: Snapshot) -> dict[str, Tensor | float]:
    """Return the step of each parameter: a tensor with one element that can be read, or a number."""
    steps: dict[str, Tensor | float] = {}
    # Most trainers store a tensor, and Muon stores a number.
    candidates = {**normalize_keys(snapshot.tensors), **snapshot.values}
    for name, step in candidates.items():
        if _OPTIMIZER_STEP.fullmatch(name) is None:
            continue

        if isinstance(step, (int, float)):
            steps[name] = float(step)
        elif _is_readable(step):
            steps[name] = step

    return steps


def _is_readable(step: object) -> bool:
    """Whether a value is a tensor of a single number with readable bytes."""
    if not isinstance(step, Tensor):
        return False

    # Refused tensors and tensors of fingerprints have no bytes.
    if step.refused is not None or step.digest is not None:
        return False

    # Bytes on another rank are not fetched for this check.
    is_local = isinstance(step.data, (bytes, NoneType))
    row = DTYPES.get(step.dtype)
    is_number = row is not None and row.struct != ""
    return step.numel == 1 and is_local and is_number


def _read_number(step: Tensor | float, files: Files) -> float:
    """Return the step of a parameter as a number."""
    if isinstance(step, float):
        return step

    code = DTYPES[step.dtype].struct
    data = bytes(files.read(step, 0, 1, 0))
    (number,) = struct.unpack(f"<{code}", data)
    return float(number)
