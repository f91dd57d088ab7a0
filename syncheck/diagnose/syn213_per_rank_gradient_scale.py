"""Some ranks clipped or scaled their gradients: same direction as on the other ranks, but another length.

Signature: with second moments (Adam, RMSprop, Adafactor), nearly all their elements are smaller on the same rank, or
nearly all are larger. They remember about 1,000 steps, so one scaled step is visible much later. In the trials
(docs/diagnosis-trials.md), the share was at least 0.98 for smaller gradients; gradients of other batches gave 0.4 to
0.6, and one rank with its own gradients 0 to 0.35, because a batch of one rank has larger gradients than an average.
Larger moments therefore also require first moments with the same direction. The finding is likely if the first moments
have nearly one factor, as after many scaled steps. Otherwise it is only consistent with a scale: a gradient that was
lost on one rank once looks the same.

With first moments alone (SGD's momentum_buffer), they differ but have the same direction, and in nearly all
tensors the same rank has the shorter moments, by about the same factor. Measured with averaged gradients clipped on one
rank, on 2 to 8 ranks after 3 to 600 steps: the same rank is shorter in every tensor, the factor is within 1.3 times its
median in at least 85 % of the tensors, and the median cosine is 0.94 to 0.999. Late in training, when the factor
changes from step to step, these bounds are 2 times and 0.85. If gradients are not averaged (SYN211), the factors
scatter around 1, with cosines of -0.4 to 0.88.

SGD's momentum contains the weight decay too, which is not clipped. A tensor is therefore ignored if its momentum is
less than four times wd / (1 - momentum) times the norm of the parameter (16 of the 23 tensors of resnet8). If no tensor
remains, a rank whose momentum is 12 times shorter in nearly all tensors contains little but weight decay.

A clip from a late step on turns the momenta at first. Several steps show it if the momenta of some ranks become shorter
and shorter, to at most half the length, while other ranks agree.

Cause: a gradient clip or loss scale depends on the rank: the norm of a local shard, a clip under `if rank == 0`,
different configurations, or a loss divided by the local batch size. It acts after gradients are averaged, so the ranks
diverge. Adam hides this well, because its steps do not depend on the length of the gradient.

Fix: compute the norm from the averaged gradients on every rank, and clip with the same value:
`torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` after `backward()`, on all ranks.

Incidents: deepspeedai/DeepSpeed#1801 (BLOOM-176B: clipped on one tensor-parallel rank only, for two weeks),
pytorch/torchtitan#766, pytorch/pytorch#170862, NVIDIA-NeMo/RL#3788.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.features import groups_of
from syncheck.diagnose.measures import cosines, evidence_of, is_at_least, is_below, median, median_cosine
from syncheck.diagnose.moments import (
    count_squares,
    decay_share,
    mean_cosine,
    median_share_differing,
    median_sidedness,
    only_decay,
    share_smaller,
)
from syncheck.diagnose.optimizer_names import is_momentum
from syncheck.diagnose.rank_values import below_highest
from syncheck.diagnose.selection import minorities_of, ranks_outside
from syncheck.diagnose.statements import follower_facts
from syncheck.frozen import record
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import TensorDiff

CODE = "SYN213"
SLUG = "per-rank-gradient-scale"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Some ranks change the size of the averaged gradients: a clip or a scale with another factor, lost gradients, "
        "or gradients of the step before that were not cleared."
    )
    DIFF_CAUSE = "One of the runs clipped or scaled its gradients by another factor than the other run."
    DIFF_FIX = (
        "Compare the clipping, the loss scale, the reduction of the loss and the number of accumulated batches of both "
        "runs."
    )
    DIFF_CAUSE_UNCOUNTED = (
        "One of the runs clipped or scaled its gradients by another factor than the other run. Or it skipped a step or "
        "lost its momentum, which looks the same without step counters."
    )
    DIFF_CLIPPED = (
        "{ranks:Ranks} clipped or scaled its gradients: its first moments are {ratio:.3g} times as long as in "
        "{others:ranks}, in the same direction"
    )
    DIFF_CONSISTENT = (
        "Consistent with clipped or scaled gradients in {ranks:ranks}: its first moments are {ratio:.3g} times as long "
        "as in {others:ranks}, in the same direction"
    )
    FIX = (
        "Clip after `backward()` with the same value on every rank: `clip_grad_norm_(model.parameters(), max_norm)`. "
        "No clip, loss scale, division or `zero_grad()` may depend on the rank, its loss or its batch. Then restart "
        "from a checkpoint in which the ranks agree."
    )
    FIX_SHARDED = (
        "Clip on every rank with all parameters of the sharded model: `clip_grad_norm_(model.parameters(), max_norm)`, "
        "which reduces the norm over the shards. A norm of `p.grad.to_local()` differs between ranks. No clip, loss "
        "scale or division may depend on the rank, its loss or its batch."
    )
    CAUSE_UNCOUNTED = (
        "Some ranks clip or scale the averaged gradients by another factor than the other ranks. Or a rank skipped a "
        "step or lost its momentum, which looks the same without step counters."
    )
    CLIPPED = (
        "{ranks:Ranks} clipped or scaled {ranks:verb its|their} gradients: {ranks:verb its|their} first moments are "
        "{ratio:.3g} times as long as on {others:ranks}, in the same direction"
    )
    CLIPPED_UNEQUALLY = (
        "{ranks:Ranks} clipped or scaled their gradients: compared with {others:ranks}, their first "
        "moments have the same direction, but these multiples of the length: {ratios:by_rank}"
    )
    CONSISTENT = (
        "Consistent with clipped or scaled gradients on {ranks:ranks}: {ranks:verb its|their} first moments are "
        "{ratio:.3g} times as long as on {others:ranks}, in the same direction"
    )
    CONSISTENT_UNEQUALLY = (
        "Consistent with clipped or scaled gradients on {ranks:ranks}: compared with {others:ranks}, "
        "their first moments have the same direction, but these multiples of the length: {ratios:by_rank}"
    )
    SCALED = (
        "{ranks:Ranks} scaled {ranks:verb its|their} gradients in some steps at least: nearly all elements of "
        "{ranks:verb its|their} second moments are {side} than on {others:ranks}"
    )
    SCALED_CONSISTENT = (
        "Consistent with scaled gradients on {ranks:ranks}: nearly all elements of {ranks:verb its|their} second "
        "moments are {side} than on {others:ranks}"
    )
    EACH_SCALED = (
        "Consistent with a scale of each rank's own: all ranks differ, and their first moments have nearly the same "
        "direction"
    )
    SMALLER = "smaller"
    LARGER = "larger"
    COSINE = "the median cosine over {count:count parameter} is {cosine:.3f}"
    PARAMETERS_AGREE = "all parameters agree, so the optimizer state alone may have been changed"
    MOSTLY_DECAY = "{count:count parameter} ignored, because momentum is mostly weight decay"
    UNCOUNTED = "the optimizer does not count steps, so a skipped step or a lost momentum would look the same"


# Share of the elements of second moments that are on one side, and the least mean cosine of first moments with it.
ONE_SIDED, ALIKE = 0.98, 0.95


class Bound(NamedTuple):
    """When the lengths of moments show a scale."""

    factor: float
    """The least factor between the lengths."""
    cosine: float
    """The least median cosine."""
    width: float
    """The largest factor of a tensor from the median. A clip has a different factor at each step."""

    def fits(self, logs: Sequence[float], cosine: float) -> bool:
        """Whether the factors are about the same, and not 1. logs: the logarithms of the factors of all tensors."""
        middle = median(logs)
        is_turned = cosine < self.cosine
        has_same_length = abs(middle) < math.log(self.factor)
        if is_turned or has_same_length:
            return False
        # A few tensors may have another factor.
        close = [log for log in logs if abs(log - middle) <= math.log(self.width)]
        return len(close) >= NEAR * len(logs)


# Least share of the elements of second moments that differ: all elements with a gradient.
NEARLY_ALL = 0.75
# Least median of the one-sidedness within a tensor, if each rank has a scale of its own, which varies over the steps.
EACH_SIDED = 0.75
# Least shares of tensors: differing; with the same shorter rank; with a factor near the median.
MOST, ONE_SIDE, NEAR = 0.9, 0.95, 0.85
# A tensor shows nothing about the gradients unless its momentum is this many times its weight decay.
ABOVE_DECAY = 4.0
# In measurements, no gradients of different batches had a cosine over 0.5 and the factor of the last bound.
SURE = (Bound(1.1, 0.97, 1.3), Bound(1.3, 0.93, 1.3), Bound(3.0, 0.5, 2.0))
# Bounds of a scale that all recent steps had. A single lost gradient changes the moments less evenly.
STEADY = (Bound(1.2, 0.99, 1.2), Bound(3.0, 0.5, 2.0))
# The same without step counts: a momentum lost k steps ago is 1 / (1 - 0.9**k) times shorter, at most 10 times, with
# cosines under 0.9 if the factor is over 1.3.
LIKELY = (Bound(1.3, 0.93, 1.3), Bound(12.0, 0.5, 2.0))
# If a rank's momentum contains only weight decay, it is shorter than a lost momentum, in any direction.
DECAY_ALONE = (Bound(12.0, 0.3, 20.0),)


class _Summary(NamedTuple):
    """The ranks with scaled gradients, and the statement about them."""

    ranks: tuple[int, ...]
    fact: Message


class _Summaries(NamedTuple):
    """The sentences about ranks with scaled gradients, with one factor of all ranks or with several."""

    equally: Sentence
    unequally: Sentence


_COUNTED = _Summaries(Text.CLIPPED, Text.CLIPPED_UNEQUALLY)
# Without step counts, another cause may have changed the lengths.
_UNCOUNTED = _Summaries(Text.CONSISTENT, Text.CONSISTENT_UNEQUALLY)


@record
class _Lengths:
    """First moments whose lengths differ between ranks."""

    moments: Sequence[TensorDiff]
    reference_of: Mapping[int, int]
    """By deviating rank, a rank of its replica group to compare with."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The deviating ranks."""
        return tuple(sorted(self.reference_of))

    def factors(self, rank: int) -> list[float]:
        """Return the norms of a deviating rank as multiples of the norms of its reference."""
        reference = self.reference_of[rank]
        factors = []
        for diff in self.moments:
            norms = evidence_of(diff).norms
            if norms.keys() >= {rank, reference}:
                factors.append(norms[rank] / norms[reference])
        return factors

    def fit(self, bounds: Sequence[Bound]) -> bool:
        """Whether the moments of each deviating rank are a multiple of the moments of its reference."""
        cosine = median_cosine(self.moments)
        if cosine is None or not self.reference_of:
            return False
        return all(_is_scale(self.factors(rank), cosine, bounds) for rank in self.reference_of)


