"""Frozen records of comparisons, findings and reports, the error with a report, and sets of ranks.

Records never read files. The JSON document has the same field names:
`report.groups[0].findings[0].code` is `.groups[0].findings[0].code`.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from syncheck.errors import SyncheckError
from syncheck.findings import (
    DECADES,
    FIRST_MOMENTS,
    MEASURED,
    Certainty,
    Closure,
    DriftPoint,
    Evidence,
    Finding,
    Fixed,
    FreeRunning,
    Histogram,
    History,
    HistoryPoint,
    NotFinite,
    Severity,
    Trend,
)  # fmt: skip
from syncheck.frozen import record
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.findings import EqualShards, Stored, UnclearParts
    from syncheck.messages import Message

__all__ = [
    "DECADES", "FIRST_MOMENTS", "MEASURED", "Alias", "Certainty", "Closure", "Comparison", "Counts", "DriftPoint",
    "Evidence", "Extent", "Finding", "Fixed", "FreeRunning", "Group", "GroupEvidence", "Histogram", "History",
    "HistoryPoint", "NotFinite", "OutOfSync", "Place", "Reason", "Replica", "Report", "Severity", "Shards",
    "Status", "TensorDiff", "Tie", "Trend", "Unreadable", "ValueDiff", "ValueKind", "Verdict",
]  # fmt: skip


class Reason(StrEnum):
    """Why a tensor was not compared by value, or only in part."""

    MISSING = "missing"
    SHAPE = "shape"
    DTYPE = "dtype"
    REFUSED = "refused"
    SHARDED = "sharded"
    AMBIGUOUS = "ambiguous"
    RNG = "rng"
    SUBSET = "subset"
    PARTS = "parts"
    DIGEST = "digest"
    CHECKSUM = "checksum"


Status = Literal["identical", "equal", "close", "different", "not_compared"]
Verdict = Literal["in_sync", "out_of_sync", "undecided", "alone"]
Extent = Literal["one", "contiguous", "all", "scattered"]
ValueKind = Literal["progress", "setting", "counter", "scaler", "average", "attribute", "model", "other"]


@record
class Tie:
    """Names that share memory on some ranks, and are separate tensors on other ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks on which the names share memory."""


@record
class Shards:
    """A summary of sharded tensors with the same layout."""

    kind: str
    """`DTensor`, `model parallel`, or `optimizer` for partitioned optimizer state."""
    layout: str
    """A description of the layout."""
    tensors: int
    compared: int
    """Number of tensors with a shard on at least two ranks."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The sets of compared ranks."""


@record
class Replica:
    """One replica of a group."""

    path: str
    rank: int
    """The rank if it is known, else the position among the sorted paths."""
    format: str
    tensors: int
    bytes: int
    host: str | None = None
    """The host name from the metadata, else from a folder named like node0."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The mesh coordinate by dimension, from the file name, the metadata or the DTensors."""
    label: str = ""
    """A or B, for one of two models; empty for a replica of a run."""
    files: int = 1
    """Number of files with parts or copies of it."""


@record
class Place:
    """The file with an element of a model. rank: None for a model in one file.

    tensor: the stored tensor, if a map renames or divides it. index: of the element in it.
    """

    path: str
    rank: int | None = None
    tensor: str = ""
    index: tuple[int, ...] | None = None


