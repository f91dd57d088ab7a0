"""--monitor: the verdicts of checks during training, and the actions if ranks are out of sync."""

from __future__ import annotations

import re
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts
from support.programs import SHORT, TRAIN
from support.scenarios import SMALL, fsdp, run, tensors
from support.started import alive
from support.states import list_differing

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.programs import Programs, Run

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

MONITORED = replace(SMALL, save_per_rank=False, monitor=2, max_steps=5)


def train_and_list_checks(ctx: RankContext, settings: Settings) -> list[str]:
    """Train, and return the step, verdict and codes of each check as rank 0 prints them; "?" for other lines."""
    stderr = StringIO()
    with redirect_stderr(stderr):
        run(ctx, settings)
    lines = find_texts(stderr.getvalue().splitlines(), start="syncheck: ")
    (lines,) = [of_rank for of_rank in ctx.gather(lines) if of_rank]  # only one rank prints
    matches = [re.match(r"syncheck: step (\d+): (in sync|OUT OF SYNC)", line) for line in lines]
    # A code that is new, for example with more tensors, stands in a line twice.
    codes = [dict.fromkeys(re.findall(r"SYN\d+", line)) for line in lines]
    pairs = zip(matches, codes, strict=True)
    return [" ".join([*match.groups(), *codes_of_check]) if match else "?" for match, codes_of_check in pairs]


@pytest.mark.parametrize(
    ("changes", "verdict"),
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
def test_verdicts_of_each_method(ctx: RankContext, changes: dict[str, Any], verdict: str) -> None:
    """Plain DDP's BatchNorm drift is SYN201 at every check, also after the last step; SyncBatchNorm is in sync."""
    checks = train_and_list_checks(ctx, replace(MONITORED, **changes))
    assert checks == [f"2 {verdict}", f"4 {verdict}", f"5 {verdict}"]


@pytest.mark.syncheck(ranks=2)
def test_localsgd_is_in_sync_until_it_leaves_its_warm_up(ctx: RankContext) -> None:
    """Local SGD is in sync during its warm-up. Afterwards its ranks differ by design, which is SYN241."""
    settings = replace(MONITORED, method="localsgd", sync_bn=True, average_every=2)
    assert train_and_list_checks(ctx, settings) == ["2 in sync", "4 OUT OF SYNC SYN241", "5 OUT OF SYNC SYN241"]


@pytest.mark.slow
@pytest.mark.syncheck(ranks=3)
def test_an_injected_fault_is_reported_at_the_next_check(ctx: RankContext) -> None:
    """A bit flip at step 3 is SYN220 at step 4, and a stale moving average is SYN219."""
    settings = replace(MONITORED, sync_bn=True, fault="bit-flip-weight", fault_step=3)
    assert train_and_list_checks(ctx, settings) == ["2 in sync", "4 OUT OF SYNC SYN220", "5 OUT OF SYNC SYN220"]
    settings = replace(MONITORED, sync_bn=True, ema=0.9, fault="average-not-updated", fault_step=3)
    assert train_and_list_checks(ctx, settings)[1] == "4 OUT OF SYNC SYN219"


@pytest.mark.syncheck(ranks=2)
def test_monitor_does_not_change_the_weights(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Runs with and without --monitor save bitwise equal tensors."""
    states = []
    for name, every in (("with", 1), ("without", 0)):
        settings = replace(SMALL, monitor=every, out=syncheck_rank.shared / name)
        run(ctx, settings)
        states.append(tensors(settings.out / f"ddp_rank{ctx.rank}.pth"))
    assert states[0].keys() == states[1].keys()
    assert not list_differing(states[0], states[1])


@pytest.mark.slow
@pytest.mark.syncheck(ranks=3)
def test_resync_repairs_an_injected_fault(ctx: RankContext, syncheck_rank: Rank) -> None:
    """With resync, a flipped bit is repaired from the other two ranks, and the run ends as without the fault."""
    final = []
    for changes in ({"fault": "bit-flip-weight", "fault_step": 4, "on_desync": "resync"}, {}):
        settings = replace(MONITORED, sync_bn=True, save_per_rank=True, out=syncheck_rank.shared, **changes)
        if changes:
            assert train_and_list_checks(ctx, settings) == ["2 in sync", "4 OUT OF SYNC SYN220", "?", "5 in sync"]
        else:
            run(ctx, settings)
        final.append(tensors(settings.out / f"{settings.run}_rank{ctx.rank}.pth"))
    assert not list_differing(final[0], final[1])


FAULT = ("--sync-bn", "--fault", "bit-flip-weight", "--fault-step", 2, "--on-desync", "raise")


def assert_ended_by_the_monitor(run: Run) -> None:
    """Assert that the check after step 2 ended the run with one message."""
    assert run.returncode == 1
    assert run.stderr.count("run.py: error: ") == 1
    assert "run.py: error: step 2 (in sync at step 1): replicas are out of sync: SYN220\n" in run.stderr
    assert run.stderr.count("1 different, 0 not compared\n") == 1
    assert "train/engine.py" not in run.stderr  # no traceback
    assert run.stdout == ""


@pytest.mark.slow
def test_raise_ends_with_one_message(programs: Programs) -> None:
    """With --on-desync raise, a flipped bit ends the run with exit code 1, one message and no remaining process."""
    process = programs.start(*TRAIN, "--spawn", 2, "--monitor", 1, *FAULT, *SHORT)
    assert_ended_by_the_monitor(programs.finish(process))
    assert not alive(process)


@pytest.mark.slow
def test_raise_ends_with_one_message_under_torchrun(torchrun: Callable[..., Run]) -> None:
    """Rank 0 prints the reason even though torchrun ends all ranks as soon as one rank fails."""
    assert_ended_by_the_monitor(torchrun("--monitor-every", 1, *FAULT, *SHORT))
