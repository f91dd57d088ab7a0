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
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, cosines, evidence_of, follower_facts
from syncheck.diagnose.moments import (
    count_squares,
    decay_share,
    differing_squares,
    mean_cosine,
    median_share_differing,
    median_sidedness,
    only_decay,
    share_smaller,
)
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

    Bounds = tuple[tuple[float, float, float], ...]

CODE = "SYN213"
SLUG = "per-rank-gradient-scale"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
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
        "Clip after backward() with the same value on every rank: `clip_grad_norm_(model.parameters(), max_norm)`. No "
        "clip, loss scale, division or `zero_grad()` may depend on the rank, its loss or its batch. Then restart from "
        "a checkpoint in which the ranks agree."
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
    EACH_SCALED = (
        "Consistent with a scale of each rank's own: all ranks differ, and their first moments have nearly the same "
        "direction"
    )
    SMALLER = "smaller"
    LARGER = "larger"
    COSINE = "the median cosine over {count:count parameter} is {cosine:.3f}"
    MOSTLY_DECAY = "{count:count parameter} ignored, because momentum is mostly weight decay"
    UNCOUNTED = "the optimizer does not count steps, so a skipped step or a lost momentum would look the same"


# Share of the elements of second moments that are on one side, and the least mean cosine of first moments with it.
ONE_SIDED, ALIKE = 0.98, 0.95
# Least share of the elements of second moments that differ: all elements with a gradient.
NEARLY_ALL = 0.75
# Least median of the one-sidedness within a tensor, if each rank has a scale of its own, which varies over the steps.
EACH_SIDED = 0.75
# Least shares of tensors: differing; with the same shorter rank; with a factor near the median.
MOST, ONE_SIDE, NEAR = 0.9, 0.95, 0.85
# A tensor shows nothing about the gradients unless its momentum is this many times its weight decay.
ABOVE_DECAY = 4.0
# (least factor, least median cosine, largest factor from the median). The last bound is for a clip with a different
# factor at each step. In measurements, no gradients of different batches had a cosine over 0.5 and this factor.
SURE = ((1.1, 0.97, 1.3), (1.3, 0.93, 1.3), (3.0, 0.5, 2.0))
# Bounds of a scale that all recent steps had. A single lost gradient changes the moments less evenly.
STEADY = ((1.2, 0.99, 1.2), (3.0, 0.5, 2.0))
# The same without step counts: a momentum lost k steps ago is 1 / (1 - 0.9**k) times shorter, at most 10 times, with
# cosines under 0.9 if the factor is over 1.3.
LIKELY = ((1.3, 0.93, 1.3), (12.0, 0.5, 2.0))
# If a rank's momentum contains only weight decay, it is shorter than a lost momentum, in any direction.
DECAY_ALONE = ((12.0, 0.3, 20.0),)


def apply(case: Case) -> Match | None:
    """Match moments with the same direction, but another length on some ranks in nearly all tensors."""
    moments = case.differing_moments()
    if not case.in_step() or len(moments) < MOST * len(case.with_moment()):
        return None
    shares = share_smaller(differing_squares(case))
    if shares:
        return _match_squares(case, moments, shares)
    if not moments or (count_squares(case) and not differing_squares(case)):
        return None  # equal second moments belong to gradients of equal size
    return _match_first_moments(case, moments)


