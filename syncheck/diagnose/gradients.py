"""Queries on parameters, first moments and trends of differences."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import is_weight, owner
from syncheck.evidence.history import difference_ratios, trend_of
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import Message, Sentence
from syncheck.records import FIRST_MOMENTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, TensorDiff, Trend

# SGD's momentum contains the weight decay of unequal parameters: wd / (1 - momentum) times their difference, less in
# the first steps and a little more later, because the difference shrinks. Measured: 0.27 to 1.04 times, in all tensors.
DECAY_ROOM = 1.25
# Kinds of tensors affected by differing parameters, without a cause of their own.
_FOLLOWERS = ("optimizer", *BN_STATISTICS, "buffer", "ema")
# Share of elements. Gradients of different batches change every element of a parameter; damage changes few elements.
TOUCHED = 0.1


class Course(Sentence):
    """How a difference developed over the steps, and which other tensors differ because of it."""

    UNCHANGED = "the difference has not changed since step {step}"
    GREW = "the difference grew {ratio:.1f} times since step {step}"
    CHANGED = "the difference is {ratio:.3g} times as large as at step {step}"
    STATISTICS_TOO = "{count:count running statistic} {count:verb differs|differ} too"
    BUFFERS_TOO = "{count:count buffer} {count:verb differs|differ} too"
    AVERAGES_TOO = "{count:count tensor} of the averaged copy {count:verb differs|differ} too"
    OPTIMIZER_TOO = "{count:count optimizer tensor} {count:verb differs|differ} too"


def in_step(case: Case) -> bool:
    """Whether the ranks took the same number of steps, as far as known. False for local SGD, which differs by design.

    Also False if loss scales differ, because ranks with different scales skip different steps.
    """
    metadata = case.group.evidence.metadata
    if case.group.evidence.stale or (metadata is not None and metadata.averaging) or not case.agrees("optimizer_step"):
        return False
    return not any(diff.counts and diff.kind in ("counter", "scaler") for diff in case.group.values)


def counts_steps(case: Case) -> bool:
    """Whether the optimizer counts its steps, as Adam does, which makes `in_step` a fact instead of an assumption."""
    adam = any(name.endswith(".exp_avg") for name in _compared(case, "optimizer"))
    return adam or case.compared("optimizer_step") > 0


def just_began(case: Case) -> bool:
    """Whether the parameters agreed at all earlier steps, so there is no trend yet.

    A single event, such as a skipped step, then looks like the start of a permanent fault.
    """
    earlier = steps_of(case)[:-1]
    return bool(earlier) and not any(diff.kind == "parameter" for group in earlier for diff in group.tensors)


def agreed_before(case: Case) -> bool:
    """Whether the parameters agreed at some earlier step, so the run started in sync."""
    return any(all(diff.kind != "parameter" for diff in group.tensors) for group in steps_of(case)[:-1])


def steps_of(case: Case) -> tuple[Comparison, ...]:
    """Return the groups of the run up to this group, by step, without files of unknown step."""
    if case.group.step is None:
        return (case.group,)
    return tuple(group for group in case.series if group.step is not None and group.step <= case.group.step)


def with_moment(case: Case) -> frozenset[str]:
    """Return the parameters whose first moments were compared, or the optimizer's ids if names are unknown."""
    moments = (name for name in _compared(case, "optimizer") if _is_first_moment(case, name))
    return frozenset(owner(case, name) for name in moments)


def _is_first_moment(case: Case, name: str) -> bool:
    """Whether an optimizer tensor is a running average of gradients.

    RMSprop's momentum is not: it averages gradients divided by their own size. The momentum of clipped gradients was
    1.4 times longer in measurements, with cosines of 0.91 to 0.97.
    """
    parameter, _, state = name.rpartition(".")
    is_rmsprop = state == "momentum_buffer" and f"{parameter}.square_avg" in case.group.evidence.names
    return state in FIRST_MOMENTS and not is_rmsprop


def trained_parameters(case: Case) -> frozenset[str]:
    """Return the parameters with a first moment, or without optimizer state all possibly trained parameters.

    If the optimizer's parameters are unknown and most tensors are named weight or bias, a tensor with another name
    counts only if it differs.
    """
    parameters = frozenset(_compared(case, "parameter"))
    if optimized := with_moment(case) & parameters:
        return optimized
    candidates = parameters - case.untrained
    weights = frozenset(name for name in candidates if is_weight(name))
    known = case.optimized is not None or 2 * len(weights) <= len(candidates)
    return candidates if known else weights | (candidates & differing_parameters(case).keys())


def differing_parameters(case: Case) -> dict[str, TensorDiff]:
    """Return the differing, unexplained trained parameters by name."""
    untrained = case.untrained
    return {
        diff.name: diff
        for diff in case.of_kind("parameter")
        if diff.status == "different" and diff.name not in untrained
    }


