"""The keys of an optimizer's parameter groups with an effect on steps.

A script may add further keys, for example the name of a group, and no step reads these keys.
"""

from __future__ import annotations

from itertools import combinations, starmap
from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import ValueDiff

# Options of the optimizers of torch, Transformers, apex and timm. An option that ranks lack shows another class.
OF_CLASSES = frozenset(
    "lr learning_rate betas eps weight_decay amsgrad maximize decoupled_weight_decay momentum dampening nesterov alpha "
    "centered rho lr_decay initial_accumulator_value lambd t0 etas step_sizes momentum_decay beta2_decay d "
    "max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn ns_coefficients ns_steps "
    "adjust_lr_fn clip_threshold decay_rate beta1 beta2 scale_parameter relative_step warmup_init correct_bias "
    "bias_correction max_grad_norm trust_coefficient".split()
)
# Options of the implementation, and values of schedulers.
_OF_ALL = frozenset(
    "foreach fused capturable differentiable initial_lr max_lr min_lr base_momentum max_momentum swa_lr lr_scale step "
    "requires_grad params param_names (positions)".split()
)
# The key is empty for other values than those of parameter groups.
_READ = OF_CLASSES | _OF_ALL | {""}
_GROUPS = "param_groups"


def find_option(name: str) -> str:
    """Return the key of a value in a parameter group: betas for `optimizer.param_groups.0.betas.1`; empty without."""
    _, _, place = f".{name}".partition(f".{_GROUPS}.")
    _, _, key = place.partition(".")
    return key.partition(".")[0]


def are_unread(settings: Iterable[ValueDiff]) -> bool:
    """Whether all settings are keys of parameter groups, and no known optimizer reads the keys."""
    keys = set(map(find_option, map(attrgetter("name"), settings)))
    return keys.isdisjoint(_READ)


def have_other_classes(settings: Iterable[ValueDiff]) -> bool:
    """Whether the optimizers are of different classes: two ranks lack different options.

    A rank with fewer options has an optimizer of another version, or no optimizer.
    """
    sets_of_ranks: set[frozenset[int]] = set()
    for setting in settings:
        if find_option(setting.name) in OF_CLASSES:
            ranks_by_value = group_ranks(setting.by_rank)
            sets_of_ranks.add(frozenset(ranks_by_value.get(None, ())))
    sets_of_ranks.discard(frozenset())
    return any(starmap(frozenset.isdisjoint, combinations(sets_of_ranks, 2)))


def split_lacked(settings: Iterable[ValueDiff]) -> tuple[tuple[str, ...], list[ValueDiff]]:
    """Return the options that some ranks lack, each once, and the other settings."""
    options: dict[str, None] = {}
    others = []
    for setting in settings:
        if None in setting.by_rank.values():
            options[find_option(setting.name)] = None
        else:
            others.append(setting)
    options.pop("", None)
    return tuple(options), others
