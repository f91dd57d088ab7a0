"""Fixes in a running job, which has no files, and whose ranks can be resynchronized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.agreement import all_pass, each_rank, flip, trained
from support.listings import get_failing, list_codes, list_fields
from torch import nn

from syncheck.diagnose import syn214_step_skipped, syn215_optimizer_state_not_restored, syn222_nonfinite_on_some_ranks
from syncheck.diagnose.syn201_bn_local_stats import Text as LocalStatistics
from syncheck.live import check, resync
from syncheck.testing import compare


@pytest.mark.syncheck(ranks=3)
def test_a_skipped_step_is_fixed_by_resync(syncheck_rank: Any) -> None:
    """Rank 2 skipped a step: the fix is resync, without files or a restart."""
    model, optimizer = trained(steps=4)
    if syncheck_rank.rank == 2:
        model.module.load_state_dict({k: v - 0.01 for k, v in model.module.state_dict().items()})
        for state in optimizer.state.values():
            state["step"] -= 1
            state["exp_avg"] *= 0.9
    result = get_failing(all_pass(each_rank(check, model, optimizer)))
    assert (result.code, result.ranks) == ("SYN214", (2,))
    assert syn214_step_skipped.Text.STEP_UNKNOWN() not in result.facts
    assert result.fix.code is syn214_step_skipped.Text.IN_A_JOB
    assert "restart" not in str(result.fix)


@pytest.mark.syncheck(ranks=3)
def test_a_nan_is_fixed_by_resync(syncheck_rank: Any) -> None:
    """A NaN on one rank: the fix is resync, without files."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        with torch.no_grad():
            model.module.fc.weight[0, 0] = float("nan")
    result = get_failing(all_pass(each_rank(check, model, optimizer)))
    assert (result.code, result.ranks) == ("SYN222", (1,))
    assert result.fix.code is syn222_nonfinite_on_some_ranks.Text.IN_A_JOB
    assert "files" not in str(result.fix)


@pytest.mark.syncheck(ranks=3)
def test_restored_state_is_not_outvoted(syncheck_rank: Any) -> None:
    """If only rank 0 restored its optimizer, the fix asks for a source, because the majority lost its state."""
    model, optimizer = trained()
    if syncheck_rank.rank > 0:
        optimizer.state.clear()
    result = get_failing(all_pass(each_rank(check, model, optimizer)))
    assert result.code == "SYN215"
    assert result.fix.code is syn215_optimizer_state_not_restored.Text.IN_A_JOB
    assert "source=RANK" in str(result.fix)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_ddp_itself_shows_whether_it_synchronizes_buffers(syncheck_rank: Any, wrapped: bool) -> None:
    """Given DDP's wrapper the cause is certain; without it, SYN201 asks for the wrapper and not for early steps."""
    model, _ = trained(norm=True)
    result = get_failing(all_pass(each_rank(check, model if wrapped else model.module)))
    assert result.code == "SYN201"
    codes = set(list_codes(result.facts))
    assert not {LocalStatistics.SYNCHRONIZED_BY_METADATA, LocalStatistics.SAVE_EARLY_STEPS} & codes
    assert (LocalStatistics.SYNCHRONIZED in codes) == wrapped
    assert (LocalStatistics.USE_WRAPPER in codes) != wrapped


def test_objects_of_one_process_are_no_job() -> None:
    """Two models of one process cannot be synchronized by a collective call, so the fix has none."""
    model, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.load_state_dict(model.state_dict())
    with torch.no_grad():
        second.weight[0, 0] = float("nan")
    findings = get_failing(compare(model, second))
    assert findings.code == "SYN222"
    assert findings.fix.code is syn222_nonfinite_on_some_ranks.Text.FIX


@pytest.mark.syncheck(ranks=2)
def test_allow_of_a_fix_can_be_pasted(syncheck_rank: Any) -> None:
    """`check` and `resync` accept allow="SYN201" as printed in fixes; a string is one entry."""
    model, optimizer = trained(norm=True)
    report = all_pass(each_rank(check, model, optimizer, allow="SYN201"))
    assert report.verdict == "in_sync"
    assert list_fields(report.groups[0].findings, "code", "allowed") == [("SYN201", True)]
    report = all_pass(each_rank(check, model, optimizer, only="params", exclude="*.bias"))
    assert set(report.groups[0].evidence.names) == {"fc.weight", "norm.weight", "head.weight"}
    assert resync(model, optimizer, allow="SYN201").before.verdict == "in_sync"


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("saved", [True, False], ids=["state dict", "module"])
def test_optimizer_state_dict_beside_a_model(syncheck_rank: Any, saved: bool) -> None:
    """A flipped bit of a model is found beside an optimizer's state dict."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    settings = model.module.state_dict() if saved else model
    report = all_pass(each_rank(check, settings, optimizer.state_dict()))
    assert get_failing(report).tensors == ("fc.weight",)
    assert report.counts.tensors == 16
