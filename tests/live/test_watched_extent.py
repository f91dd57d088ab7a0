"""How much of a run the last line says was watched: steps of optimizers, and reductions without a seen step."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.started import CLONE, Processes

from syncheck.live.watching.extent import Extent, measure_extent

if TYPE_CHECKING:
    from pathlib import Path


def make_layout(key: str, *parameters: int, sees_steps: bool = True) -> Any:
    """Return a layout of a clock with 20 reductions. key: begins with the name of the clock."""
    clock = SimpleNamespace(name=key.partition("/")[0], ticks=20)
    return SimpleNamespace(key=key, clock=clock, identities=parameters, sees_steps=sees_steps)


@pytest.mark.parametrize(
    ("counts", "layouts", "expected", "text"),
    [
        ({"a/0": 20}, [make_layout("a/0", 1, 2)], Extent(20, 1), "20 steps watched"),
        (
            {"a/0": 20, "b/0": 20},
            [make_layout("a/0", 1), make_layout("b/0", 2)],
            Extent(40, 2),
            "40 steps of 2 optimizers watched",
        ),
        # The script wraps the model again, with other frozen parameters, or replaces a layer.
        (
            {"a/0": 10, "b/0": 14},
            [make_layout("a/0", 1, 2), make_layout("b/0", 2, 3)],
            Extent(24, 1),
            "24 steps watched",
        ),
        # Two optimizers, and then one for all of their parameters.
        (
            {"a/0": 5, "a/1": 5, "a/2": 5},
            [make_layout("a/0", 1), make_layout("a/1", 2), make_layout("a/2", 1, 2)],
            Extent(15, 1),
            "15 steps watched",
        ),
        # Reductions before the first step of an optimizer.
        (
            {"a/reductions": 1, "a/0": 20},
            [make_layout("a/reductions", 1, sees_steps=False), make_layout("a/0", 1)],
            Extent(20, 1),
            "20 steps watched",
        ),
        # An optimizer that is not torch's.
        (
            {"a/reductions": 18},
            [make_layout("a/reductions", 1, sees_steps=False)],
            Extent(0, 0, 18, 20),
            "18 of 20 reductions watched",
        ),
        # An optimizer trains copies of the parameters.
        (
            {"a/reductions": 18, "steps/0": 20},
            [make_layout("a/reductions", 1, sees_steps=False), make_layout("steps/0", 2)],
            Extent(20, 1, 18, 20),
            "20 steps and 18 of 20 reductions watched",
        ),
    ],
    ids=["one", "two", "wrapped again", "joined", "warm-up", "own optimizer", "copies"],
)
def test_extent(counts: dict[str, int], layouts: list[Any], expected: Extent, text: str) -> None:
    """A step counts once, for one optimizer, whatever replaces its wrapper, its parameters or the optimizer."""
    extent = measure_extent(layouts, counts)
    assert extent == expected
    assert str(extent.describe(2)) == f"{text}, 2 checks of all replicas"


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
model = DistributedDataParallel(module)
optimizer = torch.optim.Adam(module.parameters())
if kind == "copies":
    copies = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.Adam(copies)
if kind == "warm-up":
    for _ in range(2):
        model(torch.zeros(4, 8)).sum().backward()
        optimizer.zero_grad()
for step in range(12):
    if step == 6 and kind == "frozen":
        module[0].requires_grad_(False)
        for parameter in module[0].parameters():
            parameter.grad = None
        model = DistributedDataParallel(module)
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))).sum().backward()
    if kind == "copies":
        for copy, parameter in zip(copies, module.parameters()):
            copy.grad, parameter.grad = parameter.grad, None
    optimizer.step()
    if kind == "copies":
        for copy, parameter in zip(copies, module.parameters()):
            parameter.data.copy_(copy)
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "extent"),
    [
        ("frozen", "12 steps watched, 2 checks"),
        ("warm-up", "12 steps watched, 2 checks"),
        ("copies", "12 steps and 10 of 12 reductions watched, 2 checks"),
    ],
)
def test_extent_of_a_run(tmp_path: Path, kind: str, extent: str) -> None:
    """Of one optimizer, 12 steps are counted, and the end of the training is compared."""
    (tmp_path / "training.py").write_text(SCRIPT)
    processes = Processes(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = processes.start(*launcher, "-m", "syncheck", "watch", "training.py", kind, PYTHONPATH=CLONE)
    try:
        _, errors = process.communicate(timeout=110)
    finally:
        processes.kill()
    last = [line for line in errors.splitlines() if line.startswith("syncheck: ")][-1]
    assert last.startswith(f"syncheck: in sync: {extent} of all replicas"), errors
