"""Faults of simulated runs, with the findings that name their cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.trials.simulation import average_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trials.simulation import Rank, Run, Setup

LAGS = (0, 1, 2, 5, 10, 30, 100)
Gradients = dict[str, Tensor]


class Fault:
    """A run without a fault, and the base class of faults. Hooks run in each step, also before the onset.

    name: of the fault in the table. codes: the findings that name the cause; SYN299 alone if no finding does. lags: the
    steps between the onset and the checkpoints.
    """

    name: ClassVar[str] = "none"
    codes: ClassVar[frozenset[str]] = frozenset()
    lags: ClassVar[tuple[int, ...]] = LAGS
    from_start: ClassVar[bool] = False
    """Whether the fault begins with the run, whatever its onset."""
    needs_steps: ClassVar[bool] = False
    """Whether only checkpoints of several steps can show the cause."""
    needs_optimizer: ClassVar[bool] = False
    """Whether only the optimizer state can show the cause."""
    needs_metadata: ClassVar[bool] = False
    """Whether only the metadata can show the cause."""
    saves_average: ClassVar[bool] = False
    saves_scaler: ClassVar[bool] = False
    local_buffers: ClassVar[frozenset[str]] = frozenset()
    """Buffers that are not copied from rank 0."""

    def fits(self, setup: Setup) -> bool:  # noqa: ARG002
        """Whether the fault has an effect with these settings."""
        return True

    def start(self, run: Run) -> None:
        """Change the ranks before the first step."""

    def see_batch(self, run: Run, rank: Rank, x: Tensor) -> None:
        """Run after the forward pass of a rank."""

    def averages(self, run: Run) -> bool:  # noqa: ARG002
        """Whether the gradients are averaged over all ranks in this step."""
        return True

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        """Change the averaged gradients. local: the gradients of each rank before the average."""

    def takes_step(self, run: Run, rank: Rank) -> bool:  # noqa: ARG002
        """Whether the rank updates its parameters."""
        return True

    def updates_average(self, run: Run, rank: Rank) -> bool:  # noqa: ARG002
        """Whether the rank updates its averaged copy."""
        return True

    def finish_step(self, run: Run) -> None:
        """Change the ranks after the update."""

    def change_content(self, run: Run, rank: Rank, content: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the content of the rank's checkpoint."""
        return content

    def name_step(self, run: Run, rank: Rank) -> int:  # noqa: ARG002
        """Return the step in the metadata."""
        return run.step

    def name_host(self, rank: Rank) -> str:  # noqa: ARG002
        """Return the host in the metadata."""
        return "node0"

    def describe_averaging(self, run: Run) -> dict[str, int] | None:  # noqa: ARG002
        """Return the averaging of local SGD in the metadata."""
        return None


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


