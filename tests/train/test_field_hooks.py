"""--comm-hook: the bytes sent, the equality of ranks, and the state for a resumed run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.listings import list_fields, list_rank_files
from support.resumed import TINY, assert_bitwise, state_of
from support.scenarios import SMALL, differing, load, run, tensors, trained, widest_gap
from support.states import count_elements
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import syncheck
from syncheck.messages import Detail
from syncheck.records import Reason
from train.errors import UserError
from train.launch import RankContext
from train.methods.comm_hooks import collect_hook_state, restore_hook_state
from train.methods.ddp import Ddp
from train.resume import state_path, states_folder
from train.settings import check

if TYPE_CHECKING:
    from syncheck.testing import Rank

HOOKS = ("fp16", "bf16", "powersgd")
# Without BatchNorm, so all differences come from gradients.
CONVNET = replace(SMALL, model="convnet", save_per_rank=False)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", pytest.param("zero", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_stay_equal(ctx: RankContext, syncheck_rank: Rank, method: str, hook: str) -> None:
    """With every hook, ranks end bitwise equal, and close but not equal to a run without a hook."""
    # SyncBatchNorm also communicates during backward, and must not mix with the gradients.
    plain = replace(SMALL, method=method, sync_bn=True, out=syncheck_rank.shared)
    settings = replace(plain, comm_hook=hook)
    assert not any(find_differing_tensors(ctx, settings))
    (group,) = syncheck.compare(*list_rank_files(settings.out, f"{settings.run}_rank{{}}.pth", 2)).groups
    assert group.verdict == "in_sync"
    run(ctx, plain)
    difference = widest_gap(settings.out / f"{settings.run}_rank0.pth", settings.out / f"{plain.run}_rank0.pth")
    assert 1e-7 < difference < 0.5


def find_differing_tensors(ctx: RankContext, settings: Any) -> set[str]:
    """Train, and return the names of the model tensors that differ between the two ranks' files."""
    first, second = run(ctx, settings).saved
    names = load(first)["model"]
    return {n for n in names if tensors(first)[n].numpy().tobytes() != tensors(second)[n].numpy().tobytes()}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_send_less(ctx: RankContext, monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    """The 16-bit hooks send half the bytes of the gradient per step; once started, PowerSGD sends at most a quarter."""
    messages: list[tuple[torch.dtype, int]] = []
    reduce = dist.all_reduce

    def count_bytes(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        messages.append((tensor.dtype, tensor.nbytes))
        return reduce(tensor, *arguments, **named)

    monkeypatch.setattr(dist, "all_reduce", count_bytes)
    settings = replace(CONVNET, width=16, max_steps=4, accumulate=accumulate)
    complete = 0
    for hook, share in (("fp16", 0.5), ("bf16", 0.5), ("powersgd", 0.25)):
        messages.clear()
        job = trained(ctx, replace(settings, comm_hook=hook))
        complete = 4 * count_elements(job.method.module.parameters())
        if hook == "powersgd":
            assert (
                sum(list_fields(messages, 1)) <= 2 * complete + 2 * share * complete
            )  # two steps without it, two with
            assert len(messages) == 2 + 2 * 3  # P, Q and the tensors too small to compress
        else:
            assert set(list_fields(messages, 0)) == {getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[hook])}
            assert sum(list_fields(messages, 1)) == 4 * share * complete
    assert complete > 0


@pytest.mark.syncheck(ranks=2)
def test_an_overflow_in_the_hook_skips_the_step_on_all_ranks(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a gradient on rank 1 alone overflows in the float16 hook, all ranks skip the step, and scales stay equal."""
    backward = Ddp.backward
    calls = []

    def overflow(self: Any, loss: Tensor) -> None:
        calls.append(loss)
        backward(self, loss * 1e9 if len(calls) == 3 and ctx.rank == 1 else loss)

    monkeypatch.setattr(Ddp, "backward", overflow)
    job = trained(ctx, replace(CONVNET, comm_hook="fp16", amp="fp16", optimizer="adamw"))
    steps = {state["step"].item() for state in job.trainer.optimizer.state_dict()["state"].values()}
    outcomes = ctx.gather((steps, job.trainer.scaler.get_scale()))
    assert outcomes[0] == outcomes[1]
    assert max(steps) < 6
    assert all(p.isfinite().all() for p in job.method.module.parameters())


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero"])
def test_a_resumed_run_is_bitwise_equal(ctx: RankContext, syncheck_rank: Rank, method: str) -> None:
    """A resumed run restores PowerSGD's error, thin matrices and step count, and ends bitwise equal to a whole run."""
    settings = replace(TINY, method=method, model="convnet", width=16, comm_hook="powersgd", powersgd_rank=2)
    assert_bitwise(ctx, syncheck_rank.shared, settings, [1, 5])
    settings = replace(settings, out=syncheck_rank.shared / "once")
    state = state_of(ctx, settings, 8)
    errors = ctx.gather(state["method"]["error_dict"])
    assert not errors[0][0].equal(errors[1][0])  # each rank has its own error by design
    folder = state_path(states_folder(settings.out, settings.run), 8, 0).parent
    (group,) = syncheck.compare(folder).groups
    assert group.verdict == "in_sync"
    differences = [diff for diff in group.tensors if "error_dict" in diff.name]
    assert list_fields(differences, "reason", "detail") == [(Reason.RNG, Detail.POWERSGD_ERROR())]


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("lost", ["error_dict", "q"])
def test_a_resumed_run_needs_the_whole_hook_state(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """With other errors or another Q, a resumed run ends differently, so the test above would fail."""
    load_extra_state = Ddp.load_extra_state

    def load_incomplete(self: Ddp, state: Any) -> None:
        load_extra_state(self, {**state, lost: {bucket: torch.ones_like(t) for bucket, t in state[lost].items()}})

    settings = replace(TINY, model="convnet", width=16, comm_hook="powersgd")
    monkeypatch.setattr(Ddp, "load_extra_state", load_incomplete)
    with pytest.raises(AssertionError):
        assert_bitwise(ctx, syncheck_rank.shared, settings, [5])


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_powersgd_keeps_the_order_of_collectives(ctx: RankContext, syncheck_rank: Rank) -> None:
    """DDP's collective after the last bucket (--find-unused) follows PowerSGD's; gloo fails on another order."""
    settings = replace(SMALL, comm_hook="powersgd", find_unused=True, sync_bn=True, max_steps=20)
    saved = run(ctx, replace(settings, out=syncheck_rank.shared)).saved
    assert differing(*saved) == set()


@pytest.mark.parametrize("ranks", [2, 3])
def test_another_world_size_drops_the_error(ranks: int) -> None:
    """The compression error belongs to one rank; a run with another number of ranks drops it and restores the rest."""
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
    ("changes", "message"),
    [
        ({"powersgd_rank": 2}, "--powersgd-rank: requires --comm-hook powersgd"),
        ({"powersgd_start": 5, "comm_hook": "fp16"}, "--powersgd-start: requires --comm-hook powersgd"),
        ({"powersgd_start": 1, "comm_hook": "powersgd"}, "--powersgd-start 1: must be at least 2"),
        ({"powersgd_rank": 0, "comm_hook": "powersgd"}, "--powersgd-rank 0: must be at least 1"),
        ({"amp": "fp16", "comm_hook": "powersgd"}, "--comm-hook powersgd: not with --amp fp16: "),
    ],
)
def test_invalid_hook_options_are_refused(changes: dict[str, Any], message: str) -> None:
    """Options of another hook, too small values, and PowerSGD with --amp fp16 are refused."""
    with pytest.raises(UserError, match=message):
        check(replace(SMALL, **changes), 2)


@pytest.mark.parametrize(
    ("changes", "run_name"),
    [
        ({"comm_hook": "fp16"}, "ddp-hook-fp16"),
        ({"comm_hook": "powersgd", "powersgd_rank": 4}, "ddp-hook-powersgd4"),
    ],
)
def test_the_run_name_contains_the_hook(changes: dict[str, Any], run_name: str) -> None:
    """The run's name contains the hook, so runs with different hooks keep separate files."""
    assert replace(SMALL, **changes).run == run_name
