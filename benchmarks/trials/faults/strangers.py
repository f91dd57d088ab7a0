"""Faults with which strangers led earlier rules to false statements."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.trials.faults.base import Fault
from benchmarks.trials.faults.contents import choose_weight
from benchmarks.trials.faults.gradients import scale_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.simulation import Gradients, Rank, Run, Setup


class OwnNoise(Fault):
    """Each rank adds noise of its own to the averaged gradients."""

    name = "own noise after the average"
    codes = frozenset({"SYN211"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if not run.began:
            return
        for rank in run.ranks:
            noise = torch.Generator().manual_seed(run.setup.seed + 64 * run.step + rank.rank)
            changed = {}
            for name, gradient in rank.gradients.items():
                size = 0.1 * gradient.square().mean().sqrt()
                changed[name] = gradient + size * torch.randn(gradient.shape, generator=noise)
            rank.gradients = changed


class MaskedRows(Fault):
    """A hook on one rank sets rows of one gradient to zero."""

    name = "rows of a gradient masked"
    codes = frozenset({"SYN299", "SYN221", "SYN225"})
    needs_optimizer = True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if not run.began:
            return
        name, _ = choose_weight(run.odd)
        gradient = run.odd.gradients[name].clone()
        gradient[: max(1, gradient.shape[0] // 3)] = 0.0
        run.odd.gradients = {**run.odd.gradients, name: gradient}


class StaleGradients(Fault):
    """One rank does not clear the gradients of the step before."""

    name = "gradients not cleared"
    codes = frozenset({"SYN213", "SYN211", "SYN299"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.before: Gradients = {}

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        averaged = run.odd.gradients
        if run.began and self.before:
            run.odd.gradients = {name: gradient + self.before[name] for name, gradient in averaged.items()}
        self.before = averaged


class ClippedValues(Fault):
    """One rank clips the elements of the averaged gradients."""

    name = "one rank clips elements"
    codes = frozenset({"SYN213", "SYN211", "SYN299"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.began:
            gradients = run.odd.gradients
            run.odd.gradients = {name: g.clamp(-g.abs().mean(), g.abs().mean()) for name, g in gradients.items()}


class ZeroedGradients(Fault):
    """One rank loses the gradients of five steps."""

    name = "gradients of five steps lost"
    codes = frozenset({"SYN213"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.setup.onset <= run.step < run.setup.onset + 5:
            scale_gradients(run.odd, 0.0)


class ClippedOnNode(Fault):
    """The ranks of one node halve the averaged gradients."""

    name = "one node scales"
    codes = frozenset({"SYN213"})

    def fits(self, setup: Setup) -> bool:
        return setup.ranks in (4, 8)

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.began:
            for rank in run.ranks[len(run.ranks) // 2 :]:
                scale_gradients(rank, 0.5)

    def start(self, run: Run) -> None:
        self.half = len(run.ranks) // 2

    def name_host(self, rank: Rank) -> str:
        return f"node{rank.rank // max(1, self.half)}"


class DoubleStep(Fault):
    """One rank takes an additional step with the same gradients."""

    name = "additional step"
    codes = frozenset({"SYN214"})

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            for name, parameter in rank.named_trained().items():
                parameter.grad = rank.gradients.get(name)
            for optimizer in rank.optimizers:
                optimizer.step()
        return True


class OldState(Fault):
    """One rank loads model and optimizer of three steps before."""

    name = "earlier state loaded"
    codes = frozenset({"SYN214", "SYN215", "SYN217", "SYN106"})
    has_model = True

    def fits(self, setup: Setup) -> bool:
        return setup.onset > 1 and setup.optimizer != "sgd"

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.saved: list[dict[str, Any]] = []
        self.model: dict[str, Any] = {}

    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset - 3:
            self.saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in run.odd.optimizers]
            self.model = copy.deepcopy(run.odd.module.state_dict())
        if run.step == run.setup.onset:
            for optimizer, state in zip(run.odd.optimizers, self.saved, strict=True):
                optimizer.load_state_dict(state)
            if self.has_model:
                run.odd.module.load_state_dict(self.model)


class OldOptimizer(OldState):
    """One rank loads the optimizer of three steps before."""

    name = "earlier optimizer loaded"
    codes = frozenset({"SYN215"})
    needs_optimizer = True
    has_model = False


class LayerStateLost(Fault):
    """One rank loses the optimizer state of one parameter."""

    name = "state of one parameter lost"
    codes = frozenset({"SYN215"})
    needs_optimizer = True

    def fits(self, setup: Setup) -> bool:
        return setup.optimizer != "sgd" and setup.onset > 1

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            _, parameter = choose_weight(rank)
            for optimizer in rank.optimizers:
                optimizer.state.pop(parameter, None)
        return True


class ClampedWeights(Fault):
    """One rank limits the weights of one matrix, of which few are larger."""

    name = "few weights limited"
    codes = frozenset({"SYN299", "SYN220", "SYN221"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.most = 0.0

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        _, parameter = choose_weight(run.odd)
        if run.step == run.setup.onset:
            self.most = 0.95 * float(parameter.abs().max())
        if run.began:
            parameter.clamp_(-self.most, self.most)


class Nonnegative(Fault):
    """One rank sets the negative weights of one matrix to zero."""

    name = "negative weights removed"
    codes = frozenset({"SYN226"})

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.began:
            _, parameter = choose_weight(run.odd)
            parameter.clamp_(min=0)


class FrozenChanged(Fault):
    """One rank changes its frozen layers in the middle of the run."""

    name = "frozen layer changed"
    codes = frozenset({"SYN218"})

    def fits(self, setup: Setup) -> bool:
        return setup.model == "lora" and setup.onset > 1

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            for parameter in run.odd.module.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(0.9)


class OtherRateToo(Fault):
    """One rank has a slightly different learning rate, and later initializes a matrix again."""

    name = "tiny setting and new weights"
    codes = frozenset({"SYN210", "SYN299", "SYN224"})
    background = frozenset({"SYN107"})

    def start(self, run: Run) -> None:
        for optimizer in run.odd.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 1.0001

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            _, parameter = choose_weight(run.odd)
            torch.manual_seed(run.setup.seed + 2)
            parameter.normal_(std=float(parameter.std()))
