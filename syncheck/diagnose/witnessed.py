"""Differences explained by a witness of a watched run, which proved the fault at the step of the fault.

A witness states between which ranks a parameter began to differ. The fault explains this difference in the parameter,
its optimizer state and its averaged copies. Rules explain differences of other ranks and other tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.optimizer_names import is_setting, parameter_of, split_number
from syncheck.diagnose.remainder import find_unexplained_tensors
from syncheck.diagnose.selection import list_names, ranks_outside, select_kinds, with_status
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Finding, TensorDiff

_SETTINGS_DIFFER = "SYN107"
_OPTIMIZER = ("optimizer", "optimizer_step")


class Text(Sentence, topic="watch"):
    """What a comparison adds to an earlier finding of a witness."""

    EFFECT = "since then {count:count tensor} {count:verb differs|differ}, {size}"


def cover_witnessed(
    tensors: Sequence[TensorDiff], ranks: Sequence[int], witnessed: Iterable[Finding]
) -> tuple[tuple[TensorDiff, ...], list[Finding]]:
    """Return the differences without a witness, and the findings of the witnesses with the explained tensors.

    ranks: of the group.
    witnessed: findings with the explained parameters as tensors, in the order of time.
    """
    uncovered = tuple(tensors)
    findings = []
    for finding in witnessed:
        unsuspected = ranks_outside(ranks, finding.ranks)
        effects = []
        for diff in with_status(uncovered, "different"):
            if _is_of(diff, finding) and _sets_apart(diff, frozenset(finding.ranks)):
                effects.append(diff)
        if effects:
            uncovered = find_unexplained_tensors(uncovered, effects, (unsuspected,))
            # A step counter that differs by one says little.
            measured = select_kinds(effects, "parameter") or effects
            fact = Text.EFFECT(count=len(effects), size=largest_difference(measured))
            findings.append(replace(finding, tensors=list_names(effects), facts=(*finding.facts, fact)))
    return uncovered, findings


def _sets_apart(diff: TensorDiff, suspects: frozenset[int]) -> bool:
    """Whether a tensor differs between some of the suspects and all other ranks, not among the other ranks alone."""
    return any(suspects.issuperset(cluster) for cluster in diff.clusters)


def _is_of(diff: TensorDiff, finding: Finding) -> bool:
    """Whether a tensor is a parameter of a finding, its optimizer state or averaged copy, or the setting it names."""
    parameters = frozenset(finding.tensors)
    # A learning rate may be a tensor.
    if is_setting(diff.name):
        return finding.code == _SETTINGS_DIFFER
    if diff.kind in _OPTIMIZER:
        name = parameter_of(diff.name)
        # With several optimizers, their numbers come before the parameter.
        return not parameters.isdisjoint({name, split_number(name)[1]})
    if diff.kind == "ema":
        return any(diff.name.endswith(f".{name}") for name in parameters)
    return diff.kind == "parameter" and diff.name in parameters


def join_findings(witnessed: Iterable[Finding], findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return all findings. A fault that a witness and a rule have found on the same ranks is one finding, proved."""
    proved = {(finding.code, finding.ranks): finding for finding in witnessed}
    remaining = []
    for finding in findings:
        key = finding.code, finding.ranks
        earlier = proved.get(key)
        if earlier is None:
            remaining.append(finding)
            continue
        # The rule has found values, such as a learning rate, and further tensors.
        proved[key] = replace(
            earlier,
            tensors=tuple(dict.fromkeys((*earlier.tensors, *finding.tensors))),
            values=finding.values,
            facts=(*earlier.facts, *finding.facts),
        )
    return (*proved.values(), *remaining)