@record
class TensorDiff:
    """The result of comparing the replicas of one tensor.

    max_abs, max_rel and max_ulp are over the elements that are finite on all replicas, or None without finite elements.
    max_rel is |a-b| / max(|a|, |b|). Differences are measured against the majority or the reference. Without both, or
    with a tolerance and no reference, they are between the lowest and the highest value of each element.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    status: Status
    reason: Reason | None = None
    """Why it was not (fully) compared; `digest` or `checksum` for the comparison of digests or checksums."""
    detail: Message | None = None
    """An explanation of the reason."""
    tolerance: str | None = None
    """The tolerance that applied, if the status is `close`."""
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The replica groups: ranks whose bytes must be equal."""
    clusters: tuple[tuple[int, ...], ...] = ()
    """Ranks with equal bytes, largest set first; with several replica groups, only of groups with differences."""
    mismatched: int | None = 0
    """Different elements in the worst replica group; None, like all numbers, if only digests are known."""
    numel: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    index: tuple[int, ...] | None = None
    """The index of the first element that is NaN or infinite on some replica, else of the largest difference."""
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    """Number of infinities and NaNs by rank."""
    extent: Extent | None = None
    minority: tuple[int, ...] = ()
    """Ranks outside the majority, or different from the reference; empty if there is neither."""
    evidence: Evidence | None = None
    """Evidence about the cause; None if it was not collected."""
    histogram: Histogram | None = None
    """For the floating-point tensors that differ most, if histograms are requested."""
    places: Mapping[int, Place] = field(default_factory=dict)
    """For two models: the location of the element at `index` in A (0) and in B (1)."""
    facts: tuple[TensorDiff, ...] = ()
    """The separate problems of a tensor with several: missing, different shapes or dtypes, different values."""

    @property
    def out_of_sync(self) -> bool:
        """Whether it differs, is missing on some replica, or has different shapes or dtypes."""
        # The other reasons of tensors that were not compared are no differences.
        return self.status == "different" or self._lacks_values(Reason.MISSING, Reason.SHAPE, Reason.DTYPE)

    @property
    def uncompared(self) -> bool:
        """Whether a tensor of two models could not be compared, and no option accepts the reason."""
        return self.status == "not_compared" and self.reason not in (Reason.RNG, Reason.SUBSET, Reason.PARTS)

    @property
    def unknown(self) -> bool:
        """Whether it may differ: the reader refuses it, `--quick` finds no checksum, or its replicas are unknown."""
        # A shard without a replica has nothing to differ from; missing tensors and other shapes do differ.
        return self._lacks_values(Reason.REFUSED, Reason.CHECKSUM, Reason.AMBIGUOUS)

    def _lacks_values(self, *reasons: Reason) -> bool:
        """Return whether it was not compared by value for one of the reasons."""
        return self.status == "not_compared" and self.reason in reasons


@record
class ValueDiff:
    """A Python value with differences between replicas."""

    name: str
    by_rank: Mapping[int, Any]
    """The values; None for ranks without the value."""
    counts: bool
    """Whether it makes the group out of sync, as progress, settings and scaler state do."""
    kind: ValueKind = "other"
    """`setting`: of optimizer, scheduler or modules; `counter`: optimizer steps; `average`: updates of averages;
    `attribute`: plain, of a module in memory; `model`: scales, numbers in a state dict, and extra states."""
    lost: tuple[int, ...] = ()
    """Ranks without its container (the optimizer), without a value of the model, or with another structure."""
    unknown: bool = False
    """Whether it may differ: a value of the model that the other format does not store."""


@record
class Counts:
    """Numbers of tensors by status. They add up to `tensors`."""

    tensors: int = 0
    identical: int = 0
    equal: int = 0
    close: int = 0
    different: int = 0
    not_compared: int = 0

    @property
    def compared(self) -> int:
        """Number of compared tensors."""
        # Tensors with different shapes count as not compared, although they are out of sync.
        return self.tensors - self.not_compared

    def __add__(self, added: Counts) -> Counts:
        return Counts(
            tensors=self.tensors + added.tensors,
            identical=self.identical + added.identical,
            equal=self.equal + added.equal,
            close=self.close + added.close,
            different=self.different + added.different,
            not_compared=self.not_compared + added.not_compared,
        )