def _differ_mostly(case: Case) -> bool:
    """Whether nearly all first moments differ."""
    return len(case.differing_moments()) >= MOST * len(case.with_moment())


@requires(Case.in_step, _differ_mostly)
def apply(case: Case) -> Match | None:
    """Match moments with the same direction, but another length on some ranks in nearly all tensors."""
    moments = list(case.differing_moments().values())
    shares = share_smaller(case.differing_squares())
    if shares:
        return _match_squares(case, moments, shares)
    # Equal second moments belong to gradients of equal size.
    if count_squares(case) > 0 and not case.differing_squares():
        return None
    return _match_first_moments(case, moments)


def _match_squares(case: Case, moments: list[TensorDiff], shares: dict[int, float]) -> Match | None:
    """Match second moments whose elements are nearly all smaller, or nearly all larger, on the deviating ranks."""
    squares = case.differing_squares()
    if len(squares) < MOST * count_squares(case):
        return None
    # A gradient with lost elements has smaller second moments in these elements alone.
    if median_share_differing(squares) < NEARLY_ALL:
        return None

    if min(shares.values()) >= ONE_SIDED:
        return _match_scaled_squares(case, moments, shares, is_smaller=True)
    if max(shares.values()) <= 1 - ONE_SIDED:
        return _match_scaled_squares(case, moments, shares, is_smaller=False)
    # The ranks may all have scales of their own, as if each clipped by its local norm.
    if _is_each_scaled(case, moments) and median_sidedness(squares) >= EACH_SIDED:
        return _make_unequal_match(case, moments)
    return None


