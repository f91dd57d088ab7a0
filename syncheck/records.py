"""The records everything else passes around: frozen, without behaviour that reads a file.

Field names are those of the JSON document (`syncheck/report/schema.json`), so that
`report.groups[0].findings[0].code` in Python is `.groups[0].findings[0].code` in JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from syncheck.clues import (
    DECADES,
    FIRST_MOMENTS,
    MEASURED,
    Evidence,
    Fixed,
    FreeRunning,
    Histogram,
    History,
    HistoryPoint,
    Shards,
    Tie,
    Trend,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.messages import Message
    from syncheck.snapshots import Metadata

__all__ = [
    "DECADES", "FIRST_MOMENTS", "MEASURED", "Alias", "Closure", "Counts", "DriftPoint", "Evidence", "Extent",
    "Finding", "Fixed", "FreeRunning", "Group", "Histogram", "History", "HistoryPoint", "Reason", "Replica", "Report",
    "Severity", "Shards", "Status", "TensorDiff", "Tie", "Trend", "Unreadable", "ValueDiff", "ValueKind", "Verdict",
]  # fmt: skip


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
ValueKind = Literal["progress", "setting", "counter", "scaler", "average", "other"]


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
class Group:
    """Replicas of one another, compared."""

    name: str
    run: str
    step: int | None
    verdict: Verdict
    replicas: tuple[Replica, ...]
    counts: Counts
    tensors: tuple[TensorDiff, ...] = ()
    """Those that are not identical."""
    findings: tuple[Finding, ...] = ()
    values: tuple[ValueDiff, ...] = ()
    ties: tuple[Tie, ...] = ()
    """Only those that are not the same on all ranks."""
    shards: tuple[Shards, ...] = ()
    kinds: Mapping[str, Counts] = field(default_factory=dict)
    """The counts by kind of tensor."""
    left_out: int = 0
    """Tensors that the options leave out; they are in no count."""
    normalized: Mapping[int, int] = field(default_factory=dict)
    """How many names of a rank had a wrapper's prefix such as `module.` taken off."""
    stores_progress: bool = False
    """Whether the files say at which step or epoch they were written."""
    grouping: tuple[Message, ...] = ()
    """How the group was found."""
    notes: tuple[Message, ...] = ()
    """What was normalized, guessed or skipped."""
    metadata: Metadata | None = None
    """Of the first replica that has it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The kind of every tensor that was asked for, those that are identical too, by name."""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """`lr`, `weight_decay` and `momentum` of the optimizer's first parameter group, of the first replica."""
    stale: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose parameters and optimizer state, where they differ, are the others' of an earlier step: that step."""
    free_running: FreeRunning | None = None
    """Of a run's last step whose running statistics differ: what its steps tell of their synchronization."""
    label: str = ""
    """What a baseline calls the run; empty: the same as `run`."""
    uncompared: tuple[int, ...] = ()
    """Ranks of which no tensor was compared with another rank's, where other ranks' tensors were."""
    fixed: tuple[Fixed, ...] = ()
    """What the baseline has of the run and no step of it shows any more; in the group of the last step."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(replica.rank for replica in self.replicas)


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
