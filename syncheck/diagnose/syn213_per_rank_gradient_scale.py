"""The gradients of a rank have the others' direction and another length: clipped or scaled on some ranks only.

Signature: the optimizer's first moments (Adam's exp_avg, SGD's momentum_buffer) differ, point the same way, and in
nearly all tensors the same rank has the shorter ones, by about one factor. Measured on averaged gradients that one
rank clips, 2 to 8 ranks, 3 to 600 steps: the same rank is the shorter in every tensor; the factor is within 1.3 of its
median in 85 % of the tensors or more; the median cosine is 0.94 to 0.999. Late in training, when each step is clipped
by another factor, these are 2 and 0.85. Gradients that were not averaged (SYN211) scatter around a factor of 1, with
cosines of -0.4 to 0.88.

With SGD the momentum holds the weight decay as well, which is not clipped: tensors whose momentum is less than four
times what decay puts there, wd / (1 - momentum) times the parameter's norm, are left out; of resnet8's 23 that was 16.
Where that leaves none, a rank whose momentum is 12 times shorter in nearly all tensors holds little but decay.

Cause: a clip, or a loss scale, that depends on the rank: the norm of a local shard, a clip under `if rank == 0`, a
config that is not the same everywhere, a loss divided by the local batch. It acts after the average, so it makes the
ranks unequal. Adam hides it well, for its steps do not depend on the gradient's length.

Fix: compute the norm from the averaged gradient on every rank, and clip with one number:
`torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` after `backward()`, on all ranks alike.

Incidents: deepspeedai/DeepSpeed#1801 (BLOOM-176B: clipped on one tensor-parallel rank only, for two weeks),
pytorch/torchtitan#766, pytorch/pytorch#170862, NVIDIA-NeMo/RL#3788.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted
from syncheck.diagnose.gradients import (
    cosines,
    counts_steps,
    course,
    decay_share,
    followers_text,
    in_step,
    just_began,
    moments_apart,
    parameters_apart,
    with_followers,
    with_moment,
)
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

    Bounds = tuple[tuple[float, float, float], ...]

CODE = "SYN213"
SLUG = "per-rank-gradient-scale"
SEVERITY: Severity = "error"
CAUSE = "The averaged gradients are clipped or scaled by another factor on some ranks than on the others."
FIX = (
    "Clip after backward(), with one number on every rank: clip_grad_norm_(model.parameters(), max_norm). "
    "No clip, loss scale or division may depend on the rank, its own loss or its own batch."
)

UNCOUNTED = (
    "The averaged gradients are clipped or scaled by another factor on some ranks than on the others. Or a rank "
    "skipped a step or lost its momentum: without step counters these look alike."
)

# Shares of tensors: which differ at all; in which the same rank is the shorter; whose factor is near the median.
MOST, ONE_SIDE, NEAR = 0.9, 0.95, 0.85
# A tensor whose momentum is not this many times what weight decay puts there tells nothing of the gradients.
ABOVE_DECAY = 4.0
# (least factor, least median cosine, largest factor from the median). The second is for a clip by a factor of each
# step's own; no gradients of unequal batches measured had a cosine over 0.5 and one rank so much shorter.
SURE = ((1.1, 0.97, 1.3), (1.3, 0.93, 1.3), (3.0, 0.5, 2.0))
# The same where steps are not counted: a momentum that was lost k steps ago is 1 / (1 - 0.9**k) times shorter, 10 at
# the most, with cosines under 0.9 where the factor is over 1.3.
LIKELY = ((1.3, 0.93, 1.3), (12.0, 0.5, 2.0))
# Where weight decay is all that a rank's momentum holds: shorter than a lost one can be, whatever its direction.
DECAY_ALONE = ((12.0, 0.3, 20.0),)


def apply(case: Case) -> Match | None:
    """Fit first moments of one direction, of which a rank has the shorter or longer ones nearly everywhere."""
    apart = moments_apart(case)
    total = len(with_moment(case))
    if not apart or len(apart) < MOST * total or not in_step(case):
        return None
    counting = counts_steps(case)
    if not counting and just_began(case):
        return None
    telling = _above_decay(case, apart)
    sides = _sides(telling)
    if not _scaled(telling, sides, SURE if counting else LIKELY):
        telling = _above_decay(case, apart, 0.0)
        sides = _sides(telling)
        if counting or not _scaled(telling, sides, DECAY_ALONE):
            return None
    found, odd = cosines(telling), tuple(sorted(sides))
    said = ", ".join(f"{_times(median(_factors(telling, rank, sides[rank])))} on rank {rank}" for rank in odd[:8])
    others = [rank for rank in case.group.ranks if rank not in sides]
    left_out = (
        f" ({len(apart) - len(telling)} that hold mostly weight decay aside)" if len(telling) < len(apart) else ""
    )
    text = (
        f"the first moments of {counted(len(telling), 'parameter')}{left_out} point the same way, median cosine "
        f"{median(found):.3f}, and are {said} as on {ranks_text(others)}"
    )
    if not counting:
        text += (
            ": consistent with gradients that are clipped or scaled (steps are not counted: one that was skipped, or a "
            "momentum that was lost, looks alike)"
        )
    covered = with_followers(case, parameters_apart(case).values())
    text += course(case, "parameter")[1] + followers_text(covered, "parameter", "optimizer")
    text += agreement_text(list(apart.values()), case.group)
    return Match(covered, odd, text, cause="" if counting else UNCOUNTED)


def _above_decay(case: Case, apart: dict[str, TensorDiff], times: float = ABOVE_DECAY) -> list[TensorDiff]:
    """Return the moments that have norms, without those of SGD that are mostly weight decay on some rank."""
    share, parameters = decay_share(case), parameters_apart(case)
    found = []
    for name, diff in apart.items():
        if diff.evidence is None or not diff.evidence.norms or not all(diff.evidence.norms.values()) or diff.numel < 2:
            continue
        weight = parameters[name].evidence if name in parameters else None
        decay = weight.norms if weight is not None and diff.name.endswith(".momentum_buffer") else {}
        if all(norm > times * share * decay.get(rank, 0.0) for rank, norm in diff.evidence.norms.items()):
            found.append(diff)
    return found


def _sides(moments: list[TensorDiff]) -> dict[int, int]:
    """Return the odd ranks, each with one to compare it with, within the sets that ought to hold the same.

    By the majority where there is one; else those that are shorter, with the longest.
    """
    norms = [(diff, diff.evidence.norms) for diff in moments if diff.evidence is not None]
    groups = {group for diff, of in norms for group in diff.replica_groups or (tuple(sorted(of)),)}
    found = {}
    for group in sorted(groups):
        within = [(diff, of) for diff, of in norms if set(group) <= set(of)]
        odd = {rank for diff, _ in within for rank in diff.minority if rank in group}
        if not within or len(group) < 2:
            continue
        if not odd or odd >= set(group):
            middle = {rank: median(math.log(of[rank]) for _, of in within) for rank in group}
            longest = max(group, key=lambda rank: middle[rank])
            odd = {rank for rank in group if middle[rank] < middle[longest]}
        else:
            longest = next(rank for rank in group if rank not in odd)
        found.update(dict.fromkeys(odd, longest))
    return found


def _factors(moments: list[TensorDiff], rank: int, other: int) -> list[float]:
    """Return a rank's norms as multiples of another's."""
    norms = [diff.evidence.norms for diff in moments if diff.evidence is not None]
    return [of[rank] / of[other] for of in norms if rank in of and other in of]


def _scaled(moments: list[TensorDiff], sides: dict[int, int], bounds: Bounds) -> bool:
    """Whether the moments of each odd rank are those of its other, by one factor each."""
    found = cosines(moments)
    return bool(found and sides) and all(
        _is_scale(_factors(moments, rank, other), median(found), bounds) for rank, other in sides.items()
    )


def _is_scale(factors: list[float], cosine: float, bounds: Bounds) -> bool:
    """Whether factors of all tensors are one factor other than 1, to the bounds."""
    logs = [math.log(factor) for factor in factors]
    middle = median(logs)
    same_side = sum(log * middle > 0 for log in logs) / len(logs)
    return same_side >= ONE_SIDE and any(
        abs(middle) >= math.log(least)
        and cosine >= alike
        and sum(abs(log - middle) <= math.log(width) for log in logs) >= NEAR * len(logs)
        for least, alike, width in bounds
    )


def _times(factor: float) -> str:
    return f"{factor:.3g} times as long"
