"""--comm-hook: what travels, that ranks stay equal, and what a resumed run needs of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from resumed import TINY, assert_bitwise, state_of
from scenarios import SMALL, differing, load, run, tensors, trained, widest_gap
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import syncheck
from syncheck.messages import Detail
from syncheck.records import Reason
from train.comm_hooks import collect_hook_state, restore_hook_state
from train.errors import UserError
from train.launch import RankContext
from train.methods.ddp import Ddp
from train.resume import state_path, states_folder
from train.settings import check

if TYPE_CHECKING:
    from syncheck.testing import Rank

HOOKS = ("fp16", "bf16", "powersgd")
# No BatchNorm, so all that differs comes from gradients.
CONVNET = replace(SMALL, model="convnet", save_per_rank=False)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", pytest.param("zero", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_stay_equal(ctx: RankContext, syncheck_rank: Rank, method: str, hook: str) -> None:
    """Whatever is sent, ranks end with the same bits of everything, and not with those of a run without a hook."""
    # With statistics that travel during backward, as gradients do: they must not get mixed up.
    plain = replace(SMALL, method=method, sync_bn=True, out=syncheck_rank.shared)
    settings = replace(plain, comm_hook=hook)
    assert not any(differing_models(ctx, settings))
    (group,) = syncheck.compare(*[settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(2)]).groups
    assert group.verdict == "in_sync"
    run(ctx, plain)
    gap = widest_gap(settings.out / f"{settings.run}_rank0.pth", settings.out / f"{plain.run}_rank0.pth")
    assert 1e-7 < gap < 0.5


def differing_models(ctx: RankContext, settings: Any) -> set[str]:
    """Train, and name the tensors of the model that differ between the two ranks' files."""
    first, second = run(ctx, settings).saved
    names = load(first)["model"]
    return {n for n in names if tensors(first)[n].numpy().tobytes() != tensors(second)[n].numpy().tobytes()}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_send_less(ctx: RankContext, monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    """The 16-bit hooks send half the bytes of the gradient once a step, PowerSGD a quarter or less once it begins."""
    sent: list[tuple[torch.dtype, int]] = []
    reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        sent.append((tensor.dtype, tensor.nbytes))
        return reduce(tensor, *arguments, **named)

    monkeypatch.setattr(dist, "all_reduce", counting)
    settings = replace(CONVNET, width=16, max_steps=4, accumulate=accumulate)
    whole = 0
    for hook, share in (("fp16", 0.5), ("bf16", 0.5), ("powersgd", 0.25)):
        sent.clear()
        job = trained(ctx, replace(settings, comm_hook=hook))
        whole = 4 * sum(p.numel() for p in job.method.module.parameters())
        if hook == "powersgd":
            assert sum(size for _, size in sent) <= 2 * whole + 2 * share * whole  # two steps without it, two with
            assert len(sent) == 2 + 2 * 3  # P and Q, and what is too small to compress
        else:
            assert {dtype for dtype, _ in sent} == {getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[hook])}
            assert sum(size for _, size in sent) == 4 * share * whole
    assert whole > 0


