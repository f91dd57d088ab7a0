"""The parallel methods by the name in --method, and the options that each method supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.methods.cp import Cp
from train.methods.ddp import Ddp
from train.methods.ddp_tp import DdpTp
from train.methods.diloco import DiLoCo
from train.methods.dp import Dp
from train.methods.ep import Ep
from train.methods.fsdp import Fsdp
from train.methods.fsdp_tp import FsdpTp, HsdpTp
from train.methods.hsdp import Hsdp
from train.methods.localsgd import LocalSgd
from train.methods.pp import Pp
from train.methods.pp_fsdp import PpFsdp
from train.methods.replicate import Replicate
from train.methods.single import Single
from train.methods.tp import Tp
from train.methods.zero import Zero

if TYPE_CHECKING:
    from collections.abc import Callable

    from train.methods.single import Method
    from train.settings import Settings

METHODS: dict[str, type[Method]] = {
    "single": Single,
    "dp": Dp,
    "ddp": Ddp,
    "zero": Zero,
    "localsgd": LocalSgd,
    "diloco": DiLoCo,
    "fsdp": Fsdp,
    "hsdp": Hsdp,
    "replicate": Replicate,
    "tp": Tp,
    "fsdp_tp": FsdpTp,
    "hsdp_tp": HsdpTp,
    "ddp_tp": DdpTp,
    "cp": Cp,
    "ep": Ep,
    "pp": Pp,
    "pp_fsdp": PpFsdp,
}
# Modifiers of a method, and whether the settings use them.
MODIFIERS: dict[str, Callable[[Settings], bool]] = {
    "--sync-bn": lambda s: s.sync_bn,
    "--no-buffer-sync": lambda s: not s.buffer_sync,
    "--amp bf16": lambda s: s.amp == "bf16",
    "--amp fp16": lambda s: s.amp == "fp16",
    "--accumulate": lambda s: s.accumulate > 1,
    "--grad-clip": lambda s: s.grad_clip is not None,
    "--find-unused": lambda s: s.find_unused,
    "--join": lambda s: s.join,
    "--compile": lambda s: s.compile,
    "--channels-last": lambda s: s.channels_last,
    "--comm-hook": lambda s: s.comm_hook != "none",
    "--ema": lambda s: s.ema is not None,
    "--save-format safetensors": lambda s: s.save_format == "safetensors",
}
TENSOR_PARALLEL = tuple(name for name, method in METHODS.items() if issubclass(method, Tp))
# Methods in which several ranks share one copy of the model.
PARALLEL = tuple(name for name, method in METHODS.items() if method.parallel)
DDP, SHARDED = ("ddp", "zero", "localsgd"), ("fsdp", "hsdp")
# Options that only some methods have.
OWN: dict[str, tuple[Callable[[Settings], bool], tuple[str, ...]]] = {
    "--replicas": (lambda s: s.replicas is not None, ("dp", "hsdp", "hsdp_tp")),
    "--sequence-parallel": (lambda s: s.sequence_parallel, TENSOR_PARALLEL),
    "--loss-parallel": (lambda s: s.loss_parallel, TENSOR_PARALLEL),
    "--average-every": (lambda s: s.average_every is not None, ("localsgd", "diloco")),
    "--outer-lr": (lambda s: s.outer_lr is not None, ("diloco",)),
    "--outer-momentum": (lambda s: s.outer_momentum is not None, ("diloco",)),
    "--static-graph": (lambda s: s.static_graph, DDP),
    "--bucket-view": (lambda s: s.bucket_view, DDP),
    "--reshard-after-forward": (lambda s: s.reshard_after_forward is not None, SHARDED),
    "--cpu-offload": (lambda s: s.cpu_offload, (*SHARDED, "replicate")),
    "--mp-policy": (lambda s: s.mp_policy, (*SHARDED, "replicate")),
    "--parallel-degree": (lambda s: s.parallel_degree is not None, PARALLEL),
    "--context-mode": (lambda s: s.context_mode is not None, ("cp",)),
    "--pipeline-schedule": (lambda s: s.pipeline_schedule is not None, ("pp", "pp_fsdp")),
}


def check_modifiers(settings: Settings) -> None:
    """Raise UserError if an option does not work with the method."""
    method = settings.method
    for option, used in MODIFIERS.items():
        if used(settings) and option in METHODS[method].refuses:
            raise UserError(f"{option}: not with --method {method}: {METHODS[method].refuses[option]}")
    if settings.monitor and not METHODS[method].grouped:
        raise UserError(f"--monitor: not with --method {method}: a single process has no replica to compare with")
    for option, (given, owners) in OWN.items():
        if given(settings) and method not in owners:
            raise UserError(f"{option}: only for --method {' or '.join(owners)}, not for {method}")
