"""Which differences of parameters and optimizer state unequal settings explain.

Averaged gradients stay equal, whatever the settings are. So the averages of gradients that an optimizer keeps stay
equal too if only the size of a step differs, by the learning rate, eps or a weight decay outside the gradients. A
larger difference has another cause beside the settings.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import is_below, largest_norm, median_cosine
from syncheck.diagnose.moments import unexplained_by_decay
from syncheck.diagnose.optimizer_names import is_rmsprop_momentum
from syncheck.diagnose.rank_values import known_numbers, spread
from syncheck.diagnose.selection import (
    exclude_kinds,
    exclude_names,
    join_ranks,
    last_part,
    list_names,
    module_of,
    select_kinds,
    size_of,
)
from syncheck.diagnose.syn240_rounding_only import is_rounding
from syncheck.findings import MEASURED
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
# The positions in lists at the end of the name of a setting.
_POSITIONS = r"(\.\d+)+\Z"

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


class _Bounds(NamedTuple):
    """Generous bounds of the difference of a parameter; infinity if nothing bounds it."""

    relative: float = math.inf
    """As a multiple of the root mean square of the parameter."""
    absolute: float = math.inf


def choose_only_rounding(acting: Sequence[ValueDiff]) -> bool:
    """Whether the settings choose implementations, which change nothing but rounding."""
    keys = _keys(acting)
    return bool(keys) and keys <= _OF_ROUNDING


def find_explained(case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff]) -> Effect:
    """Return which tensors the settings explain.

    acting: the settings that change the next step. settings: all settings that differ.
    """
    if not acting:
        return Effect()
    between = _select_between_settings(case, acting)
    if choose_only_rounding(acting):
        are_rounded = all(map(is_rounding, between))
        return Effect(explained=between) if are_rounded else Effect(unexplained=between)
    if not _may_explain_moments(case, acting):
        return Effect(unexplained=between)
    unexplained = _find_unexplained(
        case,
        acting,
        settings,
        between,
    )
    if not unexplained:
        return Effect(explained=between)
    return _split_by_owner(case, between, unexplained)


def _select_between_settings(case: Case, acting: Sequence[ValueDiff]) -> tuple[TensorDiff, ...]:
    """Return the trained tensors that are equal on ranks with equal settings."""
    between: Sequence[TensorDiff] = case.differing("parameter", "optimizer", "ema")
    ranks_by_settings = group_ranks(_settings_by_rank(case, acting))
    for ranks in ranks_by_settings.values():
        between = [diff for diff in between if not _differs_within(diff, set(ranks))]
    return tuple(between)


def _split_by_owner(case: Case, between: tuple[TensorDiff, ...], unexplained: frozenset[str]) -> Effect:
    """Return the tensors of explained and of unexplained parameters. unexplained: the names of these parameters."""
    # Averaged copies follow the parameters.
    of_parameters = exclude_kinds(between, "ema")
    owners = _owners(case, of_parameters)
    # A fault of most parameters is left to its own rule as a whole.
    if 2 * len(unexplained) >= len(owners):
        return Effect(unexplained=between)
    explained = []
    for diff in of_parameters:
        if _owner(case, diff) not in unexplained:
            explained.append(diff)
    explained_names = frozenset(list_names(explained))
    remaining = exclude_names(between, explained_names)
    return Effect(
        explained=tuple(explained),
        unexplained=tuple(remaining),
    )


def has_gradient_averages(case: Case) -> bool:
    """Whether the averages of gradients were compared, which show whether gradients are averaged over the ranks."""
    return any(_is_of_gradients(case, name) for name in case.names_of("optimizer"))


def has_equal_settings(case: Case, acting: Sequence[ValueDiff]) -> bool:
    """Whether some ranks have equal settings, so that their equal parameters show averaged gradients."""
    settings = _settings_by_rank(case, acting)
    return len(set(settings.values())) < len(settings)


def _settings_by_rank(case: Case, acting: Sequence[ValueDiff]) -> dict[int, tuple[str, ...]]:
    """Return the values of settings of each rank, as texts."""
    settings = {}
    for rank in case.group.ranks:
        values = []
        for diff in acting:
            value = diff.by_rank.get(rank)
            values.append(str(value))
        settings[rank] = tuple(values)
    return settings


def _keys(settings: Iterable[ValueDiff]) -> frozenset[str]:
    """Return the names of settings without containers and positions."""
    return frozenset(map(_key, settings))


def _key(setting: ValueDiff) -> str:
    """Return the name of a setting without containers and positions: betas for optimizer.param_groups.0.betas.1."""
    return last_part(re.sub(_POSITIONS, "", setting.name))


def _may_explain_moments(case: Case, acting: Sequence[ValueDiff]) -> bool:
    """Whether first moments with another direction leave room for averaged gradients."""
    changing_moments = _OF_MOMENTS | {"weight_decay"}
    if not changing_moments.isdisjoint(_keys(acting)):
        return True
    moments = case.differing_moments().values()
    cosine = median_cosine(moments)
    # Averaged gradients give the moments of all ranks one direction.
    if not is_below(cosine, ALIKE):
        return True
    return not unexplained_by_decay(case, moments)


def _find_unexplained(
    case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff], between: Sequence[TensorDiff]
) -> frozenset[str]:
    """Return the parameters that differ, or whose state differs, by more than the settings explain."""
    # The effect of other settings has no bounds.
    if not _keys(acting) <= _OF_STEPS | _OF_ROUNDING | {"weight_decay"}:
        return frozenset()
    measured = [diff for diff in between if diff.max_abs is not None and not is_rounding(diff)]
    parameters = select_kinds(measured, "parameter")
    averages = []
    for diff in select_kinds(measured, "optimizer"):
        if _is_of_gradients(case, diff.name):
            averages.append(diff)

    unexplained = _exceed_bounds(_bounds(case, acting, settings), parameters)
    hyperparameters = case.group.evidence.hyperparameters
    # Without settings of the optimizer, it is unknown whether the decay is a part of the gradients.
    if hyperparameters:
        is_decoupled = bool(hyperparameters.get("decoupled_weight_decay"))
        decay = 0.0 if is_decoupled else _difference(acting, "weight_decay")
        unexplained += unexplained_by_decay(case, averages, decay)
    return _owners(case, unexplained)


def _owners(case: Case, diffs: Iterable[TensorDiff]) -> frozenset[str]:
    """Return the parameters of tensors."""
    return frozenset(_owner(case, diff) for diff in diffs)


def _exceed_bounds(bounds: _Bounds, parameters: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Return the parameters that differ by more than the size of the steps explains."""
    unexplained = []
    for diff in parameters:
        bound = min(bounds.relative * _root_mean_square(diff), bounds.absolute)
        if size_of(diff) > bound:
            unexplained.append(diff)
    return unexplained


