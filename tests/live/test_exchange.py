"""`assert_in_sync` on real gloo ranks: all get one report, with the differing ranks and the size of the difference.

An injected fault makes the ranks differ, and the same test without the fault must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from agreement import all_pass, all_raise, each_rank, flip, trained

from syncheck.diagnose import (
    syn101_missing_tensors,
    syn201_bn_local_stats,
    syn215_optimizer_state_not_restored,
    syn220_bit_flip,
)
from syncheck.diagnose.case import Common
from syncheck.live.exchange import fetching
from syncheck.testing import assert_in_sync

if TYPE_CHECKING:
    from syncheck.records import Report


# --- in sync ---


@pytest.mark.syncheck(ranks=2)
def test_ranks_in_sync_pass_and_send_digests_only(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP ranks with their optimizers pass with two short messages, and nothing changes."""
    model, optimizer = trained()
    before = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(syncheck_rank.rank)
    random = torch.get_rng_state()
    sent, gather = [], dist.all_gather_object

    def counted(received: Any, message: Any, group: Any = None) -> None:
        sent.append(len(message))
        gather(received, message, group=group)

    def watched() -> Report:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_gather_object", counted)
            return assert_in_sync(model, optimizer)

    report = all_pass(each_rank(watched))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert report.counts.identical == report.counts.tensors == 4 + 3 * 4
    assert [replica.rank for replica in report.groups[0].replicas] == [0, 1]
    assert len(sent) == 2
    assert sum(sent) < 2000  # the parameters alone are larger


@pytest.mark.syncheck(ranks=2)
def test_values_that_are_equal_in_other_bits_pass(syncheck_rank: Any) -> None:
    """As between files, 0.0 equals -0.0, and NaNs with the same bits are equal."""
    nan = float("nan")
    state = {"w": torch.tensor([0.0 if syncheck_rank.rank else -0.0, nan]), "n": torch.tensor(nan)}
    counts = all_pass(each_rank(assert_in_sync, state)).counts
    assert (counts.equal, counts.identical) == (1, 1)


# --- one rank differs ---


@pytest.mark.syncheck(ranks=2)
def test_a_flipped_bit_raises_on_all_ranks(syncheck_rank: Any) -> None:
    """One flipped bit on rank 1 of 2 makes both ranks raise the same text, with location and size."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight, index=6)
    outcome = all_raise(each_rank(assert_in_sync, model, optimizer))
    assert outcome.codes == ["SYN220"]
    assert outcome.findings[0].fix.code is syn220_bit_flip.Text.IN_A_JOB
    [diff] = outcome.report.groups[0].tensors
    assert (diff.name, diff.mismatched, diff.index, diff.max_ulp) == ("fc.weight", 1, (1, 2), 1)
    assert "rank 1: DistributedDataParallel, AdamW on " in outcome.text
    assert outcome.text.endswith("16 tensors: 15 identical, 0 close, 1 different, 0 not compared")


@pytest.mark.syncheck(ranks=4)
def test_the_odd_one_of_four_ranks_is_named(syncheck_rank: Any) -> None:
    """With a majority of three the finding names only rank 2, on all four ranks."""
    model, optimizer = trained()
    if syncheck_rank.rank == 2:
        flip(model.module.fc.weight, index=6)
    outcome = all_raise(each_rank(assert_in_sync, model, optimizer))
    assert outcome.findings[0].ranks == (2,)
    assert {Common.AGREE(ranks=(0, 1, 3)), Common.DIFFERS(ranks=(2,))} <= set(outcome.findings[0].facts)


@pytest.mark.syncheck(ranks=2)
def test_batchnorm_under_plain_ddp_is_named() -> None:
    """Running statistics that drift under plain DDP are SYN201, and DDP shows that it synchronizes buffers."""
    outcome = all_raise(each_rank(assert_in_sync, *trained(norm=True)))
    assert outcome.codes == ["SYN201"]
    assert syn201_bn_local_stats.Text.SYNCHRONIZED() in outcome.findings[0].facts
    assert {diff.kind for diff in outcome.report.groups[0].tensors} == {"bn_mean", "bn_var"}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    "excused",
    [{"allow": "SYN201"}, {"only": "params"}, {"rtol": 1.0, "atol": 10.0}, {"exclude": "*.running_*"}],
    ids=str,
)
def test_options_hold_across_ranks(excused: dict[str, Any]) -> None:
    """Options that tolerate BatchNorm drift between files tolerate it between ranks."""
    all_pass(each_rank(assert_in_sync, *trained(norm=True), **excused))


@pytest.mark.syncheck(ranks=2)
def test_a_missing_tensor_does_not_hang(syncheck_rank: Any) -> None:
    """Ranks with different sets of tensors exchange the same messages, and all raise SYN101."""
    state = {"w": torch.ones(3), "v": torch.ones(2)}
    if syncheck_rank.rank == 1:
        state |= {"extra": torch.ones(5), "more": torch.ones(1)}
    outcome = all_raise(each_rank(assert_in_sync, state))
    assert outcome.codes == ["SYN101"]
    text = syn101_missing_tensors.Text
    missing = text.MISSING(ranks=(0,), missing=text.TENSORS(tensors=2), names=("extra", "more"))
    assert outcome.findings[0].facts == (missing,)
    assert str(missing) in outcome.text


@pytest.mark.syncheck(ranks=2)
def test_another_dtype_is_named(syncheck_rank: Any) -> None:
    """A rank with another precision is SYN102 on all ranks, and nothing is fetched in vain."""
    model, _ = trained()
    outcome = all_raise(each_rank(assert_in_sync, model.module.bfloat16() if syncheck_rank.rank == 1 else model.module))
    assert outcome.codes == ["SYN102"]
    assert "float32 on rank 0 and bfloat16 on rank 1" in outcome.text


@pytest.mark.syncheck(ranks=2)
def test_optimizer_state_on_one_rank_only_is_found(syncheck_rank: Any) -> None:
    """Optimizer state on rank 0 only, as after loading on rank 0, is reported as not restored on rank 1."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outcome = all_raise(each_rank(assert_in_sync, model, optimizer))
    assert outcome.codes == ["SYN215"]
    empty = syn215_optimizer_state_not_restored.Text.EMPTY(ranks=(1,), others=(0,), tensors=12)
    assert outcome.findings[0].facts[0] == empty
    assert str(empty) in outcome.text