@record
class GroupEvidence:
    """Information about a group besides the diffs of tensors and values; input of the diagnosis."""

    metadata: Metadata = field(default_factory=Metadata)
    """The metadata of the first replica with metadata; empty if no replica has any."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The kind of each selected tensor by name, including identical tensors."""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """`lr`, `weight_decay` and `momentum` of the first parameter group of the first replica's optimizer."""
    normalized: Mapping[int, int] = field(default_factory=dict)
    """The number of names with a wrapper's prefix like `module.`, by rank."""
    stores_progress: bool = False
    """Whether the files store their step or epoch."""
    counts_updates: bool = False
    """Whether every replica stores how often its averaged copy of the weights was updated, as a Python value."""
    runs: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """The settings of runs that differ between files, by name and rank; None for files without the setting."""
    repeated_ranks: tuple[int, ...] = ()
    """Ranks that the metadata of several files records."""
    claimed_twice: tuple[int, ...] = ()
    """Ranks that several files of one run and step claim, although no option put the files into one group."""
    absent_shards: Message | None = None
    """Why equal bytes show only a part of a model: no file holds some of the shards of a compared tensor."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names that share memory on all ranks."""
    equal_shards: tuple[EqualShards, ...] = ()
    """Tensors with equal shards at different positions."""
    unclear_parts: UnclearParts | None = None
    """Plain tensors that may be parts or copies; None if every tensor was compared, or is a shard."""
    stale: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose differing tensors equal the other ranks' tensors of an earlier step, and that step."""
    written_map: str = ""
    """For two models: the file to which a map was written."""
    base: str = ""
    """For two models: the title of the model before the update."""
    updated: int = 0
    """Number of tensors of B that equal A, while the base does not."""
    adapted: int = 0
    """Number of tensors of A with an adapter."""
    cast: str = ""
    """For two models: the dtype of the conversion that the user accepts."""
    stored: Mapping[str, tuple[Stored | None, Stored | None]] = field(default_factory=dict)
    """For two models on a report page: how A and B store each tensor."""
    inferred: bool = False
    """For two models: whether the pairs of their names were inferred from the data, and not accepted by the user."""
    contradicted: tuple[str, ...] = ()
    """For two models: the rules of an inferred map that names of tensors contradict, which no option accepts."""
    guessed: tuple[str, ...] = ()
    """For two models: numbers of heads that were chosen because they fit, and not accepted by the user."""
    fitted: tuple[str, ...] = ()
    """For two models: the tensors whose rows are in the order of a size of a head that was chosen because it fits."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """For two models: tensors that agree against a convention, and a tensor of the same name that differs by it."""
    doubt: Message | None = None
    """Why no verdict is possible although no difference was found: `parity` cannot tell a right program from a wrong
    program, files look like shards and do not state it, or rules of a map contradict each other."""
    free_running: FreeRunning | None = None
    """For the last step of a run whose running statistics differ: whether they were synchronized."""


@record
class Comparison:
    """The results for a group of replicas, before the diagnosis."""

    name: str
    run: str
    step: int | None
    replicas: tuple[Replica, ...]
    counts: Counts
    tensors: tuple[TensorDiff, ...] = ()
    """The diffs of all tensors except identical tensors."""
    values: tuple[ValueDiff, ...] = ()
    ties: tuple[Tie, ...] = ()
    """Ties missing on some ranks."""
    shards: tuple[Shards, ...] = ()
    kinds: Mapping[str, Counts] = field(default_factory=dict)
    """The counts by kind of tensor."""
    left_out: int = 0
    """Number of excluded tensors; no count includes them."""
    uncompared: tuple[int, ...] = ()
    """Ranks without any compared tensor, if other ranks have some."""
    grouping: tuple[Message, ...] = ()
    """How the checkpoints were grouped."""
    notes: tuple[Message, ...] = ()
    """Notes about normalized, guessed or skipped tensors and values."""
    label: str = ""
    """The name of the run in a baseline; empty if it equals `run`."""
    evidence: GroupEvidence = field(default_factory=GroupEvidence)
    not_finite: NotFinite | None = None
    """The tensors that are not finite on all replicas; None if there are none, or if no tensor was read."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(replica.rank for replica in self.replicas)

    @property
    def compared_kinds(self) -> frozenset[str]:
        """The kinds with a compared tensor."""
        return frozenset(kind for kind, counts in self.kinds.items() if counts.compared)

    @property
    def labels(self) -> tuple[str, ...]:
        """A and B for two models; empty for replicas."""
        return tuple(replica.label for replica in self.replicas if replica.label)

    @property
    def is_pair(self) -> bool:
        """Whether it compares two models. Their ranks are of type `text.Side`, so texts name A and B."""
        return bool(self.labels)

    @property
    def has_files(self) -> bool:
        """Whether the replicas are files, and not objects in memory."""
        return "memory" not in {replica.format for replica in self.replicas}


