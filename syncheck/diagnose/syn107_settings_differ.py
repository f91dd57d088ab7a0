"""Settings of the optimizer, the learning-rate scheduler or the modules differ between ranks.

Signature: a value of the optimizer's parameter groups (learning rate, weight decay, betas, momentum, members of the
groups) or of a scheduler's state differs. In a running job also: `requires_grad` of a parameter, or the order in which
modules register their parameters or buffers; the finding then covers the tensors that are not at the same positions. In
a watched run also: the scale, the factors and the growth interval of the GradScaler that takes a step. The finding also
covers different states of optimizers of different classes. A key of the parameter groups that no known optimizer reads
is a warning that does not fail, if all trained tensors agree. Modules in training mode on some ranks only are a warning
that does not fail; a file without modes has none. The finding also covers parameters and optimizer state if ranks with
equal settings hold equal bytes, and the settings explain the differences: averaged gradients, but unequal steps.
Another learning rate, eps or decoupled weight decay changes no average of gradients, so that exp_avg and
momentum_buffer must agree, except for the weight decay of unequal parameters within the gradients. Other settings may
change moments, which must then still have the same direction (median cosine of 0.9 or more), unless the settings turn
them. A learning rate or weight decay that differs by less than 1 % explains small differences only, and foreach, fused,
capturable and differentiable explain rounding only. All other differences have a finding of their own. The finding
covers only the values, too, if only a scheduler's state differs and has not changed a learning rate yet. Without
moments in the files, it is "consistent".

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

from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import state_if
from syncheck.diagnose.optimizer_classes import has_other_classes
from syncheck.diagnose.rank_values import find_minority
from syncheck.diagnose.selection import (
    count_kinds,
    exclude_names,
    has_kind,
    last_part,
    list_names,
    select_kinds,
    select_missing,
    select_names,
    union_of,
    with_status,
)
from syncheck.diagnose.settings_effect import (
    choose_only_rounding,
    find_explained,
    has_equal_settings,
    has_gradient_averages,
)
from syncheck.diagnose.statements import follower_facts, largest_difference, limit_facts
from syncheck.messages import Message, Sentence
from syncheck.tensors.group_options import are_unread, split_lacked
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER
from syncheck.tensors.value_kinds import ORDERS, REQUIRES_GRAD, SETTINGS, TRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff, ValueDiff

CODE = "SYN107"
SLUG = "settings-differ"
SEVERITY = "error"
CERTAINTY = "proved"

_MOST = 3  # settings


class Text(Sentence, topic=CODE):
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
    CAUSE_UNCOUNTED = (
        "The settings of the optimizer or its scheduler differ between ranks, or a rank skipped a step: then its steps "
        "no longer have the numbers of the other ranks' steps, and a schedule gives other settings."
    )
    FIX_UNCOUNTED = (
        "First look for a step that a rank skips on its own, see the findings before. If there is none, build the "
        "optimizer and the scheduler from one configuration on every rank."
    )
    CAUSE_ROUNDING = (
        "The ranks use different implementations of the optimizer (foreach, fused, capturable or differentiable), "
        "whose steps differ by rounding only."
    )
    FIX_ROUNDING = FIX
    CAUSE_ORDER = (
        "The ranks register parameters or buffers in different orders. DistributedDataParallel pairs them by position, "
        "so a rank receives the values of other tensors."
    )
    FIX_ORDER = (
        "Register parameters and buffers in the same order on every rank: iterate over a list or `sorted(names)`, not "
        "over a set. Then create the model again. Loading a checkpoint does not restore non-persistent buffers."
    )
    CAUSE_GRADIENTS = (
        "A parameter requires a gradient on some ranks only, so the ranks reduce gradients of different parameters."
    )
    FIX_GRADIENTS = "Call `requires_grad_()` for the same parameters on every rank, before DistributedDataParallel."
    CAUSE_MODES = (
        "Some ranks called train() or eval() and others did not. Dropout and BatchNorm then compute differently."
    )
    FIX_MODES = "Call `model.train()` on every rank after an evaluation, before the next training step."
    CAUSE_STATISTICS = (
        "BatchNorm averages its running statistics with another momentum on some ranks, so the statistics become "
        "unequal. The gradients need not differ."
    )
    FIX_STATISTICS = (
        "Set the momentum of BatchNorm alike on every rank, and broadcast `running_mean` and `running_var` once."
    )
    CAUSE_SCALER = (
        "The GradScaler of some ranks has another scale, or settings that lead to one. A reduction averages gradients "
        "of losses that were multiplied by unequal scales, and each rank divides the average by its own scale."
    )
    FIX_SCALER = (
        "Create the GradScaler with equal `init_scale`, factors and `growth_interval` on every rank, load its state on "
        "every rank, and never set the scale on one rank alone. Then resume from a checkpoint in which the ranks agree."
    )
    CAUSE_UNREAD = (
        "The script keeps a further value in the parameter groups. No optimizer of torch reads the key, and no "
        "parameter differs."
    )
    FIX_UNREAD = (
        "If the optimizer reads the key, build the parameter groups from one configuration on every rank. Otherwise "
        "no change is needed."
    )
    CAUSE_PROGRAM = (
        "The ranks run other versions of torch, or with other switches or environment variables, so equal operations "
        "may round differently."
    )
    FIX_PROGRAM = "Use one environment on all hosts, and set switches of torch on every rank alike."
    ORDER_OF_NAMES = "{ranks:Ranks} {ranks:verb registers|register} {names:names} in another order than the other ranks"
    EXCHANGED = "{count:count tensor} {count:verb holds|hold} other values there"
    MODE = "training mode ({name:name}) is {values:by_rank}"
    SETTINGS = "The ranks use different settings: {setting}"
    CLASSES = "the optimizers are of different classes, and some classes lack {names:names}"
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


class _Settings(NamedTuple):
    """The differing settings by their effect."""

    orders: list[ValueDiff]
    """The orders of names."""
    acting: list[ValueDiff]
    """Those with an effect on the next step."""
    delayed: list[ValueDiff]
    """A scheduler's counters and best loss, which take effect later."""


