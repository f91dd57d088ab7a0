"""What the codes of `--allow` accept: the findings themselves, and the different parameters that they lead to.

One rule holds for each allowed cause. The comparison of all replicas ignores what it attributes to an allowed code, and
so does the last line with the different parameters that a witness saw on the same ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.live.witnesses.rules import PARAMETERS_DIFFER
from syncheck.tensors.kinds import OPTIMIZER, PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Finding, Report

_TRAINED = PARAMETERS | OPTIMIZER


def has_ignored_differences(report: Report) -> bool:
    """Whether trained tensors differ, also if an allowed finding explains all of them."""
    kinds: dict[bool, set[str]] = defaultdict(set)
    for diff in report.tensors:
        kinds[diff.out_of_sync].add(diff.kind)
    return not _TRAINED.isdisjoint(kinds[True])


def list_allowed(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that the user allows."""
    by_allowance: dict[bool, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_allowance[finding.allowed].append(finding)
    return by_allowance[True]


def excuse_effects(findings: Iterable[Finding], compared: Iterable[Finding]) -> list[Finding]:
    """Return findings of witnesses, with different parameters allowed if the last comparison attributes them so.

    compared: the findings of the last comparison of all replicas.
    """
    tensors: set[str] = set()
    ranks: set[int] = set()
    for cause in list_allowed(compared):
        tensors.update(cause.tensors)
        ranks.update(cause.ranks)
    excused = []
    for finding in findings:
        conditions = (
            finding.code == PARAMETERS_DIFFER,
            tensors.issuperset(finding.tensors),
            ranks.issuperset(finding.ranks),
        )
        is_allowed = any((finding.allowed, all(conditions)))
        excused.append(replace(finding, allowed=is_allowed))
    return excused
