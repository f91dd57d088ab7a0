"""DistributedDataParallel: one replica per process, gradients averaged during backward.

Compare with single.py: equal numbers mark the same steps, letters mark additions. DDP collects gradients in buckets,
and starts an all-reduce when backward has filled a bucket, so communication overlaps with computation.
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from train.methods.comm_hooks import (
    broadcast_optimizer_state,
    build_buffer_arguments,
    collect_hook_state,
    register_hook,
    restore_hook_state,
)
from train.methods.single import Method
from train.methods.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


class Ddp(Method):
    """Every rank has the whole model and trains on its share of each global batch.

    Parameters and optimizer state stay bitwise equal on all ranks. BatchNorm's running statistics do not: each rank
    updates them from its own samples, and the next forward replaces them by rank 0's. With --no-buffer-sync they
    are never replaced. With --sync-bn all ranks compute equal statistics.
    """

    grouped = True
    refuses: ClassVar[Mapping[str, str]] = {}
    rebuilds_buckets = True

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        self.wrapper: DistributedDataParallel
        self.compressor: PowerSGDState | None = None  # with --comm-hook powersgd

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report synchronized buffers. By default they lag by one step, because the next forward synchronizes them."""
        return super().metadata_fields | {"buffers_synced": self.settings.sync_bn or self.settings.buffer_sync}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to its device and wrap it in DDP."""
        # 1a. Convert to SyncBatchNorm first, because DDP registers the modules when it is built.
        if self.settings.sync_bn:
            model = convert_sync_batchnorm(model)
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        # 1b. Wrap. DDP broadcasts rank 0's parameters and buffers, so replicas start equal whatever their seeds.
        #     `device_ids` names the GPU; it must be None on the CPU. DDP raises an error if a parameter got no gradient
        #     in the previous step, unless find_unused_parameters=True.
        self.wrapper = DistributedDataParallel(
            self.module,
            device_ids=[self.ctx.device.index] if self.ctx.device.type == "cuda" else None,
            find_unused_parameters=self.settings.find_unused,
            # With a static graph, the first step records the order of gradients, and later steps rely on it. With
            # bucket views, gradients are stored in the buckets, instead of a second time in each parameter.
            static_graph=self.settings.static_graph,
            gradient_as_bucket_view=self.settings.bucket_view,
            **build_buffer_arguments(self.settings.buffer_sync),
        )
        # 1c. Train through the wrapper, because only its forward prepares the gradient reduction. Evaluate through the
        #     module: a forward of the wrapper would broadcast rank 0's buffers and hide differences.
        # 1d. A communication hook compresses the gradients.
        if self.settings.comm_hook != "none":
            self.compressor = register_hook(self.wrapper, self.settings)
        return self.wrapper

    # 2. As in single.py: DDP averages gradients and is independent of the optimizer.

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay local, to be averaged with the last micro-batch."""
        # 3a. It must include the forward, which decides whether its backward synchronizes.
        no_sync: AbstractContextManager[None] = self.wrapper.no_sync()
        return no_sync

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, averaged over all ranks by DDP."""
        # 3b. DDP divides the sum by the number of ranks, but the losses of all ranks already add up to the global mean:
        #     undo the division. (With 32 samples on 2 ranks, each loss is a sum over 16 divided by 32; times 2 it is
        #     the usual mean over the rank's 16 samples.)
        loss = loss * self.ctx.mesh.data_size
        # 3. Every rank must call backward equally often, because each call waits for all ranks.
        loss.backward()  # type: ignore[no-untyped-call]

    # 4. As in single.py. Equal parameters and equal gradients stay equal without communication. The scaler checks
    #    averaged gradients, so all ranks skip the same steps.

    @contextmanager
    def join_ranks(self, optimizer: Optimizer) -> Iterator[None]:
        """Allow ranks to run out of batches at different steps, and synchronize them at the end."""
        # 4a. A rank without batches stays in the context and takes part in the other ranks' collectives with zeros. DDP
        #     still divides by the number of all ranks, so every sample keeps its weight. At the end DDP broadcasts the
        #     parameters and buffers of a rank that finished last.
        with self.wrapper.join():
            yield
        # 4b. DDP does not synchronize the optimizer: the momentum of a rank that finished early lacks the last steps,
        #     and replicas would diverge with the next step. Rank 0 always has the most batches.
        broadcast_optimizer_state(optimizer, self.ctx.device)

    # 5. As in single.py: the wrapper's state dict would have the prefix "module." in every name.

    def extra_state(self) -> dict[str, Any]:
        """Return the state of PowerSGD, if used."""
        # 5a. PowerSGD keeps errors by bucket, so a resumed run must have the same buckets: see `warm_up_buckets` in
        #     train/resume/state_saver.py.
        return {} if self.compressor is None else collect_hook_state(self.compressor, self.ctx)

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of PowerSGD."""
        if self.compressor is not None:
            restore_hook_state(self.compressor, state, self.ctx)
