"""What the engine asks of a parallel method."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


@dataclass(frozen=True)
class Replica:
    """What one checkpoint holds: a model's tensors, named as without any wrapper, and its optimizer; not copied."""

    model: dict[str, Tensor]
    optimizer: Optimizer


class Method(Protocol):
    """One way to train one model on several processes or devices.

    grouped: whether it needs a process group. refuses: options that make no sense with it, each with the
    reason. replicas: how many replicas of the model this process holds. module: the model without any
    wrapper, on its device, once `wrap` has run. rebuilds_buckets: whether the buckets in which gradients are sent are
    put together anew after the first backward, see `Step.rehearse`.
    """

    grouped: ClassVar[bool]
    refuses: ClassVar[Mapping[str, str]]
    replicas: int
    module: nn.Module
    rebuilds_buckets: ClassVar[bool]

    def __init__(self, settings: Settings, ctx: RankContext) -> None: ...

    @property
    def facts(self) -> dict[str, Any]:
        """Collect what the metadata block tells readers of the checkpoint: arguments of syncheck.metadata()."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that is equal on all ranks, and return what training calls."""
        ...

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer over all parameters of the unwrapped model, in their order."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of this forward and backward on their rank: more of the batch is to come."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Leave the global batch's gradient where `step` needs it.

        loss: this rank's share of the global mean: the sum over its own samples divided by the global batch
        size.
        """
        ...

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters and clear their gradients. scaler: passes all through, except with --amp fp16."""
        ...

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Give each replica that this process holds; as many as `replicas`, on every call."""
        ...

    def joined(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Let ranks run out of batches one before the other within this block; a collective. Only with --join."""
        ...

    def extra_state(self) -> dict[str, Any]:
        """Give what --resume must restore beside model and optimizer: plain values and tensors, by name."""
        ...

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `extra_state` gave on this rank; where the number of ranks has changed, on one of the old."""
        ...


class MethodDefaults:
    """What most methods answer: no buckets, no --join, and all that they hold is in the model and the optimizer."""

    rebuilds_buckets: ClassVar[bool] = False

    def joined(self, optimizer: Optimizer) -> AbstractContextManager[None]:  # noqa: ARG002 - for ddp
        """Do nothing: this method refuses it."""
        return nullcontext()

    def extra_state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Nothing."""
