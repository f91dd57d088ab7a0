"""What the engine asks of a parallel method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


class Method(Protocol):
    """One way to train one model on several processes.

    grouped: whether it needs a process group. module: the model without any wrapper, on its device, once
    `wrap` has run. buffers_synced: whether running statistics are synchronized at least once a step, if one
    forward late, rather than never.
    """

    grouped: bool
    module: nn.Module

    def __init__(self, settings: Settings, ctx: RankContext) -> None: ...

    @property
    def buffers_synced(self) -> bool:
        """Say what the metadata block tells readers of the checkpoint."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that is equal on all ranks, and return what training calls."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Leave the global batch's gradient in every rank's parameters.

        loss: this rank's share of the global mean: the sum over its own samples divided by the global batch
        size.
        """
        ...

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters and clear their gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Name the model's tensors as they are on this rank, as without any wrapper; not copied."""
        ...