def differing_moments(case: Case) -> dict[str, TensorDiff]:
    """Return the differing, unexplained first moments by parameter."""
    return {
        owner(case, diff.name): diff
        for diff in case.of_kind("optimizer")
        if diff.status == "different" and _is_first_moment(case, diff.name)
    }


def differing_share(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the median share of differing elements, or None if only digests were compared."""
    shares = [diff.mismatched / diff.numel for diff in diffs if diff.mismatched is not None and diff.numel]
    return median(shares) if shares else None


def is_share_below(diffs: Iterable[TensorDiff], least: float) -> bool:
    """Whether a smaller share of the elements than `least` differs. False if the share is unknown."""
    share = differing_share(diffs)
    return share is not None and share < least


def cosines(diffs: Iterable[TensorDiff]) -> list[float]:
    """Return the measured cosines between replicas, without tensors of one element."""
    measured = (diff.evidence.cosine for diff in diffs if diff.evidence is not None and diff.numel > 1)
    return [cosine for cosine in measured if cosine is not None]


def decay_share(case: Case) -> float:
    """Return the ratio of momentum difference to parameter difference explained by SGD's weight decay."""
    settings = case.group.evidence.hyperparameters
    momentum = settings.get("momentum", 1.0)
    return settings.get("weight_decay", 0.0) / (1 - momentum) if 0 <= momentum < 1 else 0.0


def only_decay(case: Case) -> bool:
    """Whether only SGD's momentum differs in the optimizer, by no more than weight decay explains.

    The gradients were equal then, and all differences come from earlier differences of parameters.
    """
    differing = [diff for diff in case.group.tensors if diff.out_of_sync and diff.kind == "optimizer"]
    differences = {
        name: float(diff.max_abs) for name, diff in differing_parameters(case).items() if diff.max_abs is not None
    }
    share = decay_share(case)
    if not differing or not differences or not share:
        return False
    largest = max(differences.values())
    return all(
        diff.name.endswith(".momentum_buffer")
        and diff.max_abs is not None
        and float(diff.max_abs) <= DECAY_ROOM * share * differences.get(owner(case, diff.name), largest)
        for diff in differing
    )


def trend_facts(case: Case, *kinds: str, names: Collection[str] = ()) -> tuple[Trend | None, tuple[Message, ...]]:
    """Return and state how the difference of tensors developed since the first step at which they differed.

    kinds, names: which tensors. Returns (None, ()) without a series.
    """
    groups = steps_of(case)
    steps = [[d for d in g.tensors if d.out_of_sync and (d.kind in kinds or d.name in names)] for g in groups]
    first = next((i for i, differing in enumerate(steps) if differing), len(steps))
    trend = trend_of(steps[first:])
    if trend is None:
        return None, ()
    step, ratio = groups[first].step, median(difference_ratios(steps[first], steps[-1]))
    if trend == "constant":
        return trend, (Course.UNCHANGED(step=step),)
    sentence = Course.GREW if trend == "growing" else Course.CHANGED
    return trend, (sentence(step=step, ratio=ratio),)


def course(case: Case, *kinds: str, names: Collection[str] = ()) -> tuple[Trend | None, str]:
    """Return `trend_facts` as text after a semicolon."""
    trend, facts = trend_facts(case, *kinds, names=names)
    return trend, "".join(f"; {fact}" for fact in facts)


def with_followers(case: Case, differing: Iterable[TensorDiff]) -> tuple[TensorDiff, ...]:
    """Add the affected optimizer state, running statistics, buffers and averaged copies to the differences."""
    names = {diff.name for diff in differing} | case.untrained
    return tuple(diff for diff in case.tensors if diff.name in names or diff.kind in _FOLLOWERS)


def follower_facts(covered: Iterable[TensorDiff], *reported: str) -> tuple[Message, ...]:
    """State how many other tensors a finding covers. reported: kinds already in the evidence."""
    sentences = {
        "bn_mean": Course.STATISTICS_TOO,
        "bn_var": Course.STATISTICS_TOO,
        "buffer": Course.BUFFERS_TOO,
        "ema": Course.AVERAGES_TOO,
        "optimizer": Course.OPTIMIZER_TOO,
    }
    counts = Counter(sentences[diff.kind] for diff in covered if diff.kind in sentences and diff.kind not in reported)
    return tuple(sentence(count=count) for sentence, count in counts.items())


def _compared(case: Case, kind: str) -> list[str]:
    skipped = {diff.name for diff in case.group.tensors if diff.status == "not_compared"}
    return [name for name, own_kind in case.group.evidence.names.items() if own_kind == kind and name not in skipped]
