"""Failing tests on several ranks: each failure names its rank, none hangs, and no process remains."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.processes import read_pids, wait_for_end
from support.sessions import FAST, find_failure

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)  # the suite below starts many processes

# Without a process group, ranks need not import torch; most failures do not depend on the group.
SUITE = """
import os, pathlib, subprocess, sys, threading, time
import pytest

if "RANK" in os.environ:
    pathlib.Path(__file__).with_name("pids").open("a").write(f"{os.getpid()}\\n")
on_ranks = pytest.mark.syncheck(ranks=2, group=False)

@on_ranks
def test_own_assertion(syncheck_rank):
    print("said on", syncheck_rank.rank)
    seen = [1, 2, syncheck_rank.rank]
    assert seen == [1, 2, 0]

@pytest.mark.syncheck(ranks=3, group=False)
def test_alike(syncheck_rank):
    assert syncheck_rank is None, f"seen by rank {syncheck_rank.rank}"

@pytest.mark.syncheck(ranks=2, group=False, timeout=1)
def test_hangs(syncheck_rank):
    def wait_for_nothing():
        time.sleep(1000)
    if syncheck_rank.rank == 1:
        wait_for_nothing()

@on_ranks
def test_killed(syncheck_rank):
    if syncheck_rank.rank == 1:
        os.kill(os.getpid(), 9)

@on_ranks
def test_leaves(syncheck_rank):
    if syncheck_rank.rank == 0:
        print("last words")
        os._exit(7)

@on_ranks
def test_sys_exit(syncheck_rank):
    sys.exit("I am leaving")

@on_ranks
def test_pytest_exit(syncheck_rank):
    pytest.exit("no more")

@on_ranks
def test_skips_on_one(syncheck_rank):
    if syncheck_rank.rank == 1:
        pytest.skip("not for me")

@pytest.fixture
def broken():
    raise ValueError("the fixture is broken")

@on_ranks
def test_setup(broken):
    pass

@pytest.fixture
def ends_badly():
    yield
    raise ValueError("the end is broken")

@on_ranks
def test_teardown(ends_badly):
    pass

@pytest.fixture
def leaks():
    yield
    assert 0, "LEAK"

@on_ranks
def test_body_and_teardown(leaks):
    assert 0, "the body"

@pytest.fixture
def leaves_at_the_end():
    yield
    os._exit(3)

@on_ranks
def test_body_and_exit(leaves_at_the_end):
    assert 0, "the body"

@on_ranks
def test_closes_files(syncheck_rank):
    if syncheck_rank.rank == 0:
        os.closerange(3, 100)

@on_ranks
def test_takes_the_connection(syncheck_rank, tmp_path):
    if syncheck_rank.rank == 1:
        file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
        for number in range(3, 40):
            os.dup2(file, number)

@on_ranks
def test_unknown_fixture(there_is_none): pass

@on_ranks
def test_breakpoint():
    breakpoint()

@on_ranks
@pytest.mark.xfail(raises=KeyError)
def test_another_error_than_expected():
    raise ValueError("not a KeyError")

@on_ranks
@pytest.mark.xfail(strict=True, reason="should fail")
def test_strict(): pass

@on_ranks
def test_unpicklable(record_property):
    record_property("lock", threading.Lock())
    raise type("Local", (Exception,), {"__reduce__": None})(threading.Lock())

@on_ranks
def test_segfault(syncheck_rank):
    import ctypes
    if syncheck_rank.rank == 0:
        ctypes.string_at(0)

@on_ranks
def test_leaves_a_child(syncheck_rank):
    if syncheck_rank.rank == 0:
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(__file__).with_name("pids").open("a").write(f"{child.pid}\\n")

@on_ranks
def test_random_name(): pass
globals()[f"test_{os.getpid()}"] = globals().pop("test_random_name")