@pytest.mark.syncheck(ranks=2)
def test_values_are_compared(syncheck_rank: Any) -> None:
    """Another learning rate on one rank fails although all tensors agree."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.5 if syncheck_rank.rank else 0.25
    outcome = all_raise(each_rank(assert_in_sync, model, optimizer))
    assert "0.25 on rank 0, 0.5 on rank 1" in outcome.text


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize(
    "window",
    [pytest.param(4096, marks=pytest.mark.slow), 2 << 20],
    ids=["smaller than a block", "of two blocks"],
)
def test_large_tensors_are_fetched_a_window_at_a_time(
    syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Differences in the first, a middle and the last block are measured for all strides and windows."""
    monkeypatch.setattr(fetching, "WINDOW", window)
    big = torch.arange(600_000.0)
    wide = torch.arange(3000.0).reshape(30, 100).t()
    if syncheck_rank.rank == 1:
        big[-1] += 64
        big[7] += 8
        wide[99, 29] -= 1
    if syncheck_rank.rank == 2:
        big[300_000] += 1
    outcome = all_raise(each_rank(assert_in_sync, {"big": big, "wide": wide, "same": torch.ones(5)}))
    big_diff, wide_diff = outcome.report.groups[0].tensors
    assert (big_diff.mismatched, big_diff.max_abs, big_diff.index) == (3, 64.0, (599_999,))
    assert big_diff.clusters == ((0,), (1,), (2,))
    assert (wide_diff.mismatched, wide_diff.index, wide_diff.minority) == (1, (99, 29), (1,))


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("fault", [False, True])
def test_a_wrapper_on_one_rank_only_is_no_difference(syncheck_rank: Any, fault: bool) -> None:
    """Names are normalized: DDP on rank 0 and the bare module on rank 1 agree, and a fault is still found."""
    model, _ = trained()
    if fault and syncheck_rank.rank == 1:
        flip(model.module.head.bias)
    outcomes = each_rank(assert_in_sync, model if syncheck_rank.rank == 0 else model.module)
    if not fault:
        assert all_pass(outcomes).counts.identical == 4
    else:
        assert all_raise(outcomes).findings[0].tensors == ("head.bias",)
