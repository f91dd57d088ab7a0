"""--compile: the forward and backward that training calls as generated code.

https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from train.errors import UserError
from train.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from torch import nn

    from train.launch import RankContext


def compiled(forward: nn.Module, ctx: RankContext) -> nn.Module:
    """Return what compiles itself at its first call, and again where a batch has another size; a collective.

    forward: what training calls, a parallel wrapper included. To compile around DDP, not within, lets torch cut the
    code where a bucket of gradients is full, so that backward still sends while it computes. The model inside stays
    as it is, with the names of its tensors, and evaluation calls that. Raises UserError, on all ranks alike, where
    torch cannot compile.
    """
    with ctx.together():
        check_compiler(ctx.device)
    for module in forward.modules():
        if isinstance(module, SyncBatchNorm):
            # What it sends, also in its backward, is not for generated code: that ends before it, and goes on behind.
            disabled = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
            module.forward = disabled  # type: ignore[method-assign]
    return cast("nn.Module", torch.compile(forward))


def check_compiler(device: torch.device) -> None:
    """Compile a line, which needs all that a model needs: a C++ compiler, Python's headers, on GPUs triton.

    Raises UserError with torch's reason.
    """
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # of many kinds, some of them private to torch, one for each part that is missing
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--compile: torch {torch.__version__} cannot compile for {device.type} here: {reason}; "
            "install what is missing (on the CPU g++, or name another in CXX), or leave --compile out"
        ) from error
