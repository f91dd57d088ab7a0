"""Corrupted tensors on one rank: bad memory, a bad copy, or different rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from train.faults.base import Fault

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.methods.single import Method

# The second highest exponent bit of float32. It is set in all numbers from 2**-63 to 2, so flipping it divides the
# number by 2**64: the weight is lost, but finite, and training continues. Setting the highest bit would multiply by
# 2**128.
BIT = 29
LOW, HIGH = 2.0**-63, 2.0
# Elements: 256 bytes, four cache lines.
RUN = 64


class MemoryFault(Fault):
    """Base class of faults that change elements of one tensor on the last rank after a step.

    The choice depends only on --seed, so all ranks make it, and can raise an error together.
    """

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:
        """Choose the element on all ranks, and change it on one."""
        if step != self.fault_step:
            return
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        weights = [weight for weight in method.module.parameters() if weight.dim() > 1 and weight.requires_grad]
        tensor = self.choose_tensor(weights, optimizer).detach().view(-1)
        index = self.choose_element(tensor)
        if self.is_faulty:
            self.corrupt(tensor, index)

    def choose_tensor(self, weights: list[nn.Parameter], optimizer: Optimizer) -> Tensor:  # noqa: ARG002 - for subclasses
        """Choose a tensor. weights: of convolutions and linear layers."""
        return weights[self.draw_integer(len(weights))]

    def choose_element(self, tensor: Tensor) -> int:
        """Choose an element. tensor: [N], float32."""
        return self.draw_integer(tensor.numel())

    def corrupt(self, tensor: Tensor, index: int) -> None:
        """Change the element in place. tensor: [N], float32."""
        raise NotImplementedError

    def draw_integer(self, below: int) -> int:
        """Draw an integer from 0 to below - 1."""
        return int(torch.randint(below, (), generator=self.generator))


class BitFlipWeight(MemoryFault):
    """Flip one bit of a weight, as a cosmic ray, a failing memory cell or a faulty core would.

    Gradients are averaged over all ranks, so the difference stays in this element. With --optimizer sgd, weight decay
    carries it into the same element of the momentum.
    """

    summary = "one bit of one weight flips on one rank"
    code = "SYN220"
    when = "half"

    def choose_element(self, tensor: Tensor) -> int:
        """Choose an element that stays finite when the bit is flipped."""
        size = tensor.abs()
        fit = ((size >= LOW) & (size < HIGH)).nonzero()
        if len(fit) == 0:
            self.refuse("no element of the tensor lies between 2**-63 and 2; use another --seed or --fault-step")
        return int(fit[self.draw_integer(len(fit))])

    def corrupt(self, tensor: Tensor, index: int) -> None:
        """Flip the bit."""
        bits = tensor.view(torch.int32)
        bits[index] = bits[index] ^ (1 << BIT)


class BitFlipExpAvg(BitFlipWeight):
    """Flip one bit of the optimizer's first moment: exp_avg of AdamW, or the momentum of SGD.

    At the last step only the moment differs. One step later the weight differs too.
    """

    summary = "one bit of the optimizer's first moment (exp_avg, or momentum) flips on one rank"
    code = "SYN220"
    when = "last"

    def _check(self) -> None:
        if self.settings.has_stateless_optimizer:
            self.refuse("with --momentum 0 the optimizer has no state; use --optimizer adamw")

    def choose_tensor(self, weights: list[nn.Parameter], optimizer: Optimizer) -> Tensor:
        """Choose the moment of a weight."""
        state = optimizer.state[super().choose_tensor(weights, optimizer)]
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        if not isinstance(moment, torch.Tensor):
            # With --amp fp16 all steps so far may have been skipped.
            self.refuse(f"the optimizer has no state after step {self.fault_step}; use a later --fault-step")
        return moment


class NanOnOneRank(MemoryFault):
    """Set one weight to NaN.

    At the last step only this element differs. Earlier, the rank's next gradients are NaN and the average distributes
    them, until all ranks hold the same NaNs and are in sync: try --fault-step. (With --amp fp16 the NaN stays on its
    rank, because all ranks skip every later step.)
    """

    summary = "one weight of one rank becomes NaN"
    code = "SYN222"
    when = "last"

    def corrupt(self, tensor: Tensor, index: int) -> None:
        """Write the NaN."""
        tensor[index] = float("nan")


class ContiguousCorruption(MemoryFault):
    """Overwrite a range of adjacent elements, like a copy or transfer of wrong bytes.

    https://github.com/NVIDIA/Megatron-LM/issues/5281.
    """

    summary = f"{RUN} adjacent elements of one weight are overwritten on one rank"
    code = "SYN221"
    when = "last"

    def choose_tensor(self, weights: list[nn.Parameter], optimizer: Optimizer) -> Tensor:
        """Choose a tensor at least twice as large as the range, or the largest tensor."""
        largest = max(weights, key=lambda weight: weight.numel())
        return super().choose_tensor([w for w in weights if w.numel() >= 2 * RUN] or [largest], optimizer)

    def choose_element(self, tensor: Tensor) -> int:
        """Choose the start of the range."""
        return self.draw_integer(tensor.numel() - min(RUN, tensor.numel() // 2) + 1)

    def corrupt(self, tensor: Tensor, index: int) -> None:
        """Write values of a typical weight's size, as if from another buffer of the model."""
        length = min(RUN, tensor.numel() // 2)
        tensor[index : index + length] = 0.1 * torch.randn(length, generator=self.generator).to(tensor.device)


class RoundsOtherwise(Fault):
    """Move every parameter to the next float32, like a kernel or a summation order with different rounding.

    The difference is harmless, but shows that bitwise equal replicas need equal kernels on all ranks.
    """

    summary = "all parameters of one rank differ by one rounding step, as with another kernel"
    code = "SYN240"
    when = "last"

    def after_step(self, step: int, method: Method, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Increase the parameters on one rank."""
        if self.changes_step(step):
            with torch.no_grad():
                for parameter in method.module.parameters():
                    parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