def _match_squares(case: Case, moments: dict[str, TensorDiff], shares: dict[int, float]) -> Match | None:
    """Match second moments whose elements are nearly all smaller, or nearly all larger, on the odd ranks."""
    squares = differing_squares(case)
    is_smaller = all(share >= ONE_SIDED for share in shares.values())
    is_larger = all(share <= 1 - ONE_SIDED for share in shares.values())
    cosine = mean_cosine(moments.values())
    # A gradient with lost elements has smaller second moments in these elements alone.
    if len(squares) < MOST * count_squares(case) or median_share_differing(squares) < NEARLY_ALL:
        return None
    if not (is_smaller or is_larger):
        return _match_unequal_scales(case, moments, squares)
    # The gradients of a single rank are larger than averaged gradients, but have another direction.
    if is_larger and cosine is not None and cosine < ALIKE:
        return None
    # A rank that has lost all gradients since the start has moments of zero, whose length is no factor.
    measurable = [diff for diff in moments.values() if all(norm > 0 for norm in evidence_of(diff).norms.values())]
    sides = _find_odd_ranks(measurable)
    is_steady = _are_scaled(measurable, sides, STEADY)
    if _are_scaled(measurable, sides, SURE):
        summary = _summary(case, measurable, sides)
        ranks = tuple(sides)
    else:
        ranks, others = _name_sides(case, shares, is_smaller=is_smaller)
        side = Text.SMALLER if is_smaller or len(case.group.replicas) == 2 else Text.LARGER
        summary = Text.SCALED(ranks=ranks, others=others, side=side())
    facts = [summary]
    measured = cosines(moments.values())
    if measured:
        facts.append(Text.COSINE(count=len(measured), cosine=median(measured)))
    differing = case.with_followers(case.differing_parameters().values())
    match = _make_match(case, differing, ranks, facts, moments)
    if case.agrees("parameter"):
        # Adam divides by the size of the gradients, so that equal parameters are possible; a changed state is, too.
        return replace(match, certainty="consistent", alternatives=("SYN215",))
    if is_steady:
        return match
    # Lost parts of one gradient make second moments smaller too, and the gradients of one rank alone make them larger.
    return replace(match, certainty="consistent", alternatives=("SYN211",) if is_larger else ())


def _match_unequal_scales(case: Case, moments: dict[str, TensorDiff], squares: list[TensorDiff]) -> Match | None:
    """Match ranks that all have scales of their own, as if each clipped by its local norm."""
    if not _is_each_scaled(case, moments):
        return None
    if median_sidedness(squares) < EACH_SIDED:
        return None
    return _make_unequal_match(case, moments)


def _is_each_scaled(case: Case, moments: dict[str, TensorDiff]) -> bool:
    """Whether all ranks differ, and their first moments have nearly the same direction."""
    cosine = mean_cosine(moments.values())
    differ = all(len(diff.clusters) == len(case.group.ranks) for diff in moments.values())
    return differ and cosine is not None and cosine >= ALIKE


def _make_unequal_match(case: Case, moments: dict[str, TensorDiff]) -> Match:
    """Return the match for ranks that each have a scale of their own."""
    facts: list[Message] = [Text.EACH_SCALED()]
    measured = cosines(moments.values())
    facts.append(Text.COSINE(count=len(measured), cosine=median(measured)))
    covered = case.with_followers(case.differing_parameters().values())
    match = _make_match(case, covered, case.group.ranks, facts, moments)
    return replace(match, certainty="consistent", alternatives=("SYN211",))