def _bounds(case: Case, acting: Sequence[ValueDiff], settings: Sequence[ValueDiff]) -> _Bounds:
    """Return the bounds of the difference that the settings cause in a parameter."""
    difference = _relative_difference(acting)
    # The state of a scheduler shows that the ranks were at different points of the schedule.
    has_schedule = len(settings) > len(acting)
    if has_schedule or difference > _TINY:
        return _Bounds()
    relative = _RELATIVE_ROOM * difference
    step = case.group.step or 0
    absolute = _ABSOLUTE_ROOM * _difference(acting, "lr") * step
    # Weight decay shrinks parameters, whatever Adam's bound of a step is.
    has_other_decay = _difference(acting, "weight_decay") > 0
    conditions_of_bound = (
        _is_adam(case),
        step > 0,
        not has_other_decay,
    )
    if not all(conditions_of_bound):
        absolute = math.inf
    return _Bounds(relative, absolute)


def _is_adam(case: Case) -> bool:
    """Whether the optimizer has the second moments of Adam."""
    states = case.names_of("optimizer")
    return "exp_avg_sq" in map(last_part, states)


def _root_mean_square(diff: TensorDiff) -> float:
    """Return the root mean square of a tensor; infinity if its norm is unknown."""
    return largest_norm(diff, math.inf) / math.sqrt(min(diff.numel, MEASURED))


def _relative_difference(acting: Sequence[ValueDiff]) -> float:
    """Return the largest relative difference of the settings; infinity if a setting is not a number."""
    differences = [_relative_spread(setting) for setting in acting if _key(setting) not in _OF_ROUNDING]
    return max(differences, default=0.0)


def _relative_spread(setting: ValueDiff) -> float:
    """Return the difference of a setting in relation to its largest value; infinity if it is not a number."""
    numbers = known_numbers(setting.by_rank, setting.by_rank.keys())
    # Not every optimizer normalizes its steps by eps in proportion.
    is_proportional = _key(setting) != "eps"
    if not numbers or not is_proportional:
        return math.inf
    sizes = map(abs, numbers.values())
    largest = max(sizes)
    return spread(numbers) / largest if largest else 0.0


def _difference(acting: Sequence[ValueDiff], key: str) -> float:
    """Return the largest difference of a setting; infinity if it is not a number, 0 if it does not differ."""
    differences = [_spread(setting) for setting in acting if _key(setting) == key]
    return max(differences, default=0.0)


def _spread(setting: ValueDiff) -> float:
    """Return the difference of a setting between two ranks; infinity if it is not a number."""
    numbers = known_numbers(setting.by_rank, setting.by_rank.keys())
    return spread(numbers) if numbers else math.inf


def _is_of_gradients(case: Case, name: str) -> bool:
    """Whether a state of the optimizer depends on nothing but gradients."""
    names = case.group.evidence.names
    if last_part(name) not in _OF_GRADIENTS:
        return False
    # RMSprop's momentum averages steps, which contain eps.
    averages_steps = is_rmsprop_momentum(name, names)
    averages_updates = f"{module_of(name)}.{_OF_UPDATES}" in names
    return not averages_steps and not averages_updates


def _owner(case: Case, diff: TensorDiff) -> str:
    """Return the parameter of a tensor."""
    return case.owner_of(diff.name) if diff.kind == "optimizer" else diff.name


def _differs_within(diff: TensorDiff, ranks: set[int]) -> bool:
    """Whether a tensor differs between ranks of this set that should hold the same bytes."""
    all_ranks = join_ranks(diff.clusters)
    replica_groups = diff.replica_groups or (all_ranks,)
    for group in replica_groups:
        compared_ranks = ranks.intersection(group)
        clusters = [cluster for cluster in diff.clusters if not compared_ranks.isdisjoint(cluster)]
        if len(clusters) > 1:
            return True
    return False