def _match_scaled_squares(
    case: Case, moments: list[TensorDiff], shares: dict[int, float], *, is_smaller: bool
) -> Match | None:
    """Match second moments that are on one side. is_smaller: on the deviating ranks; larger otherwise."""
    cosine = mean_cosine(moments)
    # The gradients of a single rank are larger than averaged gradients, but have another direction.
    has_own_gradients = not is_smaller and is_below(cosine, ALIKE)
    if has_own_gradients:
        return None

    lengths = _compare_lengths(list(filter(_has_lengths, moments)))
    if lengths.fit(SURE):
        ranks, summary = lengths.ranks, _summarize(case, lengths)
    else:
        is_certain = lengths.fit(STEADY) and not case.agrees("parameter")
        ranks, summary = _summarize_sides(case, shares, is_smaller=is_smaller, is_certain=is_certain)
    match = _make_match(
        case,
        ranks=ranks,
        facts=[summary, *_describe_cosine(moments)],
        moments=moments,
    )

    if case.agrees("parameter"):
        # Adam divides by the size of the gradients, so that equal parameters are possible; a changed state is, too.
        return match.as_consistent("SYN215")
    if lengths.fit(STEADY):
        return match
    # Lost parts of one gradient make second moments smaller too, and the gradients of one rank alone make them larger.
    # A state that was reset or loaded some steps before has other moments from then on.
    return match.as_consistent("SYN215") if is_smaller else match.as_consistent("SYN211", "SYN215")


