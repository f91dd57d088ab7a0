"""Process groups of ranks: failed starts are repeated, the test itself never; destroying a group is safe."""

from __future__ import annotations

import sys
from xml.etree import ElementTree as ET

import pytest
from support.listings import find_texts

# Replaces torch, which takes seconds to import. `plan` has one word for each attempt of rank 1 to join a group.
TORCH = "def __getattr__(name): return lambda *_, **__: None\n"
DISTRIBUTED = """
import os, pathlib, time

def FileStore(path, world_size):
    open(f"{path}.{os.environ['RANK']}", "x").close()  # a store that was used may hold addresses of dead ranks

def init_process_group(*_, rank, **__):
    if rank == 1:
        plan = pathlib.Path("plan")
        word, *rest = plan.read_text().split() or ["joins"]
        plan.write_text(" ".join(rest))
        if word == "aborts": os.abort()
        if word == "raises": raise RuntimeError("connectFullMesh failed")

def __getattr__(name): return lambda *_, **__: None
"""
SUITE = """
import os, pathlib
import pytest

pytestmark = pytest.mark.syncheck(ranks=2)

def once(name):
    if os.environ.get("RANK") == "1" and not os.path.exists(name):
        open(name, "x").close()
        os.abort()

@pytest.fixture
def aborts_once(): once("fixture")

def test_start(): pathlib.Path("begun").open("a").write("x")
def test_fixture(aborts_once): pass
def test_body(): once("body")
"""
REAL = """
import os, pathlib
import torch.distributed as dist

join = dist.init_process_group

def init_process_group(*arguments, **named):
    if os.environ["RANK"] == "1" and not os.path.exists("aborted"):
        open("aborted", "x").close()
        os.abort()
    return join(*arguments, **named)

dist.init_process_group = init_process_group
"""


def run(pytester: pytest.Pytester, plan: str, *arguments: str) -> tuple[pytest.RunResult, list[str]]:
    """Run the suite with injected faults. Return the result, and the retried starts in the JUnit file."""
    folder = pytester.mkpydir("torch")
    (folder / "__init__.py").write_text(TORCH)
    (folder / "distributed.py").write_text(DISTRIBUTED)
    (pytester.path / "plan").write_text(plan)
    pytester.makepyfile(test_suite=SUITE)
    plugins = ["-p", "no:xdist", "-p", "no:cov"]
    command = [sys.executable, "-m", "pytest", *plugins, "--junitxml=junit.xml", *arguments]
    result = pytester.run(*command, timeout=60)
    return result, retried(pytester)


def retried(pytester: pytest.Pytester) -> list[str]:
    """Return the retried starts in the JUnit file."""
    properties = ET.parse(pytester.path / "junit.xml").iter("property")
    return [str(p.get("value")) for p in properties if p.get("name") == "syncheck_retried_start"]


@pytest.mark.slow
def test_only_a_start_is_repeated(pytester: pytest.Pytester) -> None:
    """A failed start is repeated and reported; an abort in the code of the test fails the test."""
    result, recorded = run(pytester, "raises aborts")
    result.assert_outcomes(passed=1, failed=2)
    assert ["connectFullMesh" in recorded[0], "SIGABRT" in recorded[1], len(recorded)] == [True, True, 2]
    for reason in recorded:
        assert f"test_suite.py::test_start: {reason}; the ranks were started again" in result.outlines
    assert (pytester.path / "begun").read_text() == "xx"  # by each rank, once
    assert len(find_texts(result.outlines, "killed by SIGABRT during the test")) >= 2
    assert (pytester.path / "fixture").exists()
    assert (pytester.path / "body").exists()


@pytest.mark.slow
def test_number_of_starts_is_limited(pytester: pytest.Pytester) -> None:
    """A rank that never joins fails the test after three starts with the reason."""
    result, recorded = run(pytester, "aborts " * 9, "-k", "start")
    result.assert_outcomes(failed=1)
    assert len(recorded) == 2
    assert not (pytester.path / "begun").exists()
    assert (pytester.path / "plan").read_text().count("aborts") == 6
    result.stdout.fnmatch_lines(["*rank 1: its process was killed by SIGABRT before the test started*"])


@pytest.mark.slow
def test_crash_in_a_module_is_not_repeated(pytester: pytest.Pytester) -> None:
    """After a crash in a test module or conftest, the ranks are not started again."""
    pytester.makeconftest('import os\nif os.environ.get("RANK") == "1": open("n", "a").write("x"); os.abort()')
    result, recorded = run(pytester, "", "-k", "start")
    result.assert_outcomes(failed=1)
    assert not recorded
    assert (pytester.path / "n").read_text() == "x"
    assert not (pytester.path / "begun").exists()  # rank 0 was ready, and waited


@pytest.mark.slow
def test_gloo_ranks_start_again(pytester: pytest.Pytester) -> None:
    """With gloo, the second start creates a new group with an empty store."""
    pytester.makeconftest(REAL)
    pytester.makepyfile(
        """
        import pytest, torch
        @pytest.mark.syncheck(ranks=2)
        def test_sum():
            ones = torch.ones(2)
            torch.distributed.all_reduce(ones)
            assert ones.tolist() == [2, 2]
        """
    )
    result = pytester.runpytest_subprocess("--junitxml=junit.xml", timeout=110)
    result.assert_outcomes(passed=1)
    assert len(retried(pytester)) == 1


LEAVING = """
import os, pathlib, time
import pytest, torch
import torch.distributed as dist

pytestmark = pytest.mark.syncheck(ranks=2)

class Slow:
    def __del__(self): time.sleep(0.5)

@pytest.mark.parametrize("i", range(3))
def test_callback(i):
    pathlib.Path("pids").open("a").write(f"{os.getpid()}\\n")
    a_group, z_slow = dist.group.WORLD, Slow()  # cells are released from the last to the first
    def then(future):
        return (a_group, z_slow) and future.value()
    dist.all_reduce(torch.ones(2), async_op=True).get_future().then(then).wait()

def test_log():
    with pytest.raises(RuntimeError):
        dist.broadcast(torch.ones(2), src=7)
    assert 0
"""


@pytest.mark.slow
def test_gloo_releases_a_callback_late(pytester: pytest.Pytester) -> None:
    """A callback with the last reference to the group aborts no rank, and failed collectives are not logged."""
    pytester.makepyfile(LEAVING)
    result = pytester.runpytest_subprocess(timeout=110)
    result.assert_outcomes(passed=3, failed=1)
    pids = (pytester.path / "pids").read_text().split()
    assert len(pids) == 6
    assert len(set(pids)) == 2
    assert "Captured log" not in result.stdout.str()
