"""What DDP sends of a gradient: all of it, half as many bytes, or a product of two thin matrices.

A communication hook is called with each bucket of gradients as soon as backward has filled it, and gives back what
takes its place. DDP's own sums the bucket over the ranks in float32; these send less. What they give back comes out of
an all-reduce and of the same arithmetic on every rank, so parameters stay bitwise equal: to each other, not to those
of a run without a hook.
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from train.launch import RankContext
    from train.settings import Settings

# Steps without compression. Two is the least: in the first two torch's DDP may still change its buckets.
START = 2


def register_hook(wrapper: DistributedDataParallel, settings: Settings) -> PowerSGDState | None:
    """Register the hook of --comm-hook, once, before the first forward. Returns what it remembers, if anything."""
    if settings.comm_hook == "powersgd":
        # M = P Q^T, with a few columns each: P and Q are sent, M is not (Vogels et al. 2019,
        # https://arxiv.org/abs/1905.13727). What that leaves out of a rank's gradient is added to its next one: this
        # error is the rank's own, by design, and each step starts from the Q of the one before.
        state = PowerSGDState(
            None,
            matrix_approximation_rank=settings.powersgd_rank or 1,
            start_powerSGD_iter=settings.powersgd_start or START,
        )
        wrapper.register_comm_hook(state, powersgd_hook)
        return state
    # Divided by the number of ranks before it is summed, or 16 bits would overflow earlier.
    hook = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[settings.comm_hook]
    wrapper.register_comm_hook(None, hook)
    return None


@wraps(powerSGD_hook)  # DDP looks at the annotations, and takes no strings
def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress one bucket with torch's hook, and wait until it is done.

    It reduces P when the rest has been reduced, and Q when P has. With gloo it does so on threads of its own, and
    what backward sends meanwhile (the next bucket, SyncBatchNorm's sums) would come before it on one rank and after
    it on another: ranks would add up unlike things. The wait keeps one order.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def memory_of(state: PowerSGDState, ctx: RankContext) -> dict[str, Any]:
    """Collect what PowerSGD carries from step to step, as tensors and numbers; not copied.

    error_dict, p, q: flat float tensors by the number of their bucket. The errors are this rank's own, and keep torch's
    name, by which syncheck knows them. rng: of the first Q's.
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


def remember(state: PowerSGDState, memory: Mapping[str, Any], ctx: RankContext) -> None:
    """Put back what `memory_of` has collected, for the same buckets. Other ranks than those begin without an error."""

    def placed(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {bucket: tensor.to(ctx.device) for bucket, tensor in tensors.items()}

    state.iter = memory["iter"]
    state.error_dict = placed(memory["error_dict"]) if memory["ranks"] == ctx.world_size else {}
    state.p_memory_dict, state.q_memory_dict = placed(memory["p"]), placed(memory["q"])
    rng = memory["rng"]
    key = rng["key"].cpu().numpy().astype("uint32")
    state.rng.set_state({"bit_generator": "MT19937", "state": {"key": key, "pos": rng["pos"]}})
