"""The code printed in the fixes of findings runs, also on gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_fields

from syncheck.diagnose.rules import list_rules

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

FIX = {rule.code: str(rule.sentences["FIX"]()) for rule in list_rules()}
BUFFERS = "for b in model.buffers(): dist.broadcast(b, 0)"
AVERAGE = "for b in filter(torch.is_floating_point, model.buffers()): dist.all_reduce(b.div_(dist.get_world_size()))"
EVERYTHING = "for t in [*model.parameters(), *model.buffers()]: torch.distributed.broadcast(t.data, 0)"
HEAD = "for p in model.module.head.parameters(): dist.all_reduce(p.grad.div_(dist.get_world_size()))"
START_OF_HEAD = "for tensor in model.module.head.state_dict().values(): dist.broadcast(tensor, 0)"
# Code, line of the fix, the part of the model that becomes equal, and its value: rank 0's value or the mean.
LINES = [
    *((code, BUFFERS, "buffers", 0) for code in ("SYN201", "SYN203", "SYN204", "SYN205")),
    ("SYN202", AVERAGE, "statistics", 0.5),
    ("SYN210", "for t in model.state_dict().values(): dist.broadcast(t, 0)", "state", 0),
    ("SYN218", EVERYTHING, "state", 0),
    ("SYN241", "for p in model.parameters(): dist.all_reduce(p.data.div_(dist.get_world_size()))", "parameters", 0.5),
    ("SYN212", HEAD, "gradients", 0.5),
]


def run(code: str, line: str, **names: Any) -> dict[str, Any]:
    """Run a line from the fix of a finding with the given names, and return all names afterwards."""
    import torch
    from torch import distributed as dist

    assert line in FIX[code]
    space = {"torch": torch, "dist": dist, **names}
    exec(line, space)
    return space


def model_of(rank: int) -> Any:
    """Return a model with all tensors and gradients equal to the rank number."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for tensor in model.state_dict().values():
        tensor.fill_(rank)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank)
    return model


def wrap_head(head: Any) -> Any:
    """Return a wrapped model with this head."""
    return SimpleNamespace(module=SimpleNamespace(head=head))


@pytest.mark.syncheck(ranks=2)
def test_a_head_added_after_wrapping_stays_equal(syncheck_rank: Rank) -> None:
    """With both lines of the second fix of SYN212, a late head with another seed per rank stays equal."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(syncheck_rank.rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    model.module.add_module("head", torch.nn.Linear(3, 2))
    run("SYN212", START_OF_HEAD, model=model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        run("SYN212", HEAD, model=model)
        optimizer.step()
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert len(set(map(tuple, syncheck_rank.gather(weights.tolist())))) == 1


@pytest.mark.syncheck(ranks=2)
def test_lines_that_equalize_tensors(syncheck_rank: Rank) -> None:
    """The lines set buffers, parameters and gradients of two ranks to rank 0's values, the mean or the sum."""
    import torch
    from torch import distributed as dist

    for code, line, part, value in LINES:
        model = model_of(syncheck_rank.rank)
        run(code, line, model=wrap_head(model) if part == "gradients" else model)
        tensors = {
            "buffers": list(model.buffers()),
            "statistics": [buffer for buffer in model.buffers() if buffer.is_floating_point()],
            "state": list(model.state_dict().values()),
            "parameters": list(model.parameters()),
            "gradients": list_fields(model.parameters(), "grad"),
        }[part]
        assert set(torch.cat([tensor.flatten() for tensor in tensors]).tolist()) == {value}, code
    line = "dist.all_reduce(batch_sum); dist.all_reduce(batch_count)"
    space = run("SYN205", line, batch_sum=torch.ones(2), batch_count=torch.tensor(8 + syncheck_rank.rank))
    assert (space["batch_sum"].tolist(), int(space["batch_count"])) == ([2, 2], 17)
    p = next(model.parameters())
    p.grad = torch.full_like(p, syncheck_rank.rank)
    for line, value in (("dist.all_reduce(p.grad, group=tp_group)", 1), ("p.grad.div_(tp_group.size())", 0.5)):
        run("SYN231", line, p=p, tp_group=dist.group.WORLD)
        assert p.grad.unique().tolist() == [value]


@pytest.mark.syncheck(ranks=2)
def test_lines_that_share_a_decision(syncheck_rank: Rank) -> None:
    """A NaN, a bad batch, a loss or an overflow on one of two ranks affects both ranks."""
    import torch

    is_odd = syncheck_rank.rank == 1
    loss = torch.tensor(float("nan") if is_odd else 1.0, requires_grad=True)
    line = "ok = loss.detach().isfinite().float(); dist.all_reduce(ok, dist.ReduceOp.MIN)"
    assert run("SYN222", line, loss=loss)["ok"] == 0
    line = "bad = torch.tensor(float(skip), device=device); dist.all_reduce(bad, op=dist.ReduceOp.MAX)"
    assert run("SYN214", line, skip=is_odd, device="cpu")["bad"] == 1

    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    line = "dist.all_reduce(loss); scheduler.step(loss / dist.get_world_size())"
    run("SYN107", line, loss=torch.tensor(2.0 if is_odd else 1.0), scheduler=scheduler)
    assert scheduler.best == 1.5
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if is_odd:
        model.weight.grad[0] = torch.inf
    scaler.unscale_(optimizer)
    line = (
        "for found_inf in scaler._found_inf_per_device(optimizer).values(): "
        "dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)"
    )
    run("SYN216", line, scaler=scaler, optimizer=optimizer)
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**15


@pytest.mark.syncheck(ranks=2)
def test_local_sgd_is_saved_when_ranks_agree(syncheck_rank: Rank) -> None:
    """The condition in the fix of SYN241 is true exactly after the steps with equal ranks."""
    import torch
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    line = "(averager.step - 1 - averager.warmup_steps) % averager.period == 0"
    model, averager = torch.nn.Linear(2, 2), PeriodicModelAverager(period=4, warmup_steps=4)
    suggested, equal = [], []
    for step in range(1, 15):
        model.weight.grad = torch.ones_like(model.weight)
        with torch.no_grad():
            model.weight.fill_(step * (1 + syncheck_rank.rank))
        averager.average_parameters(model.parameters())
        space = run("SYN241", line, averager=averager)
        if step > averager.warmup_steps and eval(line, space):
            suggested.append(step)
        if len({tuple(map(tuple, weight)) for weight in syncheck_rank.gather(model.weight.tolist())}) == 1:
            equal.append(step)
    assert suggested == equal == [5, 9, 13]


def test_lines_of_one_process(tmp_path: Path) -> None:
    """The lines load saved states, update an averaged copy, convert BatchNorm layers and clip gradients."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    path = tmp_path / "rank_0.pth"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    for code in ("SYN220", "SYN221"):
        run(code, "model.load_state_dict(torch.load(FILE)['model'])", model=model, FILE=path)
    line = "optimizer.load_state_dict(torch.load(path, map_location=device)['optimizer'])"
    run("SYN215", line, optimizer=optimizer, path=path, device="cpu")
    ema = torch.optim.swa_utils.AveragedModel(model)
    run("SYN219", "ema.update_parameters(model)", ema=ema, model=model)
    assert int(ema.n_averaged) == 1
    for code in ("SYN201", "SYN202"):
        space = run(code, "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)", model=model)
        assert isinstance(space["model"][1], torch.nn.SyncBatchNorm)
    line = "clip_grad_norm_(model.parameters(), max_norm)"
    run("SYN213", line, clip_grad_norm_=torch.nn.utils.clip_grad_norm_, model=model, max_norm=1.0)
