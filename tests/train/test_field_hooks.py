"""--comm-hook: what travels, that ranks stay equal, and what a resumed run needs of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from scenarios import SMALL, load, run, tensors, trained, widest_gap
from torch import Tensor

import syncheck
from train.engine import Position, train_epoch
from train.errors import UserError
from train.job import prepare
from train.methods.comm_hooks import memory_of, remember
from train.methods.ddp import Ddp
from train.progress import Silent
from train.settings import check

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

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
    steps = {state["step"].item() for state in job.step.optimizer.state_dict()["state"].values()}
    seen = ctx.gather((steps, job.step.scaler.get_scale()))
    assert seen[0] == seen[1]
    assert max(steps) < 6
    assert all(p.isfinite().all() for p in job.method.module.parameters())


@pytest.mark.syncheck(ranks=2)
def test_powersgd_goes_on_from_its_memory(ctx: RankContext) -> None:
    """With its memory put back a new run goes on bit by bit; without it, or with the other rank's, it does not."""
    settings = replace(CONVNET, width=16, comm_hook="powersgd", powersgd_rank=2)
    job, position = prepare(settings, ctx), Position(ctx.device)
    kept: dict[str, Any] = {}
    run_step = job.step.run

    def keeping(step: int, *arguments: Any) -> None:
        run_step(step, *arguments)
        if step == 4:
            assert isinstance(job.method, Ddp)
            assert job.method.compressor is not None
            kept["memory"] = deepcopy(memory_of(job.method.compressor))
            kept["model"] = deepcopy(job.method.module.state_dict())
            kept["optimizer"] = deepcopy(job.step.optimizer.state_dict())

    job.step.run = keeping  # type: ignore[method-assign]
    train_epoch(job, position, Silent())
    ended = job.method.module.state_dict()
    errors, thin = ctx.gather(kept["memory"]["error"]), ctx.gather(kept["memory"]["q"])
    assert not errors[0][0].equal(errors[1][0])  # each rank's own, by design
    assert thin[0][0].equal(thin[1][0])

    def equal_after(memory: dict[str, Any] | None) -> bool:
        again = prepare(settings, ctx)
        again.method.module.load_state_dict(kept["model"])
        again.step.optimizer.load_state_dict(kept["optimizer"])
        assert isinstance(again.method, Ddp)
        assert again.method.compressor is not None
        if memory is not None:
            remember(again.method.compressor, deepcopy(memory), ctx.device)
        place = Position(ctx.device)
        place.step = place.in_epoch = 4
        train_epoch(again, place, Silent())
        return all(t.equal(ended[name]) for name, t in again.method.module.state_dict().items())

    assert equal_after(kept["memory"])
    assert not equal_after(None)
    assert not equal_after(kept["memory"] | {"error": errors[1 - ctx.rank]})


@pytest.mark.syncheck(ranks=2)
def test_powersgd_finds_its_buckets_again(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of a bucket are the same from the first step on, for what is remembered belongs to them."""
    import train.methods.comm_hooks as module

    held: list[list[int]] = []
    hook = module.powerSGD_hook

    def looking(state: Any, bucket: Any) -> Any:
        held.append([id(p) for p in bucket.parameters()])
        return hook(state, bucket)

    monkeypatch.setattr(module, "powerSGD_hook", looking)
    trained(ctx, replace(CONVNET, comm_hook="powersgd"))
    assert len(held) == 6
    assert all(ids == held[0] for ids in held)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"powersgd_rank": 2}, "--powersgd-rank: needs --comm-hook powersgd"),
        ({"powersgd_start": 5, "comm_hook": "fp16"}, "--powersgd-start: needs --comm-hook powersgd"),
        ({"powersgd_start": 1, "comm_hook": "powersgd"}, "--powersgd-start 1: needs 2 or more"),
        ({"powersgd_rank": 0, "comm_hook": "powersgd"}, "--powersgd-rank 0: needs 1 or more"),
        ({"amp": "fp16", "comm_hook": "powersgd"}, "--comm-hook powersgd: not with --amp fp16: an overflow would stay"),
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
