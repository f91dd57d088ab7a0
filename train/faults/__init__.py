"""Named desyncs to plant, by the name that --fault takes: for teaching, and for the tests of the diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.faults.base import Fault
from train.faults.batchnorm import BuffersNeverSynced, ExtraForward, VarianceOnly
from train.faults.buffers import LocalNormalizer
from train.faults.files import DamagedOnDisk, LastSaveFailed, OtherDtype
from train.faults.memory import BitFlipExpAvg, BitFlipWeight, ContiguousCorruption, NanOnOneRank, RoundsOtherwise
from train.faults.progress import (
    AverageNotUpdated,
    OptimizerOnOneRank,
    OtherLearningRate,
    ScalerDiverged,
    SkippedStep,
    SmallerSteps,
    StaleRank,
)
from train.faults.reduction import AdapterOnOneRank, ClipOnOneRank, DiffersByNode, ForwardThroughModule, LateHead
from train.faults.start import FrozenNotBroadcast, InitNotBroadcast
from train.listing import listing

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

__all__ = ["FAULTS", "Fault", "list_faults", "make_fault"]

# In the order of the findings that they lead to.
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
    "late-head": LateHead,
    "clip-on-one-rank": ClipOnOneRank,
    "skipped-step": SkippedStep,
    "optimizer-on-one-rank": OptimizerOnOneRank,
    "scaler-diverged": ScalerDiverged,
    "stale-rank": StaleRank,
    "frozen-not-broadcast": FrozenNotBroadcast,
    "average-not-updated": AverageNotUpdated,
    "bit-flip-weight": BitFlipWeight,
    "bit-flip-exp-avg": BitFlipExpAvg,
    "contiguous-corruption": ContiguousCorruption,
    "nan-on-one-rank": NanOnOneRank,
    "damaged-on-disk": DamagedOnDisk,
    "differs-by-node": DiffersByNode,
    "rounding-only": RoundsOtherwise,
    "smaller-steps": SmallerSteps,
}


def make_fault(settings: Settings, ctx: RankContext, steps: int) -> Fault:
    """Build the fault that the settings ask for, or the one that does nothing. steps: of the whole run.

    Raises UserError where it cannot show: another method than ddp, one rank only, a step that never comes or
    means nothing to it.
    """
    if settings.fault is None:
        return Fault(settings, ctx, steps)
    if settings.fault not in FAULTS:
        raise UserError(f"--fault {settings.fault}: unknown; there are {', '.join(FAULTS)}")
    if settings.method != "ddp":
        mend = "add --spawn 2, or start with torchrun" if settings.method == "single" else "leave --method out"
        raise UserError(f"--fault {settings.fault}: planted in --method ddp only, not in {settings.method}; {mend}")
    if ctx.world_size < 2:
        raise UserError(f"--fault {settings.fault}: one rank has no other to differ from; start two or more")
    fault = FAULTS[settings.fault]
    if settings.fault_step is not None and fault.when == "always":
        raise UserError(f"--fault-step: --fault {settings.fault} is there from the first step on; leave it out")
    if settings.fault_step is not None and settings.fault_step > steps:
        raise UserError(f"--fault-step {settings.fault_step}: the run ends after {steps} steps")
    return fault(settings, ctx, steps)


def list_faults() -> str:
    """Write a line for each fault: its name, the finding it leads to, what it does; folded on a terminal."""
    return listing([(name, fault.code, fault.says) for name, fault in FAULTS.items()])
