"""Frozen records of findings: their evidence, their history over the steps of a run, and relations of two models."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.messages import Message

Trend = Literal["constant", "shrinking", "growing", "varying"]
Severity = Literal["info", "warning", "error"]
Certainty = Literal["proved", "likely", "consistent"]
# Norms and cosines are computed over the first elements of a tensor, up to this number.
MEASURED = 1 << 18
# The powers of ten at which the decades of a histogram begin.
DECADES = range(-12, 6)
# Names of the running averages of gradients in torch optimizers.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})
# The states of optimizers that are running averages of squared gradients: Adam, RMSprop, Adafactor (torch,
# Transformers), AdaBelief.
SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "square_avg", "row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_var"}
)


class RelationKind(StrEnum):
    """How a tensor of model B follows from model A.

    All but the last seven are proven: the bytes are equal after the operation.
    """

    BASE = "base"
    """B equals the model before the update."""
    ADAPTER = "adapter"
    """B equals A without the adapter. pattern: replaced, if the adapter stores the tensor. factor: of its product.

    product: transposed, or other, if B contains this product. other: the name of the tensor with the other product."""
    TRANSPOSED = "transposed"
    """B is A with two dimensions exchanged. dims."""
    FUSED_ORDER = "fused-order"
    """The parts or rows have another order. order: a description. other: the tensor of A with its bytes."""
    ROTARY = "rotary"
    """The rows of each head are in the other order of rotary embeddings. head_dim. to: half or interleaved."""
    CAST = "cast"
    """One model is the other one, converted. dtype. side: the converted model. then: the dtype of a second conversion.

    pattern: merged, if the model is an adapter's merge within its rounding; then the bytes may differ. truncated, if
    the conversion cut off the last bits instead of rounding. overflowed or flushed, if elements became infinite, or all
    elements became zero. count, index: number and first index of the elements."""
    PADDED = "padded"
    """The common part is equal. dim, added: number of indices that B has more."""
    PART_LOST = "part-lost"
    """The common part is equal, and the part in one model only holds data. dim, added: see PADDED."""
    EXPERT = "expert"
    """B holds another expert of A. order: expert of A by expert of B. other: the tensor of A with its bytes."""
    SHARD = "shard"
    """B holds another shard or layer of A. other: tensor of A, or boxes: number of wrong boxes. files: of B.

    copy: the prefix of the names of the copy in A that B holds. source, dim, runs: shards of another tensor, as the
    first indices and lengths of their ranges."""
    TIE = "tie"
    """One model holds one weight under two names, and the other model two. other: name. tied: the first model."""
    REPEATED = "repeated"
    """B holds a part of A several times, or the reverse. times, dim, size: of the part. side: of the copies."""
    UNSCALED = "unscaled"
    """B holds the numbers of a quantized tensor of A without its scales. side: without scales. least, most: scales."""
    QUANTIZED = "quantized"
    """B is within half a quantization step of A. scheme, steps: largest difference in steps; scales: where from."""
    SCALED = "scaled"
    """B is A times a constant, within rounding. factor."""
    OFFSET = "offset"
    """B is A plus a constant, within rounding. offset."""
    FACTORS = "factors"
    """B is A times a factor for each block, within rounding. block: rows and columns. of: shape. least, most, count."""
    LOCAL = "local"
    """Few elements of B differ from A after a conversion to its dtype. count. index, values: of a single element."""
    UNRELATED = "unrelated"
    """B is constant, or not correlated with A. correlation, or value of the constant."""
    CONSTANT_PART = "constant-part"
    """Some indices of one dimension are constant in one model only. dim, side, value. runs: first indices and lengths.

    The rest of the tensor may agree or differ."""


@record
class Relation:
    """The relation of one tensor. parameters: see `RelationKind`; dtype, if the values were converted as well."""

    kind: RelationKind
    parameters: Mapping[str, int | float | str | tuple[int, ...]] = field(default_factory=dict)


@record
class Stored:
    """How the files of a model store one tensor, for the maps of shards and names of a report page.

    name, dtype, shape: of the whole stored tensor. boxes: (start, size, ranks or files with it), in elements; start and
    size are None if the files do not show the position.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...] | None, tuple[int, ...] | None, str], ...] = ()


