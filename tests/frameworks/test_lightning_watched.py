"""`syncheck watch` in front of a program of Lightning whose forward pass includes the backward pass."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.libraries import need
from support.started import CLONE, Processes, alive

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "lightning_manual.py"
STEPS = 12


@pytest.mark.parametrize(
    ("fault", "witnessed", "compared", "start"),
    [
        ("none", [], [], "in sync: 24 steps of 2 optimizers watched, 2 checks"),
        ("skip", [("SYN214", 6, [1])], ["SYN214"], "OUT OF SYNC: "),
        ("buffer", [], ["SYN220"], "OUT OF SYNC: "),
    ],
)
def test_manual_optimization(
    tmp_path: Path, fault: str, witnessed: list[tuple[str, int, list[int]]], compared: list[str], start: str
) -> None:
    """Reductions are counted although no output shows them, and the end is compared after Lightning has unwrapped."""
    need("lightning")
    processes = Processes(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    watch = ["-m", "syncheck", "watch", "--events", "events.jsonl"]
    process = processes.start(*launcher, *watch, str(PROGRAM), fault, PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    assert not alive(process)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    checks = [event for event in events if event["event"] == "check"]
    findings = [(event["code"], event["step"], event["ranks"]) for event in events if event["event"] == "witness"]
    # Optimizers after the skipped step have other gradients, as an effect.
    assert findings[: len(witnessed)] == witnessed
    assert checks[-1]["step"] == STEPS
    assert [finding["code"] for finding in checks[-1]["findings"]] == compared
    last = [line for line in errors.splitlines() if line.startswith("syncheck: ") and "wrote" not in line][-1]
    assert last.startswith(f"syncheck: {start}")
