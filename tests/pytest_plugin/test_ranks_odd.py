"""Unusual tests and conftests: tests that pass in one process pass on ranks, and no failure is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.processes import read_pids, wait_for_end
from support.sessions import find_failure

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CONFTEST = """
import multiprocessing, os, pathlib, sys
import pytest

multiprocessing.set_start_method("spawn")  # raises the second time
sys.path.insert(0, pathlib.Path(__file__).parent)

class Thing: pass

@pytest.fixture
def thing(): return Thing()

def pytest_collection_modifyitems(items):
    if "RANK" in os.environ:  # a plugin that splits a suite, and counts otherwise here
        items[:] = items[:1] * 2

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # from pytest's own manual
    report = yield
    if "tmp_path" in item.fixturenames:
        str(item.funcargs["tmp_path"])
    return report
"""
PASS = """
import faulthandler, io, json, os, pathlib, signal, subprocess, sys, time, types
import pytest
from conftest import Thing

pytestmark = pytest.mark.syncheck(ranks=2, group=False)
HERE = pathlib.Path(__file__).parent

def note(pid): (HERE / "pids").open("a").write(f"{pid}\\n")

@pytest.mark.parametrize("x", [1, 2, 3], ids=["klein", "größe", "a\\nb"])
def test_ids(x): pass

def test_class_of_conftest(thing): assert isinstance(thing, Thing)
def test_class_of_conftest_again(thing): assert isinstance(thing, Thing)
def test_hook_of_conftest(tmp_path): pass
def test_stderr_replaced(): sys.stderr = io.StringIO()
def test_stdout_closed(): sys.stdout.close()
def test_json_patched(monkeypatch): monkeypatch.setattr(json, "dumps", lambda *a, **k: "{}")

def test_odd_property(record_property):
    circle = []
    circle.append(circle)
    record_property("a", {(1, 2): circle})

def test_alarm(): signal.alarm(1)
def test_after_alarm(): time.sleep(1.5)

def test_leaves_a_session():
    note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)

def test_group_that_cannot_be_left():
    stub = types.SimpleNamespace(is_initialized=lambda: True, destroy_process_group=lambda: 1 / 0, group=None)
    sys.modules["torch.distributed"] = stub

def test_after_that(): pass

@pytest.mark.xfail(raises=AssertionError, strict=True, reason="known on rank 1")
def test_expected_on_one_rank(syncheck_rank):
    note(os.getpid())
    assert syncheck_rank.rank == 0
    time.sleep(1000)
"""
FAIL = """
import faulthandler, os, pathlib, socket, struct, time
import pytest

on_ranks = pytest.mark.syncheck(ranks=2, group=False, timeout=8)

@on_ranks
def test_strict_from_a_fixture(request):
    request.applymarker(pytest.mark.xfail(strict=True, reason="from inside"))

@on_ranks
@pytest.mark.xfail(strict=True, reason="one is slow")
def test_strict_and_slow(syncheck_rank): time.sleep(2.5 * syncheck_rank.rank)

@on_ranks
def test_fork_returns():
    if os.fork() == 0: return
    time.sleep(1)
    assert False, "the parent fails"

@pytest.mark.syncheck(ranks=2, group=False, timeout=1)
def test_half_a_message(syncheck_rank):
    if syncheck_rank.rank == 0:
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                os.write(int(name), b'{"half": ')
        time.sleep(1000)

@pytest.fixture
def slow_end(syncheck_rank):
    yield
    time.sleep(2.5)
    pathlib.Path(__file__).with_name(f"ended{syncheck_rank.rank}").touch()

@on_ranks
def test_teardown_is_given_time(slow_end, syncheck_rank): assert syncheck_rank.rank == 0, "only here"

