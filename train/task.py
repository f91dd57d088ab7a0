"""The task of a run: data, model, loss and metrics. `--task package.module:Class` selects a task of the user.

docs/tasks.md has an example.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from train.data import Data, DataOptions, load_data
from train.data.dataset import Collated, Images, limit
from train.errors import UserError
from train.models import build_from_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from train.settings import Settings


TOP = 5


class Task:
    """Base class of tasks. A task keeps no state of the run: it is built on every rank, without arguments.

    metrics: the names of metrics, and whether higher values are better. The first metric is printed, and selects the
    model of --save-best.
    """

    metrics: ClassVar[Mapping[str, bool]]

    def load(self, settings: Settings) -> Data:
        """Return the training and the test set. A sample is (x, y), two tensors; y has one number per prediction."""
        raise NotImplementedError

    def build_model(self, settings: Settings, data: Data) -> nn.Module:
        """Build the model on the CPU from torch's current seed. data: the result of `load`."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all predictions, []. The trainer divides it by the predictions of a batch."""
        raise NotImplementedError

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return a second sum over all predictions for `compute`, []; by default 0."""
        return torch.zeros((), device=targets.device)

    def count_top5(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002 - for classification
        """Return a third sum, of the metric "top5_accuracy"; by default NaN: there is none."""
        return torch.full((), math.nan, device=outputs.device)

    def count_predictions(self, targets: Tensor) -> int:
        """Return the number of predictions; by default one for each element of the targets."""
        return targets.numel()

    def compute(self, loss: float, count: float) -> dict[str, float]:
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
        """Count the correct predictions."""
        return (outputs.argmax(-1) == most_probable(targets)).sum()

    def count_top5(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the targets among the five most probable classes."""
        if outputs.shape[-1] <= TOP:
            return super().count_top5(outputs, targets)
        return (outputs.topk(TOP).indices == most_probable(targets)[..., None]).sum()

    def count_predictions(self, targets: Tensor) -> int:
        """Return the number of targets, also if they are probabilities."""
        return most_probable(targets).numel()

    def compute(self, loss: float, count: float) -> dict[str, float]:  # noqa: ARG002
        """Return the fraction of correct predictions."""
        return {"accuracy": count}


class LanguageModeling(Classification):
    """Predict the next byte of each byte of --data text."""

    metrics: ClassVar[Mapping[str, bool]] = {"perplexity": False, "accuracy": True, "top5_accuracy": True}

    def compute(self, loss: float, count: float) -> dict[str, float]:
        """Return the exponential of the mean loss too."""
        return {"perplexity": math.exp(loss) if loss < 700 else loss, "accuracy": count}


def most_probable(targets: Tensor) -> Tensor:
    """Return the most probable class of each target, int64 [...]. targets: as in `Classification.loss`."""
    return targets.argmax(-1) if targets.is_floating_point() else targets


CLASSIFICATION, LANGUAGE_MODELING = Classification(), LanguageModeling()


def make_task(settings: Settings) -> Task:
    """Return the built-in task for the data, or build the user's task. Raises UserError."""
    if settings.task is None:
        return LANGUAGE_MODELING if settings.data == "text" else CLASSIFICATION
    module, _, name = settings.task.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as in `python -m`, but after the packages of this clone
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        advice = "pass package.module:Class, importable from the current folder"
        raise UserError(f"--task {settings.task}: cannot be imported: {error}; {advice}") from error
    if not (isinstance(kind, type) and issubclass(kind, Task) and getattr(kind, "metrics", None)):
        raise UserError(f"--task {settings.task}: must be a subclass of train.task.Task with metrics")
    return kind()


def load_task_data(task: Task, settings: Settings) -> Data:
    """Load the task's data, keep the first samples of --limit-train, and check the samples. Raises UserError."""
    data = task.load(settings)
    if settings.task is not None:
        parts = [part if isinstance(part, Images) else Collated(part) for part in (data.train, data.test)]
        for part in parts:
            sample = part[[0]] if len(part) else None
            if not (sample and len(sample) == 2 and all(isinstance(tensor, torch.Tensor) for tensor in sample)):
                raise UserError(f"--task {settings.task}: each sample of its data must be a pair of tensors (x, y)")
        data = replace(data, train=parts[0], test=parts[1])
    return limit(data, settings.limit_train, settings.task or settings.data)
