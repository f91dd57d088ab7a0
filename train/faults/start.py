"""Ranks that do not start from the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from train.faults.base import Fault, classifier
from train.models import build_from_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from train.methods.base import Method


class InitNotBroadcast(Fault):
    """Leave the last rank with parameters from another seed.

    So it is with unequal seeds where nothing sends rank 0's parameters: DDP(init_sync=False), HSDP without
    sync_module_states, weights that rank 0 alone loads after the wrap. Gradients are averaged all the same,
    so all ranks take equal steps from unequal places, and the gap stays as it is; with AdamW the optimizer's
    state is equal, with SGD its momentum holds the weight decay of the unequal parameters too.
    """

    says = "one rank starts from another seed's parameters"
    code = "SYN210"

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Copy another model's parameters over this one's."""
        other = self.other_model(method.module)
        if self.bad:
            copy_parameters(other, method.module)
        return forward

    def other_model(self, module: nn.Module) -> nn.Module:
        """Build the run's model from another seed.

        By its own initialization: norm weights and zero biases come out equal, as in real life.
        """
        with self.seeded(self.settings.seed + 1):
            channels, classes = first_convolution(module).in_channels, classifier(module)[1].out_features
            size = getattr(module, "image_size", 0)  # of those that are built for one
            return build_from_settings(self.settings, channels, classes, size)


class FrozenNotBroadcast(InitNotBroadcast):
    """Freeze the first convolution, with other numbers in it on the last rank.

    A part without trainable parameters is often left out of the wrapper, so nobody sends it, and nothing
    updates it either: https://github.com/speechbrain/speechbrain/issues/2814.
    """

    says = "the first convolution is frozen, and from another seed on one rank"
    code = "SYN218"

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Freeze it on all ranks, and change it on one."""
        frozen = first_convolution(method.module)
        frozen.requires_grad_(False)
        # Wrapped again: DDP knows what was trainable when it was built, and raises when a gradient does not come.
        forward = method.wrap(method.module)
        # Only now, for the wrap sends rank 0's frozen parameters too.
        other = self.other_model(method.module)
        if self.bad:
            copy_parameters(first_convolution(other), frozen)
        return forward

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Take what is frozen out of the optimizer, as a user does who hands it the trainable ones only.

        At the first step of the run, and at the first after a resume.
        """
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]


def first_convolution(module: nn.Module) -> nn.Conv2d:
    """Find the layer that takes the images."""
    return next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy them in place, so that whoever holds the target's goes on holding the right ones."""
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)
