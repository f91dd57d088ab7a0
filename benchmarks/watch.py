"""Measure what watching costs a run: its hooks, its records, and the judge's time for many ranks.

The hooks' processor time is that of the threads that train, as a part of the processor time of the same steps. Threads
that judge and answer run beside the training, and are measured with records of simulated ranks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.timing import environment

ROUNDS = 3
ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
STEPS = 60
WARM_UP = 12
# Ranks whose records the judge reads, and steps of them.
SIMULATED = (64, 256, 1024)
JUDGED = 20
# The bars of the project: percent of a step's processor time, and bytes.
MOST_PERCENT, MOST_BYTES = 2.0, 300
PROGRAM = f"from benchmarks.watch import measure_hooks; measure_hooks({STEPS}, {WARM_UP})"


class Stopwatch:
    """Sums the processor time of the calls of a function. seconds: so far."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        begin = time.thread_time()
        try:
            return self.function(*arguments)
        finally:
            self.seconds += time.thread_time() - begin


def measure_hooks(steps: int, warm_up: int) -> None:
    """Train ResNet-18 on this rank with batches of 32 images of 32 x 32; print percent and bytes per step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from torchvision.models import resnet18

    import syncheck.live
    from syncheck.live.watching.board import Board

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    watching = syncheck.live.watch(every=0)
    stopwatch = Stopwatch(watching.watcher._guard)  # noqa: SLF001 - every hook passes through it
    watching.watcher._guard = stopwatch  # type: ignore[method-assign] # noqa: SLF001
    post = Board.post
    sizes: list[int] = []

    def post_counted(board: Board, key: str, record: Any) -> None:
        sizes.append(len(key) + len(json.dumps(record, separators=(",", ":"))))
        post(board, key, record)

    Board.post = post_counted  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = DistributedDataParallel(resnet18(num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = TensorDataset(torch.randn(64 * (steps + warm_up), 3, 32, 32))
    loader = DataLoader(samples, 32, sampler=DistributedSampler(samples))
    torch.manual_seed(dist.get_rank())
    total, hooks = 0.0, 0.0
    for number, (batch,) in enumerate(loader):
        if number == warm_up:
            total, hooks = time.thread_time(), stopwatch.seconds
            sizes.clear()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    total, hooks = time.thread_time() - total, stopwatch.seconds - hooks
    if dist.get_rank() == 0:
        print("RESULT", json.dumps([100 * hooks / (total - hooks), sum(sizes) / steps]), flush=True)
    dist.destroy_process_group()


def measure_judge(ranks: int) -> tuple[float, float]:
    """Judge steps in sync of simulated ranks. Returns milliseconds and kB per step."""
    import torch
    import torch.distributed as dist

    from syncheck.live.watching.board import Board
    from syncheck.live.watching.clock import Clock
    from syncheck.live.watching.judge import Judge
    from syncheck.live.watching.layouts import Layout
    from syncheck.live.witnesses.gradients import GradientWitness
    from syncheck.live.witnesses.settings import SettingsWitness

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    board = Board(dist.PrefixStore("watch", store), store)
    everyone = tuple(range(ranks))
    clock = Clock("0", everyone)
    # As with a wrapper, which is on no rank here.
    clock.reduces, clock.ticks = True, 1
    layout = Layout(clock, "0", None, [torch.nn.Parameter(torch.ones(1))], ["weight"], is_reduced=True)
    witnesses = {"gradients": GradientWitness(), "settings": SettingsWitness()}
    steps: list[Any] = []
    for number in range(JUDGED):
        step = SimpleNamespace(layout=layout, number=number, repeated=0, is_end=False, key=f"0/0/{number}")
        for rank in range(ranks):
            batch = {"e": 1, "s": "A" * 48, "d": ["A" * 8], "n": 98304}
            board.post(step.key, {"r": rank, "p": "01234567", "g": ["0" * 24, ""], "b": batch, "s": "0" * 16})
        steps.append(step)
    size = len(store.get(f"watch/{steps[0].key}"))
    watcher: Any = SimpleNamespace(steps=steps, witnesses=witnesses)
    judge = Judge(watcher, board, lambda judgement: sys.exit(f"a finding in sync: {judgement}"))
    begin = time.perf_counter()
    while judge._judge_next():  # noqa: SLF001 - without the pauses between two looks
        pass
    return 1e3 * (time.perf_counter() - begin) / JUDGED, size / 1e3


def run(rounds: int) -> tuple[str, bool]:
    """Measure. Returns the section, and whether the hooks and the records are within the bars."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--no-python")
    percents: list[float] = []
    sizes: list[float] = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, *launcher, sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        printed = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not printed:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-500:]}")
        percent, size = json.loads(printed[0].removeprefix("RESULT "))
        percents.append(percent)
        sizes.append(size)
    percent, size = statistics.median(percents), statistics.median(sizes)
    lines = [
        f"ResNet-18, batches of 32 images of 32 x 32, DDP on {RANKS} ranks with one thread each, all witnesses at each",
        f"of {STEPS} steps. Hooks: processor time of the hooks, relative to the rest of the training thread.",
        "",
        f"| hooks (bar: {MOST_PERCENT:g} %) | per record and step (bar: {MOST_BYTES}) |",
        "|---|---|",
        f"| {percent:.2f} % | {size:.0f} bytes |",
        "",
        "The judge reads and compares the records of simulated ranks in sync:",
        "",
        "| ranks | judge, per step | records, per step |",
        "|---|---|---|",
    ]
    for ranks in SIMULATED:
        milliseconds, kilobytes = measure_judge(ranks)
        lines.append(f"| {ranks} | {milliseconds:.1f} ms | {kilobytes:.0f} kB |")
    return "\n".join(lines) + "\n", percent <= MOST_PERCENT and size <= MOST_BYTES
