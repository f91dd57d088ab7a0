"""Bytes that `check` fetches of differing tensors: within the budget, in few messages, with correct numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import Net, all_pass, all_raise, each_rank, flip, trained
from support.listings import find_all, list_absent, list_failing, list_fields, list_names

import syncheck
from syncheck.live import check
from syncheck.live.channel import Channel
from syncheck.live.digest import host as digest_host
from syncheck.live.exchange import across_ranks, manifest
from syncheck.messages import Grouping
from syncheck.testing import message

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.testing import Rank


def apart(rank: int) -> dict[str, torch.Tensor]:
    """Return tensors of 40, 400 and 4,000 bytes that differ on rank 1, and one equal tensor."""
    sizes = {"large": 1000, "small": 10, "middle": 100}
    return {name: torch.full((size,), 1.0 + (rank == 1)) for name, size in sizes.items()} | {"same": torch.ones(9)}


# --- budget ---


@pytest.mark.syncheck(ranks=3)
def test_tensors_beyond_the_budget(syncheck_rank: Rank) -> None:
    """Tensors beyond the budget, the largest first, are reported with ranks and a reason, without numbers."""
    state = apart(syncheck_rank.rank)
    for budget, beyond in ((0, ["large", "middle", "small"]), (40, ["large", "middle"]), (440, ["large"]), (4440, [])):
        report = all_pass(each_rank(check, state, budget=budget))
        assert report.verdict == "out_of_sync"
        assert (report.counts.different, report.counts.identical, report.counts.not_compared) == (3, 1, 0)
        group = report.groups[0]
        assert set(list_names(find_all(group.tensors, reason="digest"))) == set(beyond), budget
        for diff in group.tensors:
            assert (diff.clusters, diff.minority) == (((0, 2), (1,)), (1,))
            assert (diff.max_abs, diff.mismatched) == ((None, None) if diff.name in beyond else (1.0, diff.numel))
        assert list_fields(list_failing(group), "ranks") == [(1,)]
        text = message(report)
        assert not list_absent(text, ("large", "middle", "small"))
        over = list_fields(find_all(group.grouping, code=Grouping.OVER_BUDGET), "parameters")
        assert over == ([{"tensors": len(beyond), "budget": budget}] if beyond else [])


@pytest.mark.syncheck(ranks=2)
def test_excluded_tensors_use_no_budget(syncheck_rank: Rank) -> None:
    """Differing moments that only= excludes use no budget."""
    torch.manual_seed(syncheck_rank.rank)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    size = sum(list_fields(model.parameters(), "nbytes"))
    report = all_pass(each_rank(check, model, optimizer, only="params", budget=size))
    assert list_fields(report.groups[0].tensors, "kind", "reason") == [("parameter", None)] * 4


@pytest.mark.syncheck(ranks=3)
@pytest.mark.slow
def test_many_differences_take_few_messages(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 small tensors and 40 MB in other strides take a dozen messages, with the numbers of saved files."""
    rank = syncheck_rank.rank
    torch.manual_seed(0)
    state = {f"t{i:03}": torch.randn(7, 11) + (rank == 1) * 2.0**-i for i in range(500)}
    state["wide"] = torch.arange(10_000_000, dtype=torch.float32).reshape(2500, 4000).t()
    state["wide"][17, 1] -= rank
    state["wide"][3999, 2499] += 3 * (rank == 2)
    requested: list[int] = []
    request = Channel.request

    def counted(self: Channel, rank: int, message: Any) -> Any:
        requested.append(rank)
        return request(self, rank, message)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "request", counted)
        live = all_pass(each_rank(check, state))
    # Three windows of the large tensor from each of two ranks; the small tensors, of rank 1 alone, fit into one window.
    assert len(requested) == (7 if rank == 0 else 0)
    torch.save(state, syncheck_rank.shared / f"run_rank{rank}.pth")
    syncheck_rank.barrier()
    files = syncheck.compare(syncheck_rank.shared)
    assert live.groups[0].tensors == files.groups[0].tensors
    assert live.groups[0].findings == files.groups[0].findings
    assert live.counts == files.counts


# --- different algorithms ---