@record
class Group(Comparison):
    """A comparison with its verdict and findings."""

    verdict: Verdict = "undecided"
    findings: tuple[Finding, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    """Findings of the baseline that no step of the run has any more; for the last step of a run."""


@record
class Unreadable:
    """A file with read errors."""

    path: str
    reason: str


@record
class Alias:
    """A link to another replica. It is not compared, because it is the same file."""

    path: str
    """The path as given or found."""
    # The JSON document has this name.
    of: str
    """The path of the compared replica."""


@record
class Report:
    """The complete result of a comparison."""

    verdict: Verdict
    groups: tuple[Group, ...]
    unreadable: tuple[Unreadable, ...] = ()
    skipped: int = 0
    """Number of other files in the given folders."""
    skipped_paths: tuple[str, ...] = ()
    """The paths of the first skipped files, without notes, settings and tokenizers."""
    aliases: tuple[Alias, ...] = ()
    """Links to checkpoints compared under another path."""
    quick: bool = False
    """Whether stored checksums were compared instead of bytes."""
    command: Literal["compare", "diff", "parity"] = "compare"
    drift: tuple[DriftPoint, ...] = ()
    closures: tuple[Closure, ...] = ()

    @property
    def counts(self) -> Counts:
        """The counts over all groups."""
        total = Counts()
        for group in self.groups:
            total += group.counts
        return total

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all groups, in their order: the same finding at several steps occurs several times."""
        findings: list[Finding] = []
        for group in self.groups:
            findings += group.findings
        return tuple(findings)

    @property
    def tensors(self) -> tuple[TensorDiff, ...]:
        """The diffs of all groups."""
        diffs: list[TensorDiff] = []
        for group in self.groups:
            diffs += group.tensors
        return tuple(diffs)

    @property
    def exit_code(self) -> int:
        """0 for in sync, 1 for out of sync, 2 for undecided."""
        # A checkpoint that is alone makes the report undecided.
        return {"in_sync": 0, "out_of_sync": 1}.get(self.verdict, 2)


class OutOfSync(SyncheckError, AssertionError):
    """Replicas differ, or an assertion could not compare them. report: the full report.

    The text has several lines. Names from files are already escaped in it.
    """

    exit_code = 1

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report

    def __str__(self) -> str:
        # Other errors have one line.
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[OutOfSync], tuple[str, Report]]:
        # The default calls the class with the text alone, and test runners send exceptions between processes.
        return type(self), (str(self), self.report)


def largest_first(sets: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Sort sets of ranks by size, the largest first; equally large sets by their first ranks."""
    return tuple(tuple(ranks) for ranks in sorted(sets, key=_size_and_first))


def _size_and_first(ranks: Sequence[int]) -> tuple[int, int]:
    # The first rank makes the order of equally large sets the same in every process.
    return -len(ranks), ranks[0]


def minority_of(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest set; empty if two sets are the largest. sets: largest first."""
    # Neither of two equally large sets is more likely to be right.
    if len(sets) < 2 or len(sets[0]) == len(sets[1]):
        return ()
    # In the order of ranks, because the sets have the order of their sizes.
    minority: list[int] = []
    for ranks in sets[1:]:
        minority += ranks
    return tuple(sorted(minority))


def sets_within(diff: TensorDiff) -> list[list[tuple[int, ...]]]:
    """Return the clusters of each replica group with differences."""
    # The dictionary avoids a search: 1,000 ranks may have hundreds of groups.
    number_of_group: dict[int, int] = {}
    for number, group in enumerate(diff.replica_groups):
        number_of_group.update(dict.fromkeys(group, number))
    clusters_of_group: dict[int, list[tuple[int, ...]]] = {number: [] for number in range(len(diff.replica_groups))}
    for ranks in diff.clusters:
        # A cluster lies in one replica group. Without a record of groups, all ranks are a group.
        number = number_of_group.get(ranks[0], 0)
        clusters_of_group.setdefault(number, []).append(ranks)
    return [clusters for clusters in clusters_of_group.values() if len(clusters) > 1]
