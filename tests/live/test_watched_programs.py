"""`live.watching`: programs that know nothing of it, with faults, on real ranks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from support.started import ROOT, Processes, alive, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RUNNER = """
import sys
from syncheck.live.watching.program import run_program
from syncheck.live.watching.settings import WatchSettings

if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1], sys.argv[2:], WatchSettings(events="events.jsonl"), is_module=False))
"""

TRAINING = """
import os, sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, world, fault, store):
    if store:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        if step == 5 and rank == 1:
            if fault == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if fault == "one tensor":
                model.module[2].bias.grad[0] += 1
            if fault == "error":
                raise ValueError("an error of the script")
            if fault == "exit":
                sys.exit(7)
            if fault == "skip":
                continue
        optimizer.step()
    digest = hash(tuple(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()))
    os.write(1, f"rank {rank} ends with {digest}\\n".encode())  # in one piece, so that no other rank writes between
    dist.destroy_process_group()


if __name__ == "__main__":
    fault, method = sys.argv[1], sys.argv[2]
    if method == "torchrun":
        sys.exit(train(0, 0, fault, ""))
    else:
        address = f"tcp://127.0.0.1:{sys.argv[3]}"
        context = mp.get_context(method)
        processes = [context.Process(target=train, args=(rank, 3, fault, address)) for rank in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(process.exitcode for process in processes))
"""


class Run(NamedTuple):
    """A finished program."""

    code: int
    out: list[str]
    err: str
    judgements: list[dict[str, Any]]
    """What the judge wrote as events."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Run the training with a fault, watched or not."""
    (tmp_path / "watched.py").write_text(RUNNER)
    (tmp_path / "training.py").write_text(TRAINING)
    processes = Processes(tmp_path)

    def run_training(fault: str, method: str, *, watched: bool = True) -> Run:
        events = tmp_path / "events.jsonl"
        events.unlink(missing_ok=True)
        launcher = [sys.executable]
        if method == "torchrun":
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        program = ["watched.py", "training.py"] if watched else ["training.py"]
        command = [*launcher, *program, fault, method, str(free_port())]
        process = processes.start(*command, PYTHONPATH=str(ROOT))
        out, err = process.communicate(timeout=110)
        assert not alive(process)
        rows = events.read_text().splitlines() if events.exists() else []
        judgements = [event for event in map(json.loads, rows) if event["event"] == "witness"]
        return Run(process.returncode, sorted(out.splitlines()), err, judgements)

    yield run_training
    processes.kill()


def list_findings(result: Run) -> list[tuple[str, int, list[int], list[str]]]:
    """Return code, reduction, ranks and tensors of each judgement."""
    findings = []
    for row in result.judgements:
        findings.append((row["code"], row["step"], row["ranks"], row["names"]))
    return findings


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["torchrun", "spawn", "fork", "forkserver"])
def test_a_run_in_sync_stays_the_same(run: Callable[..., Run], method: str) -> None:
    """A watched run has the weights, output and exit code of the unwatched run, and no finding, for any launcher."""
    unwatched, watched = run("none", method, watched=False), run("none", method)
    assert watched.out == unwatched.out
    assert (watched.code, unwatched.code, watched.judgements) == (0, 0, [])
    assert "in sync: 8 steps watched" in watched.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "method", "expected"),
    [
        ("clip", "torchrun", ("SYN410", 5, [1], ALL)),
        ("one tensor", "spawn", ("SYN410", 5, [1], ["2.bias"])),
        ("skip", "fork", ("SYN214", 5, [1], [])),
    ],
)
def test_faults_of_one_rank_are_named(
    run: Callable[..., Run], fault: str, method: str, expected: tuple[str, int, list[int], list[str]]
) -> None:
    """Clipping, another gradient of one tensor, and a skipped step are named on their rank and at their reduction."""
    unwatched, watched = run(fault, method, watched=False), run(fault, method)
    assert watched.out == unwatched.out
    assert watched.code == 0
    first = list_findings(watched)[0]
    assert first == expected


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("error", 1), ("exit", 7)])
def test_the_end_of_the_script_is_its_own(run: Callable[..., Run], fault: str, code: int) -> None:
    """An error and an exit code of one rank end the watched run as they end the unwatched run."""
    unwatched, watched = run(fault, "torchrun", watched=False), run(fault, "torchrun")
    assert watched.code == unwatched.code == 1
    for result in (unwatched, watched):
        assert f"exitcode  : {code} " in result.err
    assert ("ValueError: an error of the script" in watched.err) is (fault == "error")
    assert "run_program" not in watched.err