def apply(case: Case) -> Match | None:
    """Match different settings, and cover the tensors that differ only between ranks with different settings."""
    settings = case.of_values("setting")
    modes = list(filter(_is_other_mode, case.group.values))
    # Modes alone are no fault of the saved state, so they only warn.
    if not settings:
        return _match_modes(case, modes)
    orders, acting, delayed = _split_by_effect(settings)
    # Also differences of findings before this one.
    trained = select_kinds(case.group.tensors, "parameter", "ema", *OPTIMIZER)
    if are_unread(settings) and not with_status(trained, "different"):
        return _match_unread(case, settings)
    # Settings of the next step come first.
    unordered = [*acting, *delayed]

    # Another order has moved values to other names, whatever the settings are.
    exchanged = _find_exchanged(case, orders)
    explained, unexplained = find_explained(case, acting, unordered)
    other_states = select_missing(case.tensors, *OPTIMIZER) if has_other_classes(case) else ()
    covered = (*exchanged, *exclude_names(explained, list_names(exchanged)), *other_states)
    facts = _order_facts(case, orders, exchanged)
    if unordered:
        facts += [
            *_settings_facts(case, unordered),
            *_parameter_facts(case, explained),
            *follower_facts(explained),
            *_unexplained_facts(acting, unexplained),
        ]
    facts += _mode_facts(modes)
    facts += state_if(covered, *case.agreement_facts(covered))

    ordered_first = (*orders, *unordered)
    cause, fix = _choose_cause(orders, unordered)
    match = Match(
        covered,
        _find_suspects(case, ordered_first),
        facts,
        list_names(ordered_first),
        cause,
        fix,
    )
    return _limit_certainty(case, match, acting)


def _is_other_mode(value: ValueDiff) -> bool:
    """Whether modules are in another mode on some ranks. A file without modes shows none."""
    stored_modes = set(map(repr, value.by_rank.values()))
    stored_modes.discard("None")
    conditions = (
        len(stored_modes) > 1,
        not value.counts,
        last_part(value.name) == TRAINING,
    )
    return all(conditions)


def _split_by_effect(settings: Sequence[ValueDiff]) -> _Settings:
    """Return the orders, the settings with an effect on the next step, and the settings with a later effect."""
    split = _Settings([], [], [])
    for setting in settings:
        if setting.name in ORDERS:
            split.orders.append(setting)
        elif _changes_next_step(setting):
            split.acting.append(setting)
        else:
            split.delayed.append(setting)
    return split


def _limit_certainty(case: Case, match: Match, acting: Sequence[ValueDiff]) -> Match:
    """Return the match; without moments, unequal gradients may be a cause of covered parameters too."""
    has_parameters = has_kind(match.tensors, "parameter")
    if not acting or not has_parameters:
        return match
    # The averages of gradients show that the gradients are equal.
    if has_gradient_averages(case):
        return match
    other_causes = ("SYN213",) if has_equal_settings(case, acting) else ("SYN211", "SYN213")
    return match.as_consistent(*other_causes)


def _choose_cause(
    orders: Sequence[ValueDiff], unordered: Sequence[ValueDiff]
) -> tuple[Sentence | None, Sentence | None]:
    """Return cause and fix; None for an optimizer or a scheduler."""
    if orders:
        return Text.CAUSE_ORDER, Text.FIX_ORDER
    if all(setting.name.endswith(f".{REQUIRES_GRAD}") for setting in unordered):
        return Text.CAUSE_GRADIENTS, Text.FIX_GRADIENTS
    if choose_only_rounding(unordered):
        return (Text.CAUSE_ROUNDING, None)
    return (None, None)


