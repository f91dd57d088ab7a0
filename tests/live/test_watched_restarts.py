"""`syncheck watch` in front of a program that runs itself once for each rank, and on some ranks only."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from support.started import CLONE, Processes, alive, free_port

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.slow

# Rank 1 has another learning rate from step 3 on. Ranks that nobody waits for come within a second.
PROGRAM = """
import os, subprocess, sys
if "RANK" not in os.environ:
    command = [sys.executable, __file__, *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env=os.environ | {"RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
checks = sys.modules.get("syncheck.live.watching.full_checks")
if checks:
    checks._START_SECONDS = 1.0
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 8) + rank).square().mean().backward()
    if step == 2 and rank == 1:
        optimizer.param_groups[0]["lr"] = float(sys.argv[1])
    optimizer.step()
dist.destroy_process_group()
# gloo aborts a process now and then when the interpreter ends.
os._exit(0)
"""
WATCH = ("-m", "syncheck", "watch", "--events", "events.jsonl")


def start(processes: Processes, folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    """Start the program, or one of its ranks."""
    script = folder / "restarts.py"
    script.write_text(PROGRAM)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **variables}
    return processes.start(sys.executable, *options, "restarts.py", "0.2", PYTHONPATH=CLONE, **group)


def test_a_program_that_runs_itself(tmp_path: Path) -> None:
    """Each rank is watched as if the launcher had started it so, with the same options and arguments."""
    processes = Processes(tmp_path)
    process = start(processes, tmp_path, *WATCH, MASTER_PORT=f"{free_port()}")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, alive(process)) == (0, False)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    findings = [(row["code"], row["step"]) for row in rows if row["event"] == "witness"]
    assert findings[0] == ("SYN107", 3)
    # The program that started the ranks has nothing to say.
    assert "only one rank" not in errors


def test_a_rank_that_is_not_watched_stalls_no_other_one(tmp_path: Path) -> None:
    """The watched rank says why it is not watched; both ranks train to their end."""
    processes, port = Processes(tmp_path), f"{free_port()}"
    first = start(processes, tmp_path, *WATCH, MASTER_PORT=port, RANK="0")
    second = start(processes, tmp_path, MASTER_PORT=port, RANK="1")
    _, errors = first.communicate(timeout=60)
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "this run is not watched: not all of its ranks are watched" in errors
