"""No rule without a fixture that it explains, one on which it stays silent, and a text that explains it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import syncheck
from syncheck.diagnose import RULES

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ENTRIES: list[dict[str, Any]] = json.loads((FIXTURES / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]
CODES = [rule.CODE for rule in RULES]


@cache
def found(folder: str) -> frozenset[str]:
    """Codes of all findings in a fixture, at any of its steps."""
    report = syncheck.compare(FIXTURES / folder)
    return frozenset(finding.code for group in report.groups for finding in group.findings)


@pytest.mark.parametrize("code", CODES)
def test_every_rule_has_a_fixture(code: str) -> None:
    """Some real run's files lead to the finding, and the manifest says so."""
    folders = [entry["folder"] for entry in ENTRIES if code in entry["findings"]]
    assert folders, f"no fixture of fixtures/table.toml has {code} in its codes"
    assert [folder for folder in folders if code not in found(folder)] == []


@pytest.mark.parametrize("code", CODES)
def test_every_rule_has_a_near_miss(code: str) -> None:
    """Some real run's files look like the finding, the manifest says what speaks against it, and it is not made."""
    judged = [entry for entry in ENTRIES if set(entry["findings"]) <= set(CODES)]
    reasons = {entry["folder"]: entry["near_misses"][code] for entry in judged if code in entry["near_misses"]}
    assert reasons, f"no fixture of fixtures/table.toml has {code} in its near_misses"
    assert all(len(reason) > 10 for reason in reasons.values())
    assert [folder for folder in reasons if code in found(folder)] == []


def test_near_misses_are_not_findings_too() -> None:
    """No fixture is stated to have a finding and to be a near miss of it."""
    assert [entry["folder"] for entry in ENTRIES if set(entry["findings"]) & set(entry["near_misses"])] == []


@pytest.mark.parametrize("rule", RULES, ids=CODES)
def test_every_rule_is_explained(rule: Any) -> None:
    """`syncheck explain CODE` prints what the finding looks like, why, what to do, and where it has happened."""
    command = [sys.executable, "-m", "syncheck", "explain", rule.CODE]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert rule.SLUG in printed
    parts = re.split(r"^(Signature|Cause|Fix|Incidents)\b", printed, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(texts) == ["Signature", "Cause", "Fix", "Incidents"]
    assert all(len(text.split()) > (3 if name != "Incidents" else 1) for name, text in texts.items())


def test_sizes_are_sampled() -> None:
    """Fixtures of out-of-sync replicas are of 2, 4 and 8 ranks, and some are of several steps."""
    wrong = [entry for entry in ENTRIES if entry["exit_code"]]
    ranks = {len(syncheck.compare(FIXTURES / entry["folder"]).groups[-1].replicas) for entry in wrong}
    assert {2, 4, 8} <= ranks
    assert sum(len(entry["steps"]) > 1 for entry in wrong) >= 3