def _name_sides(case: Case, shares: dict[int, float], *, is_smaller: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks with scaled gradients, and the others. Of two ranks, the rank with smaller moments is odd."""
    odd = tuple(sorted(shares))
    others = tuple(rank for rank in case.group.ranks if rank not in shares)
    if len(case.group.replicas) == 2 and not is_smaller:
        return others, odd
    return odd, others


def _match_first_moments(case: Case, moments: dict[str, TensorDiff]) -> Match | None:
    """Match first moments with the same direction, but another length on some ranks in nearly all tensors."""
    counting = case.counts_steps()
    if not counting and case.just_began():
        return None
    used = _moments_above_decay(case, moments)
    sides = _find_odd_ranks(used)
    if not _are_scaled(used, sides, SURE if counting else LIKELY):
        used = _moments_above_decay(case, moments, 0.0)
        sides = _find_odd_ranks(used)
        if counting or not _are_scaled(used, sides, DECAY_ALONE):
            is_unequal = not counting and len(case.group.ranks) > 2 and not only_decay(case)
            is_unequal = is_unequal and _is_each_scaled(case, moments)
            return _make_unequal_match(case, moments) if is_unequal else None
    covered = case.with_followers(case.differing_parameters().values())
    facts = [_summary(case, used, sides), Text.COSINE(count=len(used), cosine=median(cosines(used)))]
    if len(used) < len(moments):
        facts.append(Text.MOSTLY_DECAY(count=len(moments) - len(used)))
    if not counting:
        facts.append(Text.UNCOUNTED())
    match = _make_match(case, covered, tuple(sides), facts, moments)
    if counting:
        # Lion has no second moments, and the first moments alone do not tell a factor from lost gradients.
        return replace(match, certainty="consistent", alternatives=("SYN214", "SYN215"))
    return replace(match, cause=Text.CAUSE_UNCOUNTED, certainty="consistent", alternatives=("SYN214", "SYN215"))


def _make_match(
    case: Case,
    covered: tuple[TensorDiff, ...],
    ranks: tuple[int, ...],
    facts: list[Message],
    moments: dict[str, TensorDiff],
) -> Match:
    """Return the match, and state the trend, what follows, and which ranks agree."""
    facts += case.trend_facts("parameter")[1]
    facts += follower_facts(covered, "optimizer")
    facts += case.agreement_facts(list(moments.values()))
    return Match(covered, ranks, facts)


def _summary(case: Case, moments: list[TensorDiff], sides: dict[int, int]) -> Message:
    """State which ranks clipped or scaled their gradients, and by which factors."""
    ranks, counting = tuple(sorted(sides)), case.counts_steps()
    others = tuple(rank for rank in case.group.ranks if rank not in sides)
    ratios = {rank: float(f"{median(_factors(moments, rank, sides[rank])):.3g}") for rank in ranks}
    if len(set(ratios.values())) > 1:
        sentence = Text.CLIPPED_UNEQUALLY if counting else Text.CONSISTENT_UNEQUALLY
        return sentence(ranks=ranks, ratios=ratios, others=others)
    sentence = Text.CLIPPED if counting else Text.CONSISTENT
    return sentence(ranks=ranks, ratio=ratios[ranks[0]], others=others)


def _moments_above_decay(case: Case, moments: dict[str, TensorDiff], times: float = ABOVE_DECAY) -> list[TensorDiff]:
    """Return the moments with norms, except SGD's momenta if they are mostly weight decay on some rank."""
    share, parameters = decay_share(case), case.differing_parameters()
    used = []
    for name, diff in moments.items():
        norms = evidence_of(diff).norms
        if not norms or not all(norms.values()) or diff.numel < 2:
            continue
        of_momentum = name in parameters and diff.name.endswith(".momentum_buffer")
        decay = evidence_of(parameters[name]).norms if of_momentum else {}
        if all(norm > times * share * decay.get(rank, 0.0) for rank, norm in norms.items()):
            used.append(diff)
    return used


def _find_odd_ranks(moments: list[TensorDiff]) -> dict[int, int]:
    """Return the odd ranks, each with a rank of its replica group to compare with.

    Odd ranks are outside the majority. Without a majority they are shorter than the longest rank.
    """
    norms = [(diff, evidence_of(diff).norms) for diff in moments]
    groups = {group for diff, by_rank in norms for group in diff.replica_groups or (tuple(sorted(by_rank)),)}
    sides = {}
    for group in sorted(groups):
        within = [(diff, by_rank) for diff, by_rank in norms if set(group) <= set(by_rank)]
        odd = {rank for diff, _ in within for rank in diff.minority if rank in group}
        if not within or len(group) < 2:
            continue
        if not odd or odd >= set(group):
            middle = {rank: median(math.log(by_rank[rank]) for _, by_rank in within) for rank in group}
            longest = max(group, key=lambda rank: middle[rank])
            odd = {rank for rank in group if middle[rank] < middle[longest]}
        else:
            longest = next(rank for rank in group if rank not in odd)
        sides.update(dict.fromkeys(odd, longest))
    return sides


def _factors(moments: list[TensorDiff], rank: int, other: int) -> list[float]:
    """Return a rank's norms as multiples of another rank's norms."""
    norms = [evidence_of(diff).norms for diff in moments]
    return [by_rank[rank] / by_rank[other] for by_rank in norms if rank in by_rank and other in by_rank]


def _are_scaled(moments: list[TensorDiff], sides: dict[int, int], bounds: Bounds) -> bool:
    """Whether the moments of each odd rank are a multiple of the other rank's moments."""
    measured = cosines(moments)
    return bool(measured and sides) and all(
        _is_scale(_factors(moments, rank, other), median(measured), bounds) for rank, other in sides.items()
    )


def _is_scale(factors: list[float], cosine: float, bounds: Bounds) -> bool:
    """Whether the factors of all tensors are about the same, and not 1."""
    logs = [math.log(factor) for factor in factors]
    middle = median(logs)
    same_side = sum(log * middle > 0 for log in logs) / len(logs)
    return same_side >= ONE_SIDE and any(
        abs(middle) >= math.log(least)
        and cosine >= alike
        and sum(abs(log - middle) <= math.log(width) for log in logs) >= NEAR * len(logs)
        for least, alike, width in bounds
    )
