"""DataParallel whose replicas can be looked at after the step: torch's own on several GPUs, a stand-in elsewhere.

torch's DataParallel makes its replicas anew at each forward and drops them when it returns, and without a GPU it
makes none at all: it passes its input through
(https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
"""

# ruff: noqa: SLF001 - replicas are put together as torch does it, from the parts of a module
from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


class ReplicaBuffers:
    """What the last training forward made of each replica's buffers.

    count: replicas. A replica that got no samples holds the buffers of the module from before that forward. The
    first replica's are the module's own, as in torch's DataParallel.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.last: list[dict[str, Tensor]] = [{} for _ in range(count)]

    @contextmanager
    def watch(self, module: nn.Module, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Keep them from one forward, which is the block; not from an evaluation, which would make all equal."""
        before = [{n: buffer.clone() for n, buffer in _buffers(module)} for _ in range(len(replicas), self.count)]
        yield
        if module.training:
            self.last = [dict(_buffers(replica)) for replica in replicas] + before

    def states(self, module: nn.Module) -> list[dict[str, Tensor]]:
        """Give the state dict of each replica, with the names of the module's.

        Parameters are the module's: there is one of each, and what a GPU's replica has is a copy from before the
        optimizer's step.
        """
        state = module.state_dict()
        return [state | {n: buffer for n, buffer in own.items() if n in state} for own in self.last]


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class ThreadModes:
    """What torch keeps for each thread: a new thread starts with the defaults, whatever the caller has set."""

    device: str
    grad: bool
    inference: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def read_current(cls, device: str) -> ThreadModes:
        """Read them. device: the type of the one to compute on."""
        return cls(
            device,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )

    def call(self, module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        """Call `module` with the switches set so."""
        # Inference mode first, for it switches gradients too. autocast's cache of converted weights is one for all
        # threads: with it, whether two replicas share a converted weight, and add up its gradient in 16 bits, would
        # depend on which is faster.
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, self.dtype, enabled=self.autocast, cache_enabled=False),
        ):
            return module(*inputs, **kwargs)


class GpuReplicas(nn.DataParallel[nn.Module]):
    """torch's DataParallel; `buffers` keeps what its replicas would take with them."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], buffers: ReplicaBuffers) -> None:
        super().__init__(module, list(devices))
        self.replica_buffers = buffers

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas as torch does, in the caller's precision.

        torch tells its threads that autocast is on, but not for which type, so bfloat16 would become float16:
        https://github.com/pytorch/pytorch/blob/v2.6.0/torch/nn/parallel/parallel_apply.py#L92
        """
        switches = ThreadModes.read_current(self.src_device_obj.type)
        calls: list[Any] = [partial(switches.call, replica) for replica in replicas]
        with self.replica_buffers.watch(self.module, replicas):
            return super().parallel_apply(calls, inputs, kwargs)


class ThreadReplicas(nn.Module):
    """What DataParallel does, with all replicas on one device: to see it without a GPU, not to be faster.

    module: takes one tensor [N, ...] and returns one. at_once: whether the replicas' threads run at the same time;
    None for yes, unless the module has active dropout: they share the random generator, so which numbers a
    replica draws would depend on which is faster. Otherwise the results are the same bits either way.
    """

    def __init__(self, module: nn.Module, buffers: ReplicaBuffers, at_once: bool | None = None) -> None:
        super().__init__()
        self.module, self.replica_buffers, self.at_once = module, buffers, at_once

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, ...]. Returns the outputs of all samples, in their order."""
        # 1. Scatter: contiguous shares of ceil(N / replicas) samples. The last may be smaller, and replicas that would
        #    get none are left out.
        shares = x.chunk(self.replica_buffers.count)
        # 2. Replicate.
        replicas = [replicate(self.module, own_buffers=index > 0) for index in range(len(shares))]
        # 3. Apply.
        at_once = not has_active_dropout(self.module) if self.at_once is None else self.at_once
        with self.replica_buffers.watch(self.module, replicas):
            outputs = parallel_apply(replicas, shares, at_once=at_once)
        # 4. Gather. From here autograd goes back through all replicas into the one set of parameters, where their
        #    gradients add up.
        return torch.cat(outputs)


def replicate(module: nn.Module, *, own_buffers: bool) -> nn.Module:
    """Copy the structure of a module, around the very same parameters.

    own_buffers: whether it gets copies of the buffers too; else it updates those of the module. As
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/nn/parallel/replicate.py#L115, where a parameter on
    another GPU has to be a copy through which its gradient comes back.
    """
    # Not copy.deepcopy of all but the parameters, which takes five times as long.
    copies: dict[nn.Module, nn.Module] = {
        part: part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for part in module.modules()
    }
    buffers = {buffer: buffer.clone() if own_buffers else buffer for buffer in module.buffers()}
    for part, copy in copies.items():
        copy._parameters = part._parameters.copy()
        for name, buffer in part._buffers.items():
            copy._buffers[name] = None if buffer is None else buffers[buffer]
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[child]
    return copies[module]


def parallel_apply(replicas: Sequence[nn.Module], shares: Sequence[Tensor], *, at_once: bool) -> list[Tensor]:
    """Call each replica with its share in a new thread: all at once, or one after the other.

    Also one after the other in threads of their own, for autograd numbers a thread's operations from 0 and goes
    back through the replicas by these numbers, so the gradients of three or more would be added up in another order.
    Returns the outputs in the order of the replicas. Raises what the first replica that failed has raised.
    """
    switches = ThreadModes.read_current(shares[0].device.type)
    outputs: dict[int, Tensor] = {}
    failures: dict[int, BaseException] = {}

    def work(index: int) -> None:
        try:
            outputs[index] = switches.call(replicas[index], shares[index])
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            error.add_note(f"in replica {index} of {len(replicas)}")
            failures[index] = error

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(replicas))]
    for worker in workers:
        worker.start()
        if not at_once:
            worker.join()
    for worker in workers:
        worker.join()
    for index in sorted(failures):
        raise failures[index]
    return [outputs[index] for index in range(len(replicas))]


def has_active_dropout(module: nn.Module) -> bool:
    """Tell whether a forward in the present mode drops out at random in one of torch's layers.

    A module that calls functional.dropout itself is not seen: give it at_once=False.
    """
    for part in module.modules():
        # The recurrent and attention layers have no Dropout within, but a rate of that name.
        rate = part.p if isinstance(part, _DropoutNd) else getattr(part, "dropout", 0)
        if part.training and isinstance(rate, (int, float)) and rate > 0:
            return True
    return False
