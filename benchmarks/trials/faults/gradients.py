"""Faults of gradients: not averaged, scaled, or averaged over a part of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.trials.faults.base import Fault
from benchmarks.trials.simulation import average_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchmarks.trials.simulation import Gradients, Rank, Run, Setup


class LocalGradients(Fault):
    """No rank averages its gradients."""

    name = "gradients not averaged"
    codes = frozenset({"SYN211"})

    def averages(self, run: Run) -> bool:
        return not run.began


class LocalGradientsOnce(Fault):
    """A single step without averaging, such as a `no_sync` that covers one micro-batch too many."""

    name = "gradients not averaged once"
    codes = frozenset({"SYN211"})

    def averages(self, run: Run) -> bool:
        return run.step != run.setup.onset


class OwnGradientsOfOneRank(Fault):
    """One rank steps with its own gradients."""

    name = "one rank does not average"
    codes = frozenset({"SYN211"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        if run.began:
            run.odd.gradients = dict(local[run.odd.rank])


class LateHead(Fault):
    """The head is outside the wrapper."""

    name = "head outside the wrapper"
    codes = frozenset({"SYN212"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        if run.began:
            for rank in run.ranks:
                own = {name: gradient for name, gradient in local[rank.rank].items() if name.startswith("head")}
                rank.gradients = {**rank.gradients, **own}


def scale_gradients(rank: Rank, factor: float | Tensor) -> None:
    """Multiply all gradients of a rank."""
    rank.gradients = {name: gradient * factor for name, gradient in rank.gradients.items()}


def measure_norm(gradients: Gradients) -> Tensor:
    """Return the norm of all gradients together."""
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


class ClipOnOneRank(Fault):
    """One rank clips to a norm below that of most steps."""

    name = "one rank clips"
    codes = frozenset({"SYN213"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.most = 0.0

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        norm = measure_norm(run.odd.gradients)
        if run.step == run.setup.onset:
            self.most = float(norm) * 0.4
        if run.began:
            scale_gradients(run.odd, min(torch.tensor(1.0), self.most / norm))


class HalfGradients(Fault):
    """One rank divides its gradients by two."""

    name = "half gradients"
    codes = frozenset({"SYN213"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.began:
            scale_gradients(run.odd, 0.5)


class SummedGradients(Fault):
    """One rank uses the sum of the gradients instead of their average."""

    name = "sum instead of average"
    codes = frozenset({"SYN213"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.began:
            scale_gradients(run.odd, float(len(run.ranks)))


class ClipByLocalNorm(Fault):
    """Each rank clips the averaged gradients by the norm of its own gradients."""

    name = "clip by local norm"
    codes = frozenset({"SYN213", "SYN211"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.most = 0.0

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        norms = [measure_norm(gradients) for gradients in local]
        if run.step == run.setup.onset:
            self.most = float(torch.stack(norms).mean()) * 0.5
        if run.began:
            for rank, norm in zip(run.ranks, norms, strict=True):
                scale_gradients(rank, min(torch.tensor(1.0), self.most / norm))


class DiffersByNode(Fault):
    """Gradients are averaged within each node only."""

    name = "averaged within nodes only"
    codes = frozenset({"SYN230"})
    needs_metadata = True

    def fits(self, setup: Setup) -> bool:
        return setup.ranks in (4, 8)

    def averages(self, run: Run) -> bool:
        return not run.began

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        if run.began:
            half = len(run.ranks) // 2
            average_gradients(local[:half], run.ranks[:half])
            average_gradients(local[half:], run.ranks[half:])

    def name_host(self, rank: Rank) -> str:
        return f"node{rank.rank // max(1, self.half)}"

    def start(self, run: Run) -> None:
        self.half = len(run.ranks) // 2
