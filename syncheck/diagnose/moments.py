"""What the optimizer's moments show about the gradients of each rank.

A first moment is a running average of gradients, over about 10 steps with the usual settings. A second moment is a
running average of their squares, over about 1,000 steps, so it remembers an event much longer. If a rank scales its
gradients by a factor below 1, nearly all elements of its second moments are smaller. If it uses other gradients, about
half of the elements are smaller.

Means over tensors are weighted by the elements, so that a bias of two numbers does not decide.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import evidence_of
from syncheck.findings import FIRST_MOMENTS, MEASURED, SECOND_MOMENTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

# SGD's momentum contains the weight decay of unequal parameters: wd / (1 - momentum) times their difference, less in
# the first steps and a little more later, because the difference shrinks. Measured: 0.27 to 1.04 times, in all tensors.
DECAY_ROOM = 1.25
# SGD's usual weight decay.
USUAL_DECAY = 5e-4
# Mean cosine of parameters that started with equal values. Different initial values have a cosine near 0.
COMMON_START = 0.5
# Bounds of the share of smaller second moments if all ranks have gradients of their own.
BOTH_SIDES = (0.35, 0.65)


def mean_cosine(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the mean of the cosines between replicas, weighted by the elements; None without any cosine."""
    total = elements = 0.0
    for diff in diffs:
        cosine = evidence_of(diff).cosine
        if cosine is not None:
            total += cosine * _weight(diff)
            elements += _weight(diff)
    return total / elements if elements else None


def differing_squares(case: Case) -> list[TensorDiff]:
    """Return the uncovered, differing second moments."""
    return [diff for diff in case.differing("optimizer") if _is_square(diff.name)]


def count_squares(case: Case) -> int:
    """Return the number of second moments, including equal second moments."""
    return sum(map(_is_square, case.names_of("optimizer")))


def _is_square(name: str) -> bool:
    return name.rpartition(".")[2] in SECOND_MOMENTS


def share_smaller(diffs: Iterable[TensorDiff]) -> dict[int, float]:
    """Return the share of the elements of second moments that are smaller than in the majority, by odd rank.

    Without a majority, smaller than on the first rank. A share near 1 or 0 means that the gradients were scaled.
    """
    totals: dict[int, float] = {}
    elements: dict[int, float] = {}
    for diff in diffs:
        # Few elements differ in an embedding with few tokens per batch, and the rest does not count.
        weight = _weight(diff) * min(1.0, (diff.mismatched or 0) / diff.numel)
        for rank, share in evidence_of(diff).smaller.items():
            totals[rank] = totals.get(rank, 0.0) + share * weight
            elements[rank] = elements.get(rank, 0.0) + weight
    return {rank: total / elements[rank] for rank, total in totals.items() if elements[rank]}


def median_sidedness(diffs: Iterable[TensorDiff]) -> float:
    """Return how one-sided the differences of second moments are within a tensor, 0.5 to 1; 1 without tensors.

    The median over tensors: in an embedding, the rows of each batch may be on another side.
    """
    sides = [max(share, 1 - share) for diff in diffs for share in evidence_of(diff).smaller.values()]
    return median(sides) if sides else 1.0


def median_share_differing(diffs: Iterable[TensorDiff]) -> float:
    """Return the median share of the elements that differ; 0 without tensors."""
    shares = [(diff.mismatched or 0) / diff.numel for diff in diffs if diff.numel]
    return median(shares) if shares else 0.0


def _weight(diff: TensorDiff) -> int:
    """Return the number of measured elements."""
    return min(diff.numel, MEASURED)


def decay_share(case: Case) -> float:
    """Return the ratio of momentum difference to parameter difference explained by SGD's weight decay."""
    settings = case.group.evidence.hyperparameters
    momentum = settings.get("momentum", 1.0)
    return settings.get("weight_decay", 0.0) / (1 - momentum) if 0 <= momentum < 1 else 0.0


def only_decay(case: Case) -> bool:
    """Whether the moments differ by no more than the weight decay of unequal parameters explains.

    The gradients were equal then, and all differences come from earlier differences of parameters. Adam adds the decay
    to the gradients, and AdamW does not.
    """
    differing = [diff for diff in case.group.tensors if diff.out_of_sync and diff.kind == "optimizer"]
    # The first moments show the size of the difference, which squares do not.
    averages = [diff for diff in differing if not _is_square(diff.name)]
    if not averages or not case.differing_parameters():
        return False
    shares = {"momentum_buffer": decay_share(case), "exp_avg": _adam_decay(case)}
    sizes = _Sizes(case)
    return all(sizes.explain(diff, shares.get(diff.name.rpartition(".")[2], 0.0)) for diff in averages)


def unexplained_by_decay(case: Case, diffs: Iterable[TensorDiff], decay: float = 0.0) -> list[TensorDiff]:
    """Return the averages of gradients that differ by more than weight decay within the gradients explains.

    decay: the difference of the weight decay between the ranks. Squares are explained by any decay.
    """
    sizes, settings = _Sizes(case), case.group.evidence.hyperparameters
    momentum = settings.get("momentum", 0.0)
    length = 1 / (1 - momentum) if 0 <= momentum < 1 else 1.0
    # Only the first parameter group is known, which often has no decay, unlike the others.
    of_sgd = max(decay_share(case), 0.0 if settings.get("weight_decay") else USUAL_DECAY * length)
    unexplained = []
    for diff in diffs:
        state = diff.name.rpartition(".")[2]
        is_sgd = state == "momentum_buffer"
        share = of_sgd if is_sgd else _adam_decay(case)
        if state not in FIRST_MOMENTS:
            is_explained = bool(share or decay)
        else:
            is_explained = sizes.explain(diff, share, decay * length if is_sgd else decay)
        if not is_explained:
            unexplained.append(diff)
    return unexplained


class _Sizes:
    """The differences and norms of the differing parameters."""

    def __init__(self, case: Case) -> None:
        """Read the differences of the parameters."""
        self.case = case
        parameters = case.differing_parameters()
        self.differences = {name: float(diff.max_abs) for name, diff in parameters.items() if diff.max_abs is not None}
        self.norms = {
            name: max(evidence_of(diff).norms.values(), default=math.inf) for name, diff in parameters.items()
        }
        self.largest = max(self.differences.values(), default=None)

    def explain(self, diff: TensorDiff, share: float, decay: float = 0.0) -> bool:
        """Whether a first moment differs by at most this share of the parameter's difference, and a part of its norm.

        decay: the part of the norm.
        """
        if diff.max_abs is None or self.largest is None:
            return False
        owner = self.case.owner_of(diff.name)
        explained = share * self.differences.get(owner, self.largest)
        if decay:
            # No element is larger than the norm. Without a norm, nothing bounds the effect of another decay.
            explained += decay * self.norms.get(owner, 0.0)
        return float(diff.max_abs) <= DECAY_ROOM * explained


def _adam_decay(case: Case) -> float:
    """Return the weight decay that Adam adds to the gradients; 0 for AdamW."""
    settings = case.group.evidence.hyperparameters
    return 0.0 if settings.get("decoupled_weight_decay") else settings.get("weight_decay", 0.0)
