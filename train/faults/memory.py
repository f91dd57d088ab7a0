"""What a bad memory, a bad copy or a bad computation leaves in one rank's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from train.faults.base import Fault

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings

# The second highest bit of float32's exponent. It is set in all numbers from 2**-63 to 2, so flipping it
# divides by 2**64: the weight is as good as gone, the number stays finite, and training goes on. The highest
# bit, set by a flip, would multiply by 2**128.
BIT = 29
LOW, HIGH = 2.0**-63, 2.0
RUN = 64  # elements: 256 bytes, four cache lines


class MemoryFault(Fault):
    """Base of those that change some elements of one tensor on the last rank after a step.

    Which ones follows from --seed, so that all ranks know, and can refuse together.
    """

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        self.generator = torch.Generator().manual_seed(settings.seed)

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Choose on all ranks, change on one."""
        if step != self.at:
            return
        weights = [weight for weight in method.module.parameters() if weight.dim() > 1 and weight.requires_grad]
        tensor = self.choose(weights, optimizer).detach().view(-1)
        place = self.place(tensor)
        if self.bad:
            self.change(tensor, place)

    def choose(self, weights: list[nn.Parameter], optimizer: Optimizer) -> Tensor:  # noqa: ARG002 - some look there
        """Choose a tensor. weights: of convolutions and linear layers."""
        return weights[self.draw(len(weights))]

    def place(self, tensor: Tensor) -> int:
        """Choose an element. tensor: [N], float32."""
        return self.draw(tensor.numel())

    def change(self, tensor: Tensor, place: int) -> None:
        """Change it in place. tensor: [N], float32."""
        raise NotImplementedError

    def draw(self, below: int) -> int:
        """Draw a number from 0 to below - 1."""
        return int(torch.randint(below, (), generator=self.generator))


class BitFlipWeight(MemoryFault):
    """Flip one bit of a weight: cosmic rays, a failing memory cell, a core that computes wrong.

    The gradients are averaged over all ranks, so the gap stays in this one element. With --optimizer sgd its
    weight decay carries it on into the same element of the momentum.
    """

    says = "one bit of one weight flips on one rank"
    code = "SYN220"
    when = "half"

    def place(self, tensor: Tensor) -> int:
        """Choose among the elements whose bit can be flipped without harm."""
        size = tensor.abs()
        fit = ((size >= LOW) & (size < HIGH)).nonzero()
        if len(fit) == 0:
            self.refuse("no element of the tensor lies between 2**-63 and 2; use another --seed or --fault-step")
        return int(fit[self.draw(len(fit))])

    def change(self, tensor: Tensor, place: int) -> None:
        """Flip the bit."""
        bits = tensor.view(torch.int32)
        bits[place] = bits[place] ^ (1 << BIT)


class BitFlipExpAvg(BitFlipWeight):
    """Flip one bit of the optimizer's first moment: exp_avg of AdamW, the momentum of SGD.

    At the last step the flip stands alone in the file; a step later the weight has it too.
    """

    says = "one bit of the optimizer's first moment (exp_avg, or momentum) flips on one rank"
    code = "SYN220"
    when = "last"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.optimizer == "sgd" and settings.momentum == 0:
            self.refuse("--momentum 0 leaves the optimizer without a state; use --optimizer adamw")

    def choose(self, weights: list[nn.Parameter], optimizer: Optimizer) -> Tensor:
        """Choose the moment that belongs to a weight."""
        state = optimizer.state[super().choose(weights, optimizer)]
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        if not isinstance(moment, torch.Tensor):
            # With --amp fp16 the first steps may all have been left out.
            self.refuse(f"the optimizer has no state after step {self.at}; use a later --fault-step")
        return moment


class NanOnOneRank(MemoryFault):
    """Put one NaN into a weight.

    At the last step it stays where it is. Earlier, the next gradients of this rank are NaN, the average takes
    them to all ranks, and soon all hold the same NaNs, which is in sync: --fault-step shows that. (With --amp fp16
    the NaN stays on its rank: all ranks leave every later step out.)
    """

    says = "one weight of one rank becomes NaN"
    code = "SYN222"
    when = "last"

    def change(self, tensor: Tensor, place: int) -> None:
        """Write it."""
        tensor[place] = float("nan")


class ContiguousCorruption(MemoryFault):
    """Overwrite a run of adjacent elements: a copy or a transfer that brought other bytes.

    https://github.com/NVIDIA/Megatron-LM/issues/5281.
    """

    says = f"{RUN} adjacent elements of one weight are overwritten on one rank"
    code = "SYN221"
    when = "last"

    def choose(self, weights: list[nn.Parameter], optimizer: Optimizer) -> Tensor:
        """Choose a tensor of which a run is only a part; the largest where none is that large."""
        largest = max(weights, key=lambda weight: weight.numel())
        return super().choose([w for w in weights if w.numel() >= 2 * RUN] or [largest], optimizer)

    def place(self, tensor: Tensor) -> int:
        """Choose where the run starts."""
        return self.draw(tensor.numel() - run_length(tensor) + 1)

    def change(self, tensor: Tensor, place: int) -> None:
        """Write numbers of a weight's size, as another buffer of the model would hold."""
        length = run_length(tensor)
        tensor[place : place + length] = 0.1 * torch.randn(length, generator=self.generator).to(tensor.device)


def run_length(tensor: Tensor) -> int:
    """Count the elements to overwrite: never the whole tensor."""
    return min(RUN, tensor.numel() // 2)


class RoundsOtherwise(Fault):
    """Move every parameter to the next float32: a kernel, or an order of summing, that rounds otherwise.

    Harmless by itself, and the reason why the same bits on all ranks need the same kernels on all of them.
    """

    says = "all parameters of one rank are one rounding step off, as with another kernel"
    code = "SYN240"
    when = "last"

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Move them up, on one rank."""
        if self.bad and step == self.at:
            with torch.no_grad():
                for parameter in method.module.parameters():
                    parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
