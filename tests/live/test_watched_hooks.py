"""Gradients that are changed late: in hooks of the optimizer, or by backward passes after the reduction."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.started import CLONE, Processes, free_port
from torch.optim import optimizer as hooking

from syncheck.live.watching.pre_hooks import LastHook

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Two micro-batches for each step; rank 1 deviates at step 4.
ACCUMULATED = """
import os
import sys
import torch
import torch.distributed as dist
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel

fault, rank, os.environ["MASTER_PORT"] = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if fault == "hook" and rank:
    optimizer.register_step_pre_hook(lambda *_: setattr(model.module.weight, "grad", model.module.weight.grad / 2))
generator = torch.Generator().manual_seed(rank)
for step in range(1, 9):
    optimizer.zero_grad()
    is_faulty = rank == 1 and step == 4
    reducing = 0 if is_faulty and fault == "early" else 1
    for number in range(2):
        inputs = torch.randn(4, 6, generator=generator)
        with nullcontext() if number == reducing else model.no_sync():
            model(inputs).square().mean().backward()
    if is_faulty and fault == "evaluates":
        with torch.no_grad():
            model(inputs)
    if not (is_faulty and fault == "skip"):
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def global_hooks() -> Iterator[Any]:
    """All global hooks, which are removed after the test."""
    hooks = hooking._global_optimizer_pre_hooks
    before = dict(hooks)
    yield hooks
    hooks.clear()
    hooks.update(before)


@pytest.mark.parametrize("place", ["optimizer", "global", "removes itself", "none"])
def test_the_watcher_is_called_after_all_hooks_of_the_script(place: str, global_hooks: Any) -> None:
    """A hook that scales the gradient comes first at each step, and no hook of the watcher stays in the optimizer."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    LastHook(lambda *_: seen.append(model.bias.grad.item())).install()

    def halve(*_: Any) -> None:
        model.bias.grad.mul_(0.5)
        if place == "removes itself":
            handle.remove()

    if place == "global":
        handle = hooking.register_optimizer_step_pre_hook(halve)
    elif place != "none":
        handle = optimizer.register_step_pre_hook(halve)
    hooks = {**global_hooks, **optimizer._optimizer_step_pre_hooks}
    for _ in range(2):
        model.bias.grad = torch.ones(1)
        optimizer.step()
    assert seen == {"none": [1, 1], "removes itself": [0.5, 1]}.get(place, [0.5, 0.5])
    remaining = {**global_hooks, **optimizer._optimizer_step_pre_hooks}
    assert remaining.items() <= hooks.items()


@pytest.mark.usefixtures("global_hooks")
def test_arguments_and_errors_of_hooks_are_those_of_the_script() -> None:
    """The watcher gets the arguments that a hook returns; after an error in a hook, the hooks are called as before."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    calls: list[int] = []
    LastHook(lambda _optimizer, arguments, _named: seen.append(len(arguments))).install()

    def fail_once(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError

    optimizer.register_step_pre_hook(fail_once)
    optimizer.register_step_pre_hook(lambda _optimizer, arguments, named: ((*arguments, None), named))
    with pytest.raises(ValueError, match=r"^$"):
        optimizer.step()
    optimizer.step()
    optimizer.step()
    assert (len(calls), seen) == (3, [2, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("early", [("SYN410", 4, [1])]),
        ("skip", [("SYN214", 4, [1])]),
        ("hook", [("SYN410", 1, [1])]),
        ("evaluates", []),
    ],
)
def test_late_changes_of_gradients_are_seen(fault: str, expected: list[Any], tmp_path: Path) -> None:
    """A rank that reduces an earlier micro-batch skips no step, nor does one that evaluates before the step."""
    processes = Processes(tmp_path)
    (tmp_path / "train.py").write_text(ACCUMULATED)
    port = free_port()
    watch = ["-m", "syncheck", "watch", "--events", "events.jsonl", "train.py", fault]
    variables = {"PYTHONPATH": str(CLONE), "MASTER_ADDR": "127.0.0.1"}
    started = [processes.start(sys.executable, *watch, rank, port, **variables) for rank in range(2)]
    errors = [process.communicate(timeout=110)[1] for process in started]
    processes.kill()
    assert [process.returncode for process in started] == [0, 0], errors
    rows = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    found = [(row["code"], row["step"], row["ranks"]) for row in rows if row["event"] == "witness"]
    # Its effects follow.
    assert found[:1] == expected
