"""Options that choose the parallel method, what changes it, and what goes wrong in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.faults import FAULTS, list_faults
from train.methods import METHODS
from train.options.parser import Print
from train.settings import DEFAULT

if TYPE_CHECKING:
    import argparse


def add_method(group: argparse._ArgumentGroup) -> None:
    """Add --method and what belongs to one of them."""
    group.add_argument(
        "--method", choices=METHODS, help="default: ddp where several processes were started, else single"
    )
    group.add_argument(
        "--replicas", type=int, metavar="N", help="dp: replicas (its GPUs, or 2); hsdp: copies of the sharded model (2)"
    )
    group.add_argument(
        "--average-every", type=int, metavar="N", help="localsgd: steps between two averages of the models (4)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="wait this long for other ranks (%(default)s)",
    )


def add_modifiers(group: argparse._ArgumentGroup) -> None:
    """Add what changes a method."""
    group.add_argument("--sync-bn", action="store_true", help="BatchNorm over the samples of all ranks")
    group.add_argument("--no-buffer-sync", action="store_true", help="let each rank keep its own BatchNorm statistics")
    group.add_argument(
        "--amp",
        choices=("off", "bf16", "fp16"),
        default=DEFAULT.amp,
        help="mixed precision by torch.autocast, with loss scaling for fp16 (%(default)s)",
    )
    group.add_argument(
        "--accumulate",
        type=int,
        default=DEFAULT.accumulate,
        metavar="K",
        help="split each rank's share into K micro-batches; gradients are reduced after the last (%(default)s)",
    )
    group.add_argument("--grad-clip", type=float, metavar="NORM", help="clip the norm of the whole gradient")
    group.add_argument(
        "--find-unused", action="store_true", help="let DDP look for parameters that a step does not use"
    )
    group.add_argument(
        "--join", action="store_true", help="each rank makes batches of its own; DDP's join waits for those with more"
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="generate code with torch.compile; the first step takes seconds to minutes",
    )
    group.add_argument(
        "--channels-last", action="store_true", help="memory format of images and weights: NHWC, faster on many GPUs"
    )
    group.add_argument(
        "--comm-hook",
        choices=("none", "fp16", "bf16", "powersgd"),
        default=DEFAULT.comm_hook,
        help="what DDP sends of a gradient: all, half as many bytes, or thin matrices (%(default)s)",
    )
    group.add_argument("--powersgd-rank", type=int, metavar="N", help="powersgd: columns of its matrices (1)")
    group.add_argument("--powersgd-start", type=int, metavar="N", help="powersgd: steps without it at first (2)")
    group.add_argument(
        "--ema", type=float, metavar="DECAY", help="also keep and save the moving average of the weights, like 0.999"
    )


def add_faults(group: argparse._ArgumentGroup) -> None:
    """Add the planted desyncs."""
    group.add_argument("--fault", metavar="NAME", choices=FAULTS, help="plant one; --list-faults names them")
    group.add_argument("--fault-step", type=int, metavar="N", help="the step at which it strikes (default: its own)")
    group.add_argument(
        "--list-faults", action=Print, const=list_faults, help="list the faults and what each does, and exit"
    )
