"""Every rule has a matching fixture and a near miss."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.listings import join_fields, list_fields

import syncheck
from syncheck.diagnose.rules import REPLICA_RULES

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ENTRIES: list[dict[str, Any]] = json.loads((FIXTURES / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]
CODES = [rule.code for rule in REPLICA_RULES]


@cache
def compare(folder: str) -> tuple[frozenset[str], int]:
    """Return the codes of all findings in a fixture, at any of its steps, and the number of its ranks."""
    groups = syncheck.compare(FIXTURES / folder).groups
    return frozenset(list_fields(join_fields(groups, "findings"), "code")), len(groups[-1].replicas)


@pytest.mark.parametrize("code", CODES)
def test_every_rule_has_a_fixture_and_a_near_miss(code: str) -> None:
    """Each rule matches the files of at least one fixture and does not match at least one near miss."""
    matching = [entry["folder"] for entry in ENTRIES if code in entry["findings"]]
    assert matching, f"no fixture of fixtures/table.toml has {code} in its codes"
    assert [folder for folder in matching if code not in compare(folder)[0]] == []
    judged = [entry for entry in ENTRIES if set(entry["findings"]) <= set(CODES)]
    reasons = {entry["folder"]: entry["near_misses"][code] for entry in judged if code in entry["near_misses"]}
    assert reasons, f"no fixture of fixtures/table.toml has {code} in its near_misses"
    assert all(len(reason) > 10 for reason in reasons.values())
    assert [folder for folder in reasons if code in compare(folder)[0]] == []


def test_fixtures_have_several_sizes() -> None:
    """Fixtures of out-of-sync replicas have 2, 4 and 8 ranks, and some have several steps."""
    wrong = [entry for entry in ENTRIES if entry["exit_code"]]
    assert {2, 4, 8} <= {compare(entry["folder"])[1] for entry in wrong}
    assert sum(len(entry["steps"]) > 1 for entry in wrong) >= 3
