"""Causes and fixes fit the case: a majority or none, settings beside statistics, shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case, diff, group
from support.groups import facts_of
from support.small_model import HALF, moments, unreduced
from support.small_model import group as model_group
from support.small_model import model as model_diffs

from syncheck.diagnose import syn201_bn_local_stats as syn201
from syncheck.diagnose import syn211_gradients_not_reduced as syn211
from syncheck.diagnose import syn220_bit_flip as syn220
from syncheck.diagnose import syn221_contiguous_corruption as syn221
from syncheck.diagnose.bn import Statistics
from syncheck.diagnose.rules import list_rules
from syncheck.records import Evidence, Shards

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

HSDP = Shards("DTensor", "copied to 2 along replicate, divided in 2 along shard (dimension 0)", 5, 5)
TP = Shards("DTensor", "divided in 2 along tp (dimension 0)", 5, 5)
UNNAMED = Shards("DTensor", "copied to 2, divided in 2 (dimension 0)", 5, 5)


def flipped(clusters: Any) -> TensorDiff:
    """Return a weight with one flipped bit."""
    evidence = Evidence(flipped_bits=1, bit=20)
    return diff("fc.weight", "parameter", clusters, mismatched=1, extent="one", evidence=evidence)


def test_no_fix_refers_to_suspects_that_are_not_named() -> None:
    """Without a majority no rank is suspect, so a fix speaks of some ranks; ranks as a parameter are named."""
    for rule in list_rules():
        for sentence in rule.sentences:
            assert "suspects" not in sentence.value, sentence


@pytest.mark.parametrize(
    ("clusters", "ranks", "majority"),
    [
        (((0,), (1,)), 2, False),
        (((0, 2), (1,)), 3, True),
        (((0, 1), (2, 3)), 4, False),
        (((0, 1), (2,), (3,)), 4, False),
    ],
    ids=["two ranks", "two of three", "two pairs", "half"],
)
def test_a_majority_is_named_only_if_there_is_one(clusters: Any, ranks: int, majority: bool) -> None:
    """Without a majority, the fix says how to choose the healthy rank."""
    findings = diagnose_case(group(flipped(clusters), ranks=ranks))["SYN220"]
    assert findings.fix.code is (syn220.Text.FIX if majority else syn220.Text.FIX_NO_MAJORITY)
    elements = {"numel": 100, "shape": (10, 10), "mismatched": 4, "extent": "contiguous"}
    run = diff("fc.weight", "parameter", clusters, evidence=Evidence(first=3), **elements)
    names = {"fc.weight": "parameter", "optimizer.fc.weight.exp_avg": "optimizer"}
    findings = diagnose_case(group(run, ranks=ranks, names=names))["SYN221"]
    assert findings.fix.code is (syn221.Text.FIX if majority else syn221.Text.FIX_NO_MAJORITY)


@pytest.mark.parametrize(("shards", "sharded"), [(HSDP, True), (UNNAMED, True), (TP, False)], ids=str)
def test_sharded_models_have_their_own_fix(shards: Shards, sharded: bool) -> None:
    """Advice about DDP does not help with fully_shard."""
    findings = diagnose_case(model_group(*unreduced(), shards=(shards,)))["SYN211"]
    assert findings.fix.code is (syn211.Text.FIX_SHARDED if sharded else syn211.Text.FIX)


def test_statistics_beside_settings() -> None:
    """SYN107 is the reason of local statistics beside it, and a flipped bit is not."""
    names = {"bn.running_mean": "bn_mean", "bn.running_var": "bn_var"}
    local = [diff(name, kind) for name, kind in names.items()]
    findings = diagnose_case(model_group(*model_diffs(), *moments(), *local, more=names, values=(HALF,)))
    assert list(findings) == ["SYN107", "SYN201"]
    assert findings["SYN201"].cause.code is syn201.Text.CAUSE_OF_SETTINGS
    assert Statistics.SETTINGS in facts_of(findings["SYN201"])
    findings = diagnose_case(model_group(flipped(((0,), (1,))), *local, more=names))
    assert findings["SYN201"].cause.code is syn201.Text.CAUSE


def test_every_sentence_about_a_case_replaces_another() -> None:
    """A sentence for a case stands beside the sentence for all cases, and has no parameters."""
    for rule in list_rules():
        for name, sentence in rule.sentences.__members__.items():
            if name.startswith(("FIX", "IN_A_JOB", "CAUSE")):
                assert str(sentence())
            if name.endswith("_NO_MAJORITY"):
                assert name.removesuffix("_NO_MAJORITY") in rule.sentences.__members__