@record
class HistoryPoint:
    """The tensors of a finding at one step."""

    step: int
    differing: int
    """Number of tensors out of sync."""
    max_abs: float | None
    """Their largest difference, 0.0 if all agree; None if it is unknown."""
    others_differ: bool = False
    """Whether tensors or values of other findings were out of sync at this step."""


@record
class History:
    """The history of a finding over the compared steps of its run."""

    points: tuple[HistoryPoint, ...]
    """One per compared step, in the order of steps."""
    since: int
    """The first step with a tensor out of sync."""
    agreed: int | None
    """The compared step before `since`; None if `since` is the first compared step."""
    tensors: tuple[str, ...]
    """The tensors out of sync at step `since`."""
    ranks: tuple[int, ...]
    """The suspects at step `since`."""
    trend: Trend | None = None
    """The trend from the first to the last step with differences; None if only a single step differs."""


@record
class NotFinite:
    """The tensors that hold NaN or infinity on all replicas."""

    # Buffers count with NaN only, because masks legitimately hold infinity.
    names: tuple[str, ...]
    count: int
    """Number of these tensors; events of a monitor list only the first names."""
    since: int | None = None
    """The first compared step with a tensor of this kind; None if only one step was compared."""
    finite: int | None = None
    """The compared step before it; None if there is none."""
    first: tuple[str, ...] = ()
    """The tensors at step `since`."""


@record
class EqualShards:
    """A tensor with equal shards at different positions, although random numbers would make them differ."""

    name: str
    shards: int
    """Number of positions with a shard of the same shape."""
    equal: int
    """Number of positions in the largest set of equal shards."""
    clusters: tuple[tuple[int, ...], ...]
    """Ranks with equal bytes at different positions, with all replicas of each shard."""


@record
class UnclearParts:
    """Plain tensors of ranks in a mesh that were not compared, because files do not record which tensors are parts.

    Each has one name and one shape on several ranks.
    """

    equal: tuple[str, ...] = ()
    """Names of tensors with equal bytes on all ranks that hold them."""
    different: tuple[str, ...] = ()


@record
class Evidence:
    """Evidence about a different tensor. Fields are empty or None if they were not computed or do not apply.

    Norms and the cosine are over the first `MEASURED` elements, skipping NaNs and infinities of any replica.
    """

    damaged: tuple[int, ...] = ()
    """Ranks whose storage does not match its CRC-32 in the file, written by torch.save."""
    first: int | None = None
    """The flat index of the first different element in C order, if the different elements are contiguous."""
    values: Mapping[int, int | float | str] = field(default_factory=dict)
    """The value of the different element by rank, if only one element differs; NaN and infinity as text."""
    flipped_bits: int | None = None
    """The largest number of different bits between two replicas, if only one element differs."""
    bit: int | None = None
    """The position of the different bit, 0 for the lowest bit of the element, if only one bit differs."""
    norms: Mapping[int, float] = field(default_factory=dict)
    """Euclidean norm by rank, of parameters, buffers and moments."""
    cosine: float | None = None
    """Smallest cosine between a replica of the majority (without a majority, the first replica) and another replica."""
    smaller: Mapping[int, float] = field(default_factory=dict)
    """For second moments: the share of the different elements that are smaller than in the first replica of the
    majority (without a majority, the first replica), by rank, for the other replicas."""
    zeroed: Mapping[int, float] = field(default_factory=dict)
    """For parameters: the share of the different elements that are zero, by rank, for ranks with zeros."""
    holds: Mapping[int, str] = field(default_factory=dict)
    """By rank, the tensor of the other ranks with exactly the values that this rank has here."""
    resembles: Mapping[int, str] = field(default_factory=dict)
    """By rank, the tensor of the other ranks with nearly the direction of the values that this rank has here, if both
    tensors are exchanged in this way."""
    relation: Relation | None = None
    """For two models: how B follows from A, if a relation was found."""


