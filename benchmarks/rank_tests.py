"""Many rank tests on a busy machine: none may fail, because users would look for rare failures in their own code.

Each batch is a pytest run of ten kinds of tests on two ranks, beside `LOAD` busy loops. If a rank dies before its test
begins, the plugin retries the start; retries are counted.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from benchmarks.timing import bar, environment, section

TESTS = int(os.environ.get("SYNCHECK_RANK_TESTS", "10000"))
LOAD = 6
BATCH = 250
ROUNDS = 1
FILE = """
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.syncheck(ranks=2, timeout=200)
KEPT = []


def layers():
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("i", range(int(os.environ["SYNCHECK_BATCH"]) // 10))
class TestKinds:
    def test_all_reduce(self, i):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == 2

    def test_ddp(self, i):
        train(DistributedDataParallel(layers()))

    def test_fp16_hook(self, i):
        model = DistributedDataParallel(layers())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(model)

    def test_power_sgd(self, i):
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.004)
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(model, steps=4)

    def test_python_hook_in_a_reference_cycle(self, i):
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.004)

        def hook(state, bucket):
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / 2)

        model.register_comm_hook(None, hook)
        train(model)
        model.cycle = [model]

    def test_nobody_waits(self, i):
        for work in [dist.all_reduce(torch.ones(20_000), async_op=True) for _ in range(20)]:
            work.get_future().then(lambda done: done.value()[0] + 1)

    def test_fsdp2(self, i):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model)

    def test_new_groups(self, i):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group)
        if i % 2:
            dist.destroy_process_group(groups[0])

    def test_model_outlives_its_group(self, i):
        model = DistributedDataParallel(layers())
        train(model)
        KEPT.append(model)
        del KEPT[:-3]

    def test_ranks_end_apart(self, i, syncheck_rank):
        found = [None, None]
        dist.all_gather_object(found, list(range(1000 * syncheck_rank.rank)))
        time.sleep(0.01 * syncheck_rank.rank)
"""


def run(rounds: int) -> tuple[str, bool]:
    """Run the tests; return a section of RESULTS.md and whether none failed."""
    busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(LOAD)]
    for process in busy:
        process.start()
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    loads = []
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as name:
            file = Path(name, "test_kinds.py")
            file.write_text(FILE)
            while outcomes["tests"] < TESTS * rounds:
                outcomes += _batch(file, min(BATCH, TESTS * rounds - outcomes["tests"]), failed)
                loads.append(os.getloadavg()[0])
                print(f"{dict(outcomes)}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    finally:
        for process in busy:
            process.kill()
    minutes = (time.monotonic() - began) / 60
    kinds = "DDP alone, with hooks of torch and of Python, FSDP2, groups of their own, and collectives nobody waits for"
    load = f"{min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores"
    return section(
        f"{outcomes['tests']:,} tests on two ranks in runs of {BATCH}: {kinds}.",
        f"{minutes:.0f} minutes at a load of {load}; starts that were tried again: {outcomes['retried']}.",
        [bar("failed rank tests", outcomes["failed"], 0)],
        *failed,
    )


def _batch(file: Path, tests: int, failed: list[str]) -> Counter[str]:
    """Run a batch; return the numbers of tests, failures and retried starts."""
    report = file.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={file.parent}",
        f"--junitxml={report}", str(file),
    ]  # fmt: skip
    batch = {"SYNCHECK_BATCH": str(max(10, tests // 10 * 10))}
    done = subprocess.run(command, env=environment() | batch, capture_output=True, text=True, check=False)
    root = ET.parse(report).getroot()
    cases = root.findall(".//testcase")
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failed += [f"{case.get('name')}: {done.stdout[-1500:]}" for case in bad]
    retried = root.findall(".//property[@name='syncheck_retried_start']")
    return Counter(tests=len(cases), failed=len(bad), retried=len(retried))


def _spin() -> None:
    while True:
        pass
