"""Build groups of replicas and findings for tests of the diagnosis and of reports."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from support.listings import list_fields
from syncheck.messages import Fact, Message, Sentence
from syncheck.records import Finding, Group, GroupEvidence

if TYPE_CHECKING:
    from collections.abc import Mapping

_EVIDENCE = frozenset(field.name for field in fields(GroupEvidence))


def make_group(
    name: str, step: int | None, verdict: Any, replicas: Any, counts: Any, tensors: Any = (), **given: Any
) -> Group:
    """Return a group. given: fields of `Group` and of `GroupEvidence`."""
    evidence = GroupEvidence(**{key: given.pop(key) for key in _EVIDENCE & given.keys()})
    return Group(name, name, step, replicas, counts, tuple(tensors), verdict=verdict, evidence=evidence, **given)


def make_finding(code: str, slug: str, severity: Any, ranks: Any, tensors: Any, evidence: str = "", cause: str = "",
                 fix: str = "", values: Any = (), **given: Any) -> Finding:  # fmt: skip
    """Return a finding with the given texts as evidence, cause and fix."""
    return Finding(code, slug, severity, ranks, tensors, (text(evidence),), text(cause), text(fix), values, **given)


def text(words: str) -> Message:
    """Return a message with this text."""
    return Fact.TEXT(text=words)


def facts_of(finding: Finding) -> dict[Sentence, Mapping[str, Any]]:
    """Return the evidence of a finding: the parameters of each statement by its code."""
    return dict(list_fields(finding.facts, "code", "parameters"))
