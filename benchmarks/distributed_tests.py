"""Twenty tests on two ranks: `@pytest.mark.syncheck(ranks=2)` against one torch.multiprocessing.spawn a test."""

from __future__ import annotations

import statistics
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.timing import bar, median, section, table, take_turns

ROUNDS = 3
TESTS = 20
BODY = """
def body():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.full((4, 8), float(dist.get_rank()))).sum().backward()
    gathered = [torch.empty(8, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, model.module.weight.grad)
    assert gathered[0].equal(gathered[1])
"""
MARKED = f"""
import pytest, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{BODY}
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("i", range({TESTS}))
def test_gradients_agree(i):
    body()
"""
# Common in projects: two processes per test, rendezvous through a file, errors through spawn's own pipe.
SPAWNED = f"""
import pytest, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
{BODY}
def on_rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2)
    body()
    dist.barrier()
    dist.destroy_process_group()

@pytest.mark.parametrize("i", range({TESTS}))
def test_gradients_agree(i, tmp_path):
    mp.spawn(on_rank, args=(tmp_path / "store",), nprocs=2)
"""
# Seconds of a test after the first, which starts python and imports torch. The limit of this project.
MOST_SECONDS = 0.5


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {}
        for what, content in (("syncheck(ranks=2)", MARKED), ("spawn", SPAWNED)):
            file = folder / what.partition("(")[0] / "test_it.py"
            file.parent.mkdir()
            file.write_text(content)
            commands[what] = [
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={file.parent}",
                f"--junitxml={file.with_suffix('.xml')}", str(file),
            ]  # fmt: skip
        times = take_turns(commands, rounds, warm=False)
        cases = ET.parse(folder / "syncheck" / "test_it.xml").findall(".//testcase")
        each = [float(case.get("time", "nan")) for case in cases]
        assert len(each) == TESTS
        failures = ET.parse(folder / "spawn" / "test_it.xml").findall(".//failure")
        # Some versions of gloo occasionally abort at exit of the interpreter, after the test.
        assert all("SIGABRT" in (failure.get("message") or "") for failure in failures)
    of = median(times)
    first = f"The first test took {each[0]:.2f} s, the slowest of the others {max(each[1:]):.2f} s."
    if failures:
        first += f"\n{len(failures)} spawned tests failed, because gloo aborted a process at its exit."
    return section(
        f"A file of {TESTS} tests on two ranks, each with DDP and a collective, as a whole pytest run.",
        table(times),
        [
            bar("`syncheck(ranks=2)` / `spawn`", of["syncheck(ranks=2)"] / of["spawn"], 0.25),
            bar("a test after the first, s", statistics.median(each[1:]), MOST_SECONDS),
        ],
        first,
    )
