"""Which keys of an optimizer's parameter group change its steps.

A script may add keys of its own, for example the name of a group, and no step reads them.
"""

from __future__ import annotations

from itertools import combinations, starmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.records import ValueDiff

# Options of the optimizers of torch, Transformers, apex and timm. An option that ranks lack shows another class.
OF_CLASSES = frozenset(
    "lr learning_rate betas eps weight_decay amsgrad maximize decoupled_weight_decay momentum dampening nesterov alpha "
    "centered rho lr_decay initial_accumulator_value lambd t0 etas step_sizes momentum_decay beta2_decay d "
    "max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn ns_coefficients ns_steps "
    "adjust_lr_fn clip_threshold decay_rate beta1 beta2 scale_parameter relative_step warmup_init correct_bias "
    "bias_correction max_grad_norm trust_coefficient".split()
)
# Options that choose an implementation, and what schedulers keep in a group.
_OF_ALL = frozenset(
    "foreach fused capturable differentiable initial_lr max_lr min_lr base_momentum max_momentum swa_lr lr_scale step "
    "requires_grad params param_names (positions)".split()
)
_KNOWN = OF_CLASSES | _OF_ALL
_GROUPS = "param_groups"


def find_option(name: str) -> str:
    """Return the key of a value in a parameter group: betas for `optimizer.param_groups.0.betas.1`; empty without."""
    _, _, place = f".{name}".partition(f".{_GROUPS}.")
    _, _, key = place.partition(".")
    return key.partition(".")[0]


def is_known(key: str) -> bool:
    """Whether a key of a parameter group is an option of a known optimizer, or of a scheduler."""
    return key in _KNOWN


def are_unread(settings: Iterable[ValueDiff]) -> bool:
    """Whether all settings are keys of parameter groups that no known optimizer reads."""
    for setting in settings:
        key = find_option(setting.name)
        if not key or is_known(key):
            return False
    return True


def have_other_classes(settings: Iterable[ValueDiff]) -> bool:
    """Whether the optimizers of the ranks are of different classes: each of two ranks lacks an option of the other.

    A rank that only lacks options has an optimizer of another version, or no optimizer.
    """
    sets_of_ranks: set[frozenset[int]] = set()
    for setting in settings:
        if find_option(setting.name) in OF_CLASSES:
            ranks = set(setting.by_rank)
            for rank, value in setting.by_rank.items():
                if value is not None:
                    ranks.remove(rank)
            sets_of_ranks.add(frozenset(ranks))
    sets_of_ranks.discard(frozenset())
    return any(starmap(frozenset.isdisjoint, combinations(sets_of_ranks, 2)))


def split_lacked(settings: Iterable[ValueDiff], are_other_classes: bool) -> tuple[tuple[str, ...], list[ValueDiff]]:
    """Return the options that optimizers of other classes lack, each once, and the other settings."""
    options: dict[str, None] = {}
    others = []
    for setting in settings:
        option = find_option(setting.name)
        if are_other_classes and option and None in setting.by_rank.values():
            options[option] = None
        else:
            others.append(setting)
    return tuple(options), others


def drop_unread(groups: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Delete the keys of parameter groups that no step reads. options: of the optimizer; some declare none."""
    for group in groups:
        for key in list(group):
            if options and key not in options and not is_known(key):
                del group[key]
