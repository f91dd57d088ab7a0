"""What the rules on gradients and on the start have in common: who differs, in which direction, since when."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import counted, differ, is_weight, owner
from syncheck.evidence.history import difference_ratios, trend_of
from syncheck.kinds import BN_STATISTICS
from syncheck.records import FIRST_MOMENTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, TensorDiff, Trend

# A momentum of SGD holds the weight decay of unequal parameters: wd / (1 - momentum) times their gap, less at first,
# and a little more later, since the gap shrinks. Measured: 0.27 to 1.04 times that, the same in all tensors.
DECAY_ROOM = 1.25
# What follows from parameters that differ, and needs no cause of its own.
_FOLLOWERS = ("optimizer", *BN_STATISTICS, "buffer", "ema")
# Share of elements. Gradients of unequal batches touch every element of what they train; damage touches few.
TOUCHED = 0.1


def in_step(case: Case) -> bool:
    """Whether the ranks made equally many updates, as far as the files tell; local SGD differs by design.

    Loss scales that differ found other overflows, and left out other steps.
    """
    metadata = case.group.evidence.metadata
    if case.group.evidence.stale or (metadata is not None and metadata.averaging) or not case.agrees("optimizer_step"):
        return False
    return not any(diff.counts and diff.kind in ("counter", "scaler") for diff in case.group.values)


def counts_steps(case: Case) -> bool:
    """Whether the optimizer counts its steps, as Adam does, so that `in_step` is known and not only assumed."""
    adam = any(name.endswith(".exp_avg") for name in _compared(case, "optimizer"))
    return adam or case.compared("optimizer_step") > 0


def just_began(case: Case) -> bool:
    """Whether the parameters agreed at all earlier steps that were compared, so that no trend shows yet.

    A single event, such as a step that was left out, looks like the start of a lasting fault then.
    """
    earlier = steps_of(case)[:-1]
    return bool(earlier) and not any(diff.kind == "parameter" for group in earlier for diff in group.tensors)


def agreed_before(case: Case) -> bool:
    """Whether the parameters agreed at some step that was compared: then the cause came later than the start."""
    return any(all(diff.kind != "parameter" for diff in group.tensors) for group in steps_of(case)[:-1])


def steps_of(case: Case) -> tuple[Comparison, ...]:
    """Return the groups of the run up to this one, by step; files that tell no step have no place among them."""
    if case.group.step is None:
        return (case.group,)
    return tuple(group for group in case.series if group.step is not None and group.step <= case.group.step)


def with_moment(case: Case) -> frozenset[str]:
    """The parameters, or the optimizer's ids where names are not known, whose first moments were compared."""
    moments = (name for name in _compared(case, "optimizer") if _is_first_moment(case, name))
    return frozenset(owner(case, name) for name in moments)


def _is_first_moment(case: Case, name: str) -> bool:
    """Whether an optimizer's tensor averages gradients.

    RMSprop's momentum averages gradients over their own size, which says nothing of their length: clipped ones came out
    longer (measured: 1.4 times, with cosines of 0.91 to 0.97).
    """
    of, _, state = name.rpartition(".")
    return state in FIRST_MOMENTS and not (
        state == "momentum_buffer" and f"{of}.square_avg" in case.group.evidence.names
    )


def trained(case: Case) -> frozenset[str]:
    """The parameters that are trained, as far as known: those with a first moment, else all that may be.

    Where nothing tells, tensors that agree count only if they are called weight or bias, provided that most are.
    """
    parameters = frozenset(_compared(case, "parameter"))
    if found := with_moment(case) & parameters:
        return found
    others = parameters - case.untrained
    usual = frozenset(name for name in others if is_weight(name))
    known = case.optimized is not None or 2 * len(usual) <= len(others)
    return others if known else usual | (others & parameters_apart(case).keys())


def parameters_apart(case: Case) -> dict[str, TensorDiff]:
    """Return the differing parameters that are not explained yet, by name, without those that are not trained."""
    untrained = case.untrained
    return {
        diff.name: diff
        for diff in case.of_kind("parameter")
        if diff.status == "different" and diff.name not in untrained
    }


