"""The records everything else passes around: frozen, without behaviour that reads a file.

Field names are those of the JSON document (`syncheck/report/schema.json`), so that
`report.groups[0].findings[0].code` in Python is `.groups[0].findings[0].code` in JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.messages import Message
    from syncheck.snapshots import Metadata

__all__ = [
    "DECADES", "FIRST_MOMENTS", "MEASURED", "Alias", "Closure", "Comparison", "Counts", "DriftPoint", "Evidence",
    "Extent", "Finding", "Fixed", "FreeRunning", "Group", "GroupEvidence", "Histogram", "History", "HistoryPoint",
    "Reason", "Replica", "Report", "Severity", "Shards", "Status", "TensorDiff", "Tie", "Trend", "Unreadable",
    "ValueDiff", "ValueKind", "Verdict",
]  # fmt: skip


# Elements of a tensor, from its first, that norms and the cosine are of.
MEASURED = 1 << 18

# The decades of a histogram: the powers of ten where they begin.
DECADES = range(-12, 6)

# The running averages of the gradients in torch's optimizers, and in those that follow its names.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})


class Reason(StrEnum):
    """Why a tensor was not, or not fully, compared by value."""

    MISSING = "missing"
    SHAPE = "shape"
    DTYPE = "dtype"
    REFUSED = "refused"
    SHARDED = "sharded"
    AMBIGUOUS = "ambiguous"
    RNG = "rng"
    DIGEST = "digest"
    CHECKSUM = "checksum"


Status = Literal["identical", "equal", "close", "different", "not_compared"]
Verdict = Literal["in_sync", "out_of_sync", "undecided", "alone"]
Severity = Literal["info", "warning", "error"]
Extent = Literal["one", "contiguous", "all", "scattered"]
Trend = Literal["constant", "shrinking", "growing", "varying"]
ValueKind = Literal["progress", "setting", "counter", "scaler", "average", "other"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a second look at a tensor that differs tells; empty or None is what was not looked at, or does not apply.

    Norms and the cosine are over the tensor's first `MEASURED` elements, without those that are not finite everywhere.
    """

    damaged: tuple[int, ...] = ()
    """Ranks whose bytes, or others of the same storage, do not match the CRC-32 that torch.save stored for them."""
    first: int | None = None
    """Of a tensor in which adjacent elements differ, and no others: the first of them, counted in C order."""
    values: Mapping[int, int | float | str] = field(default_factory=dict)
    """Of a tensor of which one element differs: that element by rank; NaN and infinity as text."""
    flipped_bits: int | None = None
    """Of such a tensor: in how many bits the element differs between the two replicas where these are most."""
    bit: int | None = None
    """If that is one: which, 0 for the lowest of the element's bits."""
    norms: Mapping[int, float] = field(default_factory=dict)
    """Euclidean norm by rank, of parameters and of the optimizer's first moments."""
    cosine: float | None = None
    """Smallest cosine between a majority's replica (the first, where there is none) and another one."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """How the tensors of a finding stood at one step."""

    step: int
    differing: int
    """How many of them were out of sync."""
    max_abs: float | None
    """Their largest gap, 0.0 where all agree; None where no number tells it."""


@dataclass(frozen=True, slots=True)
class History:
    """How a finding came about over the steps of its run that were compared.

    since: the first step at which one of its tensors was out of sync; agreed: the last one before, None where that is
    the first step compared. tensors: those that were out of sync at that step; ranks: the suspects then.
    """

    points: tuple[HistoryPoint, ...]
    since: int
    agreed: int | None
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    trend: Trend | None = None
    """What the gaps did from the first to the last step at which the same tensors differed; None with one such step."""


@dataclass(frozen=True, slots=True)
class FreeRunning:
    """Whether running statistics lag by one update or run freely, by their gaps at several steps of a run.

    The gaps are those between the first rank and each other one. misfit_free, misfit_lag: how far they are from what
    statistics would do that run freely, and from what a lag does, in squares of their usual scatter; None where the
    steps are too few, too late or too far apart to tell the two.
    """

    steps: tuple[int, ...]
    """That were looked at."""
    cosine: float
    """Mean cosine between the gaps at neighbouring steps."""
    growth: float
    """Median ratio of the gaps at the last step to those at the first."""
    misfit_free: float | None = None
    misfit_lag: float | None = None
    below: int = 0
    """Running variances that are lower than they can be if they were copied from rank 0 since an earlier step."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many elements of a tensor are how far apart, of those looked at: of a very large one evenly spread parts.

    An element counts with its gap against a majority or a reference. Without one, or with a tolerance and no reference,
    it counts with the gap between the two farthest replicas.
    """

    equal: int
    counts: tuple[int, ...]
    """First of gaps below 1e-12, then by decade (from 1e-12 up to 1e-11, ..., from 1e5 up to 1e6), last of the rest."""
    not_finite: int
    """Elements that differ and are NaN or infinite on some replica."""

    @property
    def elements(self) -> int:
        """How many were looked at."""
        return self.equal + sum(self.counts) + self.not_finite


@dataclass(frozen=True, slots=True)
class Tie:
    """Names that are one tensor, sharing its memory, on some ranks, and several tensors on the others."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those on which they are one."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Tensors that the ranks hold in parts, all laid out alike."""

    kind: str
    """`DTensor`, `model parallel`, or `optimizer` where the metadata says that each rank has a part of its state."""
    layout: str
    """In words."""
    tensors: int
    compared: int
    """Those of which at least two ranks hold the same part."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The sets of ranks that were compared."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A finding that the baseline accepts, or a part of it, which is not found any more."""

    code: str
    names: tuple[str, ...]
    """Tensors and values."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A snapshot's place in its group."""

    path: str
    rank: int
    """The rank where it is known, else the position among the sorted paths."""
    format: str
    tensors: int
    bytes: int
    host: str | None = None
    """The machine, where the metadata, or else a folder such as node0, tells it."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Its place by dimension of the mesh of ranks, where the metadata, or else its DTensors, tell it."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How the replicas of one tensor compare.

    max_abs, max_rel and max_ulp are over the elements that are finite on all replicas, None where there is none;
    max_rel is |a-b| / max(|a|, |b|). With a majority, or a reference in its place, they are against it. Without one, or
    with a tolerance and no reference, they are between the two farthest replicas.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    status: Status
    reason: Reason | None = None
    """Why it was not (fully) compared; `digest` or `checksum` if only these differ."""
    detail: Message | None = None
    """Explains the reason."""
    tolerance: str | None = None
    """The tolerance that applied, if the status is `close`."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The sets of ranks that ought to hold the same bytes."""
    clusters: tuple[tuple[int, ...], ...] = ()
    """Ranks that hold equal bytes, largest set first; of several replica groups, those within which bytes differ."""
    mismatched: int | None = 0
    """Elements whose values are not equal on all replicas; all numbers are of the replica group that is worst.

    None where only digests or checksums tell that bytes differ; then the numbers below are not known either.
    """
    numel: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    index: tuple[int, ...] | None = None
    """Where the gap is greatest, or where one side is not finite."""
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    """Infinities and NaNs per rank."""
    extent: Extent | None = None
    minority: tuple[int, ...] = ()
    """Ranks outside the majority, or apart from the reference that was asked for; empty where there is neither."""
    evidence: Evidence | None = None
    """Of a tensor that differs; None where no second look was taken."""
    histogram: Histogram | None = None
    """Of the floating-point tensors that differ most, where it was asked for."""
    facts: tuple[TensorDiff, ...] = ()
    """Where several things are wrong with it, each by itself: missing, of unlike shapes or dtypes, of unlike values."""

    @property
    def out_of_sync(self) -> bool:
        """Different, or missing on some replica, or of another shape or dtype."""
        return self.status == "different" or (
            self.status == "not_compared" and self.reason in (Reason.MISSING, Reason.SHAPE, Reason.DTYPE)
        )

    @property
    def unknown(self) -> bool:
        """Whether it may differ: its checksums do not show it (`--quick`), or nothing says who holds the same part."""
        return self.status == "not_compared" and self.reason in (Reason.CHECKSUM, Reason.AMBIGUOUS)


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A Python value that is not equal on all replicas."""

    name: str
    by_rank: Mapping[int, Any]
    """None where a rank does not have it."""
    counts: bool
    """Whether it makes the group out of sync: progress, settings and the scaler's state do, notes do not."""
    kind: ValueKind = "other"
    """`setting`: of optimizer or scheduler; `counter`: optimizer steps; `average`: updates of averaged weights."""
    lost: tuple[int, ...] = ()
    """Ranks that lack its whole container, such as the optimizer or the scaler."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tensors ended how. They add up to `tensors`."""

    tensors: int = 0
    identical: int = 0
    equal: int = 0
    close: int = 0
    different: int = 0
    not_compared: int = 0

    @property
    def compared(self) -> int:
        """Tensors whose bytes were looked at."""
        return self.tensors - self.not_compared

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Finding:
    """A named cause for some differences, with what to do about it."""

    code: str
    slug: str
    severity: Severity
    ranks: tuple[int, ...]
    """The suspects, or all ranks of the group where none stands out."""
    tensors: tuple[str, ...]
    facts: tuple[Message, ...]
    """The evidence, one statement each."""
    cause: Message
    fix: Message
    values: tuple[str, ...] = ()
    """Names of the Python values it covers."""
    allowed: bool = False
    history: History | None = None
    """In the group of a run's last step, where several steps were compared."""
    accepted: bool = False
    """Whether the baseline has all of it."""
    new: tuple[str, ...] = ()
    """Tensors and values that the baseline does not have under this code; empty without one."""

    @property
    def evidence(self) -> str:
        """The facts in words."""
        return "; ".join(map(str, self.facts))

    @property
    def fails(self) -> bool:
        """Whether it makes the group out of sync."""
        return self.severity != "info" and not (self.allowed or self.accepted)


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """What is known of a group besides the differences of its tensors and values; input of the diagnosis."""

    metadata: Metadata | None = None
    """Of the first replica that has it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The kind of each selected tensor by name, including identical tensors."""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """`lr`, `weight_decay` and `momentum` of the first parameter group of the first replica's optimizer."""
    normalized: Mapping[int, int] = field(default_factory=dict)
    """The number of names with a wrapper's prefix such as `module.`, by rank."""
    stores_progress: bool = False
    """Whether the files store the step or epoch at which they were written."""
    stale: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose differing tensors equal the other ranks' tensors of an earlier step, and that step."""
    free_running: FreeRunning | None = None
    """In the last step of a run whose running statistics differ: whether they were synchronized."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A group of replicas, compared and not judged yet."""

    name: str
    run: str
    step: int | None
    replicas: tuple[Replica, ...]
    counts: Counts
    tensors: tuple[TensorDiff, ...] = ()
    """The tensors that are not identical."""
    values: tuple[ValueDiff, ...] = ()
    ties: tuple[Tie, ...] = ()
    """The ties that some ranks lack."""
    shards: tuple[Shards, ...] = ()
    kinds: Mapping[str, Counts] = field(default_factory=dict)
    """The counts by kind of tensor."""
    left_out: int = 0
    """Tensors that the options exclude; no count includes them."""
    uncompared: tuple[int, ...] = ()
    """Ranks without any compared tensor, if other ranks have some."""
    grouping: tuple[Message, ...] = ()
    """How the group was found."""
    notes: tuple[Message, ...] = ()
    """What was normalized, guessed or skipped."""
    label: str = ""
    """The name of the run in a baseline; empty if it is `run`."""
    evidence: GroupEvidence = field(default_factory=GroupEvidence)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(replica.rank for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Group(Comparison):
    """A comparison with its judgement."""

    verdict: Verdict = "undecided"
    findings: tuple[Finding, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    """Findings of the baseline that no step of the run has any more; in the group of the last step."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that was given and could not be compared."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A link to another replica: not compared, because it would equal itself."""

    path: str
    """As it was given or found."""
    of: str
    """The replica that was compared in its place."""


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """The largest gap of any running statistic of a run at one step."""

    run: str
    step: int | None
    max_abs: float
    tensor: str | None


@dataclass(frozen=True, slots=True)
class Closure:
    """Two runs that differ in SyncBatchNorm only: what it did to the drift of the running statistics."""

    plain: DriftPoint
    synced: DriftPoint
    sentence: str


@dataclass(frozen=True, slots=True)
class Report:
    """The whole answer."""

    verdict: Verdict
    groups: tuple[Group, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Files in the folders given that are no checkpoints."""
    aliases: tuple[Alias, ...] = ()
    """Links to checkpoints that were compared under another path."""
    quick: bool = False
    """Whether stored checksums were compared in place of the bytes."""
    drift: tuple[DriftPoint, ...] = ()
    closures: tuple[Closure, ...] = ()

    @property
    def counts(self) -> Counts:
        """Over all groups."""
        return sum((group.counts for group in self.groups), Counts())

    @property
    def exit_code(self) -> int:
        """0 in sync, 1 out of sync, 2 could not tell."""
        return {"in_sync": 0, "out_of_sync": 1}.get(self.verdict, 2)
