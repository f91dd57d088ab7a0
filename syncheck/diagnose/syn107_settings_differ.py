"""Settings of the optimizer, the learning-rate scheduler or the modules differ between ranks.

Signature: a value of the optimizer's parameter groups (learning rate, weight decay, betas, momentum, members of the
groups) or of a scheduler's state differs. In a running job also: `requires_grad` of a parameter, or the order in which
modules register their parameters or buffers; the finding then covers the tensors that are not at the same positions.
Modules in training mode on some ranks only are a warning that does not fail. The finding also covers parameters and
optimizer state if ranks with equal settings hold equal bytes, and the settings explain the differences: averaged
gradients, but unequal steps. Another learning rate, eps or decoupled weight decay changes no average of gradients, so
that exp_avg and momentum_buffer must agree, except for the weight decay of unequal parameters within the gradients.
Other settings may change moments, which must then still have the same direction (median cosine of 0.9 or more), unless
the settings turn them. A learning rate or weight decay that differs by less than 1 % explains small differences only,
and foreach, fused, capturable and differentiable explain rounding only. All other differences have a finding of their
own. The finding covers only the values, too, if only a scheduler's state differs and has not changed a learning rate
yet. Without moments in the files, it is "consistent".

Cause: each rank decides from its own numbers. ReduceLROnPlateau gets the loss of a rank's own batches, a schedule
counts a rank's own batches or overflows, the configuration differs between ranks or hosts, or some ranks did not
restore the scheduler's state. DDP averages gradients and never compares settings. It pairs parameters and buffers by
position, not by name: after registration in another order, for example over a set, a rank receives the values of other
tensors.

Fix: build the optimizer and the scheduler from one configuration on every rank, and step the scheduler with a number
equal on all ranks: `dist.all_reduce(loss); scheduler.step(loss / dist.get_world_size())`. Register parameters and
buffers in one order. Then resume from a checkpoint in which the ranks agree.

Incidents: lucidrains/DALLE-pytorch#268 and PaddlePaddle/Paddle#50589 (ReduceLROnPlateau on a rank's own loss),
karpathy/nanochat#857 (the schedule follows each rank's own progress through the data), rwth-i6/returnn#1493,
huggingface/transformers#48162 (buffers registered in the order of a set).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, follower_facts, largest_difference, limit_facts
from syncheck.diagnose.counters import find_minority
from syncheck.diagnose.settings_effect import (
    choose_only_rounding,
    find_explained,
    has_equal_settings,
    has_gradient_averages,
)
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS
from syncheck.tensors.value_kinds import ORDERS, REQUIRES_GRAD, SETTINGS, TRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff, ValueDiff

CODE = "SYN107"
SLUG = "settings-differ"
SEVERITY = "error"
CERTAINTY = "proved"

_MOST = 3  # settings


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "The settings of the optimizer or its scheduler differ between ranks, so equal gradients lead to unequal steps."
    )
    DIFF_CAUSE = (
        "The settings of the optimizer or its scheduler differ between A and B, so equal gradients lead to unequal "
        "steps."
    )
    DIFF_FIX = "Compare the configurations of both runs, and train with the same settings."
    DIFF_SETTINGS = "A and B use different settings: {setting}"
    DIFF_MEMBERS = "{name:name} contains {names:names} in one of them only"
    DIFF_PARAMETERS = "{count} of {total:count parameter} {count:verb differs|differ}, {size}"
    FIX = (
        "Build the optimizer and the scheduler from one configuration on every rank. Step ReduceLROnPlateau and "
        "similar schedulers with a number equal on all ranks: `dist.all_reduce(loss)`; `scheduler.step(loss / "
        "dist.get_world_size())`. Then resume from a checkpoint in which the ranks agree."
    )
    CAUSE_ROUNDING = (
        "The ranks use different implementations of the optimizer (foreach, fused, capturable or differentiable), "
        "whose steps differ by rounding only."
    )
    CAUSE_ORDER = (
        "The ranks register parameters or buffers in different orders. DistributedDataParallel pairs them by position, "
        "so a rank receives the values of other tensors."
    )
    FIX_ORDER = (
        "Register parameters and buffers in the same order on every rank: iterate over a list or sorted(names), not "
        "over a set. Then create the model again. Loading a checkpoint does not restore non-persistent buffers."
    )
    CAUSE_GRADIENTS = (
        "A parameter requires a gradient on some ranks only, so the ranks reduce gradients of different parameters."
    )
    FIX_GRADIENTS = "Call `requires_grad_()` for the same parameters on every rank, before DistributedDataParallel."
    CAUSE_MODES = (
        "Some ranks called train() or eval() and others did not. Dropout and BatchNorm then compute differently."
    )
    FIX_MODES = "Call model.train() on every rank after an evaluation, before the next training step."
    ORDER_OF_NAMES = "{ranks:Ranks} {ranks:verb registers|register} {names:names} in another order than the other ranks"
    EXCHANGED = "{count:count tensor} {count:verb holds|hold} other values there"
    MODE = "training mode ({name:name}) is {values:by_rank}"
    SETTINGS = "The ranks use different settings: {setting}"
    VALUE = "{name:name} is {values:by_rank}"
    MEMBERS = "{name:name} contains {names:names} on some ranks only"
    ORDER = "{name:name} has the same members in another order"
    MORE = "{count:count more setting} {count:verb differs|differ}"
    PARAMETERS = (
        "{count} of {total:count parameter} {count:verb differs|differ}, only between ranks with different settings, "
        "{size}"
    )
    ONLY_ROUNDING = (
        "{count:count differing parameter} {count:verb has|have} another cause: the settings change rounding only"
    )
    UNEXPLAINED = (
        "{count:count differing parameter} {count:verb has|have} another cause beside the settings, which explain only "
        "smaller differences of parameters and moments"
    )
    GRADIENTS_UNKNOWN = "no first moment was compared, so it is unknown whether gradients are averaged"


def apply(case: Case) -> Match | None:
    """Match different settings, and cover the tensors that differ only between ranks with different settings."""
    settings = [diff for diff in case.of_values() if diff.kind == "setting"]
    modes = [diff for diff in case.group.values if not diff.counts and diff.name.rpartition(".")[2] == TRAINING]
    if not settings:
        return _match_modes(case, modes) if modes else None
    orders = [diff for diff in settings if diff.name in ORDERS]
    others = [diff for diff in settings if diff.name not in ORDERS]
    # Settings of the next step come first. A scheduler's counters and best loss take effect later.
    others.sort(key=lambda diff: not _changes_next_step(diff))
    acting = [diff for diff in others if _changes_next_step(diff)]
    covered = _find_exchanged(case, orders)
    facts = _order_facts(case, orders, covered)
    if others:
        explained, unexplained = find_explained(case, acting, others) if acting else ((), ())
        facts += [*_settings_facts(others), *_parameter_facts(case, explained), *follower_facts(explained)]
        facts += _unexplained_facts(acting, unexplained)
        exchanged = {diff.name for diff in covered}
        covered = (*covered, *(diff for diff in explained if diff.name not in exchanged))
    facts += _mode_facts(modes)
    if covered:
        facts += case.agreement_facts(covered)
    cause, fix = _choose_cause(orders, others)
    names = tuple(diff.name for diff in (*orders, *others))
    match = Match(covered, _find_odd(case, [*orders, *others]), facts, names, cause, fix)
    return _limit_certainty(case, match, acting)


def _limit_certainty(case: Case, match: Match, acting: Sequence[ValueDiff]) -> Match:
    """Return the match; without moments, unequal gradients may be a cause of covered parameters too."""
    is_covered = any(diff.kind == "parameter" for diff in match.tensors)
    if not acting or not is_covered or has_gradient_averages(case):
        return match
    others = ("SYN213",) if has_equal_settings(case, acting) else ("SYN211", "SYN213")
    return replace(match, certainty="consistent", alternatives=others)


def _choose_cause(orders: Sequence[ValueDiff], others: Sequence[ValueDiff]) -> tuple[Sentence | None, Sentence | None]:
    """Return cause and fix; None for an optimizer or a scheduler."""
    if orders:
        return Text.CAUSE_ORDER, Text.FIX_ORDER
    if all(diff.name.endswith(f".{REQUIRES_GRAD}") for diff in others):
        return Text.CAUSE_GRADIENTS, Text.FIX_GRADIENTS
    return (Text.CAUSE_ROUNDING, None) if choose_only_rounding(others) else (None, None)


def _unexplained_facts(acting: Sequence[ValueDiff], unexplained: Sequence[TensorDiff]) -> list[Message]:
    """State how many parameters differ by more than the settings explain."""
    count = sum(diff.kind == "parameter" for diff in unexplained)
    if not count:
        return []
    sentence = Text.ONLY_ROUNDING if choose_only_rounding(acting) else Text.UNEXPLAINED
    return [sentence(count=count)]


def _find_exchanged(case: Case, orders: Sequence[ValueDiff]) -> tuple[TensorDiff, ...]:
    """Return the differing parameters and buffers that are not at the same positions on all ranks."""
    moved: set[str] = set()
    for diff in orders:
        for names in diff.by_rank.values():
            moved.update(names or ())
    model = case.differing("parameter", "buffer", *BN_STATISTICS) if moved else ()
    return tuple(diff for diff in model if diff.name in moved)


def _order_facts(case: Case, orders: Sequence[ValueDiff], exchanged: Sequence[TensorDiff]) -> list[Message]:
    facts: list[Message] = []
    for diff in orders:
        odd = _find_odd(case, [diff])
        names = next(names for rank, names in diff.by_rank.items() if rank in odd)
        facts.append(Text.ORDER_OF_NAMES(ranks=tuple(sorted(odd)), names=names))
    if exchanged:
        facts.append(Text.EXCHANGED(count=len(exchanged)))
    return facts


def _match_modes(case: Case, modes: Sequence[ValueDiff]) -> Match:
    """Match modules that are in training mode on some ranks only."""
    names = tuple(diff.name for diff in modes)
    odd = _find_odd(case, modes)
    return Match((), odd, _mode_facts(modes), names, Text.CAUSE_MODES, Text.FIX_MODES, only_warns=True)


def _mode_facts(modes: Sequence[ValueDiff]) -> list[Message]:
    return [Text.MODE(name=diff.name, values=dict(diff.by_rank)) for diff in modes[:_MOST]]


def _find_odd(case: Case, settings: Sequence[ValueDiff]) -> Sequence[int]:
    """Return the ranks outside the majority of the first setting that has one, else all ranks."""
    for diff in settings:
        minority = find_minority({rank: str(value) for rank, value in diff.by_rank.items()})
        if minority:
            return tuple(minority)
    return case.group.ranks


def _settings_facts(settings: Sequence[ValueDiff]) -> tuple[Message, ...]:
    first, *others = limit_facts([_describe_setting(diff) for diff in settings], _MOST, Text.MORE)
    return (Text.SETTINGS(setting=first), *others)


def _parameter_facts(case: Case, covered: Sequence[TensorDiff]) -> tuple[Message, ...]:
    parameters = [diff for diff in covered if diff.kind == "parameter"]
    if not parameters:
        return ()
    total, size = case.compared("parameter"), largest_difference(parameters)
    facts = [Text.PARAMETERS(count=len(parameters), total=total, size=size)]
    if not case.with_moment():
        facts.append(Text.GRADIENTS_UNKNOWN())
    return (*facts, *case.trend_facts("parameter")[1])


def _changes_next_step(diff: ValueDiff) -> bool:
    """Whether a setting changes the next step: a value in a parameter group, a learning rate or the like."""
    parts = diff.name.split(".")
    return "param_groups" in parts or "_last_lr" in parts or parts[-1] in (*SETTINGS, REQUIRES_GRAD)


def _describe_setting(diff: ValueDiff) -> Message:
    """State the value of each rank, or the members of a parameter group missing on some ranks."""
    if not diff.name.endswith((".params", ".(positions)")):
        return Text.VALUE(name=diff.name, values=dict(diff.by_rank))
    members = [set(str(value).split(", ")) for value in diff.by_rank.values() if value is not None]
    first, *others = members
    partial = tuple(sorted(first.union(*others) - first.intersection(*others)))
    return Text.MEMBERS(name=diff.name, names=partial) if partial else Text.ORDER(name=diff.name)
