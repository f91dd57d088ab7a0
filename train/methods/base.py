"""The interface between the training loop and a parallel method."""

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
    """The contents of one checkpoint: model tensors without a wrapper's prefix, and the optimizer; not copied."""

    model: dict[str, Tensor]
    optimizer: Optimizer


class Method(Protocol):
    """A way to train one model on several processes or devices.

    grouped: whether it needs a process group. refuses: unsupported options with the reason. replicas: number of
    replicas in this process. module: the model without a wrapper, on its device, after `wrap`. rebuilds_buckets:
    whether gradient buckets are rebuilt after the first backward, see `Step.warm_up_buckets`.
    """

    grouped: ClassVar[bool]
    refuses: ClassVar[Mapping[str, str]]
    replicas: int
    module: nn.Module
    rebuilds_buckets: ClassVar[bool]

    def __init__(self, settings: Settings, ctx: RankContext) -> None: ...

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Return further arguments for syncheck.metadata()."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that is equal on all ranks. Returns the module that training calls."""
        ...

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer for all parameters of the unwrapped model, in their order."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which forward and backward accumulate gradients without communication."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of the global batch.

        loss: this rank's share of the global mean, i.e. the sum over its samples divided by the global batch size.
        """
        ...

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters and clear the gradients. scaler: disabled except with --amp fp16."""
        ...

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Return the replicas of this process; always `replicas` of them."""
        ...

    def join_ranks(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Allow ranks to run out of batches at different steps within this context, with --join; a collective."""
        ...

    def extra_state(self) -> dict[str, Any]:
        """Return the state, besides model and optimizer, that --resume needs: plain values and tensors by name."""
        ...

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore `extra_state` of this rank, or of an old rank if the number of ranks has changed."""
        ...


class MethodDefaults:
    """Defaults: no gradient buckets, no --join, and no state besides the model and the optimizer."""

    rebuilds_buckets: ClassVar[bool] = False

    def join_ranks(self, optimizer: Optimizer) -> AbstractContextManager[None]:  # noqa: ARG002 - for ddp
        """Return an empty context, because the method does not support --join."""
        return nullcontext()

    def extra_state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""