def _has_lengths(diff: TensorDiff) -> bool:
    """Whether no rank has a moment of zero: it lost all gradients since the start, and its length is no factor."""
    return min(evidence_of(diff).norms.values(), default=1.0) > 0


def _summarize_sides(case: Case, shares: dict[int, float], *, is_smaller: bool, is_certain: bool) -> _Summary:
    """Return the ranks with scaled gradients, and the statement about their second moments.

    is_certain: whether only a scale explains them.
    """
    ranks = tuple(sorted(shares))
    reference_ranks = ranks_outside(case.group.ranks, shares)
    # Of two ranks, the rank with smaller moments is suspect.
    if case.number_of_ranks == 2 and not is_smaller:
        ranks, reference_ranks, is_smaller = reference_ranks, ranks, True
    side = Text.SMALLER() if is_smaller else Text.LARGER()
    sentence = Text.SCALED if is_certain else Text.SCALED_CONSISTENT
    return _Summary(ranks, sentence(ranks=ranks, others=reference_ranks, side=side))


def _is_each_scaled(case: Case, moments: list[TensorDiff]) -> bool:
    """Whether all ranks differ, and their first moments have nearly the same direction."""
    return is_at_least(mean_cosine(moments), ALIKE) and case.ranks_differ(moments)


def _make_unequal_match(case: Case, moments: list[TensorDiff]) -> Match:
    """Return the match for ranks that each have a scale of their own."""
    facts = [Text.EACH_SCALED(), *_describe_cosine(moments)]
    return _make_match(
        case,
        ranks=case.group.ranks,
        facts=facts,
        moments=moments,
    ).as_consistent("SYN211")


