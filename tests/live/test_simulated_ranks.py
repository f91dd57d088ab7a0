"""`python -m benchmarks scale` simulates a job of many ranks with the messages and reports of a real job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import on_all
from support.listings import list_fields, map_fields
from support.started import CLONE, ROOT

from syncheck.live import check

pytestmark = pytest.mark.usefixtures("benchmarks")


PLAY = """
import json
from benchmarks.scale_ranks import measured
print(json.dumps([measured(2, 40, case) for case in ("in sync", "one tensor of one rank differs")]))
"""


def played() -> list[dict[str, Any]]:
    """Simulate two equal or different ranks in a process without a process group."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [sys.executable, "-c", PLAY],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": CLONE},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.mark.syncheck(ranks=2)
@pytest.mark.slow
def test_simulated_and_real_ranks_send_the_same(syncheck_rank: Any) -> None:
    """Simulated and real ranks send equally many bytes, with a fault and without."""
    from benchmarks.scale_ranks import plain, values
    from benchmarks.traffic import counted

    messages = []
    for outlier, verdict in ((False, "in_sync"), (True, "out_of_sync")):
        model = plain(values(40, 0, odd=outlier and syncheck_rank.rank == 1))
        with counted() as traffic:
            report = check(model)
        assert report.verdict == verdict
        messages.append(max(on_all(traffic.sent)))
    simulated: list[Any] = [played() if syncheck_rank.rank == 0 else None]
    dist.broadcast_object_list(simulated)
    assert list_fields(simulated[0], "sent") == messages


@pytest.mark.parametrize(
    "case", ["one tensor of one rank differs", "HSDP, in sync", "HSDP, one shard of one rank differs"]
)
def test_sixteen_simulated_ranks_find_the_fault(case: str) -> None:
    """All ranks have one report, which names rank 15 if it differs; under HSDP shards are no difference."""
    from benchmarks.scale_ranks import measured

    result = measured(16, 20, case)  # compares the reports with each other and with the injected fault
    # 16 bytes per tensor and distinct digest list.
    assert result["received"] >= 16 * 20


@pytest.mark.parametrize(("ranks", "tensors"), [(6, 100), (64, 30), (64, 300)])
def test_traffic_matches_the_formula(ranks: int, tensors: int) -> None:
    """If one rank differs, a rank receives the bytes of the formula in docs/scale.md within 15 %."""
    from benchmarks import scale
    from benchmarks.scale_ranks import measured

    each = measured(ranks, 5, scale.IN_SYNC)["sent"]
    result = measured(ranks, tensors, scale.ONE_DIFFERS)["received"]
    assert result == pytest.approx(scale.received(ranks, tensors, answers=2, letters=6, each=each), rel=0.15)


def test_mismatched_simulated_ranks_fail() -> None:
    """A simulated rank that exits before a collective ends the run with an error."""
    from benchmarks.simulated import Kinds, play

    def work(kind: str) -> None:
        if kind == "stays":
            dist.all_gather([torch.zeros(1) for _ in range(3)], torch.zeros(1))

    with pytest.raises(RuntimeError, match="wait for one another"):
        play(Kinds({"stays": 0, "leaves": 1}, ["stays", "leaves", "leaves"]), work)
    assert not dist.is_initialized()


def test_simulated_messages_reach_their_receiver() -> None:
    """all_gather returns all messages by position, broadcast the root's, recv the sender's."""
    from benchmarks.simulated import Kinds, play

    def work(kind: str) -> list[float]:
        result = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(result, torch.tensor([{"a": 1.0, "b": 2.0}[kind]]))
        reports = torch.tensor([7.0 if kind == "b" else 0.0])
        dist.broadcast(reports, 1)
        letter = torch.tensor([9.0 if kind == "a" else 0.0])
        dist.send(letter, 1) if kind == "a" else dist.recv(letter, 0)
        return [*(float(value) for value in result), float(reports), float(letter)]

    done = play(Kinds({"a": 0, "b": 1}, ["a", "b", "b", "a"]), work)
    assert map_fields(done, "result") == {key: [1.0, 2.0, 2.0, 1.0, 7.0, 9.0] for key in "ab"}
    # Sent: 4 bytes to all, then bytes from one of the two ranks. Received: from three peers, and bytes for one rank
    # only.
    assert [(done[kind].sent, done[kind].received) for kind in "ab"] == [(8, 16), (8, 16)]
