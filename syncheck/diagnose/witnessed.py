"""Differences explained by a witness of a watched run: it proved the fault at the step of the fault.

A witness states between which ranks a parameter began to differ. The fault explains this difference in the parameter,
its optimizer state and its averaged copies. Rules explain differences of other ranks and other tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.optimizer_names import is_setting, parameter_of, split_number
from syncheck.diagnose.remainder import find_unexplained_tensors
from syncheck.diagnose.selection import exclude_kinds, list_names, ranks_outside, select_kinds, with_status
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Finding, TensorDiff, ValueDiff

_SETTINGS_DIFFER = "SYN107"
_COUNTER = "optimizer_step"
_OPTIMIZER = ("optimizer", _COUNTER)
# After these faults, optimizers count different numbers of steps.
_UNEQUAL_STEPS = ("SYN214", "SYN216", "SYN410")


class Text(Sentence, topic="watch"):
    """What a comparison adds to an earlier finding of a witness."""

    EFFECT = "since then {count:count tensor} {count:verb differs|differ}, {size}"


def cover_witnessed(
    tensors: Sequence[TensorDiff], ranks: Sequence[int], witnessed: Iterable[Finding], values: Sequence[ValueDiff] = ()
) -> tuple[tuple[TensorDiff, ...], list[Finding]]:
    """Return the differences without a witness, and the findings of the witnesses with the explained tensors.

    ranks: of the group.
    witnessed: findings with the explained parameters as tensors, in the order of time.
    values: the counting ones. A finding names the explained ones.
    """
    uncovered = tuple(tensors)
    findings = []
    for finding in witnessed:
        unsuspected = ranks_outside(ranks, finding.ranks)
        effects = []
        for diff in with_status(uncovered, "different"):
            if _is_of(diff, finding) and _sets_apart(diff, frozenset(finding.ranks)):
                effects.append(diff)
        if finding.code not in _UNEQUAL_STEPS and select_kinds(effects, _COUNTER):
            # The fault changes no number of steps: the states were reset or loaded, which is a fault of its own.
            settings = [diff for diff in effects if is_setting(diff.name)]
            effects = [*exclude_kinds(effects, *_OPTIMIZER), *settings]
        if effects:
            uncovered = find_unexplained_tensors(uncovered, effects, (unsuspected,))
            # A step counter that differs by one says little.
            measured = select_kinds(effects, "parameter") or effects
            fact = Text.EFFECT(count=len(effects), size=largest_difference(measured))
            explained = replace(
                finding,
                tensors=list_names(effects),
                facts=(*finding.facts, fact),
                values=_list_counters(values, unsuspected, finding),
            )
            findings.append(explained)
    return uncovered, findings


def _list_counters(values: Iterable[ValueDiff], unsuspected: Iterable[int], finding: Finding) -> tuple[str, ...]:
    """Return the step counters of a finding's parameters: plain numbers, equal on all other ranks.

    Some optimizers, such as SparseAdam, count steps with a number, and not with a tensor.
    """
    names = []
    for value in select_kinds(values, "counter"):
        counts = set(map(value.by_rank.get, unsuspected))
        conditions = (finding.code in _UNEQUAL_STEPS, len(counts) < 2, _is_state_of(value.name, finding))
        if all(conditions):
            names.append(value.name)
    return tuple(names)


def _sets_apart(diff: TensorDiff, suspects: frozenset[int]) -> bool:
    """Whether a tensor differs between some of the suspects and all other ranks, not among the other ranks alone."""
    return any(map(suspects.issuperset, diff.clusters))


def _is_of(diff: TensorDiff, finding: Finding) -> bool:
    """Whether a tensor is a parameter of a finding, its optimizer state or averaged copy, or the setting it names."""
    parameters = frozenset(finding.tensors)
    # A learning rate may be a tensor.
    if is_setting(diff.name):
        return finding.code == _SETTINGS_DIFFER
    if diff.kind in _OPTIMIZER:
        return _is_state_of(diff.name, finding)
    if diff.kind == "ema":
        return diff.name.endswith(tuple(map(".{}".format, parameters)))
    return diff.kind == "parameter" and diff.name in parameters


def _is_state_of(name: str, finding: Finding) -> bool:
    """Whether an optimizer state is of a parameter of a finding."""
    parameter = parameter_of(name)
    # With several optimizers, their numbers come before the parameter.
    return not {parameter, split_number(parameter)[1]}.isdisjoint(finding.tensors)


def join_findings(witnessed: Iterable[Finding], findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return all findings. A fault found by a witness and by a rule on the same ranks is one finding, proved."""
    proved = {(finding.code, finding.ranks): finding for finding in witnessed}
    remaining = []
    for finding in findings:
        key = finding.code, finding.ranks
        earlier = proved.get(key)
        if earlier is None:
            remaining.append(finding)
            continue
        # The rule has found values, like a learning rate, and further tensors.
        proved[key] = replace(
            earlier,
            tensors=tuple(dict.fromkeys((*earlier.tensors, *finding.tensors))),
            values=(*earlier.values, *finding.values),
            facts=(*earlier.facts, *finding.facts),
        )
    return (*proved.values(), *remaining)