@pytest.mark.syncheck(ranks=2)
def test_an_overflow_in_the_hook_is_every_ranks(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that fits float32 and not float16, on rank 1 alone: no rank takes that step, and scales stay equal."""
    backward = Ddp.backward
    calls = []

    def large(self: Any, loss: Tensor) -> None:
        calls.append(loss)
        backward(self, loss * 1e9 if len(calls) == 3 and ctx.rank == 1 else loss)

    monkeypatch.setattr(Ddp, "backward", large)
    job = trained(ctx, replace(CONVNET, comm_hook="fp16", amp="fp16", optimizer="adamw"))
    steps = {state["step"].item() for state in job.trainer.optimizer.state_dict()["state"].values()}
    seen = ctx.gather((steps, job.trainer.scaler.get_scale()))
    assert seen[0] == seen[1]
    assert max(steps) < 6
    assert all(p.isfinite().all() for p in job.method.module.parameters())


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", pytest.param("zero", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_bit_by_bit(ctx: RankContext, syncheck_rank: Rank, method: str) -> None:
    """PowerSGD's error, thin matrices and count of steps are restored: an interruption leaves no trace."""
    settings = replace(TINY, method=method, model="convnet", width=16, comm_hook="powersgd", powersgd_rank=2)
    assert_bitwise(ctx, syncheck_rank.shared, settings, [1, 5])
    settings = replace(settings, out=syncheck_rank.shared / "once")
    state = state_of(ctx, settings, 8)
    errors = ctx.gather(state["method"]["error_dict"])
    assert not errors[0][0].equal(errors[1][0])  # each rank's own, by design
    folder = state_path(states_folder(settings.out, settings.run), 8, 0).parent
    (group,) = syncheck.compare(folder).groups
    assert group.verdict == "in_sync"
    apart = [diff for diff in group.tensors if "error_dict" in diff.name]
    assert [(diff.reason, diff.detail) for diff in apart] == [(Reason.RNG, Detail.POWERSGD_ERROR())]


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("lost", ["error_dict", "q"])
def test_a_resumed_run_needs_all_of_it(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Without the error, or from another Q, a resumed run ends elsewhere: the test above would see it."""
    take = Ddp.load_extra_state

    def forgetting(self: Ddp, state: Any) -> None:
        take(self, {**state, lost: {bucket: torch.ones_like(t) for bucket, t in state[lost].items()}})

    settings = replace(TINY, model="convnet", width=16, comm_hook="powersgd")
    monkeypatch.setattr(Ddp, "load_extra_state", forgetting)
    with pytest.raises(AssertionError):
        assert_bitwise(ctx, syncheck_rank.shared, settings, [5])


@pytest.mark.syncheck(ranks=2)
def test_powersgd_keeps_one_order(ctx: RankContext, syncheck_rank: Rank) -> None:
    """DDP's own message after the last bucket (--find-unused) comes after PowerSGD's: else gloo ends the ranks."""
    settings = replace(SMALL, comm_hook="powersgd", find_unused=True, sync_bn=True, max_steps=20)
    saved = run(ctx, replace(settings, out=syncheck_rank.shared)).saved
    assert differing(*saved) == set()


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_ranks_begin_without_an_error(ranks: int) -> None:
    """What compression left out of a rank's gradient is that rank's own: with another number of ranks it is dropped."""
    state = PowerSGDState(None)
    state.error_dict, state.q_memory_dict, state.iter = {0: torch.ones(3)}, {0: torch.ones(2)}, 7
    memory = collect_hook_state(state, RankContext(0, 2))
    again = PowerSGDState(None)
    restore_hook_state(again, memory, RankContext(0, ranks))
    assert set(again.error_dict) == ({0} if ranks == 2 else set())
    assert again.q_memory_dict[0].equal(torch.ones(2))
    assert again.iter == 7
    assert again.rng.randint(1_000_000) == state.rng.randint(1_000_000)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"powersgd_rank": 2}, "--powersgd-rank: requires --comm-hook powersgd"),
        ({"powersgd_start": 5, "comm_hook": "fp16"}, "--powersgd-start: requires --comm-hook powersgd"),
        ({"powersgd_start": 1, "comm_hook": "powersgd"}, "--powersgd-start 1: must be at least 2"),
        ({"powersgd_rank": 0, "comm_hook": "powersgd"}, "--powersgd-rank 0: must be at least 1"),
        ({"amp": "fp16", "comm_hook": "powersgd"}, "--comm-hook powersgd: not with --amp fp16: "),
    ],
)
def test_what_a_hook_cannot_do_is_refused(given: dict[str, Any], says: str) -> None:
    """An option of a hook that is not used, too early a start, and an overflow that would never leave, are refused."""
    with pytest.raises(UserError, match=says):
        check(replace(SMALL, **given), 2)


@pytest.mark.parametrize(
    ("given", "run_name"),
    [
        ({"comm_hook": "fp16"}, "ddp-hook-fp16"),
        ({"comm_hook": "powersgd", "powersgd_rank": 4}, "ddp-hook-powersgd4"),
    ],
)
def test_a_hook_is_in_the_runs_name(given: dict[str, Any], run_name: str) -> None:
    """Runs with different hooks do not replace each other's files."""
    assert replace(SMALL, **given).run == run_name