class ClipByLocalNorm(Fault):
    """Each rank clips the averaged gradients by the norm of its own gradients."""

    name = "clip by local norm"
    codes = frozenset({"SYN213"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.most = 0.0

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        norms = [measure_norm(gradients) for gradients in local]
        if run.step == run.setup.onset:
            self.most = float(torch.stack(norms).mean()) * 0.5
        if run.began:
            for rank, norm in zip(run.ranks, norms, strict=True):
                scale_gradients(rank, min(torch.tensor(1.0), self.most / norm))


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


class AverageNotUpdated(Fault):
    """One rank does not update its averaged copy."""

    name = "average not updated"
    codes = frozenset({"SYN219"})
    saves_average = True

    def updates_average(self, run: Run, rank: Rank) -> bool:
        return rank is not run.odd or not run.began


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


class RoundsOtherwise(Fault):
    """The parameters of one rank differ by one rounding step."""

    name = "rounding"
    codes = frozenset({"SYN240"})

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            for parameter in run.odd.named_trained().values():
                parameter.data = torch.nextafter(parameter.data, torch.tensor(10.0))


class PeriodicAveraging(Fault):
    """Local SGD: ranks step with their own gradients and average their parameters in each eighth step."""

    name = "periodic averaging"
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


class OtherLearningRate(Fault):
    """One rank has another learning rate."""

    name = "other learning rate"
    codes = frozenset({"SYN107"})
    needs_optimizer = True

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            for optimizer in rank.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.7
        return True


class OtherDecay(Fault):
    """One rank has another weight decay."""

    name = "other weight decay"
    codes = frozenset({"SYN107"})
    needs_optimizer = True

    def takes_step(self, run: Run, rank: Rank) -> bool:
        if rank is run.odd and run.step == run.setup.onset:
            for optimizer in rank.optimizers:
                for group in optimizer.param_groups:
                    group["weight_decay"] += 0.01
        return True


class BuffersNeverSynced(Fault):
    """Nothing copies the buffers of rank 0."""

    name = "buffers never synchronized"
    codes = frozenset({"SYN202"})
    needs_steps = True
    from_start = True

    def fits(self, setup: Setup) -> bool:
        return setup.model == "conv"

    def start(self, run: Run) -> None:
        run.buffers_synced = False


class ExtraForward(Fault):
    """One rank runs a forward pass in training mode outside the steps."""

    name = "extra forward pass"
    codes = frozenset({"SYN203"})

    def fits(self, setup: Setup) -> bool:
        return setup.model == "conv"

    def start(self, run: Run) -> None:
        run.buffers_synced = False

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.step == run.setup.onset:
            x, _ = run.model.draw(run.setup.sizes, 4, run.odd.data)
            run.odd.module(x)


class LocalBuffer(Fault):
    """Each rank updates a buffer from its own data."""

    name = "buffer of local data"
    codes = frozenset({"SYN205"})
    local_buffers = frozenset({"observed_mean"})

    def start(self, run: Run) -> None:
        for rank in run.ranks:
            rank.module.register_buffer("observed_mean", torch.zeros(8))

    @torch.no_grad()
    def see_batch(self, run: Run, rank: Rank, x: Tensor) -> None:
        if run.began:
            observed = x.float().flatten()[:8]
            buffer = rank.module.get_buffer("observed_mean")
            buffer.lerp_(observed, 0.1)


class NoisyGradient(Fault):
    """Noise is added to the averaged gradients of one rank, in one step."""

    name = "one noisy gradient"
    codes = frozenset({"SYN299"})

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
    codes = frozenset({"SYN299"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.step == run.setup.onset:
            scale_gradients(run.odd, 0.0)


class NeverUpdated(Fault):
    """One rank no longer updates one matrix, as if it were frozen there."""

    name = "one parameter not updated"
    codes = frozenset({"SYN299"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:  # noqa: ARG002
        if run.began:
            name, _ = choose_weight(run.odd)
            run.odd.gradients = {key: value for key, value in run.odd.gradients.items() if key != name}


class ExchangedMoments(Fault):
    """The optimizer states of two parameters of one rank are exchanged, as after a resume by position."""

    name = "exchanged moments"
    codes = frozenset({"SYN299"})
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


class Pruned(Fault):
    """One rank sets small elements of a matrix to zero after every step."""

    name = "pruned on one rank"
    codes = frozenset({"SYN299"})

    def start(self, run: Run) -> None:  # noqa: ARG002
        self.mask: Tensor | None = None

    @torch.no_grad()
    def finish_step(self, run: Run) -> None:
        if run.began:
            _, weight = choose_weight(run.odd)
            if self.mask is None:
                self.mask = weight.abs() > weight.abs().median()
            weight.data.mul_(self.mask)


class DataDependentSkip(Fault):
    """Each rank updates one matrix only if its own batch needs it, like an unused expert."""

    name = "data-dependent update"
    codes = frozenset({"SYN299"})

    def change_gradients(self, run: Run, local: Sequence[Gradients]) -> None:
        if run.began:
            for rank in run.ranks:
                name, _ = choose_weight(rank)
                is_used = float(local[rank.rank][name].sum()) > 0
                if not is_used:
                    rank.gradients = {key: value for key, value in rank.gradients.items() if key != name}


class ExchangedWeights(Fault):
    """Two parameters of the same shape hold each other's values on one rank."""

    name = "exchanged weights"
    codes = frozenset({"SYN299"})

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


FAULTS = (
    Fault, LocalGradients, LocalGradientsOnce, OwnGradientsOfOneRank, LateHead, ClipOnOneRank, HalfGradients,
    ClipByLocalNorm, SkippedStep, SkippedSteps, LostOptimizer, ScalerDiverged, FrozenNotBroadcast, InitNotBroadcast,
    LoadedOnOneRank, AverageNotUpdated, BitFlipWeight, BitFlipMoment, Corruption, NotFinite, DiffersByNode,
    RoundsOtherwise, PeriodicAveraging, OtherLearningRate, OtherDecay, BuffersNeverSynced, ExtraForward, LocalBuffer,
    NoisyGradient, ZeroedGradient, NeverUpdated, ExchangedMoments, Pruned, DataDependentSkip, ExchangedWeights,
)  # fmt: skip
