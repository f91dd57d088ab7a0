"""Which differences of parameters and optimizer state unequal settings explain.

Averaged gradients stay equal, whatever the settings are. So the averages of gradients that an optimizer keeps stay
equal too if only the size of a step differs, by the learning rate, eps or a weight decay outside the gradients. A
larger difference has another cause beside the settings.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import is_below, largest_norm, median_cosine
from syncheck.diagnose.moments import unexplained_by_decay
from syncheck.diagnose.optimizer_names import is_rmsprop_momentum
from syncheck.diagnose.selection import exclude_kinds, exclude_names, join_ranks, last_part, list_names, module_of
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


class Effect(NamedTuple):
    """The trained tensors that differ only between ranks with different settings."""

    explained: tuple[TensorDiff, ...] = ()
    unexplained: tuple[TensorDiff, ...] = ()


def choose_only_rounding(acting: Sequence[ValueDiff]) -> bool:
    """Whether the settings choose implementations, which change nothing but rounding."""
    return bool(acting) and _keys(acting) <= _OF_ROUNDING


def find_explained(case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff]) -> Effect:
    """Return which tensors the settings explain.

    acting: the settings that change the next step. settings: all settings that differ.
    """
    if not acting:
        return Effect()
    between = _select_between_settings(case, acting)
    keys = _keys(acting)
    if keys <= _OF_ROUNDING:
        is_explained = all(map(is_rounding, between))
        if is_explained:
            return Effect(explained=between)
        return Effect(unexplained=between)
    if not _may_explain_moments(case, keys):
        return Effect(unexplained=between)
    unexplained = _find_unexplained(case, acting, settings, between)
    if not unexplained:
        return Effect(explained=between)
    return _split_by_owner(case, between, unexplained)


def _select_between_settings(case: Case, acting: Sequence[ValueDiff]) -> tuple[TensorDiff, ...]:
    """Return the trained tensors that are equal on ranks with equal settings."""
    sets_of_ranks = [set(ranks) for ranks in group_ranks(_settings_by_rank(case, acting)).values()]
    between = []
    for diff in case.differing("parameter", "optimizer", "ema"):
        if not any(_differs_within(diff, ranks) for ranks in sets_of_ranks):
            between.append(diff)
    return tuple(between)


def _split_by_owner(case: Case, between: tuple[TensorDiff, ...], unexplained: set[str]) -> Effect:
    """Return the tensors of explained and of unexplained parameters. unexplained: the names of these parameters."""
    # Averaged copies follow the parameters.
    of_parameters = exclude_kinds(between, "ema")
    owners = {_owner(case, diff) for diff in of_parameters}
    # A fault of most parameters is left to its own rule as a whole.
    if 2 * len(unexplained) >= len(owners):
        return Effect(unexplained=between)
    explained = [diff for diff in of_parameters if _owner(case, diff) not in unexplained]
    names = frozenset(list_names(explained))
    return Effect(tuple(explained), tuple(exclude_names(between, names)))


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
    if keys & (_OF_MOMENTS | {"weight_decay"}):
        return True
    moments = case.differing_moments().values()
    if not is_below(median_cosine(moments), ALIKE):
        return True
    return not unexplained_by_decay(case, moments)


def _find_unexplained(
    case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff], between: Sequence[TensorDiff]
) -> set[str]:
    """Return the parameters that differ, or whose state differs, by more than the settings explain."""
    # The effect of other settings has no bounds.
    if not _keys(acting) <= _OF_STEPS | _OF_ROUNDING | {"weight_decay"}:
        return set()
    parameters: list[TensorDiff] = []
    averages: list[TensorDiff] = []
    for diff in between:
        if diff.max_abs is None or is_rounding(diff):
            continue
        if diff.kind == "parameter":
            parameters.append(diff)
        elif diff.kind == "optimizer" and _is_of_gradients(case, diff.name):
            averages.append(diff)

    unexplained = _exceed_bounds(case, acting, settings, parameters)
    # Without settings of the optimizer, it is unknown whether the decay is a part of the gradients.
    if case.group.evidence.hyperparameters:
        decay = 0.0 if _is_decoupled(case) else _difference(acting, "weight_decay")
        unexplained += unexplained_by_decay(case, averages, decay)
    return {_owner(case, diff) for diff in unexplained}


def _exceed_bounds(
    case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff], parameters: Sequence[TensorDiff]
) -> list[TensorDiff]:
    """Return the parameters that differ by more than the size of the steps explains."""
    relative, absolute = _bounds(case, acting, settings)
    unexplained = []
    for diff in parameters:
        bound = min(relative * _root_mean_square(diff), absolute)
        if diff.max_abs is not None and float(diff.max_abs) > bound:
            unexplained.append(diff)
    return unexplained


def _bounds(case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff]) -> tuple[float, float]:
    """Return generous bounds of the difference of a parameter: relative to its size, and absolute; or infinity."""
    relative = _relative_difference(acting)
    if relative is None or relative > _TINY:
        return math.inf, math.inf
    # The state of a scheduler shows that the ranks were at different points of the schedule.
    if len(settings) > len(acting):
        return math.inf, math.inf
    is_adam = any(name.endswith(".exp_avg_sq") for name in case.names_of("optimizer"))
    if not is_adam or not case.group.step or _difference(acting, "weight_decay"):
        return _RELATIVE_ROOM * relative, math.inf
    absolute = _ABSOLUTE_ROOM * _difference(acting, "lr") * case.group.step
    return _RELATIVE_ROOM * relative, absolute


def _root_mean_square(diff: TensorDiff) -> float:
    """Return the root mean square of a tensor; infinity if its norm is unknown."""
    return largest_norm(diff, math.inf) / math.sqrt(min(diff.numel, MEASURED))


def _relative_difference(acting: Sequence[ValueDiff]) -> float | None:
    """Return the largest relative difference of the settings; None if a setting is not a number."""
    largest = 0.0
    for setting in acting:
        keys = _keys([setting])
        if keys <= _OF_ROUNDING:
            continue
        values = _numbers(setting.by_rank)
        # Not every optimizer normalizes its steps by eps in proportion.
        if not values or "eps" in keys:
            return None
        size = max(map(abs, values))
        if size:
            largest = max(largest, (max(values) - min(values)) / size)
    return largest


def _difference(acting: Sequence[ValueDiff], key: str) -> float:
    """Return the largest difference of a setting; infinity if it is not a number, 0 if it does not differ."""
    largest = 0.0
    for setting in acting:
        if key not in _keys([setting]):
            continue
        values = _numbers(setting.by_rank)
        if not values:
            return math.inf
        largest = max(largest, max(values) - min(values))
    return largest


def _numbers(by_rank: Mapping[int, object]) -> list[float]:
    """Return the numbers of all ranks; empty if a rank has no number."""
    numbers = []
    for value in by_rank.values():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return []
        numbers.append(float(value))
    return numbers


def _is_of_gradients(case: Case, name: str) -> bool:
    """Whether a state of the optimizer depends on nothing but gradients."""
    names = case.group.evidence.names
    if last_part(name) not in _OF_GRADIENTS or f"{module_of(name)}.{_OF_UPDATES}" in names:
        return False
    # RMSprop's momentum averages steps, which contain eps.
    return not is_rmsprop_momentum(name, names)


def _is_decoupled(case: Case) -> bool:
    return bool(case.group.evidence.hyperparameters.get("decoupled_weight_decay"))


def _owner(case: Case, diff: TensorDiff) -> str:
    """Return the parameter of a tensor."""
    if diff.kind == "optimizer":
        return case.owner_of(diff.name)
    return diff.name


def _differs_within(diff: TensorDiff, ranks: set[int]) -> bool:
    """Whether a tensor differs between ranks of this set that should hold the same bytes."""
    for group in diff.replica_groups or (join_ranks(diff.clusters),):
        common = ranks.intersection(group)
        clusters = [cluster for cluster in diff.clusters if not common.isdisjoint(cluster)]
        if len(clusters) > 1:
            return True
    return False