@pytest.mark.syncheck(ranks=3)
def test_digests_of_other_algorithms_are_never_compared(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 1 lacks xxhash, equal ranks are in sync, and a flipped bit on rank 2 is found."""
    model, optimizer = trained(norm=True)
    model.module.norm.reset_running_stats()
    with monkeypatch.context() as patch:
        if syncheck_rank.rank == 1:
            patch.setattr(digest_host, "default_algorithm", lambda: digest_host.COMMON)
        report = all_pass(each_rank(check, model, optimizer))
        assert (report.verdict, report.counts.identical) == ("in_sync", report.counts.tensors)
        if syncheck_rank.rank == 2:
            flip(model.module.head.weight)
        report = all_pass(each_rank(check, model, optimizer))
        # Beyond the budget, digests of the agreed algorithm are compared.
        untold = all_pass(each_rank(check, model, optimizer, budget=0))
    for result in (report, untold):
        assert list_fields(result.groups[0].tensors, "name", "minority") == [("head.weight", (2,))]
    assert report.groups[0].tensors[0].max_ulp == 1


# --- a rank that fails ---


class Stubborn(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def stubborn(*_: Any, **__: Any) -> Any:
    raise Stubborn("a\nb" * 1000)


# Messages that cannot be sent; `test_channel_phases` fails at every other point. The failing rank, the patched
# function, its replacement, and the error on all ranks.
FAILING: dict[str, tuple[int, Any, str, Callable[..., Any], str]] = {
    "an error that cannot be sent": (0, across_ranks, "judge", stubborn, r"rank 0: Stubborn: a\nba\nb"),
    "a report that cannot be sent": (0, across_ranks, "judge", lambda *_, **__: lambda: 1, "rank 0: "),
    "an answer that cannot be sent": (1, across_ranks, "read_pieces", lambda *_: [lambda: 1], "rank 1: "),
    "an answer with too little": (1, across_ranks, "read_pieces", lambda *_: [], "rank 0: ValueError: zip()"),
}


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("what", FAILING)
def test_any_failure_is_raised_on_all_ranks(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Any error on one rank makes all raise the same RankFailed, and the next check works."""
    rank, where, name, does, says = FAILING[what]
    state = apart(syncheck_rank.rank)
    if syncheck_rank.rank == 2:
        state["more"] = torch.ones(1)
    with monkeypatch.context() as patch:
        if syncheck_rank.rank == rank:
            patch.setattr(where, name, does)
        outcome = all_raise(each_rank(check, state), "RankFailed")
    assert outcome.text.startswith(says), outcome.text
    assert "\n" not in outcome.text
    assert len(outcome.text) < 1000
    assert all_pass(each_rank(check, state)).verdict == "out_of_sync"


# --- concurrent changes ---


def after_digests(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Make a change after all digests were exchanged."""
    real = manifest.exchange_contents

    def exchanged(*args: Any) -> Any:
        result = real(*args)
        change()
        return result

    monkeypatch.setattr(across_ranks, "exchange_contents", exchanged)


@pytest.mark.syncheck(ranks=2)
def test_a_tensor_that_changes_during_a_check(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a tensor changes between digest and bytes, the report reflects the bytes, and nothing crashes."""
    rank = syncheck_rank.rank
    for first, then, verdict, different in (
        (1.0 + rank, 1.0, "in_sync", []),  # the values are equal by now
        (1.0 + rank, 5.0 + 2 * rank, "out_of_sync", ["w"]),
        (1.0, 1.0 + rank, "in_sync", []),  # missed until the next check
    ):
        state = {"w": torch.full((100,), first), "v": torch.ones(3)}
        with monkeypatch.context() as patch:
            after_digests(patch, lambda state=state, then=then: state["w"].fill_(then))
            report = all_pass(each_rank(check, state))
        assert report.verdict == verdict
        assert list_names(find_all(report.groups[0].tensors, status="different")) == different
        if different:
            assert report.groups[0].tensors[0].max_abs == 2.0


@pytest.mark.syncheck(ranks=2)
def test_a_tensor_that_shrinks_during_a_check(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a tensor shrinks during a check, all ranks raise, and no number is wrong."""
    for outlier in (0, 1):
        state = {"w": torch.full((100,), float(syncheck_rank.rank))}
        with monkeypatch.context() as patch:
            if syncheck_rank.rank == outlier:
                after_digests(patch, lambda state=state: state["w"].resize_(3))
            outcome = all_raise(each_rank(check, state), "RankFailed")
        assert outcome.text.startswith(
            f"rank {outlier}: w: size changed during the check (found 12 bytes from byte 0 on, expected 400)"
        )
