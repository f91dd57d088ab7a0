"""Communication hooks of DDP: send gradients in 16 bits, or as a low-rank approximation.

DDP calls the hook with each bucket of gradients as soon as backward has filled it, and uses its result in place of the
bucket. Without a hook DDP averages the bucket in float32. The hooks below send fewer bytes. Their result comes from an
all-reduce and equal arithmetic on every rank, so parameters stay bitwise equal between ranks, but differ from a run
without a hook.
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import GradBucket
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

# Steps before PowerSGD starts. At least 2, because DDP may still rebuild its buckets in the first two.
START = 2


def register_hook(wrapper: DistributedDataParallel, settings: Settings) -> PowerSGDState | None:
    """Register the hook of --comm-hook once, before the first forward. Returns the state of PowerSGD, if used."""
    if settings.comm_hook == "powersgd":
        # The gradient matrix is approximated by P Q^T with few columns, and only P and Q are sent (Vogels et al. 2019,
        # https://arxiv.org/abs/1905.13727). Each rank adds its approximation error to its next gradient, so the error
        # differs between ranks by design. Each step starts from the previous Q.
        state = PowerSGDState(
            None,
            matrix_approximation_rank=settings.powersgd_rank or 1,
            start_powerSGD_iter=settings.powersgd_start or START,
        )
        wrapper.register_comm_hook(state, powersgd_hook)
        return state
    # Both hooks divide by the number of ranks before the sum, which avoids most overflows in 16 bits.
    hook = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[settings.comm_hook]
    wrapper.register_comm_hook(None, hook)
    return None


# DDP checks the annotations and rejects strings.
@wraps(powerSGD_hook)
def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress one bucket with torch's hook, and wait until it is complete.

    The hook reduces P, then Q, in callbacks. With gloo the callbacks run in other threads. The collectives of backward
    (the next bucket, SyncBatchNorm's sums) could run before them on one rank and after them on another, and ranks would
    add unrelated values. Waiting keeps the order equal on all ranks.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def collect_hook_state(state: PowerSGDState, ctx: RankContext) -> dict[str, Any]:
    """Collect the state of PowerSGD as tensors and numbers; not copied.

    error_dict, p, q: flat float tensors by bucket number. Errors differ between ranks; syncheck recognizes them by
    torch's name error_dict. rng: generator of the first Q.
    """
    rng = state.rng.get_state(legacy=False)["state"]
    return {
        "ranks": ctx.world_size,
        "iter": state.iter,
        "error_dict": dict(state.error_dict),
        "p": dict(state.p_memory_dict),
        "q": dict(state.q_memory_dict),
        "rng": {"key": torch.tensor(rng["key"].astype("int64")), "pos": rng["pos"]},
    }


def restore_hook_state(state: PowerSGDState, memory: Mapping[str, Any], ctx: RankContext) -> None:
    """Restore the result of `collect_hook_state`. After a change of the number of ranks, errors start at zero."""

    def move_to_device(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {bucket: tensor.to(ctx.device) for bucket, tensor in tensors.items()}

    state.iter = memory["iter"]
    state.error_dict = move_to_device(memory["error_dict"]) if memory["ranks"] == ctx.world_size else {}
    state.p_memory_dict, state.q_memory_dict = move_to_device(memory["p"]), move_to_device(memory["q"])
    rng = memory["rng"]
    key = rng["key"].cpu().numpy().astype("uint32")
    state.rng.set_state({"bit_generator": "MT19937", "state": {"key": key, "pos": rng["pos"]}})


def broadcast_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Broadcast rank 0's optimizer state; a collective. All ranks have made a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    # Adam's step count is on the CPU, which NCCL does not support.
                    payload = value.to(device)
                    dist.broadcast(payload, 0)
                    value.copy_(payload)


def build_buffer_arguments(sync: bool) -> dict[str, Any]:
    """Return the DDP arguments for --no-buffer-sync in the installed torch version.

    forward_sync_buffers=False still broadcasts buffers once at the start. broadcast_buffers=False, its predecessor
    before torch 2.13, does not; here buffers start equal because all ranks use one seed.
    """
    if sync:
        return {}
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}
