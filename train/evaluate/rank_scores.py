"""How well each rank's weights do on the same test data, with its own BatchNorm statistics and with all ranks'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from train.data import DataOptions, load_data
from train.errors import UserError
from train.evaluate.replicas import load_weights
from train.launch import RankContext
from train.models import build_from_settings
from train.scoring import evaluate, evaluation_batches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from train.data import Data
    from train.evaluate.replicas import Replicas
    from train.metrics import Score
    from train.scoring import Batches

State = dict[str, "Tensor"]


@dataclass(frozen=True)
class RankScore:
    """What one rank's weights reach.

    own: with the statistics in its file. averaged: with those averaged over the ranks; None without BatchNorm.
    """

    rank: int
    path: str
    own: Score
    averaged: Score | None


@dataclass(frozen=True)
class RunScores:
    """The scores of all ranks of one run after one step, lowest rank first."""

    replicas: Replicas
    ranks: tuple[RankScore, ...]

    @property
    def spread(self) -> float:
        """Best accuracy less worst, 0 to 1, each rank with its own statistics."""
        return _spread([rank.own for rank in self.ranks])

    @property
    def averaged_spread(self) -> float | None:
        """The same with the averaged statistics; None without BatchNorm."""
        averaged = [rank.averaged for rank in self.ranks if rank.averaged is not None]
        return _spread(averaged) if averaged else None

    @property
    def sentence(self) -> str:
        """What the numbers say, and why."""
        r = self.replicas
        step = "" if r.step is None else f", step {r.step}"
        present = "" if len(self.ranks) == r.world_size else f" ({len(self.ranks)} of its {r.world_size} ranks)"
        averaged = [rank.averaged for rank in self.ranks if rank.averaged is not None]
        return f"{r.run}{step}{present}: {_differs(self, bool(averaged))}{_gives(r, averaged)}"


def _differs(scores: RunScores, batchnorm: bool) -> str:
    r = scores.replicas
    if not (r.statistics_differ or r.parameters_differ):
        agree = "weights and BatchNorm statistics agree" if batchnorm else "weights agree, and there is no BatchNorm"
        return f"accuracy is {_range([rank.own for rank in scores.ranks])}: {agree}"
    reasons = []
    if r.statistics_differ:
        reasons.append("drifted BatchNorm statistics")
    if r.parameters_differ:
        reasons.append("different weights")
    what = " and ".join(reasons)
    if not scores.spread:
        return f"accuracy is {_range([rank.own for rank in scores.ranks])} despite {what}"
    return f"accuracy differs by up to {100 * scores.spread:.2f} points between ranks with {what}"


def _gives(replicas: Replicas, averaged: Sequence[Score]) -> str:
    if not replicas.statistics_differ or not averaged:
        return ""
    what = "the statistics alone" if replicas.parameters_differ else "them"
    return f"; averaging {what} gives {_range(averaged)}"


def _range(scores: Sequence[Score]) -> str:
    low, high = (extreme(score.accuracy for score in scores) for extreme in (min, max))
    return f"{low:.2%} on every rank" if low == high else f"{low:.2%} to {high:.2%}"


def _spread(scores: Sequence[Score]) -> float:
    accuracies = [score.accuracy for score in scores]
    return max(accuracies) - min(accuracies)


def score_run(replicas: Replicas, data_dir: Path | None) -> RunScores:
    """Score every rank of one run on the test data. data_dir: its folder, None: the clone's own. Raises UserError.

    One process, on the CPU, without autocast: where two ranks hold the same bits, their scores are the same bits too.
    """
    # 1. The same test samples for every rank, all of them: nothing is divided as it is in training.
    task = replicas.task
    folder = None if task.data == "synthetic" else data_dir
    sizes = DataOptions(task.image_size, task.channels, task.classes, task.train_samples)
    data = load_data(task.data, folder, None, sizes)
    ctx = RankContext()
    batches = evaluation_batches(data.test, ctx)
    # 2. All ranks' tensors, and one model to put them into.
    states = [load_weights(file) for file in replicas.files]
    model = _build(replicas, data, states)
    # 3. Each rank as it was saved: its weights, and the statistics that it has tracked.
    own = [_score(model, state, batches, ctx) for state in states]
    # 4. Each rank's weights again, with the statistics of all ranks together.
    averaged = average_statistics(model, states)
    merged = [_score(model, {**state, **averaged}, batches, ctx) if averaged else None for state in states]
    files = zip(replicas.files, own, merged, strict=True)
    return RunScores(replicas, tuple(RankScore(file.rank, file.path, mine, all_) for file, mine, all_ in files))


def average_statistics(model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> State:
    """Average the BatchNorm statistics over the ranks; empty for a model without any.

    states: one state dict of `model` per rank. With mean_r and var_r, both [C], of rank r, and E over ranks:

        mean = E[mean_r]
        var  = E[var_r] + E[(mean_r - mean)^2]

    which is the law of total variance (Weiss, A Course in Probability, 2005, p. 385: Var(X) = E[Var(X|R)] +
    Var(E[X|R])) for ranks that saw equally many samples, as here to within one. Averaging the variances alone would
    leave out how far the ranks' means lie apart. It is close to what SyncBatchNorm would have tracked, not equal:
    running means are smoothed over steps, so they lie closer together than those of single batches.

    In float64, so that statistics that are the same on all ranks come out with the same bits.
    """
    averaged: State = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or layer.running_mean is None:
            continue
        mean_name, var_name = (f"{name}.{part}".lstrip(".") for part in ("running_mean", "running_var"))
        means, variances = (torch.stack([state[key].double() for state in states]) for key in (mean_name, var_name))
        mean = means.mean(0)  # [C], of [ranks, C]
        var = variances.mean(0) + (means - mean).square().mean(0)
        averaged[mean_name] = mean.to(states[0][mean_name].dtype)
        averaged[var_name] = var.to(states[0][var_name].dtype)
    return averaged


def _build(replicas: Replicas, data: Data, states: Sequence[State]) -> nn.Module:
    """Build the model that the metadata names, if the tensors of all ranks fit it. Raises UserError."""
    task = replicas.task
    # Without memory first: the width comes out of a file, and nothing is allocated for one that does not fit.
    try:
        with torch.device("meta"):
            model = build_from_settings(task, data.channels, data.classes, data.image_size)
    except UserError as error:
        raise UserError(f"{replicas.files[0].path}: {error}") from error
    needed = {name: _described(tensor) for name, tensor in model.state_dict().items()}
    for file, state in zip(replicas.files, states, strict=True):
        found = {name: _described(tensor) for name, tensor in state.items()}
        for name in [*needed, *found]:
            if needed.get(name) != found.get(name):
                has = f"{task.model} has {needed.get(name, 'no tensor of this name')}"
                reason = f"{file.path}: {name} is {found.get(name, 'not there')}, {has}"
                raise UserError(
                    f"{reason}; needs a file as train/run.py saves it without a fault that changes the model"
                )
    return model.to_empty(device="cpu")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _score(model: nn.Module, state: State, batches: Batches, ctx: RankContext) -> Score:
    model.load_state_dict(state)
    return evaluate(model, batches, ctx)
