"""Frozen records of a comparison and its report. They do not read files.

Fields have the same names as in the JSON document (`syncheck/report/schema.json`):
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


# Norms and cosines cover this many elements at the start of a tensor.
MEASURED = 1 << 18

# The bins of a histogram, by the power of ten at their lower end.
DECADES = range(-12, 6)

# Running averages of the gradients in torch's optimizers, and in optimizers with torch's names.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})


class Reason(StrEnum):
    """Why a tensor was not compared by value, or only in part."""

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
    """Additional measurements of a tensor that differs. Empty or None: not measured, or not applicable.

    Norms and the cosine cover the tensor's first `MEASURED` elements, except elements that are not finite on every
    replica.
    """

    damaged: tuple[int, ...] = ()
    """Ranks whose storage does not match the CRC-32 checksum that torch.save stored for it."""
    first: int | None = None
    """If the elements that differ are adjacent: the position of the first, in C order."""
    values: Mapping[int, int | float | str] = field(default_factory=dict)
    """If a single element differs: its value by rank; NaN and infinity as text."""
    flipped_bits: int | None = None
    """If a single element differs: the largest number of bits that differ between two replicas."""
    bit: int | None = None
    """If a single bit differs: its position, 0 for the lowest bit of the element."""
    norms: Mapping[int, float] = field(default_factory=dict)
    """Euclidean norm by rank, for parameters and for the optimizer's first moments."""
    cosine: float | None = None
    """Smallest cosine between a replica of the majority (without a majority, the first replica) and another replica."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The tensors of a finding at one step."""

    step: int
    differing: int
    """Number of tensors that were out of sync."""
    max_abs: float | None
    """Their largest difference, 0.0 if all agree; None if it is not a number, for example for a missing tensor."""


@dataclass(frozen=True, slots=True)
class History:
    """A finding over the compared steps of its run.

    since: the first step at which a tensor of the finding was out of sync. agreed: the compared step before it, None if
    `since` is the first compared step. tensors: the tensors out of sync at step `since`. ranks: the suspects at step
    `since`.
    """

    points: tuple[HistoryPoint, ...]
    since: int
    agreed: int | None
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    trend: Trend | None = None
    """Trend of the differences over the steps at which the same tensors differed; None for a single step."""


