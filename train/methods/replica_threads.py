"""DataParallel with access to the replicas' buffers: torch's own on several GPUs, an emulation elsewhere.

torch.nn.DataParallel creates replicas at each forward and discards them afterwards. Without a GPU it creates none and
calls the module directly (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
"""

# ruff: noqa: SLF001 - replicas are assembled from a module's private dictionaries, as in torch
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


class ReplicaBuffers:
    """The buffers of each replica after the last training forward.

    count: number of replicas. A replica without samples has the module's buffers from before the forward. The first
    replica uses the module's buffers, as in torch.nn.DataParallel.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.last: list[dict[str, Tensor]] = [{} for _ in range(count)]

    @contextmanager
    def watch(self, module: nn.Module, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Record the buffers after a training forward, which is the block. An evaluation is not recorded."""
        # Replicas without samples keep the buffers from before the forward.
        idle_buffers = []
        for _ in range(len(replicas), self.count):
            idle_buffers.append({name: buffer.clone() for name, buffer in _buffers(module)})
        yield
        if module.training:
            self.last = [dict(_buffers(replica)) for replica in replicas] + idle_buffers

    def states(self, module: nn.Module) -> list[dict[str, Tensor]]:
        """Return the state dict of each replica, with the module's names.

        Parameters are the module's own. A GPU replica has copies, but from before the optimizer step.
        """
        states = []
        for replica_buffers in self.last:
            state = module.state_dict()
            for name, buffer in replica_buffers.items():
                if name in state:
                    state[name] = buffer
            states.append(state)
        return states


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def keep_modes(device: str) -> Callable[..., Any]:
    """Return a function that calls a module in the modes of the current thread. device: type of the device.

    Modes of torch are local to a thread. A new thread starts with the defaults, independent of the caller.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def call(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        # Set inference mode first, because it changes grad mode too. All threads share autocast's cache of converted
        # weights. With the cache, timing would decide whether two replicas share a converted weight and add its
        # gradient in 16 bits.
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(device, dtype, enabled=autocast, cache_enabled=False),
        ):
            return module(*inputs, **kwargs)

    return call


class GpuReplicas(nn.DataParallel[nn.Module]):
    """torch.nn.DataParallel that records the buffers of its replicas."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], buffers: ReplicaBuffers) -> None:
        super().__init__(module, list(devices))
        self.replica_buffers = buffers

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas with the caller's autocast dtype.

        torch passes on that autocast is enabled, but not the dtype, so bfloat16 would become float16:
        https://github.com/pytorch/pytorch/blob/v2.6.0/torch/nn/parallel/parallel_apply.py#L92
        """
        call = keep_modes(self.src_device_obj.type)
        calls: list[Any] = [partial(call, replica) for replica in replicas]
        with self.replica_buffers.watch(self.module, replicas):
            return super().parallel_apply(calls, inputs, kwargs)


class ThreadReplicas(nn.Module):
    """DataParallel with all replicas on one device, for demonstration without GPUs; it is not faster.

    module: takes and returns one tensor [N, ...].
    """

    def __init__(self, module: nn.Module, buffers: ReplicaBuffers) -> None:
        super().__init__()
        self.module, self.replica_buffers = module, buffers

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, ...]. Returns the outputs of all samples in order."""
        # 1. Scatter contiguous shares of ceil(N / replicas) samples. The last share may be smaller, and empty shares
        #    are omitted.
        shares = x.chunk(self.replica_buffers.count)
        # 2. Replicate.
        replicas = [replicate(self.module, own_buffers=index > 0) for index in range(len(shares))]
        # 3. Apply.
        with self.replica_buffers.watch(self.module, replicas):
            outputs = parallel_apply(replicas, shares)
        # 4. Gather. Autograd later goes back through all replicas to the common parameters and adds the gradients
        #    there.
        return torch.cat(outputs)


def replicate(module: nn.Module, *, own_buffers: bool) -> nn.Module:
    """Copy the structure of a module without copying its parameters.

    own_buffers: whether to copy the buffers; otherwise the copy updates the module's. See
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/nn/parallel/replicate.py#L115: there, a parameter on another
    GPU is a differentiable copy.
    """
    # copy.deepcopy with shared parameters takes five times as long.
    copies: dict[nn.Module, nn.Module] = {
        part: part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for part in module.modules()
    }
    buffers: dict[Tensor | None, Tensor | None] = {buffer: buffer for buffer in module.buffers()}
    if own_buffers:
        buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    # A module may have a name without a buffer or a child.
    buffers[None] = None
    children: dict[Any, Any] = {**copies, None: None}
    for part, copy in copies.items():
        copy._parameters = part._parameters.copy()
        for name, buffer in part._buffers.items():
            copy._buffers[name] = buffers[buffer]
        for name, child in part._modules.items():
            copy._modules[name] = children[child]
    return copies[module]


def parallel_apply(replicas: Sequence[nn.Module], shares: Sequence[Tensor]) -> list[Tensor]:
    """Call each replica with its share in a new thread, one after another.

    In sequence, because replicas on one device share its generator: for concurrent replicas, timing would decide which
    numbers of dropout each replica draws. In threads, because autograd numbers operations per thread from 0 and
    processes replicas by their numbers; otherwise it would add the gradients of three or more replicas in another
    order. Returns the outputs in the order of the replicas.
    """
    call, outputs = keep_modes(shares[0].device.type), []
    for index, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
        with ThreadPoolExecutor(1) as thread:
            output = thread.submit(call, replica, share)
        try:
            outputs.append(output.result())
        except Exception as error:
            error.add_note(f"in replica {index} of {len(replicas)}")
            raise
    return outputs
