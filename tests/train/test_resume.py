"""A resumed run is bitwise equal to an uninterrupted run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.listings import list_fields, list_files
from support.resumed import TINY, assert_bitwise, interrupt, resume, state_of, whole
from support.scenarios import NEEDS_FSDP, fsdp, load
from torch import Tensor, nn

import syncheck
from train.launch import RankContext
from train.resume import state_path, states_folder

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 0.005}
UNEVEN: dict[str, Any] = {"batch_size": 15, "keep_last": True}  # five steps an epoch, of 15 and 10 samples
# Changed settings, and the steps after which the run crashes. Each option appears with methods for which it adds state.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "ddp, first step": ({"ema": 0.9, **ADAMW}, [1]),
}
MORE: dict[str, tuple[dict[str, Any], list[int]]] = {
    "ddp, end of an epoch": ({}, [4]),
    "ddp, before the last step": ({"amp": "fp16", **UNEVEN}, [9]),
    "localsgd, between averages": ({"method": "localsgd", "average_every": 2, "amp": "bf16"}, [5]),
    "ddp, each step": ({"save_every": 3}, [1, 2, 3, 4, 5, 6, 7, 8]),
    "ddp, sync_bn, ema": ({"sync_bn": True, "ema": 0.9, "grad_clip": 0.5}, [3]),
    "ddp, own statistics": ({"buffer_sync": False, "amp": "bf16", **UNEVEN}, [6]),
    "ddp, powersgd": ({"comm_hook": "powersgd", "model": "convnet", "width": None}, [5]),
    "ddp, bf16 hook": ({"comm_hook": "bf16", **ADAMW}, [3]),
    "ddp, find_unused": ({"find_unused": True, "accumulate": 2}, [5]),
    "ddp, a fault at the next step": ({"fault": "stale-rank", "fault_step": 4, **ADAMW}, [3]),
    "ddp, frozen parameters": ({"fault": "frozen-not-broadcast", **ADAMW}, [3]),
    "zero, sgd": ({"method": "zero", "ema": 0.9, "amp": "bf16", **UNEVEN}, [5]),
    "zero, fp16": ({"method": "zero", "amp": "fp16", "sync_bn": True, **ADAMW}, [4]),
    "localsgd, in the warm-up": ({"method": "localsgd", "average_every": 3, "accumulate": 2}, [2]),
    "localsgd, at an average": ({"method": "localsgd", "average_every": 2, "sync_bn": True, **ADAMW}, [4]),
    "ddp, static_graph": ({"static_graph": True}, [1, 3]),
    "replicate": ({"method": "replicate", **ADAMW}, [3]),
    "diloco, between and at outer steps": ({"method": "diloco", "average_every": 3, **UNEVEN}, [2, 6]),
    "zero, twice": ({"method": "zero", "accumulate": 2, **ADAMW}, [3, 6]),
    "fsdp": ({"method": "fsdp", "amp": "fp16", "sync_bn": True, **ADAMW}, [3]),
    "fsdp, sgd": ({"method": "fsdp", "grad_clip": 0.5, **UNEVEN}, [5]),
    "fsdp, bf16": ({"method": "fsdp", "amp": "bf16", "accumulate": 2, "sync_bn": True}, [1]),
}
SLOW = [pytest.param(name, marks=[pytest.mark.slow, *([NEEDS_FSDP] if name[0] in "fr" else [])]) for name in MORE]
ALONE: dict[str, tuple[dict[str, Any], list[int]]] = {
    "single": ({"method": "single", "amp": "bf16", "ema": 0.9, **UNEVEN}, [3, 7]),
    "single, each step": ({"method": "single", "model": "convnet", "width": None, **ADAMW}, [1, 2, 3, 4, 5, 6, 7, 8]),
    "dp": ({"method": "dp", "replicas": 3, "batch_size": 17}, [2]),
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("case", [*CASES, *SLOW])
def test_resumed_is_bitwise_equal(ctx: RankContext, syncheck_rank: Rank, case: str) -> None:
    """After crashes and resumes, the final state, files and scores are bitwise equal to an uninterrupted run."""
    changes, stops = (CASES | MORE)[case]
    assert_bitwise(ctx, syncheck_rank.shared, replace(TINY, **changes), stops)


@pytest.mark.parametrize("case", ALONE)
def test_one_process_resumes_bitwise(tmp_path: Path, case: str) -> None:
    """Runs without a process group, including dp, resume bitwise after any step."""
    changes, stops = ALONE[case]
    assert_bitwise(RankContext(), tmp_path, replace(TINY, **changes), stops)


def test_state_and_checkpoint_have_equal_metadata(tmp_path: Path) -> None:
    """State and checkpoint of a step share one syncheck block; its epoch counts only completed epochs."""
    settings = replace(TINY, method="single", max_steps=7, save_every=1, out=tmp_path)
    whole(RankContext(), settings)
    state = load(state_path(states_folder(tmp_path, settings.run), 7, 0))
    block = load(tmp_path / "history" / settings.run / "step_7" / "rank_0.pth")["syncheck"]
    assert (state["syncheck"], block["epoch"], state["epoch"]) == (block, 1, 2)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("method", ["ddp", "zero", "localsgd", fsdp("hsdp")])
def test_four_ranks_resume_bitwise(ctx: RankContext, syncheck_rank: Rank, method: str) -> None:
    """Four ranks resume bitwise, although the order of the gradients' sums affects rounding."""
    settings = replace(TINY, method=method, batch_size=17, **ADAMW)
    assert_bitwise(ctx, syncheck_rank.shared, settings, [3, 6])


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("rebuilt", [True, False])
def test_buckets_must_be_rebuilt_before_the_first_step(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, *, rebuilt: bool
) -> None:
    """On four ranks, a resumed run is bitwise equal only if DDP rebuilds its buckets before the first step."""
    if not rebuilt:
        monkeypatch.setattr("train.resume.state_saver.warm_up_buckets", lambda *_: None)
    settings = replace(TINY, model="convnet", width=None, batch_size=17, out=syncheck_rank.shared, save_per_rank=False)
    whole(ctx, settings)
    once = state_of(ctx, settings, 8)["model"]
    interrupt(ctx, settings, 3)
    resume(ctx, settings)
    again = state_of(ctx, settings, 8)["model"]
    assert all(once[name].equal(again[name]) for name in once) is rebuilt


