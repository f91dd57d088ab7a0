"""Ranks that start from different models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from train.faults.base import Fault

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from train.methods.single import Method


class InitNotBroadcast(Fault):
    """Initialize the last rank's parameters from another seed.

    Examples without a broadcast of rank 0's parameters: different seeds with DDP(init_sync=False), HSDP without
    sync_module_states, weights loaded on rank 0 after wrapping. Gradients are still averaged, so all ranks make equal
    updates from different starting points, and the difference stays constant. With AdamW the optimizer state is equal.
    With SGD the momentum contains the weight decay of different parameters.
    """

    summary = "one rank's parameters are initialized from another seed"
    code = "SYN210"

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Copy the parameters of another model."""
        unequal_model = self.build_other_model()
        if self.is_faulty:
            copy_parameters(unequal_model, method.module)
        return wrapped

    def build_other_model(self) -> nn.Module:
        """Build the run's model from another seed. Its norm weights and zero biases are equal, as in practice."""
        with self.fork_rng(self.settings.seed + 1):
            unequal_model: nn.Module = self.build_model()
        return unequal_model


class FrozenNotBroadcast(InitNotBroadcast):
    """Freeze the first layer, with different values on the last rank.

    Parts without trainable parameters are often not wrapped, so they are neither broadcast nor updated:
    https://github.com/speechbrain/speechbrain/issues/2814.
    """

    summary = "the first layer is frozen, and on one rank initialized from another seed"
    code = "SYN218"

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Freeze the layer on all ranks, and change it on one."""
        frozen = find_first_layer(method.module)
        frozen.requires_grad_(False)
        # Wrap again: DDP records which parameters are trainable, and raises an error if a gradient is missing.
        wrapped = method.wrap(method.module)
        # After wrapping, which broadcasts rank 0's frozen parameters too.
        unequal_model = self.build_other_model()
        if self.is_faulty:
            copy_parameters(find_first_layer(unequal_model), frozen)
        return wrapped

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Remove frozen parameters from the optimizer, like users who pass only trainable parameters."""
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]


def find_first_layer(module: nn.Module) -> nn.Module:
    """Return the layer that takes the input."""
    return next(layer for layer in module.modules() if isinstance(layer, (nn.Conv2d, nn.Embedding, nn.Linear)))


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters in place, so that references to the target's parameters stay valid."""
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)