def _unexplained_facts(acting: Sequence[ValueDiff], unexplained: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State how many parameters differ by more than the settings explain."""
    count = count_kinds(unexplained, "parameter")
    sentence = Text.ONLY_ROUNDING if choose_only_rounding(acting) else Text.UNEXPLAINED
    return state_if(count, sentence(count=count))


def _find_exchanged(case: Case, orders: Sequence[ValueDiff]) -> tuple[TensorDiff, ...]:
    """Return the differing parameters and buffers that are not at the same positions on all ranks."""
    moved: set[str] = set()
    for order in orders:
        # A rank without the module has no order of names.
        moved |= union_of(filter(None, order.by_rank.values()))
    return tuple(select_names(case.differing("parameter", "buffer", *BN_STATISTICS), moved))


def _order_facts(case: Case, orders: Sequence[ValueDiff], exchanged: Sequence[TensorDiff]) -> list[Message]:
    """State which ranks register which names in another order, and how many tensors hold other values there."""
    facts: list[Message] = []
    for order in orders:
        suspects = _find_suspects(case, [order])
        first_suspect = next(rank for rank in order.by_rank if rank in suspects)
        names = order.by_rank[first_suspect]
        facts.append(Text.ORDER_OF_NAMES(ranks=tuple(sorted(suspects)), names=names))
    return [*facts, *state_if(exchanged, Text.EXCHANGED(count=len(exchanged)))]


def _match_modes(case: Case, modes: Sequence[ValueDiff]) -> Match | None:
    """Match modules that are in training mode on some ranks only."""
    if not modes:
        return None
    match = Match(
        (),
        _find_suspects(case, modes),
        _mode_facts(modes),
        list_names(modes),
        only_warns=True,
    )
    return match.with_cause(Text.CAUSE_MODES, Text.FIX_MODES)


def _mode_facts(modes: Sequence[ValueDiff]) -> list[Message]:
    """State the mode of the first modules on each rank."""
    facts = []
    for mode in modes[:_MOST]:
        facts.append(Text.MODE(name=mode.name, values=dict(mode.by_rank)))
    return facts


def _find_suspects(case: Case, settings: Sequence[ValueDiff]) -> Sequence[int]:
    """Return the ranks outside the majority of the first setting that has one, else all ranks."""
    for setting in settings:
        minority = find_minority({rank: str(value) for rank, value in setting.by_rank.items()})
        if minority:
            return minority
    return case.group.ranks


def _settings_facts(case: Case, settings: Sequence[ValueDiff]) -> tuple[Message, ...]:
    """State the first settings and the values by rank. Options of another class are one setting."""
    options: tuple[str, ...] = ()
    others = list(settings)
    if has_other_classes(case):
        options, others = split_lacked(settings)
    described = list(state_if(options, Text.CLASSES(names=options)))
    described += map(_describe_setting, others)
    # The first setting belongs to the first statement of the finding.
    first, *further = limit_facts(described, _MOST, Text.MORE)
    return (Text.SETTINGS(setting=first), *further)


def _parameter_facts(case: Case, covered: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State how many parameters differ because of the settings, and how this developed."""
    parameters = select_kinds(covered, "parameter")
    summary = Text.PARAMETERS(
        count=len(parameters),
        total=case.compared("parameter"),
        size=largest_difference(parameters),
    )
    unknown = state_if(not case.with_moment(), Text.GRADIENTS_UNKNOWN())
    _, since = case.trend_facts("parameter")
    return state_if(parameters, summary, *unknown, *since)


def _match_unread(case: Case, settings: Sequence[ValueDiff]) -> Match:
    """Match keys of a script in the parameter groups, without an effect so far."""
    match = Match(
        (),
        _find_suspects(case, settings),
        _settings_facts(case, settings),
        list_names(settings),
        only_warns=True,
    )
    return match.as_consistent().with_cause(Text.CAUSE_UNREAD, Text.FIX_UNREAD)


def _changes_next_step(setting: ValueDiff) -> bool:
    """Whether a setting changes the next step: a value in a parameter group, a learning rate or the like."""
    parts = setting.name.split(".")
    is_in_group = not {"param_groups", "_last_lr"}.isdisjoint(parts)
    is_known_setting = parts[-1] in (*SETTINGS, REQUIRES_GRAD)
    return is_in_group or is_known_setting


def _describe_setting(setting: ValueDiff) -> Message:
    """State the value of each rank, or the members of a parameter group missing on some ranks."""
    if not setting.name.endswith((".params", ".(positions)")):
        return Text.VALUE(name=setting.name, values=dict(setting.by_rank))
    all_members: set[str] = set()
    sets_of_members = []
    for text in setting.by_rank.values():
        if text is not None:
            members = set(str(text).split(", "))
            sets_of_members.append(members)
            all_members |= members
    partial_members = all_members.difference(all_members.intersection(*sets_of_members))
    if not partial_members:
        return Text.ORDER(name=setting.name)
    return Text.MEMBERS(name=setting.name, names=tuple(sorted(partial_members)))
