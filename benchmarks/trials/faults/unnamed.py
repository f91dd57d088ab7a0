"""Faults of a single step that have no finding of their own. Wide sentences of a finding may be true for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.trials.faults.base import Fault
from benchmarks.trials.faults.gradients import scale_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.simulation import Gradients, Run


class NoisyGradient(Fault):
    """Noise is added to the averaged gradients of one rank, in one step."""

    name = "one noisy gradient"
    codes = frozenset({"SYN299", "SYN211"})
    needs_optimizer = True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.step == run.setup.onset:
            noise = torch.Generator().manual_seed(run.setup.seed)
            changed = {}
            for name, gradient in run.odd.gradients.items():
                size = gradient.square().mean().sqrt()
                changed[name] = gradient + size * torch.randn(gradient.shape, generator=noise)
            run.odd.gradients = changed


class ZeroedGradient(Fault):
    """One rank steps once with gradients of zero."""

    name = "one zeroed gradient"
    codes = frozenset({"SYN299", "SYN213"})
    needs_optimizer = True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.step == run.setup.onset:
            scale_gradients(run.odd, 0.0)


class NegatedGradient(Fault):
    """One rank steps once in the opposite direction."""

    name = "one negated gradient"
    codes = frozenset({"SYN299", "SYN211"})
    needs_optimizer = True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.step == run.setup.onset:
            scale_gradients(run.odd, -1.0)


class DroppedGradient(Fault):
    """A random half of the elements of the averaged gradients of one rank is zero, in one step."""

    name = "half of one gradient lost"
    codes = frozenset({"SYN299", "SYN211", "SYN213"})
    needs_optimizer = True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.step == run.setup.onset:
            numbers = torch.Generator().manual_seed(run.setup.seed)
            changed = {}
            for name, gradient in run.odd.gradients.items():
                changed[name] = gradient * (torch.rand(gradient.shape, generator=numbers) < 0.5)
            run.odd.gradients = changed


class ShrunkWeights(Fault):
    """All parameters of one rank are multiplied by 0.9 once."""

    name = "weights shrunk once"
    codes = frozenset({"SYN299"})
    needs_optimizer = True

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            for parameter in run.odd.named_trained().values():
                parameter.mul_(0.9)
