"""A slow copy of the weights, for evaluation: their exponential moving average over the steps.

https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from torch import Tensor, nn


class Average:
    """The average of one rank's parameters.

    Every rank keeps its own, and nothing is sent: equal parameters give equal averages, if all ranks start and
    update them together. Buffers stay those of the model. decay: what the average keeps of itself in a step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.copy = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def update(self, module: nn.Module) -> None:
        """Take the parameters in; the first time they are the average."""
        self.copy.update_parameters(module)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The averages, by the names of the model's parameters; not copied."""
        return dict(self.copy.module.named_parameters())