def _describe_cosine(moments: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State the median cosine of first moments; empty if none was measured."""
    measured = cosines(moments)
    cosine = median_cosine(moments)
    return state_if(measured, Text.COSINE(count=len(measured), cosine=cosine))


def _match_first_moments(case: Case, moments: list[TensorDiff]) -> Match | None:
    """Match first moments with the same direction, but another length on some ranks in nearly all tensors."""
    if case.counts_steps():
        lengths = _compare_lengths(_select_above_decay(case, moments, ABOVE_DECAY))
        if lengths.fit(SURE):
            return _match_lengths(case, moments, lengths)
        return None
    # The start of a fault looks like a skipped step or a lost momentum.
    if case.just_began():
        return None
    for bounds, above_decay in ((LIKELY, ABOVE_DECAY), (DECAY_ALONE, 0.0)):
        lengths = _compare_lengths(_select_above_decay(case, moments, above_decay))
        if lengths.fit(bounds):
            return _match_lengths(case, moments, lengths)
    # Of two ranks, one would have the other length.
    if case.number_of_ranks == 2 or only_decay(case):
        return None
    return _make_unequal_match(case, moments) if _is_each_scaled(case, moments) else None


def _match_lengths(case: Case, moments: list[TensorDiff], lengths: _Lengths) -> Match:
    """Return the match for first moments with other lengths on some ranks."""
    is_counted = case.counts_steps()
    ignored = len(moments) - len(lengths.moments)
    facts = [
        _summarize(case, lengths),
        Text.COSINE(
            count=len(lengths.moments),
            cosine=median_cosine(lengths.moments),
        ),
        *state_if(ignored, Text.MOSTLY_DECAY(count=ignored)),
        *state_if(not is_counted, Text.UNCOUNTED()),
    ]
    # Lion has no second moments, and the first moments alone do not tell a factor from lost gradients.
    match = _make_match(
        case,
        ranks=lengths.ranks,
        facts=facts,
        moments=moments,
    ).as_consistent("SYN214", "SYN215")
    return match if is_counted else match.with_cause(Text.CAUSE_UNCOUNTED, None)


def _make_match(case: Case, ranks: tuple[int, ...], facts: list[Message], moments: list[TensorDiff]) -> Match:
    """Return the match of the differing parameters, and state the trend, what follows, and which ranks agree."""
    covered = case.with_followers(case.differing_parameters().values())
    _, since = case.trend_facts("parameter")
    all_facts = [
        *facts,
        *state_if(case.is_in_sync("parameter"), Text.PARAMETERS_AGREE()),
        *since,
        *follower_facts(covered, "optimizer"),
        *case.agreement_facts(moments),
    ]
    return Match(covered, ranks, all_facts)


def _summarize(case: Case, lengths: _Lengths) -> Message:
    """State which ranks clipped or scaled their gradients, and by which factors."""
    ranks = lengths.ranks
    # Scaled gradients usually change the parameters, too.
    is_certain = case.counts_steps() and not case.is_in_sync("parameter")
    sentences = _COUNTED if is_certain else _UNCOUNTED
    reference_ranks = ranks_outside(case.group.ranks, ranks)
    ratios: dict[int, float] = {}
    for rank in ranks:
        # Three digits, because the factors of several ranks differ by their rounding.
        ratios[rank] = float(f"{median(lengths.factors(rank)):.3g}")
    if len(set(ratios.values())) > 1:
        return sentences.unequally(
            ranks=ranks,
            ratios=ratios,
            others=reference_ranks,
        )
    return sentences.equally(
        ranks=ranks,
        ratio=ratios[ranks[0]],
        others=reference_ranks,
    )


def _select_above_decay(case: Case, moments: list[TensorDiff], times: float) -> list[TensorDiff]:
    """Return the moments with norms, except SGD's momenta if they are mostly weight decay on some rank.

    times: how many times a momentum must be as long as its weight decay.
    """
    share, parameters = decay_share(case), case.differing_parameters()
    selected = []
    for diff in moments:
        norms = evidence_of(diff).norms
        # A number has no direction, nor has a tensor of zeros on some rank.
        if diff.numel < 2 or min(norms.values(), default=0) == 0:
            continue
        decay_of_rank: Mapping[int, float] = {}
        parameter = parameters.get(case.owner_of(diff.name))
        if parameter is not None and is_momentum(diff.name):
            decay_of_rank = evidence_of(parameter).norms
        # A rank without the norm of the parameter has no known decay.
        is_above = all(norm > times * share * decay_of_rank.get(rank, 0.0) for rank, norm in norms.items())
        if is_above:
            selected.append(diff)
    return selected


def _compare_lengths(moments: list[TensorDiff]) -> _Lengths:
    """Return the moments with the deviating ranks of each replica group, and a rank to compare each with."""
    groups: set[tuple[int, ...]] = set()
    for diff in moments:
        groups.update(groups_of(diff, evidence_of(diff).norms))
    reference_of: dict[int, int] = {}
    for group in sorted(groups):
        measured = [diff for diff in moments if evidence_of(diff).norms.keys() >= set(group)]
        if measured:
            reference_of.update(_find_references(measured, group))
    return _Lengths(moments, reference_of)


def _find_references(moments: list[TensorDiff], group: tuple[int, ...]) -> dict[int, int]:
    """Return a rank to compare with by deviating rank of a replica group.

    Deviating ranks are outside the majority. Without a majority they are shorter than the longest rank.
    """
    minority = minorities_of(moments).intersection(group)
    majority = ranks_outside(group, minority)
    if minority and majority:
        return dict.fromkeys(minority, majority[0])
    lengths = {}
    for rank in group:
        lengths[rank] = median(math.log(evidence_of(diff).norms[rank]) for diff in moments)
    longest = max(group, key=lengths.__getitem__)
    return dict.fromkeys(below_highest(lengths), longest)


def _is_scale(factors: list[float], cosine: float, bounds: Sequence[Bound]) -> bool:
    """Whether the factors of all tensors are about the same, and not 1."""
    logs = [math.log(factor) for factor in factors]
    middle = median(logs)
    on_one_side = [log for log in logs if log * middle > 0]
    if len(on_one_side) / len(logs) < ONE_SIDE:
        return False
    return any(bound.fits(logs, cosine) for bound in bounds)
