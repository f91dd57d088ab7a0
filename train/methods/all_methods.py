"""The parallel methods by the name in --method, the options that each method supports, and the mesh of its ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from train.errors import UserError
from train.mesh import Mesh
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
    from train.launch import RankContext
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
# The modifiers that a method may refuse.
MODIFIERS = (
    *("--sync-bn", "--no-buffer-sync", "--amp bf16", "--amp fp16", "--accumulate", "--grad-clip", "--find-unused"),
    *("--join", "--compile", "--channels-last", "--comm-hook", "--ema", "--save-format safetensors"),
)
TENSOR_PARALLEL = tuple(name for name, method in METHODS.items() if issubclass(method, Tp))
# Methods in which several ranks share one copy of the model.
PARALLEL = tuple(name for name, method in METHODS.items() if method.parallel)
DDP, SHARDED = ("ddp", "zero", "localsgd"), ("fsdp", "hsdp")
# Options that only some methods have.
OWN: dict[str, tuple[str, ...]] = {
    "--replicas": ("dp", "hsdp", "hsdp_tp"),
    "--sequence-parallel": TENSOR_PARALLEL,
    "--loss-parallel": TENSOR_PARALLEL,
    "--average-every": ("localsgd", "diloco"),
    "--outer-lr": ("diloco",),
    "--outer-momentum": ("diloco",),
    "--static-graph": DDP,
    "--bucket-view": DDP,
    "--reshard-after-forward": SHARDED,
    "--cpu-offload": (*SHARDED, "replicate"),
    "--mp-policy": (*SHARDED, "replicate"),
    "--parallel-degree": PARALLEL,
    "--context-mode": ("cp",),
    "--pipeline-schedule": ("pp", "pp_fsdp"),
}


def check_modifiers(settings: Settings) -> None:
    """Raise UserError if an option does not work with the method."""
    method = METHODS[settings.method]
    for option in settings.list_used(MODIFIERS):
        if option in method.refuses:
            raise UserError(f"{option}: not with --method {settings.method}: {method.refuses[option]}")
    if settings.monitor and not method.grouped:
        raise UserError(
            f"--monitor: not with --method {settings.method}: a single process has no replica to compare with"
        )
    for option in settings.list_used(OWN):
        if settings.method not in OWN[option]:
            methods = " or ".join(OWN[option])
            raise UserError(f"{option}: only for --method {methods}, not for {settings.method}")


def assign_mesh(settings: Settings, ctx: RankContext) -> RankContext:
    """Return the context of this rank with its coordinates in the method's mesh.

    Without it, every rank has samples of its own. Raises UserError if the number of ranks does not fit the method.
    """
    shape = METHODS[settings.method].mesh_shape(settings, ctx.world_size)
    return replace(ctx, mesh=Mesh(ctx.rank, tuple(shape), tuple(shape.values())))