@record
class FreeRunning:
    """Whether running statistics lag by one update or are unsynchronized, from their differences at several steps.

    Differences are between the first rank and each other rank. misfit_free, misfit_lag: mean squared errors of the
    models of unsynchronized and of lagging statistics, in units of the usual standard deviations; None if the steps do
    not distinguish the models (see `comparison.free_running`).
    """

    steps: tuple[int, ...]
    """The steps used."""
    cosine: float
    """Mean cosine between the differences at neighbouring steps."""
    growth: float
    """Median ratio of the differences at the last step to the differences at the first step."""
    misfit_free: float | None = None
    misfit_lag: float | None = None
    below: int = 0
    """Number of running variances that are too low to have been copied from rank 0 since an earlier step."""


@record
class Histogram:
    """A histogram of the differences of a tensor's elements. For very large tensors, of evenly spaced blocks.

    The difference of an element is against the majority or the reference. Without both, or with a tolerance and no
    reference, it is between the lowest and the highest value.
    """

    equal: int
    counts: tuple[int, ...]
    """Elements with differences below 1e-12, by decade (1e-12 to 1e-11, ..., 1e5 to 1e6), and of at least 1e6."""
    not_finite: int
    """Elements that differ and are NaN or infinite on some replica."""

    @property
    def elements(self) -> int:
        """Number of elements read."""
        # Each element read is in one of the three.
        return self.equal + sum(self.counts) + self.not_finite


@record
class Fixed:
    """A finding of the baseline, or part of a finding, that no longer occurs."""

    code: str
    names: tuple[str, ...]
    """Names of tensors and values."""


@record
class Finding:
    """A diagnosed cause of differences, with its fix."""

    code: str
    slug: str
    severity: Severity
    ranks: tuple[int, ...]
    """The suspects, or all ranks of the group if no rank is suspect; empty for two models."""
    tensors: tuple[str, ...]
    facts: tuple[Message, ...]
    """The evidence, one statement per message."""
    cause: Message
    fix: Message
    values: tuple[str, ...] = ()
    """The names of its Python values."""
    allowed: bool = False
    history: History | None = None
    """For the last step of a run, if several steps were compared."""
    accepted: bool = False
    """Whether the baseline contains all of its tensors and values."""
    new: tuple[str, ...] = ()
    """Tensors and values missing in the baseline under this code; empty without a baseline."""
    counts: bool = True
    """Whether it makes the group out of sync; False for a warning that is only reported."""
    certainty: Certainty = "likely"
    """`proved`: follows from bytes or saved values. `likely`: right in at least 98 % of the trials in
    docs/diagnosis-trials.md. `consistent`: the evidence fits this cause, and other causes too."""
    alternatives: tuple[str, ...] = ()
    """Codes of other causes that fit the evidence as well."""

    @property
    def evidence(self) -> str:
        """The text of the facts."""
        # Surfaces with their own spelling of names render the facts themselves.
        return "; ".join(map(str, self.facts))

    @property
    def fails(self) -> bool:
        """Whether the finding makes the group out of sync."""
        # A user accepts a finding with `--allow`, or with a baseline that has all of its names.
        is_tolerated = self.allowed or self.accepted
        return self.counts and self.severity != "info" and not is_tolerated


@record
class DriftPoint:
    """The largest difference of any running statistic of a run at one step."""

    run: str
    step: int | None
    max_abs: float
    tensor: str | None


@record
class Closure:
    """The effect of SyncBatchNorm on the drift of the running statistics, from two runs that differ only in it."""

    plain: DriftPoint
    synced: DriftPoint
    message: Message
    """How much of the difference SyncBatchNorm removed."""

    @property
    def sentence(self) -> str:
        """The text of the message."""
        return str(self.message)