@on_ranks
def test_skips_while_the_other_waits(syncheck_rank):
    if syncheck_rank.rank == 1: pytest.skip("not for me")
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with both suites and a separate ini file."""
    created = tmp_path_factory.mktemp("odd")
    (created / "tests").mkdir()
    (created / "ini").mkdir()
    (created / "tests" / "conftest.py").write_text(CONFTEST)
    (created / "tests" / "test_pass.py").write_text(PASS)
    (created / "tests" / "test_fail.py").write_text(FAIL)
    (created / "ini" / "pytest.ini").write_text(f"[pytest]\nlog_file = {created}/log.txt\n")
    return created


def pytest_on(folder: Path, file: str) -> subprocess.CompletedProcess[str]:
    """Run one of the suites."""
    # If hypothesis is installed, its plugin fails on the path that the conftest adds.
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", "-ra", "-c", "ini/pytest.ini", *without, f"tests/{file}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_unusual_tests_pass_on_ranks(folder: Path) -> None:
    """Ids, conftests, hooks, replaced streams, patched modules and side effects fail no test."""
    done = pytest_on(folder, "test_pass.py")
    assert re.search(r"\b15 passed, 1 xfailed\b", done.stdout), done.stdout + done.stderr
    pids = [int(line) for line in (folder / "tests" / "pids").read_text().split()]
    assert len(pids) == 4
    wait_for_end(pids)


@pytest.fixture(scope="module")
def failed(folder: Path) -> str:
    """Return the output of the failing suite."""
    done = pytest_on(folder, "test_fail.py")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("test_strict_from_a_fixture", "[XPASS(strict)] from inside"),
        ("test_strict_and_slow", "[XPASS(strict)] one is slow"),
        ("test_fork_returns", "AssertionError: the parent fails"),
        ("test_half_a_message", "rank 0: had not finished"),
        ("test_teardown_is_given_time", "AssertionError: only here"),
        ("test_skips_while_the_other_waits", "disagree on the outcome: not finished on rank 0; skipped on rank 1"),
    ],
)
def test_unusual_failures(failed: str, test: str, text: str) -> None:
    """Strict xfails, forks, invalid messages and skips on one rank fail quickly."""
    assert text in find_failure(failed, test)


def test_a_failed_rank_tears_down(failed: str, folder: Path) -> None:
    """Fixtures of a failed rank are torn down, even if this takes longer than the grace period."""
    assert "6 failed" in failed
    assert (folder / "tests" / "ended1").exists()


STOPPED = """
import os, pathlib, signal
import pytest

@pytest.mark.syncheck(ranks=2, group=False)
def test_stops():
    pathlib.Path(__file__).with_name("pids").open("a").write(f"{os.getpid()}\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_stopped_ranks_end_with_pytest(tmp_path: Path) -> None:
    """Stopped ranks are killed when pytest is killed."""
    (tmp_path / "test_it.py").write_text(STOPPED)
    with subprocess.Popen([sys.executable, "-m", "pytest"], cwd=tmp_path, stdout=subprocess.DEVNULL) as running:
        started = read_pids(tmp_path / "pids", 2)
        os.kill(running.pid, 9)
    wait_for_end(started)


def test_subtests_do_not_decide(pytester: pytest.Pytester) -> None:
    """A skipped subtest does not skip the test, and a failed subtest fails the test."""
    if not hasattr(pytest, "Subtests"):
        pytest.skip("this pytest has no subtests")
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.syncheck(ranks=2, group=False)
        def test_skips(subtests):
            with subtests.test("a"): pytest.skip("this part")
        def test_fails(subtests):
            with subtests.test("a"): assert False
        """
    )
    result = pytester.runpytest_subprocess()
    assert re.search(r"\b1 failed, 1 passed\b", result.stdout.str())


TEXTS = """
'''
>>> 1 + 1
3
'''
import pytest
pytestmark = pytest.mark.syncheck(ranks=2, group=False)
def test_differs(syncheck_rank): assert syncheck_rank.rank == 5
"""


@pytest.mark.parametrize(
    ("options", "hint"), [("-q -vv", "use -v to"), ("-v", "use -v to"), ("-q", "use -vvv to"), ("-vv", "")]
)
def test_summary_and_hint(pytester: pytest.Pytester, options: str, hint: str) -> None:
    """The summary of a doctest contains its expectation, and the hint depends on the verbosity."""
    pytester.makepyfile(TEXTS)
    result = pytester.runpytest_subprocess("--doctest-modules", *options.split())
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["FAILED *::test_summary_and_hint - rank 0: Expected: 3 *"])
    assert [line.partition(" see")[0] for line in result.outlines if "to see the full failure" in line] == (
        [hint] if hint else []
    )
