"""Scores of each rank's weights on the same test data, with its own and with averaged BatchNorm statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from train.data.loading import evaluation_batches
from train.errors import UserError
from train.evaluate.replicas import load_weights
from train.launch import RankContext
from train.methods.single import Single
from train.metrics import evaluate
from train.settings import DEFAULT
from train.task import load_task_data, make_task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from train.evaluate.replicas import Replicas
    from train.metrics import Score

State = dict[str, "Tensor"]


@dataclass(frozen=True)
class RankScore:
    """Scores of one rank's weights.

    own: with the statistics in its file. averaged: with the statistics averaged over ranks; None without BatchNorm.
    """

    rank: int
    path: str
    own: Score
    averaged: Score | None


@dataclass(frozen=True)
class RunScores:
    """Scores of all ranks of a run after one step, sorted by rank."""

    replicas: Replicas
    ranks: tuple[RankScore, ...]

    @property
    def averaged(self) -> list[Score]:
        """Scores with averaged statistics; empty without BatchNorm."""
        return [rank.averaged for rank in self.ranks if rank.averaged is not None]

    @property
    def spread(self) -> float:
        """Difference of the best and worst first metric (accuracy: 0 to 1) of ranks with their own statistics."""
        return _compute_spread([rank.own for rank in self.ranks])

    @property
    def averaged_spread(self) -> float | None:
        """The same difference with averaged statistics; None without BatchNorm."""
        return _compute_spread(self.averaged) if self.averaged else None

    @property
    def sentence(self) -> str:
        """Summary of the scores and the causes of their differences."""
        r, scores = self.replicas, [rank.own for rank in self.ranks]
        title = r.run
        if r.step is not None:
            title += f", step {r.step}"
        if len(scores) < r.world_size:
            title += f" ({len(scores)} of its {r.world_size} ranks)"
        causes = ["drifted BatchNorm statistics"] * r.statistics_differ + ["different weights"] * r.parameters_differ
        name, cause = scores[0].main[0], " and ".join(causes)
        if causes and self.spread:
            text = f"{name} differs by up to {self._format_spread()} between ranks with {cause}"
        elif causes:
            text = f"{name} is {_format_range(scores)} despite {cause}"
        elif self.averaged:
            text = f"{name} is {_format_range(scores)}: weights and BatchNorm statistics agree"
        else:
            text = f"{name} is {_format_range(scores)}: weights agree, and there is no BatchNorm"
        if r.statistics_differ and self.averaged:
            statistics = "the statistics alone" if r.parameters_differ else "them"
            text += f"; averaging {statistics} gives {_format_range(self.averaged)}"
        return f"{title}: {text}"

    def _format_spread(self) -> str:
        if self.ranks[0].own.main[0] == "accuracy":
            return f"{100 * self.spread:.2f} points"
        return f"{self.spread:.4g}"


def _format_range(scores: Sequence[Score]) -> str:
    ordered = sorted(scores, key=lambda score: score.main[1])
    low, high = ordered[0].format(2, named=False), ordered[-1].format(2, named=False)
    if low == high:
        return f"{low} on every rank"
    return f"{low} to {high}"


def _compute_spread(scores: Sequence[Score]) -> float:
    numbers = [score.main[1] for score in scores]
    return max(numbers) - min(numbers)


def score_run(replicas: Replicas, data_dir: Path | None) -> RunScores:
    """Score every rank of a run on the test data in `data_dir` (None: the digits in this clone). Raises UserError.

    Scores are computed in one process on the CPU without autocast, so ranks with bitwise equal models have bitwise
    equal scores.
    """
    settings = replicas.settings
    if settings.task is None and settings.data != "synthetic":
        settings = replace(settings, data_dir=data_dir)
    task = make_task(settings)
    data = load_task_data(task, settings)
    # All test samples; training partitions them over the ranks.
    batches = evaluation_batches(data.test, RankContext())
    states = [load_weights(file) for file in replicas.files]
    model = _build_model(replicas, partial(task.build_model, settings, data), states)

    def score(state: State) -> Score:
        model.load_state_dict(state)
        method = Single(DEFAULT, RankContext())
        method.wrap(model)
        return evaluate(method, batches, method.ctx, task)

    averaged = average_statistics(model, states)
    ranks = []
    for file, state in zip(replicas.files, states, strict=True):
        own_score, averaged_score = score(state), None
        if averaged:
            averaged_score = score({**state, **averaged})
        ranks.append(RankScore(file.rank, file.path, own_score, averaged_score))
    return RunScores(replicas, tuple(ranks))


def average_statistics(model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> State:
    """Average the BatchNorm statistics over the ranks; empty for a model without BatchNorm.

    states: one state dict of `model` per rank. With mean_r and var_r, both [C], of rank r, and E over ranks:

        mean = E[mean_r]
        var  = E[var_r] + E[(mean_r - mean)^2]

    This is the law of total variance (Weiss, A Course in Probability, 2005, p. 385: Var(X) = E[Var(X|R)] +
    Var(E[X|R])) for ranks with equal numbers of samples; here they differ by at most one per step. Averaging only the
    variances would ignore the differences between the means. The result is close to the statistics of SyncBatchNorm,
    but not equal: running means are smoothed over steps, so they differ less between ranks than means of single
    batches.

    Averages are computed in float64, so that equal statistics on all ranks remain bitwise unchanged.
    """
    averaged: State = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or layer.running_mean is None:
            continue
        mean_name, var_name = f"{name}.running_mean".lstrip("."), f"{name}.running_var".lstrip(".")
        means = torch.stack([state[mean_name].double() for state in states])
        variances = torch.stack([state[var_name].double() for state in states])
        mean = means.mean(0)  # [ranks, C] to [C]
        var = variances.mean(0) + (means - mean).square().mean(0)
        averaged[mean_name] = mean.to(states[0][mean_name].dtype)
        averaged[var_name] = var.to(states[0][var_name].dtype)
    return averaged


def _build_model(replicas: Replicas, build: Callable[[], nn.Module], states: Sequence[State]) -> nn.Module:
    """Build the model of the metadata, after checking that the tensors of all ranks fit. Raises UserError."""
    trained = replicas.settings.task or replicas.settings.model
    # On the meta device first, because the width in a file is untrusted: memory is allocated only if all tensors fit.
    try:
        with torch.device("meta"):
            model = build()
    except UserError as error:
        raise UserError(f"{replicas.files[0].path}: {error}") from error
    expected = {name: _describe_tensor(tensor) for name, tensor in model.state_dict().items()}
    for file, state in zip(replicas.files, states, strict=True):
        actual = {name: _describe_tensor(tensor) for name, tensor in state.items()}
        for name in [*expected, *actual]:
            if expected.get(name) != actual.get(name):
                difference = f"found {actual.get(name, 'no tensor')}, expected {expected.get(name, 'no tensor')}"
                advice = "pass a file that train/run.py saved without a fault that changes the model"
                raise UserError(f"{file.path}: {name} does not fit {trained}: {difference}; {advice}")
    return model.to_empty(device="cpu")


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
