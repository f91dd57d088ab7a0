"""Faults of the update: skipped steps, lost state, other settings, parameters that are not updated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.trials.faults.base import Fault
from benchmarks.trials.faults.contents import choose_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.simulation import Gradients, Rank, Run, Setup


class SkippedStep(Fault):
    """One rank skips one step."""

    name = "skipped step"
    codes = frozenset({"SYN214"})

    def takes_step(self, run: Run, rank: Rank) -> bool:
        return rank is not run.odd or run.step != run.setup.onset


class SkippedSteps(Fault):
    """One rank skips every fourth step."""

    name = "skipped steps"
    codes = frozenset({"SYN214"})

    def takes_step(self, run: Run, rank: Rank) -> bool:
        return rank is not run.odd or not run.began or (run.step - run.setup.onset) % 4 != 0


class LostOptimizer(Fault):
    """One rank loses its optimizer state before the onset, as after a resume."""

    name = "optimizer state lost"
    needs_optimizer = True
    codes = frozenset({"SYN215"})

    def fits(self, setup: Setup) -> bool:
        return setup.optimizer != "sgd" and setup.onset > 1

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            for optimizer in rank.optimizers:
                optimizer.state.clear()
        return True


class ScalerDiverged(Fault):
    """The loss scale of one rank is halved, and it skips this step."""

    name = "loss scale diverged"
    codes = frozenset({"SYN216"})
    saves_scaler = True

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            rank.scaler["scale"] /= 2
            return False
        return True


class OtherLearningRate(Fault):
    """One rank has another learning rate."""

    name = "other learning rate"
    codes = frozenset({"SYN107"})
    needs_optimizer = True

    def change_group(self, group: dict[str, Any]) -> None:
        """Change the settings of a parameter group."""
        group["lr"] *= 0.7

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            for optimizer in rank.optimizers:
                for group in optimizer.param_groups:
                    self.change_group(group)
        return True


class OtherDecay(OtherLearningRate):
    """One rank has another weight decay."""

    name = "other weight decay"

    def change_group(self, group: dict[str, Any]) -> None:
        group["weight_decay"] += 0.01


class NeverUpdated(Fault):
    """One rank no longer updates one matrix, as if it were frozen there."""

    name = "one parameter not updated"
    codes = frozenset({"SYN225"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.began:
            name, _ = choose_weight(run.odd)
            run.odd.gradients = {key: value for key, value in run.odd.gradients.items() if key != name}


class DataDependentSkip(Fault):
    """Each rank updates one matrix only if its own batch needs it, like an unused expert."""

    name = "data-dependent update"
    codes = frozenset({"SYN225"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        if run.began:
            for rank in run.ranks:
                name, _ = choose_weight(rank)
                is_used = float(local[rank.rank][name].sum()) > 0
                if not is_used:
                    rank.gradients = {key: value for key, value in rank.gradients.items() if key != name}


class PeriodicAveraging(Fault):
    """Local SGD: ranks step with their own gradients and average their parameters in each eighth step."""

    name = "periodic averaging"
    fallback = frozenset({"SYN211"})
    codes = frozenset({"SYN241"})
    needs_metadata = True
    from_start = True

    def averages(self, run: Run) -> bool:  # noqa: ARG002
        return False

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step % 8 == 0:
            for parameters in zip(*(rank.module.parameters() for rank in run.ranks), strict=True):
                mean = torch.stack([parameter.data for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.data.copy_(mean)

    def describe_averaging(self, run: Run) -> dict[str, int] | None:
        return {"period": 8, "warmup_steps": 0, "last_step": run.step // 8 * 8}


class AverageNotUpdated(Fault):
    """One rank does not update its averaged copy."""

    name = "average not updated"
    codes = frozenset({"SYN219"})
    saves_average = True

    def updates_average(self, run: Run, rank: Rank) -> bool:
        return rank is not run.odd or not run.began
