"""Which differences of parameters and optimizer state unequal settings explain.

Averaged gradients stay equal, whatever the settings are. So the averages of gradients that an optimizer keeps stay
equal too if only the size of a step differs, by the learning rate, eps or a weight decay outside the gradients. A
larger difference has another cause beside the settings.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import cosines, evidence_of
from syncheck.diagnose.moments import unexplained_by_decay
from syncheck.diagnose.syn240_rounding_only import is_rounding
from syncheck.findings import MEASURED
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff, ValueDiff

# Median cosine of first moments above which gradients count as averaged, as in SYN211.
ALIKE = 0.9
# Settings with an effect on the averages of gradients. Weight decay has one if it is a part of the gradients.
_OF_MOMENTS = frozenset("betas momentum dampening nesterov alpha params (positions) maximize rho requires_grad".split())
# Settings that choose an implementation. The implementations differ in the rounding only.
_OF_ROUNDING = frozenset("foreach fused capturable differentiable".split())
# Settings with an effect on the size of a step alone. A learning rate is in the state of a scheduler too.
_OF_STEPS = frozenset("lr learning_rate eps initial_lr max_lr min_lr _last_lr base_lrs lr_decay".split())
# The states of optimizers that depend on nothing but gradients.
_OF_GRADIENTS = frozenset("exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer square_avg grad_avg sum".split())
# Adafactor of fairseq and Transformers averages its updates, which contain the learning rate, in `exp_avg`.
_OF_UPDATES = "exp_avg_sq_row"

# Relative difference of settings up to which a bound is known. A schedule may have been further apart before.
_TINY = 0.01
# A parameter that follows a relatively larger learning rate moves farther in the same proportion, and weight decay
# shrinks a parameter in proportion. Elements move about as far as their size, which is a few times the root mean
# square, and schedules may have been further apart before.
_RELATIVE_ROOM = 100
# An element moves by at most (1 - beta1) / sqrt(1 - beta2) learning rates per step of Adam, which is 3 with the usual
# settings, and by about one in most steps.
_ABSOLUTE_ROOM = 10


def choose_only_rounding(acting: Sequence[ValueDiff]) -> bool:
    """Whether the settings choose implementations, which change nothing but rounding."""
    return bool(acting) and _keys(acting) <= _OF_ROUNDING


def find_explained(
    case: Case, acting: Sequence[ValueDiff], others: Sequence[ValueDiff]
) -> tuple[tuple[TensorDiff, ...], tuple[TensorDiff, ...]]:
    """Return the trained tensors that differ only between ranks with different settings: explained, unexplained.

    acting: the settings that change the next step. others: all settings that differ.
    """
    equal = [set(ranks) for ranks in group_ranks(_settings_by_rank(case, acting)).values()]
    trained = case.differing("parameter", "optimizer", "ema")
    between = tuple(diff for diff in trained if not any(_differs_within(diff, ranks) for ranks in equal))
    keys = _keys(acting)
    if keys <= _OF_ROUNDING:
        return (between, ()) if all(map(is_rounding, between)) else ((), between)
    if not _may_explain_moments(case, keys):
        return (), between
    unexplained = _find_unexplained(case, keys, acting, others, between)
    owners = {_owner(case, diff) for diff in between if diff.kind != "ema"}
    # Averaged copies follow the parameters.
    if not unexplained:
        return between, ()
    # A fault of most parameters is left to its own rule as a whole.
    if 2 * len(unexplained) >= len(owners):
        return (), between
    explained = tuple(diff for diff in between if diff.kind != "ema" and _owner(case, diff) not in unexplained)
    names = {diff.name for diff in explained}
    return explained, tuple(diff for diff in between if diff.name not in names)


def has_gradient_averages(case: Case) -> bool:
    """Whether the averages of gradients were compared, which show whether gradients are averaged over the ranks."""
    return any(_is_of_gradients(case, name) for name in case.names_of("optimizer"))


def has_equal_settings(case: Case, acting: Sequence[ValueDiff]) -> bool:
    """Whether some ranks have equal settings, so that their equal parameters show averaged gradients."""
    settings = _settings_by_rank(case, acting)
    return len(set(settings.values())) < len(settings)


def _settings_by_rank(case: Case, acting: Sequence[ValueDiff]) -> dict[int, tuple[str, ...]]:
    """Return the values of settings of each rank, as texts."""
    return {rank: tuple(str(diff.by_rank.get(rank)) for diff in acting) for rank in case.group.ranks}


def _keys(settings: Sequence[ValueDiff]) -> frozenset[str]:
    """Return the names of settings without containers and positions: betas for optimizer.param_groups.0.betas.1."""
    keys = set()
    for diff in settings:
        parts = diff.name.split(".")
        while len(parts) > 1 and parts[-1].isdecimal():
            parts.pop()
        keys.add(parts[-1])
    return frozenset(keys)


def _may_explain_moments(case: Case, keys: frozenset[str]) -> bool:
    """Whether first moments with another direction leave room for averaged gradients."""
    measured = cosines(case.differing_moments().values())
    if not measured or median(measured) >= ALIKE or keys & _OF_MOMENTS or "weight_decay" in keys:
        return True
    return not unexplained_by_decay(case, case.differing_moments().values())


def _find_unexplained(
    case: Case,
    keys: frozenset[str],
    acting: Sequence[ValueDiff],
    others: Sequence[ValueDiff],
    between: Sequence[TensorDiff],
) -> set[str]:
    """Return the parameters that differ, or whose state differs, by more than the settings explain."""
    step_only = keys <= _OF_STEPS | _OF_ROUNDING | {"weight_decay"}
    if not step_only:
        return set()
    differing = [diff for diff in between if not is_rounding(diff) and diff.max_abs is not None]
    relative, absolute = _bounds(case, acting, others)
    unexplained = [
        diff
        for diff in differing
        if diff.kind == "parameter" and float(diff.max_abs or 0) > min(relative * _scale(diff), absolute)
    ]
    # Without settings of the optimizer, it is unknown whether the decay is a part of the gradients.
    if case.group.evidence.hyperparameters:
        averages = [diff for diff in differing if diff.kind == "optimizer" and _is_of_gradients(case, diff.name)]
        decay = 0.0 if _is_decoupled(case) else _difference(acting, "weight_decay")
        unexplained += unexplained_by_decay(case, averages, decay)
    return {_owner(case, diff) for diff in unexplained}


def _bounds(case: Case, acting: Sequence[ValueDiff], others: Sequence[ValueDiff]) -> tuple[float, float]:
    """Return generous bounds of the difference of a parameter: relative to its size, and absolute; or infinity."""
    relative = _relative_difference(acting)
    # The state of a scheduler shows that the ranks were at different points of the schedule.
    if relative is None or relative > _TINY or len(others) > len(acting):
        return math.inf, math.inf
    absolute = math.inf
    is_adam = any(name.endswith(".exp_avg_sq") for name in case.names_of("optimizer"))
    if is_adam and case.group.step and not _difference(acting, "weight_decay"):
        absolute = _ABSOLUTE_ROOM * _difference(acting, "lr") * case.group.step
    return _RELATIVE_ROOM * relative, absolute


def _scale(diff: TensorDiff) -> float:
    """Return the root mean square of a tensor; infinity if its norm is unknown."""
    norm = max(evidence_of(diff).norms.values(), default=math.inf)
    return norm / math.sqrt(min(diff.numel, MEASURED))


def _relative_difference(acting: Sequence[ValueDiff]) -> float | None:
    """Return the largest relative difference of the settings; None if a setting is not a number."""
    largest = 0.0
    for diff in acting:
        if _keys([diff]) <= _OF_ROUNDING:
            continue
        values = _numbers(diff.by_rank)
        # Not every optimizer normalizes its steps by eps in proportion.
        if not values or _keys([diff]) & {"eps"}:
            return None
        size = max(map(abs, values))
        largest = max(largest, (max(values) - min(values)) / size if size else 0.0)
    return largest


def _difference(acting: Sequence[ValueDiff], key: str) -> float:
    """Return the largest difference of a setting; infinity if it is not a number, 0 if it does not differ."""
    largest = 0.0
    for diff in acting:
        if key in _keys([diff]):
            values = _numbers(diff.by_rank)
            largest = max(largest, max(values) - min(values) if values else math.inf)
    return largest


def _numbers(by_rank: Mapping[int, object]) -> list[float]:
    """Return the numbers of all ranks; empty if a rank has no number."""
    numbers = [float(value) for value in by_rank.values() if isinstance(value, (int, float)) and math.isfinite(value)]
    return numbers if len(numbers) == len(by_rank) else []


def _is_of_gradients(case: Case, name: str) -> bool:
    """Whether a state of the optimizer depends on nothing but gradients."""
    parameter, _, state = name.rpartition(".")
    is_of_updates = f"{parameter}.{_OF_UPDATES}" in case.group.evidence.names
    # RMSprop's momentum averages steps, which contain eps.
    is_of_steps = state == "momentum_buffer" and f"{parameter}.square_avg" in case.group.evidence.names
    return state in _OF_GRADIENTS and not is_of_updates and not is_of_steps


def _is_decoupled(case: Case) -> bool:
    return bool(case.group.evidence.hyperparameters.get("decoupled_weight_decay"))


def _owner(case: Case, diff: TensorDiff) -> str:
    """Return the parameter of a tensor."""
    return case.owner_of(diff.name) if diff.kind == "optimizer" else diff.name


def _differs_within(diff: TensorDiff, ranks: set[int]) -> bool:
    """Whether a tensor differs between ranks of this set that should hold the same bytes."""
    groups = diff.replica_groups or (tuple(rank for cluster in diff.clusters for rank in cluster),)
    return any(sum(bool(ranks & set(group) & set(cluster)) for cluster in diff.clusters) > 1 for group in groups)