def moments_apart(case: Case) -> dict[str, TensorDiff]:
    """Return the differing first moments that are not explained yet, by the parameter that they are of."""
    return {
        owner(case, diff.name): diff
        for diff in case.of_kind("optimizer")
        if diff.status == "different" and _is_first_moment(case, diff.name)
    }


def touched(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the median share of elements that differ; None where only digests were compared."""
    shares = [diff.mismatched / diff.numel for diff in diffs if diff.mismatched is not None and diff.numel]
    return median(shares) if shares else None


def touched_less(diffs: Iterable[TensorDiff], least: float) -> bool:
    """Whether it is known that a smaller share of the elements than `least` differs."""
    share = touched(diffs)
    return share is not None and share < least


def cosines(diffs: Iterable[TensorDiff]) -> list[float]:
    """Return the cosines between replicas, where they were taken; a single number has no direction."""
    found = (diff.evidence.cosine for diff in diffs if diff.evidence is not None and diff.numel > 1)
    return [cosine for cosine in found if cosine is not None]


def decay_share(case: Case) -> float:
    """Return the most that SGD's momentum differs for each unit of the parameters' gap, by weight decay alone."""
    settings = case.group.evidence.hyperparameters
    momentum = settings.get("momentum", 1.0)
    return settings.get("weight_decay", 0.0) / (1 - momentum) if 0 <= momentum < 1 else 0.0


def only_decay(case: Case) -> bool:
    """Whether all that is apart of the optimizer is SGD's momentum, and weight decay alone explains it.

    Then the gradients were equal, and all differences come from parameters that were unequal before.
    """
    apart = [diff for diff in case.group.tensors if diff.out_of_sync and diff.kind == "optimizer"]
    gaps = {name: float(diff.max_abs) for name, diff in parameters_apart(case).items() if diff.max_abs is not None}
    share = decay_share(case)
    if not apart or not gaps or not share:
        return False
    widest = max(gaps.values())
    return all(
        diff.name.endswith(".momentum_buffer")
        and diff.max_abs is not None
        and float(diff.max_abs) <= DECAY_ROOM * share * gaps.get(owner(case, diff.name), widest)
        for diff in apart
    )


def course(case: Case, *kinds: str, names: Collection[str] = ()) -> tuple[Trend | None, str]:
    """Say what the gaps of these kinds or names did over the series, since they are there; '' if it does not show."""
    groups = steps_of(case)
    steps = [[d for d in g.tensors if d.out_of_sync and (d.kind in kinds or d.name in names)] for g in groups]
    first = next((i for i, apart in enumerate(steps) if apart), len(steps))
    trend = trend_of(steps[first:])
    if trend is None:
        return None, ""
    ratio = median(difference_ratios(steps[first], steps[-1]))
    text = {"constant": "has not changed since", "growing": f"grew {ratio:.1f} times since"}
    since = text.get(trend, f"is {ratio:.3g} times that of")
    return trend, f"; the gap {since} step {groups[first].step}"


def with_followers(case: Case, named: Iterable[TensorDiff]) -> tuple[TensorDiff, ...]:
    """Return these and what follows from them: optimizer state, running statistics, buffers, an averaged copy."""
    names = {diff.name for diff in named}
    names |= case.untrained
    return tuple(diff for diff in case.tensors if diff.name in names or diff.kind in _FOLLOWERS)


def followers_text(covered: Iterable[TensorDiff], *told: str) -> str:
    """Name what is covered besides the kinds that the evidence has told of: '; 14 running statistics differ too'."""
    words = {
        "bn_mean": "running statistic",
        "bn_var": "running statistic",
        "buffer": "buffer",
        "ema": "tensor of the averaged copy|tensors of the averaged copy",
        "optimizer": "tensor of the optimizer|tensors of the optimizer",
    }
    numbers = Counter(words[diff.kind] for diff in covered if diff.kind in words and diff.kind not in told)
    listed = [counted(number, *word.split("|")) for word, number in numbers.items()]
    return f"; {', '.join(listed)} {differ(numbers.total())} too" if listed else ""


def _compared(case: Case, kind: str) -> list[str]:
    unseen = {diff.name for diff in case.group.tensors if diff.status == "not_compared"}
    return [name for name, of in case.group.evidence.names.items() if of == kind and name not in unseen]
