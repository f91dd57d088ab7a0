"""All faults of simulated runs, with the findings that name their cause."""

from benchmarks.trials.faults.base import Fault
from benchmarks.trials.faults.buffers import BuffersNeverSynced, ExtraForward, LocalBuffer
from benchmarks.trials.faults.contents import (
    BitFlipMoment,
    BitFlipWeight,
    Corruption,
    ExchangedMoments,
    ExchangedWeights,
    FrozenNotBroadcast,
    InitNotBroadcast,
    LoadedOnOneRank,
    NotFinite,
    OldFile,
    Pruned,
    RoundsOtherwise,
)
from benchmarks.trials.faults.gradients import (
    ClipByLocalNorm,
    ClipOnOneRank,
    DiffersByNode,
    HalfGradients,
    LateHead,
    LocalGradients,
    LocalGradientsOnce,
    OwnGradientsOfOneRank,
    SummedGradients,
)
from benchmarks.trials.faults.strangers import (
    ClampedWeights,
    ClippedOnNode,
    ClippedValues,
    DoubleStep,
    FrozenChanged,
    LayerStateLost,
    MaskedRows,
    Nonnegative,
    OldOptimizer,
    OldState,
    OtherRateToo,
    OwnNoise,
    StaleGradients,
    ZeroedGradients,
)
from benchmarks.trials.faults.unnamed import (
    DroppedGradient,
    NegatedGradient,
    NoisyGradient,
    ShrunkWeights,
    ZeroedGradient,
)
from benchmarks.trials.faults.updates import (
    AverageNotUpdated,
    DataDependentSkip,
    LostOptimizer,
    NeverUpdated,
    OtherDecay,
    OtherLearningRate,
    PeriodicAveraging,
    ScalerDiverged,
    SkippedStep,
    SkippedSteps,
)

__all__ = ["FAULTS", "ClippedOnNode", "DiffersByNode", "Fault"]

FAULTS = (
    Fault, LocalGradients, LocalGradientsOnce, OwnGradientsOfOneRank, LateHead, ClipOnOneRank, HalfGradients,
    SummedGradients, ClipByLocalNorm, SkippedStep, SkippedSteps, LostOptimizer, ScalerDiverged, OldFile,
    FrozenNotBroadcast, InitNotBroadcast, LoadedOnOneRank, AverageNotUpdated, BitFlipWeight, BitFlipMoment, Corruption,
    NotFinite, DiffersByNode, RoundsOtherwise, PeriodicAveraging, OtherLearningRate, OtherDecay, BuffersNeverSynced,
    ExtraForward, LocalBuffer, NeverUpdated, DataDependentSkip, ExchangedMoments, ExchangedWeights, Pruned,
    NoisyGradient, ZeroedGradient, NegatedGradient, DroppedGradient, ShrunkWeights,
    OwnNoise, MaskedRows, StaleGradients, ClippedValues, ZeroedGradients, ClippedOnNode, DoubleStep, OldState,
    OldOptimizer, LayerStateLost, ClampedWeights, Nonnegative, FrozenChanged, OtherRateToo,
)  # fmt: skip