class Draws(nn.Module):
    """A model whose forward depends on the RNG states of torch, Python and NumPy, and on a non-persistent buffer."""

    steps: Tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        random.seed(0)  # the trainer itself seeds torch only
        np.random.seed(0)
        self.hidden, self.out = nn.Linear(64, 8), nn.Linear(8, 10)
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 1, 8, 8]."""
        hidden = self.hidden(x.flatten(1))
        if self.training:
            with torch.no_grad():
                self.steps += 1
            hidden = nn.functional.dropout(hidden, 0.5) * (random.random() + np.random.random() + self.steps)
        out: Tensor = self.out(hidden)
        return out


@pytest.mark.parametrize("stop", [3, 4])
def test_random_numbers_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """A resumed run restores the RNG states of torch, Python and NumPy, and a non-persistent buffer."""
    monkeypatch.setattr("train.task.build_from_settings", Draws)
    assert_bitwise(RankContext(), tmp_path, replace(TINY, method="single"), [stop])


@pytest.mark.parametrize("generator", ["torch", "python", "numpy"])
def test_each_rng_state_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: str) -> None:
    """If one RNG has a different state, the final weights differ, so `assert_bitwise` detects each RNG."""
    monkeypatch.setattr("train.task.build_from_settings", Draws)
    settings = replace(TINY, method="single", out=tmp_path)
    whole(RankContext(), settings)
    once = state_of(RankContext(), settings, 8)["model"]
    interrupt(RankContext(), settings, 3)
    path = state_path(states_folder(tmp_path, "single"), 3, 0)
    state, early = load(path), load(path.parent.parent / "step_2" / path.name)
    assert not state["rng"][generator].equal(early["rng"][generator]) or generator != "torch"
    state["rng"] |= {name: value for name, value in early["rng"].items() if name.startswith(generator)}
    torch.save(state, path)
    resume(RankContext(), settings)
    again = state_of(RankContext(), settings, 8)["model"]
    assert not all(once[name].equal(again[name]) for name in once)


@pytest.mark.syncheck(ranks=2)
def test_history_of_later_steps_is_removed(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A resumed run removes history files of later steps, and keeps earlier files and the run id unchanged."""
    settings = replace(TINY, checkpoint_every=4, save_every=1, out=syncheck_rank.shared, save_format="safetensors")
    interrupt(ctx, settings, 6)
    ctx.gather(None)
    history = settings.out / "history" / "ddp"
    assert list_files(history) == [f"step_{n}" for n in range(1, 7)]
    before = {path: path.stat().st_ino for path in history.rglob("*.safetensors")}
    result, notes = resume(ctx, replace(settings, save_every=4, save_format="pth"))
    assert notes.steps == [5, 6, 7, 8]
    assert result.replaced == 0
    assert list_files(history) == [f"step_{n}" for n in (1, 2, 3, 4, 8)]
    assert {path for path, inode in before.items() if path.exists() and path.stat().st_ino == inode} == {
        path for path in before if path.parent.name <= "step_4"
    }
    files = [load(path) for path in settings.out.glob("*.pth")]
    assert {file["syncheck"]["run_id"] for file in files} == {syncheck.read(str(next(iter(before)))).metadata.run_id}


@pytest.mark.syncheck(ranks=2)
def test_states_are_compared_only_if_passed_explicitly(ctx: RankContext, syncheck_rank: Rank) -> None:
    """`compare` ignores states in an output folder. It compares states passed explicitly, but tolerates RNG states."""
    settings = replace(TINY, save_every=4, sync_bn=True, ema=0.9, amp="bf16", out=syncheck_rank.shared)
    whole(ctx, settings)
    ctx.gather(None)
    if ctx.rank == 1:
        return
    with_states = syncheck.compare(settings.out)
    assert len(with_states.groups) == 3
    states = states_folder(settings.out, settings.run) / "step_8"
    (group,) = syncheck.compare(states).groups
    assert (group.verdict, len(group.ranks), group.counts.different) == ("in_sync", 2, 0)
    assert set(list_fields(group.tensors, "reason")) == {"rng"}
    path = states / "rank_1.pth"
    state = torch.load(path, weights_only=True)
    state["model"]["fc.weight"][0, 0] += 1
    torch.save(state, path)
    (group,) = syncheck.compare(states).groups
    assert [diff.name for diff in group.tensors if diff.reason != "rng"] == ["fc.weight"]
    (settings.out / ".resume").rename(settings.out.parent / "elsewhere")
    assert syncheck.compare(settings.out) == with_states
