"""`assert_in_sync` on real gloo ranks: all get one report, with the differing ranks and the size of the difference.

An injected fault makes the ranks differ, and the same test without the fault must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import all_pass, all_raise, each_rank, flip, trained
from support.listings import list_fields
from support.states import clone_parameters

from syncheck.diagnose import syn220_bit_flip
from syncheck.live.exchange import fetching
from syncheck.testing import assert_in_sync, compare

if TYPE_CHECKING:
    from syncheck.records import Report


# --- in sync ---


@pytest.mark.syncheck(ranks=2)
def test_ranks_in_sync_pass_and_send_digests_only(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP ranks with their optimizers pass with two short messages, and nothing changes."""
    model, optimizer = trained()
    before = clone_parameters(model)
    torch.manual_seed(syncheck_rank.rank)
    random = torch.get_rng_state()
    messages, gather = [], dist.all_gather_object

    def counted(received: Any, message: Any, group: Any = None) -> None:
        messages.append(len(message))
        gather(received, message, group=group)

    def watched() -> Report:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_gather_object", counted)
            return assert_in_sync(model, optimizer)

    report = all_pass(each_rank(watched))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert report.counts.identical == report.counts.tensors == 4 + 3 * 4
    assert list_fields(report.groups[0].replicas, "rank") == [0, 1]
    assert len(messages) == 2
    assert sum(messages) < 2000  # the parameters alone are larger


# --- one rank differs ---


@pytest.mark.syncheck(ranks=2)
def test_a_flipped_bit_raises_on_all_ranks(syncheck_rank: Any) -> None:
    """One flipped bit on rank 1 of 2 makes both ranks raise the same text, with location and size."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight, index=6)
    outcome = all_raise(each_rank(assert_in_sync, model, optimizer))
    assert outcome.codes == ["SYN220"]
    assert outcome.findings[0].fix.code is syn220_bit_flip.Text.IN_A_JOB_NO_MAJORITY
    [diff] = outcome.report.groups[0].tensors
    assert (diff.name, diff.mismatched, diff.index, diff.max_ulp) == ("fc.weight", 1, (1, 2), 1)
    assert "rank 1: DistributedDataParallel, AdamW on " in outcome.text
    assert outcome.text.endswith("16 tensors: 15 identical, 0 close, 1 different, 0 not compared")


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    "excused",
    [{"allow": "SYN201"}, {"only": "params"}, {"rtol": 1.0, "atol": 10.0}, {"exclude": "*.running_*"}],
    ids=str,
)
def test_options_hold_across_ranks(excused: dict[str, Any]) -> None:
    """Options that tolerate BatchNorm drift between files tolerate it between ranks."""
    all_pass(each_rank(assert_in_sync, *trained(norm=True), **excused))


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


@pytest.mark.syncheck(ranks=1)
@pytest.mark.parametrize("chosen, says", [(None, "in a process group of one rank"), (True, "a single rank")])
def test_a_group_of_one_rank_never_passes(chosen: bool | None, says: str) -> None:
    """A group of one rank is an error and never passes."""
    outcome = all_raise(each_rank(assert_in_sync, {"w": torch.ones(1)}, across_ranks=chosen), "UsageError")
    assert says in outcome.text


@pytest.mark.syncheck(ranks=2)
def test_across_ranks_false_in_a_group(syncheck_rank: Any) -> None:
    """With across_ranks=False each rank compares alone: rank 0 passes while rank 1 raises."""
    first, second = {"w": torch.ones(1)}, {"w": torch.full((1,), 1.0 + syncheck_rank.rank)}
    outcomes = each_rank(assert_in_sync, first, second, across_ranks=False)
    assert list_fields(outcomes, "error") == ["", "OutOfSync"]


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("values", [(0, 3, 4), (1, 1, 1)], ids=["different", "equal"])
def test_a_rank_is_the_reference(syncheck_rank: Any, values: tuple[int, ...]) -> None:
    """All ranks have the same report against the chosen rank; an unknown rank is an error, even without differences."""
    state = {"w": torch.full((2,), float(values[syncheck_rank.rank]))}
    (group,) = all_pass(each_rank(compare, state, reference=1)).groups
    assert list_fields(group.tensors, "max_abs", "minority") == ([(3.0, (0, 2))] if values[0] == 0 else [])
    assert list_fields(group.replicas, "rank") == [0, 1, 2]
    outcome = all_raise(each_rank(compare, state, reference=7), "UsageError")
    assert "reference=7: no replica has this rank or path" in outcome.text
