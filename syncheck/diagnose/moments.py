"""What the optimizer's moments show about the gradients of each rank.

A first moment is a running average of gradients, over about 10 steps with the usual settings. A second moment is a
running average of their squares, over about 1,000 steps, so it remembers an event much longer. If a rank scales its
gradients by a factor below 1, nearly all elements of its second moments are smaller. If it uses other gradients, about
half of the elements are smaller.

Means over tensors are weighted by the elements, so that a bias of two numbers does not decide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import evidence_of, largest_norm, median_or, share_of
from syncheck.diagnose.optimizer_names import is_gradient_average, is_momentum, is_square
from syncheck.diagnose.selection import last_part, out_of_sync
from syncheck.findings import MEASURED

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


class _WeightedMean:
    """A mean of numbers with weights."""

    def __init__(self) -> None:
        """Begin without any number."""
        self._total = 0.0
        self._weight = 0.0

    def add(self, number: float, weight: float) -> None:
        """Add a number to the mean."""
        self._total += number * weight
        self._weight += weight

    def value(self) -> float | None:
        """Return the mean; None without any weight."""
        return self._total / self._weight if self._weight else None


def mean_cosine(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the mean of the cosines between replicas, weighted by the elements; None without any cosine."""
    mean = _WeightedMean()
    for diff in diffs:
        cosine = evidence_of(diff).cosine
        if cosine is not None:
            weight = _measured_elements(diff)
            mean.add(cosine, weight)
    return mean.value()


def count_squares(case: Case) -> int:
    """Return the number of second moments, including equal second moments."""
    return sum(map(is_square, case.names_of("optimizer")))


def share_smaller(diffs: Iterable[TensorDiff]) -> dict[int, float]:
    """Return the share of the elements of second moments that are smaller than in the majority, by rank.

    The ranks are those outside the majority. Without a majority, the shares are compared with the first rank. A share
    near 1 or 0 means that the gradients were scaled.
    """
    means: dict[int, _WeightedMean] = defaultdict(_WeightedMean)
    for diff in diffs:
        # Few elements differ in an embedding with few tokens per batch, and the rest does not count.
        weight = _measured_elements(diff) * min(1.0, share_of(diff))
        for rank, share in evidence_of(diff).smaller.items():
            means[rank].add(share, weight)
    shares = {}
    for rank, mean in means.items():
        value = mean.value()
        if value is not None:
            shares[rank] = value
    return shares


def median_sidedness(diffs: Iterable[TensorDiff]) -> float:
    """Return how one-sided the differences of second moments are within a tensor, 0.5 to 1; 1 without tensors.

    The median over tensors: in an embedding, the rows of each batch may be on another side.
    """
    sides = []
    for diff in diffs:
        for share in evidence_of(diff).smaller.values():
            larger_share = max(share, 1 - share)
            sides.append(larger_share)
    return median_or(sides, 1.0)


def _measured_elements(diff: TensorDiff) -> int:
    """Return the number of measured elements."""
    return min(diff.numel, MEASURED)


def median_share_differing(diffs: Iterable[TensorDiff]) -> float:
    """Return the median share of the elements that differ; 0 without tensors."""
    shares = [share_of(diff) for diff in diffs if diff.numel]
    return median_or(shares, 0.0)


def decay_share(case: Case) -> float:
    """Return the ratio of momentum difference to parameter difference explained by SGD's weight decay."""
    settings = case.group.evidence.hyperparameters
    decay = settings.get("weight_decay", 0.0)
    momentum = settings.get("momentum", 1.0)
    return decay / (1 - momentum) if 0 <= momentum < 1 else 0.0


def only_decay(case: Case) -> bool:
    """Whether the moments differ by no more than the weight decay of unequal parameters explains.

    The gradients were equal then, and all differences come from earlier differences of parameters. Adam adds the decay
    to the gradients, and AdamW does not.
    """
    # The first moments show the size of the difference, which squares do not.
    averages = [diff for diff in out_of_sync(case.group, "optimizer") if not is_square(diff.name)]
    if not averages or not case.differing_parameters():
        return False
    shares = {
        "momentum_buffer": decay_share(case),
        "exp_avg": _adam_decay(case),
    }
    sizes = _ParameterSizes(case)
    unexplained = []
    for diff in averages:
        # Decay has no known effect on the states of other optimizers.
        share = shares.get(last_part(diff.name), 0.0)
        if not sizes.explain(diff, share):
            unexplained.append(diff)
    return not unexplained


class _DecayBounds(NamedTuple):
    """Bounds of what weight decay within the gradients adds to the difference of a moment."""

    share: float
    """As a multiple of the difference of the parameter."""
    of_norm: float
    """As a multiple of the norm of the parameter."""


def unexplained_by_decay(case: Case, diffs: Iterable[TensorDiff], decay: float = 0.0) -> list[TensorDiff]:
    """Return the averages of gradients that differ by more than weight decay within the gradients explains.

    decay: the difference of the weight decay between the ranks. Squares are explained by any decay.
    """
    sizes = _ParameterSizes(case)
    of_sgd = _bounds_of_momentum(case, decay)
    of_adam = _DecayBounds(share=_adam_decay(case), of_norm=decay)
    unexplained = []
    for diff in diffs:
        bounds = of_sgd if is_momentum(diff.name) else of_adam
        is_explained = bool(bounds.share or decay)
        if is_gradient_average(diff.name):
            is_explained = sizes.explain(diff, bounds.share, bounds.of_norm)
        if not is_explained:
            unexplained.append(diff)
    return unexplained


def _bounds_of_momentum(case: Case, decay: float) -> _DecayBounds:
    """Return the bounds for SGD's momentum, which sums up the decay of many steps."""
    settings = case.group.evidence.hyperparameters
    momentum = settings.get("momentum", 0.0)
    length = 1 / (1 - momentum) if 0 <= momentum < 1 else 1.0
    share = decay_share(case)
    # Only the first parameter group is known, which often has no decay, unlike the others.
    if not settings.get("weight_decay"):
        share = max(share, USUAL_DECAY * length)
    return _DecayBounds(
        share=max(share, 0.0),
        of_norm=decay * length,
    )


class _ParameterSizes:
    """The differences and norms of the differing parameters."""

    def __init__(self, case: Case) -> None:
        """Read the differences of the parameters."""
        self._case = case
        self._differences: dict[str, float] = {}
        self._norms: dict[str, float] = {}
        for name, diff in case.differing_parameters().items():
            self._norms[name] = largest_norm(diff, math.inf)
            if diff.max_abs is not None:
                self._differences[name] = float(diff.max_abs)
        self._largest = max(self._differences.values(), default=None)

    def explain(self, diff: TensorDiff, share: float, of_norm: float = 0.0) -> bool:
        """Whether a first moment differs by at most this share of the parameter's difference, and a part of its norm.

        of_norm: the part of the norm.
        """
        if diff.max_abs is None or self._largest is None:
            return False
        owner = self._case.owner_of(diff.name)
        difference = self._differences.get(owner, self._largest)
        explained = share * difference
        if of_norm:
            # No element is larger than the norm. Without a norm, nothing bounds the effect of another decay.
            norm = self._norms.get(owner, 0.0)
            explained += of_norm * norm
        return float(diff.max_abs) <= DECAY_ROOM * explained


def _adam_decay(case: Case) -> float:
    """Return the weight decay that Adam adds to the gradients; 0 for AdamW."""
    settings = case.group.evidence.hyperparameters
    is_decoupled = bool(settings.get("decoupled_weight_decay"))
    return 0.0 if is_decoupled else settings.get("weight_decay", 0.0)