@on_ranks
def test_afterwards(): pass
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the suite once. Return its folder and output."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", *FAST],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return folder, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "texts"),
    [
        ("test_own_assertion", ["rank 1 of 2 failed:", ">       assert seen == [1, 2, 0]", "At index 2 diff: 1 != 0"]),
        (
            "test_own_assertion",
            ["Captured stdout rank 0 call", "said on 0", "Captured stdout rank 1 call", "said on 1"],
        ),
        ("test_alike", ["rank 0 of 3 failed:", "seen by rank 0", "ranks 1, 2: failed too", "with the same failure"]),
        ("test_hangs", ["time limit of 1 s exceeded", "rank 0 of 2 had ended", "rank 1: had not finished"]),
        ("test_hangs", [' in wait_for_nothing\n  File "', "in test_hangs"]),
        ("test_killed", ["rank 1 of 2 failed:", "killed by SIGKILL during the test", "out of memory"]),
        ("test_leaves", ["rank 0 of 2 failed:", "exited with code 7 during the test", "last words"]),
        ("test_sys_exit", ["SystemExit: I am leaving"]),
        ("test_pytest_exit", ["its session was ended by Exit: no more"]),
        ("test_skips_on_one", ["disagree on the outcome: passed on rank 0; skipped on rank 1"]),
        ("test_setup", ["rank 0 of 2 failed in setup:", "ValueError: the fixture is broken"]),
        ("test_teardown", ["rank 0 of 2 failed in teardown:", "ValueError: the end is broken"]),
        (
            "test_body_and_teardown",
            ["rank 0 of 2 failed:", "AssertionError: the body", "rank 0: failed in teardown too"],
        ),
        ("test_body_and_teardown", ["AssertionError: LEAK", "rank 1: failed too", "with the same failure"]),
        ("test_body_and_exit", ["AssertionError: the body", "exited with code 3 during the test"]),
        ("test_closes_files", ["rank 0 of 2 failed:", "lost the connection to pytest during the test"]),
        ("test_takes_the_connection", ["rank 1 of 2 failed:", "lost the connection to pytest during"]),
        ("test_unknown_fixture", ["rank 0 of 2 failed in setup:", "fixture 'there_is_none' not found"]),
        ("test_breakpoint", ["breakpoint() in a test on several ranks: ranks have no terminal"]),
        ("test_another_error_than_expected", ["ValueError: not a KeyError"]),
        ("test_strict", ["[XPASS(strict)] should fail"]),
        ("test_unpicklable", ["test_suite.Local: <unlocked _thread.lock object"]),
        ("test_segfault", ["killed by SIGSEGV", "Captured stderr rank 0", "in string_at"]),
        (r"test_\d+", ["the rank collected no test test_suite.py::test_"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_output_of_failures(done: tuple[Path, str], test: str, texts: list[str]) -> None:
    """The output contains the failure of the rank, and the state of the other ranks."""
    text = find_failure(done[1], test)
    for expected in texts:
        assert expected in text, text


@pytest.mark.slow
def test_hint_about_memory(done: tuple[Path, str]) -> None:
    """The hint about memory is printed only for a SIGKILL that the plugin did not send."""
    for test in ("test_closes_files", "test_takes_the_connection"):
        assert "SIGKILL" not in find_failure(done[1], test)


def test_tracebacks_without_the_plugin(done: tuple[Path, str]) -> None:
    """Tracebacks contain no files of the plugin."""
    output = done[1]
    for test in ("test_segfault", "test_closes_files"):  # stacks of all threads, and an error of pytest itself
        output = output.replace(find_failure(done[1], test), "")
    assert "pytest_plugin/" not in output


def test_summary_names_rank_and_reason(done: tuple[Path, str]) -> None:
    """The short summary has one line per test, which starts with the rank."""
    assert "FAILED test_suite.py::test_own_assertion - rank 1: assert [1, 2" in done[1]
    assert re.search(r"FAILED test_suite.py::test_hangs - time limit of 1 s exceeded", done[1])
    assert "FAILED test_suite.py::test_unknown_fixture - rank 0: fixture 'there_is_none'" in done[1]


def test_the_next_test_runs(done: tuple[Path, str]) -> None:
    """After failures a test on ranks passes. Processes are reused after a common failure, not after side effects."""
    assert "21 failed, 2 passed" in done[1]
    pids = (done[0] / "pids").read_text().split()
    assert 20 < len(pids) == len(set(pids)) < 40


def test_no_process_is_left(done: tuple[Path, str]) -> None:
    """Neither ranks nor their children outlive pytest."""
    wait_for_end([int(line) for line in (done[0] / "pids").read_text().split()])


WAITS = """
import os, pathlib, subprocess, time
import pytest

@pytest.mark.syncheck(ranks=2, group=False)
def test_waits():
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(__file__).with_name("pids").open("a").write(f"{os.getpid()}\\n{child.pid}\\n")
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["INT", "TERM", "KILL"])
def test_the_end_of_pytest_ends_the_ranks(tmp_path: Path, signal: str) -> None:
    """Ctrl-C, SIGTERM and SIGKILL of pytest end all ranks and their children."""
    (tmp_path / "test_it.py").write_text(WAITS)
    with subprocess.Popen([sys.executable, "-m", "pytest"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        started = read_pids(tmp_path / "pids", 4)
        subprocess.run(["kill", f"-{signal}", str(running.pid)], check=True)
        out = running.communicate(timeout=30)[0]
    wait_for_end(started)
    assert ("KeyboardInterrupt" in out) == (signal == "INT")


@pytest.mark.slow
def test_another_timeout_shows_stacks_too(pytester: pytest.Pytester) -> None:
    """If pytest-timeout ends the test first, the ranks are killed and their stacks are shown."""
    path = pytester.makepyfile(WAITS)
    result = pytester.runpytest_subprocess("--timeout=5", timeout=60)  # time for the ranks to begin the test
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 0: had not finished*", "*in test_waits"])
    wait_for_end([int(line) for line in path.with_name("pids").read_text().split()])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("ranks=0", "ranks=0: must be a number from 1 to 64"),
        ("ranks=1000", "ranks=1000: must be a number from 1 to 64"),
        ("ranks=[]", "ranks=[]: must be a number"),
        ("ranks=[2, 2]", "or a list of different numbers"),
        ("ranks='2'", "ranks='2': must be a number"),
        ("ranks=True", "ranks=True: must be a number"),
        ("rank=2", "has no argument 'rank'; it takes ranks, timeout and group"),
        ("ranks=2, timeout=0", "timeout=0: must be a number of seconds above 0"),
    ],
)
def test_invalid_markers(pytester: pytest.Pytester, marker: str, message: str) -> None:
    """An invalid marker fails at collection with one line about its problem."""
    pytester.makepyfile(f"import pytest\n@pytest.mark.syncheck({marker})\ndef test_it(): pass\n")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    assert message in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_the_fixture_needs_the_marker(pytester: pytest.Pytester) -> None:
    """syncheck_rank in a test without the marker fails with the required marker."""
    pytester.makepyfile("def test_it(syncheck_rank): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["the fixture syncheck_rank requires @pytest.mark.syncheck(ranks=2) on the test"])
