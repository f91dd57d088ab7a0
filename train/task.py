"""The task of a run: data, model, loss and metrics. `--task package.module:Class` selects a task of the user.

docs/tasks.md has an example.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from train.data import Data, DataOptions, load_data
from train.data.dataset import Collated, Images, limit
from train.errors import UserError, join_lines
from train.models import build_from_settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.settings import Settings

TOP = 5  # of top5_accuracy


class Task:
    """Base class of tasks. A task keeps no state of the run: it is built on every rank, without arguments.

    metrics: the names of metrics, and whether higher values are better. The first metric is printed, and selects the
    model of --save-best.
    """

    metrics: ClassVar[Mapping[str, bool]]

    def load(self, settings: Settings) -> Data:
        """Return the training and the test set.

        A sample is (x, y), two tensors or values that torch collates to tensors. y has one number per prediction.
        """
        raise NotImplementedError

    def build_model(self, settings: Settings, data: Data) -> nn.Module:
        """Build the model on the CPU from torch's current seed. data: the result of `load`."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all predictions, []. The trainer divides it by the predictions of a batch."""
        raise NotImplementedError

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return one or two more sums over all predictions for `compute`, [] or [2]; by default 0."""
        return torch.zeros((), device=targets.device)

    def count_predictions(self, targets: Tensor) -> int:
        """Return the number of predictions that these targets are for; by default one for each number."""
        return targets.numel()

    def compute(self, loss: float, counts: tuple[float, float]) -> dict[str, float]:
        """Compute all metrics from the means of `loss` and `count` per prediction, over all ranks."""
        raise NotImplementedError


class Classification(Task):
    """Classify the images of --data with --model."""

    metrics: ClassVar[Mapping[str, bool]] = {"accuracy": True, "top5_accuracy": True}

    def load(self, settings: Settings) -> Data:
        """Load the data set in the settings."""
        return load_data(settings.data, settings.data_dir, None, DataOptions.from_settings(settings))

    def build_model(self, settings: Settings, data: Data) -> nn.Module:
        """Build the network in the settings for this data."""
        return build_from_settings(settings, data.channels, data.classes, data.image_size)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy.

        outputs: [..., classes]. targets: int64 [...] classes, or float [..., classes] probabilities, as after mixup.
        """
        classes = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
        return F.cross_entropy(outputs.flatten(0, -2), classes, reduction="sum")

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the correct predictions, and the classes among the five most probable; NaN with at most five."""
        classes = targets.argmax(-1) if targets.is_floating_point() else targets
        right = (outputs.argmax(-1) == classes).sum().double()
        many = outputs.shape[-1] > TOP
        top5 = (outputs.topk(TOP).indices == classes[..., None]).sum() if many else right * math.nan
        return torch.stack([right, top5])

    def count_predictions(self, targets: Tensor) -> int:
        """Return one for each class, or each distribution over classes."""
        return targets[..., 0].numel() if targets.is_floating_point() else targets.numel()

    def compute(self, loss: float, counts: tuple[float, float]) -> dict[str, float]:  # noqa: ARG002
        """Return the fractions of correct predictions."""
        return {"accuracy": counts[0], "top5_accuracy": counts[1]}


class LanguageModeling(Classification):
    """Predict the next byte of each byte of --data text."""

    metrics: ClassVar[Mapping[str, bool]] = {"perplexity": False, **Classification.metrics}

    def compute(self, loss: float, counts: tuple[float, float]) -> dict[str, float]:
        """Return the exponential of the mean loss too."""
        return {"perplexity": math.exp(loss) if loss < 700 else loss, **super().compute(loss, counts)}


CLASSIFICATION, LANGUAGE_MODELING = Classification(), LanguageModeling()


def make_task(settings: Settings) -> Task:
    """Return the built-in task for the data, or build the user's task. Raises UserError."""
    if settings.task is None:
        return LANGUAGE_MODELING if settings.data == "text" else CLASSIFICATION
    module, _, name = settings.task.partition(":")
    if str(Path.cwd()) not in sys.path:
        # As in `python -m`, but after the packages of this clone.
        sys.path.append(str(Path.cwd()))
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        advice = "pass package.module:Class, importable from the current folder"
        raise UserError(f"--task {settings.task}: cannot be imported: {error}; {advice}") from error
    if not (isinstance(kind, type) and issubclass(kind, Task) and getattr(kind, "metrics", None)):
        raise UserError(f"--task {settings.task}: must be a subclass of train.task.Task with metrics")
    if not isinstance(kind.metrics, Mapping):
        advice = "map each name to whether higher values are better"
        raise UserError(f"--task {settings.task}: metrics is {kind.metrics!r}; {advice}")
    try:
        return kind()
    except TypeError as error:
        advice = "a task is built without arguments"
        raise UserError(f"--task {settings.task}: cannot be built: {error}; {advice}") from error


def load_task_data(task: Task, settings: Settings) -> Data:
    """Load the task's data, keep the first samples of --limit-train, and check the samples. Raises UserError."""
    if settings.task is None:
        return limit(task.load(settings), settings.limit_train, settings.data)
    return limit(_load_user_data(task, settings), settings.limit_train, settings.task)


def _load_user_data(task: Task, settings: Settings) -> Data:
    """Load the data of --task as data sets whose samples form batches. Raises UserError."""
    if type(task).load is Task.load:
        raise UserError(f"--task {settings.task}: has no data; define its method load")
    try:
        loaded: Any = task.load(settings)
        if not isinstance(loaded, Data):
            kind = type(loaded).__name__
            raise UserError(f"--task {settings.task}: load returned {kind}; return a train.data.Data")
        data = replace(loaded, train=_collate(loaded.train), test=_collate(loaded.test))
        for samples in (data.train, data.test):
            if not _has_pairs(samples):
                raise UserError(f"--task {settings.task}: each sample of its data must be a pair of tensors (x, y)")
    except OSError as error:
        # A missing folder or an unreadable file, which data sets open here or with their first sample. Libraries raise
        # OSError with a sentence of their own, which may have no `strerror`.
        advice = f"relative paths start at {Path.cwd()}"
        raise UserError(f"--task {settings.task}: cannot read its data: {join_lines(error)}; {advice}") from error
    return data


def _collate(samples: Any) -> Images:
    """Return a data set whose samples form batches."""
    if isinstance(samples, Images):
        return samples
    return Collated(samples)


def _has_pairs(samples: Images) -> bool:
    """Return whether the first sample is a pair of tensors."""
    if len(samples) == 0:
        return False
    sample = samples[[0]]
    return len(sample) == 2 and all(isinstance(tensor, torch.Tensor) for tensor in sample)
