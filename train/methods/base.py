"""The part of a method that is not training: its ranks, its files, and its state for --resume."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


@dataclass(frozen=True)
class Replica:
    """The contents of one checkpoint: model tensors without a wrapper's prefix, and the optimizer; not copied."""

    model: dict[str, Tensor]
    optimizer: Optimizer


class MethodBase:
    """The base class of `Method`.

    grouped: whether the method needs a process group. refuses: unsupported options with the reason. replicas: number of
    replicas in this process. module: the model without a wrapper, on its device, after `wrap`. rebuilds_buckets:
    whether gradient buckets are rebuilt after the first backward (see train/resume/state_saver.py). parallel: whether
    ranks compute one copy of the model together, with --parallel-degree. parameters: elements of the whole model.
    """

    grouped: ClassVar[bool]
    refuses: ClassVar[Mapping[str, str]]
    replicas = 1
    module: nn.Module
    rebuilds_buckets: ClassVar[bool] = False
    parallel: ClassVar[bool] = False
    parameters = 0

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings, self.ctx = settings, ctx
        assert ctx.mesh.names == tuple(self.mesh_shape(settings, ctx.world_size)), "the context is not of assign_mesh"

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:  # noqa: ARG003 - for subclasses
        """Return the sizes of the mesh by dimension, outermost first (`train.mesh`); by default all ranks hold data.

        Raises UserError if the number of ranks does not fit.
        """
        return {"data": world_size}

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Return further arguments for syncheck.metadata(). A single replica equals itself: its buffers are synced."""
        names = self.ctx.mesh.names
        return {"buffers_synced": True} | ({} if names == ("data",) else {"mesh": self.ctx.mesh.coordinates})

    @property
    def monitored(self) -> Any:
        """The model for the checks of --monitor: the module, or an object with a method `state_dict`."""
        return self.module

    def mark(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return the tensor of a parameter as it is saved, not copied."""
        return tensor

    def share_sums(self, sums: Tensor) -> Tensor:
        """Return the measured sums, on ranks that have no outputs too."""
        return sums

    def join_ranks(self, optimizer: Optimizer) -> AbstractContextManager[None]:  # noqa: ARG002 - for ddp
        """Allow ranks to run out of batches at different steps within this context, with --join; a collective."""
        return nullcontext()

    def extra_state(self) -> dict[str, Any]:
        """Return the state, besides model and optimizer, that --resume needs: plain values and tensors by name."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore `extra_state` of this rank, or of an old rank if the number of ranks has changed."""
