"""The injected faults by the name in --fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError, refuse
from train.faults.base import Fault
from train.faults.batches import NoSetEpoch, Overlap, RngShared, SameBatch
from train.faults.buffers import BuffersNeverSynced, ExtraForward, LocalNormalizer, VarianceOnly
from train.faults.damaged_files import DamagedOnDisk, LastSaveFailed, OtherDtype
from train.faults.memory import BitFlipExpAvg, BitFlipWeight, ContiguousCorruption, NanOnOneRank, RoundsOtherwise
from train.faults.parallel import ClipByLocalNorm, ExpertReplicatedWrongly, NormNotReduced, RouterUpdatedLocally
from train.faults.progress import (
    AverageNotUpdated,
    OptimizerOnOneRank,
    OtherLearningRate,
    ScalerDiverged,
    SkippedStep,
    SmallerSteps,
    StaleRank,
    StaleStage,
)
from train.faults.reduction import (
    AdapterOnOneRank,
    ClipOnOneRank,
    DiffersByNode,
    ForwardThroughModule,
    GradNotReducedOnce,
    LateHead,
    TiedApart,
)
from train.faults.start import FrozenNotBroadcast, InitNotBroadcast

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

# Sorted by their findings.
FAULTS: dict[str, type[Fault]] = {
    "adapter-on-one-rank": AdapterOnOneRank,
    "other-dtype-on-one-rank": OtherDtype,
    "last-save-failed": LastSaveFailed,
    "other-learning-rate": OtherLearningRate,
    "buffers-never-synced": BuffersNeverSynced,
    "extra-forward": ExtraForward,
    "variance-only-bn": VarianceOnly,
    "local-normalizer": LocalNormalizer,
    "init-not-broadcast": InitNotBroadcast,
    "forward-through-module": ForwardThroughModule,
    "grad-not-reduced-once": GradNotReducedOnce,
    "expert-replicated-wrongly": ExpertReplicatedWrongly,
    "router-updated-locally": RouterUpdatedLocally,
    "late-head": LateHead,
    "tied-apart": TiedApart,
    "clip-on-one-rank": ClipOnOneRank,
    "skipped-step": SkippedStep,
    "optimizer-on-one-rank": OptimizerOnOneRank,
    "scaler-diverged": ScalerDiverged,
    "stale-rank": StaleRank,
    "stale-stage": StaleStage,
    "frozen-not-broadcast": FrozenNotBroadcast,
    "average-not-updated": AverageNotUpdated,
    "bit-flip-weight": BitFlipWeight,
    "bit-flip-exp-avg": BitFlipExpAvg,
    "contiguous-corruption": ContiguousCorruption,
    "nan-on-one-rank": NanOnOneRank,
    "damaged-on-disk": DamagedOnDisk,
    "differs-by-node": DiffersByNode,
    "norm-not-reduced": NormNotReduced,
    "clip-by-local-norm": ClipByLocalNorm,
    "rounding-only": RoundsOtherwise,
    "smaller-steps": SmallerSteps,
    "same-batch": SameBatch,
    "overlap": Overlap,
    "no-set-epoch": NoSetEpoch,
    "rng-shared": RngShared,
}


def make_fault(settings: Settings, ctx: RankContext, steps: int) -> Fault:
    """Build the fault in the settings, or one without effect. Raises UserError if the fault cannot have an effect."""
    if settings.fault is None:
        return Fault(settings, ctx, steps)
    if settings.fault not in FAULTS:
        raise UserError(f"--fault {settings.fault}: unknown; choose from {', '.join(FAULTS)}")
    fault = FAULTS[settings.fault]
    if settings.method not in fault.methods:
        needed = " or ".join(fault.methods)
        fix = f"use --method {fault.methods[0]}"
        if "ddp" in fault.methods:
            fix = "add --spawn 2, or start with torchrun" if settings.method == "single" else "remove --method"
        raise UserError(f"--fault {settings.fault}: requires --method {needed}, not {settings.method}; {fix}")
    name, step = settings.fault, settings.fault_step or 0
    refuse(
        (
            ctx.world_size < 2,
            f"--fault {name}: needs at least 2 ranks, because one rank has no replica to differ from",
        ),
        (
            step and fault.when == "always",
            f"--fault-step: --fault {name} is active from the first step; remove --fault-step",
        ),
        (step > steps, f"--fault-step {step}: the run ends after {steps} steps"),
    )
    return fault(settings, ctx, steps)
