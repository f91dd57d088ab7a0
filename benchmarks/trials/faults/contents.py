"""Faults of the values: other starts, damage, exchanged tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.trials.faults.base import Fault

if TYPE_CHECKING:
    from benchmarks.trials.simulation import Rank, Run, Setup


class FrozenNotBroadcast(Fault):
    """A frozen layer of one rank has other values from the start."""

    name = "frozen layer not broadcast"
    codes = frozenset({"SYN218"})
    from_start = True

    def fits(self, setup: Setup) -> bool:
        return setup.model == "lora"

    def start(self, run: Run) -> None:
        torch.manual_seed(run.setup.seed + 1)
        for name, parameter in run.odd.module.named_parameters():
            if not parameter.requires_grad and name.endswith("weight"):
                nn.init.normal_(parameter, std=float(parameter.detach().std()))


class InitNotBroadcast(Fault):
    """Each rank has initial values of its own."""

    name = "initial values not broadcast"
    codes = frozenset({"SYN210"})
    from_start = True

    def start(self, run: Run) -> None:
        for rank in run.ranks[1:]:
            torch.manual_seed(run.setup.seed + rank.rank)
            rank.module.load_state_dict(run.model.build(run.setup.sizes).state_dict())


class LoadedOnOneRank(Fault):
    """One rank loads other weights during the run."""

    name = "weights loaded on one rank"
    codes = frozenset({"SYN210"})

    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            torch.manual_seed(run.setup.seed + 1)
            run.odd.module.load_state_dict(run.model.build(run.setup.sizes).state_dict())


def choose_weight(rank: Rank) -> tuple[str, nn.Parameter]:
    """Return the first matrix that is no embedding, with its name."""
    for name, parameter in rank.named_trained().items():
        if parameter.dim() >= 2 and not name.startswith(("embed", "positions", "table")):
            return name, parameter
    raise LookupError("no matrix")


@torch.no_grad()
def flip_bit(tensor: Tensor, index: int, bit: int) -> None:
    """Flip a bit of one float32 element."""
    bits = tensor.view(torch.int32).view(-1)
    bits[index] ^= 1 << bit


class BitFlipWeight(Fault):
    """One bit of a weight flips."""

    name = "bit flip in a weight"
    codes = frozenset({"SYN220"})

    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            _, weight = choose_weight(run.odd)
            flip_bit(weight.data, run.setup.seed % weight.numel(), 18 + run.setup.seed % 6)


class BitFlipMoment(Fault):
    """One bit of an optimizer tensor flips."""

    name = "bit flip in the optimizer"
    codes = frozenset({"SYN220"})
    needs_optimizer = True

    def fits(self, setup: Setup) -> bool:
        return setup.optimizer in ("momentum", "nesterov", "adam", "adamw")

    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            name, _ = choose_weight(run.odd)
            state = run.odd.state_of(name)
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            assert moment is not None
            flip_bit(moment, run.setup.seed % moment.numel(), 20)


class Corruption(Fault):
    """A range of a weight is overwritten."""

    name = "corrupted range"
    codes = frozenset({"SYN221"})

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            _, weight = choose_weight(run.odd)
            flat = weight.data.view(-1)
            start = run.setup.seed % (flat.numel() // 2)
            flat[start : start + 16] = torch.linspace(-0.5, 0.5, 16)


class NotFinite(Fault):
    """One element of one rank becomes NaN after the step."""

    name = "NaN on one rank"
    codes = frozenset({"SYN222"})
    lags = (0,)

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            _, weight = choose_weight(run.odd)
            weight.data.view(-1)[3] = float("nan")


class RoundsOtherwise(Fault):
    """The parameters of one rank differ by one rounding step."""

    name = "rounding"
    codes = frozenset({"SYN240"})

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            for parameter in run.odd.named_trained().values():
                parameter.data = torch.nextafter(parameter.data, torch.tensor(10.0))


class ExchangedMoments(Fault):
    """The optimizer states of two parameters of one rank are exchanged, as after a resume by position."""

    name = "exchanged moments"
    codes = frozenset({"SYN224"})
    needs_optimizer = True

    def fits(self, setup: Setup) -> bool:
        return setup.optimizer in ("momentum", "nesterov", "adam", "adamw")

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            by_shape: dict[torch.Size, list[str]] = {}
            for name, parameter in run.odd.named_trained().items():
                by_shape.setdefault(parameter.shape, []).append(name)
            for names in by_shape.values():
                if len(names) > 1:
                    self._exchange(run.odd, names[0], names[1])
                    return

    def _exchange(self, rank: Rank, first: str, second: str) -> None:
        one, other = rank.state_of(first), rank.state_of(second)
        for key, value in one.items():
            if isinstance(value, Tensor):
                kept = value.clone()
                value.copy_(other[key])
                other[key].copy_(kept)


class ExchangedWeights(Fault):
    """Two parameters of the same shape hold each other's values on one rank."""

    name = "exchanged weights"
    codes = frozenset({"SYN224"})

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            parameters = list(run.odd.named_trained().values())
            for number, first in enumerate(parameters):
                for second in parameters[number + 1 :]:
                    if first.shape == second.shape and not torch.equal(first, second):
                        kept = first.data.clone()
                        first.data.copy_(second.data)
                        second.data.copy_(kept)
                        return


class Pruned(Fault):
    """One rank sets small elements of a matrix to zero after every step."""

    name = "pruned on one rank"
    codes = frozenset({"SYN226"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.mask: Tensor | None = None

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.began:
            _, weight = choose_weight(run.odd)
            if self.mask is None:
                self.mask = weight.abs() > weight.abs().median()
            weight.data.mul_(self.mask)


class OldFile(Fault):
    """The file of one rank is that of the previous checkpoint."""

    name = "old file"
    codes = frozenset({"SYN217", "SYN106"})
    needs_steps = True

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.by_step: dict[int, dict[str, Any]] = {}

    def change_content(self, run: Run, rank: Rank, content: dict[str, Any]) -> dict[str, Any]:
        if rank is not run.odd:
            return content
        if "optimizer" in content or "optimizers" in content:
            self.by_step.setdefault(run.step, content)
        earlier = [step for step in self.by_step if step < run.step]
        if not run.began or not earlier:
            return content
        old = self.by_step[max(earlier)]
        return {key: old.get(key, value) for key, value in content.items()}

    def name_step(self, run: Run, rank: Rank) -> int:
        earlier = [step for step in self.by_step if step < run.step]
        return max(earlier) if rank is run.odd and run.began and earlier else run.step