@dataclass(frozen=True, slots=True)
class FreeRunning:
    """Whether running statistics lag by one update or are unsynchronized, judged by their differences at several steps.

    Differences are measured between the first rank and each other rank. misfit_free, misfit_lag: squared distance of
    the differences from a model of unsynchronized statistics, and from a model of a lag, in units of their usual
    scatter; None if the steps are too few, too late or too far apart to distinguish the models.
    """

    steps: tuple[int, ...]
    """The steps that were measured."""
    cosine: float
    """Mean cosine between the differences at neighboring steps."""
    growth: float
    """Median ratio of the differences at the last step to the differences at the first step."""
    misfit_free: float | None = None
    misfit_lag: float | None = None
    below: int = 0
    """Number of running variances below the minimum for variances copied from rank 0 since an earlier step."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """The number of elements of a tensor by the size of their difference. A very large tensor is sampled evenly.

    Differences are measured against the majority or the reference. Without either, or with a tolerance and no
    reference, they are measured between the two most distant replicas.
    """

    equal: int
    counts: tuple[int, ...]
    """Differences below 1e-12, then one count per decade (1e-12 to 1e-11, ..., 1e5 to 1e6), then larger differences."""
    not_finite: int
    """Elements that differ and are NaN or infinite on some replica."""

    @property
    def elements(self) -> int:
        """Number of elements in the histogram."""
        return self.equal + sum(self.counts) + self.not_finite


@dataclass(frozen=True, slots=True)
class Tie:
    """Names of a tied tensor: they share memory on some ranks, and are separate tensors on other ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks on which the names share memory."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Sharded tensors with a common layout."""

    kind: str
    """`DTensor`, `model parallel`, or `optimizer` if the metadata reports sharded optimizer state."""
    layout: str
    """Description of the layout."""
    tensors: int
    compared: int
    """Number of tensors with a shard that at least two ranks hold."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The sets of ranks that were compared."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Entries of the baseline that no longer occur, of one finding."""

    code: str
    names: tuple[str, ...]
    """Names of tensors and values."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One checkpoint of a group."""

    path: str
    rank: int
    """The rank, or the position among the sorted paths if the rank is unknown."""
    format: str
    tensors: int
    bytes: int
    host: str | None = None
    """The machine, from the metadata or from a folder name such as node0."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The coordinate by mesh dimension, from the metadata or from DTensors."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The differences between the replicas of one tensor.

    max_abs, max_rel and max_ulp cover the elements that are finite on all replicas, and are None without any. max_rel
    is |a-b| / max(|a|, |b|). They are measured against the reference or the majority. Without either, or with a
    tolerance and no reference, they are measured between the two most distant replicas.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    status: Status
    reason: Reason | None = None
    """Why the tensor was not compared in full; `digest` or `checksum` if only digests or checksums were compared."""
    detail: Message | None = None
    """An explanation of the reason."""
    tolerance: str | None = None
    """The tolerance that applied, if the status is `close`."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The sets of ranks that must hold equal bytes."""
    clusters: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks with equal bytes, largest first; only replica groups with a difference are listed."""
    mismatched: int | None = 0
    """Number of elements with unequal values.

    With several replica groups, all numbers describe the group with the largest difference. None if only digests or
    checksums were compared; then the numbers below are unknown too.
    """
    numel: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    index: tuple[int, ...] | None = None
    """Index of the largest difference, or of an element that is not finite on one side."""
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    """Number of infinities and NaNs by rank."""
    extent: Extent | None = None
    minority: tuple[int, ...] = ()
    """Ranks outside the majority, or ranks that differ from the reference; empty without a majority or reference."""
    evidence: Evidence | None = None
    """Additional measurements of a tensor that differs; None if none were made."""
    histogram: Histogram | None = None
    """For the floating-point tensors that differ most, if histograms were requested."""
    facts: tuple[TensorDiff, ...] = ()
    """If the tensor has several problems, one record for each: missing, different shapes, dtypes, values."""

    @property
    def out_of_sync(self) -> bool:
        """Whether the tensor differs, is missing on some replica, or has several shapes or dtypes."""
        return self.status == "different" or (
            self.status == "not_compared" and self.reason in (Reason.MISSING, Reason.SHAPE, Reason.DTYPE)
        )

    @property
    def unknown(self) -> bool:
        """Whether the tensor may differ: it lacks a usable checksum (`--quick`), or its replicas are not identified."""
        return self.status == "not_compared" and self.reason in (Reason.CHECKSUM, Reason.AMBIGUOUS)


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A Python value that is not equal on all replicas."""

    name: str
    by_rank: Mapping[int, Any]
    """The value by rank, None if it is missing."""
    counts: bool
    """Whether the value makes the group out of sync, as progress, settings and scaler state do; notes do not."""
    kind: ValueKind = "other"
    """`setting`: of optimizer or scheduler; `counter`: optimizer steps; `average`: updates of averaged weights."""
    lost: tuple[int, ...] = ()
    """Ranks that lack the whole container of the value, such as the optimizer or the scaler."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of tensors by status; the statuses add up to `tensors`."""

    tensors: int = 0
    identical: int = 0
    equal: int = 0
    close: int = 0
    different: int = 0
    not_compared: int = 0

    @property
    def compared(self) -> int:
        """Number of compared tensors."""
        return self.tensors - self.not_compared

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosed cause of some differences, and its fix."""

    code: str
    slug: str
    severity: Severity
    ranks: tuple[int, ...]
    """The suspects, or all ranks of the group without a suspect."""
    tensors: tuple[str, ...]
    facts: tuple[Message, ...]
    """The evidence, one statement each."""
    cause: Message
    fix: Message
    values: tuple[str, ...] = ()
    """Names of the Python values with this cause."""
    allowed: bool = False
    history: History | None = None
    """Set in the group of a run's last step, if several steps were compared."""
    accepted: bool = False
    """Whether the baseline lists all tensors and values of the finding."""
    new: tuple[str, ...] = ()
    """Tensors and values that the baseline does not list under this code; empty without a baseline."""

    @property
    def evidence(self) -> str:
        """The facts as text."""
        return "; ".join(map(str, self.facts))

    @property
    def fails(self) -> bool:
        """Whether the finding makes the group out of sync."""
        return self.severity != "info" and not (self.allowed or self.accepted)


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """Input of the diagnosis about a group, besides the differences of its tensors and values."""

    metadata: Metadata | None = None
    """The first metadata block in the group."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The kind of each selected tensor by name, including identical tensors."""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """`lr`, `weight_decay` and `momentum` of the first parameter group of the first replica's optimizer."""
    normalized: Mapping[int, int] = field(default_factory=dict)
    """Number of names with a wrapper prefix such as `module.`, by rank."""
    stores_progress: bool = False
    """Whether the files store the step or epoch at which they were written."""
    stale: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose differing tensors equal the other ranks' tensors of an earlier step, and that step."""
    free_running: FreeRunning | None = None
    """For the last step of a run whose running statistics differ: whether they were synchronized."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A compared group of replicas, without findings and verdict."""

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
    """Number of tensors excluded by the options; the counts do not include them."""
    uncompared: tuple[int, ...] = ()
    """Ranks without any compared tensor, if other ranks have some."""
    grouping: tuple[Message, ...] = ()
    """How the checkpoints were grouped."""
    notes: tuple[Message, ...] = ()
    """Options, assumptions and gaps that affect the result."""
    label: str = ""
    """The name of the run in a baseline; empty if it equals `run`."""
    evidence: GroupEvidence = field(default_factory=GroupEvidence)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(replica.rank for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Group(Comparison):
    """A comparison with its findings and verdict."""

    verdict: Verdict = "undecided"
    findings: tuple[Finding, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    """Baseline entries that no longer occur at any step of the run; set in the group of the last step."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that could not be compared."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A link to another replica. It is not compared, because a file equals itself."""

    path: str
    """The path of the link."""
    of: str
    """The path of the compared replica."""


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """The largest difference in any BatchNorm running statistic of a run at one step."""

    run: str
    step: int | None
    max_abs: float
    tensor: str | None


@dataclass(frozen=True, slots=True)
class Closure:
    """The drift of two runs that differ only in SyncBatchNorm."""

    plain: DriftPoint
    synced: DriftPoint
    sentence: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a comparison: all groups, and the paths without a comparison."""

    verdict: Verdict
    groups: tuple[Group, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Number of files in the given folders that are not checkpoints."""
    aliases: tuple[Alias, ...] = ()
    """Links to checkpoints that were compared under another path."""
    quick: bool = False
    """Whether stored checksums were compared instead of the bytes."""
    drift: tuple[DriftPoint, ...] = ()
    closures: tuple[Closure, ...] = ()

    @property
    def counts(self) -> Counts:
        """The counts over all groups."""
        return sum((group.counts for group in self.groups), Counts())

    @property
    def exit_code(self) -> int:
        """0 in sync, 1 out of sync, 2 could not tell."""
        return {"in_sync": 0, "out_of_sync": 1}.get(self.verdict, 2)
