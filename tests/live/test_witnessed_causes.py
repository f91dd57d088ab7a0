"""A fault that a witness proved is the cause of the differences that comparisons find later, also in reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import support
from support.started import CLONE, Processes, free_port

from syncheck.report.events import read_events

if TYPE_CHECKING:
    from collections.abc import Iterator

SUPPORT = Path(support.__file__).parent
PARAMETERS = {"0.weight", "0.bias", "2.weight", "2.bias"}

# The rank and its number of steps are known to the fault.
MONITORED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from syncheck.live import SyncMonitor

fault = sys.argv[1]
dist.init_process_group("gloo")
is_faulty = dist.get_rank() == 1
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
witnesses = ("gradients", "settings")
torch.manual_seed(dist.get_rank())
with SyncMonitor(model, optimizer, every=1, on_desync="warn", witnesses=witnesses, events="events.jsonl") as monitor:
    for step in range(1, 7):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        if is_faulty and step == 4 and fault == "one tensor":
            model.module[2].bias.grad[0] += 1
        if not (is_faulty and step == 4 and fault == "skip"):
            optimizer.step()
        # Another fault, after the replicas were equal again.
        if step == 6 and fault == "healed" and is_faulty:
            model.module[0].weight.data[0] += 1
        if step == 4 and fault == "healed":
            if is_faulty:
                model.module[2].bias.data += 1
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        monitor.step()
dist.destroy_process_group()
"""

# The models and optimizers of before stay, as references of a script keep them.
RESUMED = """
import copy
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault = sys.argv[1]
dist.init_process_group("gloo")
is_faulty = dist.get_rank() == 1
kept = []


def resume():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kept:
        model.load_state_dict(kept[0].state_dict())
        if not (is_faulty and fault == "state"):
            optimizer.load_state_dict(copy.deepcopy(kept[1].state_dict()))
    kept.extend([model, optimizer])
    return model, optimizer


generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(1, 13):
    if step in (1, 5):
        model, optimizer = resume()
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    if not (is_faulty and step == 8 and fault == "skip"):
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Start programs in an empty folder."""
    started = Processes(tmp_path)
    yield started
    started.kill()


def watch(processes: Processes, folder: Path, fault: str, ranks: int) -> str:
    """Train with a fault under `syncheck watch`, comparing at every fourth reduction; return what it prints."""
    watch_options = ["-m", "syncheck", "watch", "--every", "4", "--events", "events.jsonl"]
    command = [SUPPORT / "watched_training.py", fault, "fork", ranks, free_port()]
    process = processes.start(sys.executable, *watch_options, *command, PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    return str(errors)


def read_checks(folder: Path) -> list[list[tuple[str, tuple[int, ...], set[str]]]]:
    """Return code, ranks and names of the findings of each comparison."""
    checks = []
    for row in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        if row["event"] == "check":
            findings = row["findings"]
            checks.append([(found["code"], tuple(found["ranks"]), set(found["names"])) for found in findings])
    return checks


def list_reported(folder: Path) -> set[tuple[str, tuple[int, ...]]]:
    """Return code and ranks of the findings in a report of the events."""
    report = read_events([folder / "events.jsonl"])
    return {(finding.code, finding.ranks) for finding in report.groups[-1].findings}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "ranks", "expected"),
    [
        ("clip", 3, ("SYN410", (1,))),
        ("clip", 2, ("SYN410", (1,))),
        ("one tensor", 3, ("SYN410", (1,))),
        ("skip", 2, ("SYN214", (1,))),
        ("skip", 3, ("SYN214", (1,))),
        ("lr", 3, ("SYN107", (1,))),
    ],
)
def test_comparisons_name_the_fault_of_the_witness(
    tmp_path: Path, processes: Processes, fault: str, ranks: int, expected: tuple[str, tuple[int, ...]]
) -> None:
    """Every comparison after the fault has its code and ranks, and no other cause; so has the report of the events."""
    watch(processes, tmp_path, fault, ranks)
    failing = [findings for findings in read_checks(tmp_path) if findings]
    assert failing
    assert {(code, suspects) for findings in failing for code, suspects, _ in findings} == {expected}
    assert list_reported(tmp_path) == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_another_tensor_keeps_its_own_cause(tmp_path: Path, processes: Processes, ranks: int) -> None:
    """Beside the gradient of one tensor, the values of another tensor change: both are findings, also of witnesses."""
    watch(processes, tmp_path, "two faults", ranks)
    # Of two ranks, the gradients show which one changed them, and the values of a tensor do not.
    suspects = (1,) if ranks == 3 else (0, 1)
    (witnessed,), *_ = [
        [names for code, _, names in findings if code == "SYN410"] for findings in read_checks(tmp_path) if findings
    ]
    assert "2.bias" in witnessed
    assert "0.weight" not in witnessed
    last = read_checks(tmp_path)[-1]
    (second,) = [code for code, _, names in last if "0.weight" in names]
    assert second not in ("SYN410", "SYN411")
    assert {("SYN410", (1,)), (second, suspects)} <= list_reported(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", ["one tensor", "skip", "healed"])
def test_a_monitor_names_the_fault_of_its_witness(tmp_path: Path, processes: Processes, fault: str, ranks: int) -> None:
    """The check right after the step has the code of the witness; after a check in sync, a new fault has its own."""
    (tmp_path / "monitored.py").write_text(MONITORED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    process = processes.start(sys.executable, *launcher, "monitored.py", fault, PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    everyone = tuple(range(ranks))
    first: Any = next(findings for findings in read_checks(tmp_path) if findings)
    codes = {code for code, _, _ in first}
    expected = {"one tensor": {"SYN410"}, "skip": {"SYN214"}}
    assert codes == expected.get(fault, codes)
    assert not (fault == "healed" and codes & {"SYN410", "SYN214"})
    assert all(set(suspects) <= set(everyone) for _, suspects, _ in first)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "expected"), [("state", "SYN215"), ("skip", "SYN214")])
def test_a_step_is_skipped_only_if_the_witnesses_saw_it(
    tmp_path: Path, processes: Processes, fault: str, expected: str
) -> None:
    """After a resume in the middle, counters that lag are of lost state, unless a rank was seen to skip a step."""
    (tmp_path / "resumed.py").write_text(RESUMED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    watched = ["-m", "syncheck", "watch", "--events", "events.jsonl", "resumed.py", fault]
    process = processes.start(sys.executable, *launcher, *watched, PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    (findings,) = [findings for findings in read_checks(tmp_path) if findings]
    assert {(code, ranks) for code, ranks, _ in findings} == {(expected, (1,))}
    assert "Also possible: SYN214" not in errors


@pytest.mark.slow
def test_equal_findings_are_counted(tmp_path: Path, processes: Processes) -> None:
    """Of the comparisons with the findings of before, three are printed, and the last line has their number."""
    lines = watch(processes, tmp_path, "clip", 3).splitlines()
    repeated = [line for line in lines if "(still, since step " in line]
    assert len(repeated) <= 3
    failing = [findings for findings in read_checks(tmp_path) if findings]
    (last,) = [line for line in lines if line.startswith("syncheck: OUT OF SYNC: ")]
    assert last.endswith(f", in {len(failing)} comparisons")
