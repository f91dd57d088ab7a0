"""--monitor: what each method's training says of its ranks, and how it ends where they are apart."""

from __future__ import annotations

import re
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from programs import SHORT, TRAIN
from scenarios import SMALL, fsdp, run, tensors
from started import alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from programs import Programs, Run

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

MONITORED = replace(SMALL, save_per_rank=False, monitor=2, max_steps=5)


def told(ctx: RankContext, settings: Settings) -> list[str]:
    """Train, and return of each check the step, the verdict and the codes of rank 0's line."""
    heard = StringIO()
    with redirect_stderr(heard):
        run(ctx, settings)
    lines = [line for line in heard.getvalue().splitlines() if line.startswith("syncheck: ")]
    (lines,) = [found for found in ctx.gather(lines) if found]  # of one rank
    found = [re.match(r"syncheck: step (\d+): (in sync|OUT OF SYNC)", line) for line in lines]
    return [" ".join([*match.groups(), *re.findall(r"SYN\d+", match.string)]) if match else "?" for match in found]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "OUT OF SYNC SYN201"),
        ({"sync_bn": True}, "in sync"),
        ({"sync_bn": True, "amp": "fp16", "ema": 0.9}, "in sync"),
        ({"sync_bn": True, "method": "zero"}, "in sync"),
        fsdp({"sync_bn": True, "method": "fsdp"}, "in sync"),
    ],
    ids=["ddp", "ddp-syncbn", "ddp-syncbn-amp-ema", "zero-syncbn", "fsdp-syncbn"],
)
@pytest.mark.syncheck(ranks=2)
def test_each_method_says_what_its_files_would(ctx: RankContext, changes: dict[str, Any], says: str) -> None:
    """Plain DDP's BatchNorm drift is SYN201 at each check, with SyncBatchNorm there is none; the last is checked."""
    assert told(ctx, replace(MONITORED, **changes)) == [f"2 {says}", f"4 {says}", f"5 {says}"]


@pytest.mark.syncheck(ranks=2)
def test_localsgd_is_in_sync_until_it_leaves_its_warm_up(ctx: RankContext) -> None:
    """Local SGD is plain DDP at first; then its ranks are apart by design, SYN241, as its files are."""
    settings = replace(MONITORED, method="localsgd", sync_bn=True, average_every=2)
    assert told(ctx, settings) == ["2 in sync", "4 OUT OF SYNC SYN241", "5 OUT OF SYNC SYN241"]


@pytest.mark.syncheck(ranks=3)
def test_a_planted_fault_is_found_at_its_step(ctx: RankContext) -> None:
    """A bit that flips at step 3 is SYN220 at the next check, and a moving average left behind is SYN219."""
    settings = replace(MONITORED, sync_bn=True, fault="bit-flip-weight", fault_step=3)
    assert told(ctx, settings) == ["2 in sync", "4 OUT OF SYNC SYN220", "5 OUT OF SYNC SYN220"]
    settings = replace(MONITORED, sync_bn=True, ema=0.9, fault="average-not-updated", fault_step=3)
    assert told(ctx, settings)[1] == "4 OUT OF SYNC SYN219"


@pytest.mark.syncheck(ranks=2)
def test_weights_are_the_same_bits_with_it(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A run with --monitor saves the same tensors as one without."""
    states = []
    for name, every in (("with", 1), ("without", 0)):
        settings = replace(SMALL, monitor=every, out=syncheck_rank.shared / name)
        run(ctx, settings)
        states.append(tensors(settings.out / f"ddp_rank{ctx.rank}.pth"))
    assert states[0].keys() == states[1].keys()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


@pytest.mark.syncheck(ranks=3)
def test_resync_heals_a_planted_fault(ctx: RankContext, syncheck_rank: Rank) -> None:
    """With resync a flipped bit is repaired from the other two ranks, and the run ends as one without the fault."""
    ends = []
    for changes in ({"fault": "bit-flip-weight", "fault_step": 4, "on_desync": "resync"}, {}):
        settings = replace(MONITORED, sync_bn=True, save_per_rank=True, out=syncheck_rank.shared, **changes)
        if changes:
            assert told(ctx, settings) == ["2 in sync", "4 OUT OF SYNC SYN220", "?", "5 in sync"]
        else:
            run(ctx, settings)
        ends.append(tensors(settings.out / f"{settings.run}_rank{ctx.rank}.pth"))
    assert all(tensor.equal(ends[1][name]) for name, tensor in ends[0].items())


FAULT = ("--sync-bn", "--fault", "bit-flip-weight", "--fault-step", 2, "--on-desync", "raise")


def assert_ended_by_the_monitor(run: Run) -> None:
    """Check that a run ended with one message, which is that of the check after step 2."""
    assert run.returncode == 1
    assert run.stderr.count("run.py: error: ") == 1
    assert "run.py: error: step 2 (in sync at step 1): replicas are out of sync: SYN220\n" in run.stderr
    assert run.stderr.count("1 different, 0 not compared\n") == 1
    assert "train/engine.py" not in run.stderr  # as a traceback would have it
    assert run.stdout == ""


@pytest.mark.slow
def test_raise_ends_with_one_message(programs: Programs) -> None:
    """With --on-desync raise a flipped bit is exit code 1 and one message, without traceback or a process left."""
    process = programs.start(*TRAIN, "--spawn", 2, "--monitor", 1, *FAULT, *SHORT)
    assert_ended_by_the_monitor(programs.finish(process))
    assert not alive(process)


@pytest.mark.slow
def test_raise_ends_with_one_message_under_torchrun(torchrun: Callable[..., Run]) -> None:
    """Under torchrun, which ends all ranks as soon as one has failed, rank 0 still says why."""
    assert_ended_by_the_monitor(torchrun("--monitor-every", 1, *FAULT, *SHORT))
