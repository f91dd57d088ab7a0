"""pytest's own options and other plugins with tests on several ranks."""

from __future__ import annotations

import os
import textwrap
from importlib import util

import pytest
from support.listings import list_names

SUITE = """
import os, time
import pytest
import measured

pytestmark = pytest.mark.syncheck(ranks=2, group=False)

def test_first(syncheck_rank, worker_id):
    print("worker", worker_id, "on", syncheck_rank.rank)
    measured.branch(syncheck_rank.rank)

def test_second(syncheck_rank):
    assert syncheck_rank.rank == 0

def test_third():
    pass
"""
MEASURED = """
def branch(rank):
    if rank == 0:
        return "zero"
    return "other"

def never():
    return 1
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Three tests on two ranks; the second test fails."""
    pytester.makepyfile(measured=MEASURED, test_suite=SUITE)
    return pytester


@pytest.mark.slow
def test_xdist(suite: pytest.Pytester) -> None:
    """`-n 2`: each worker has its own ranks, and the output contains the failure and the id of the worker."""
    result = suite.runpytest_subprocess("-n", "2", "-rA")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines_random(["rank 1 of 2 failed:", "E * assert 1 == 0", "worker gw[01] on 1"])
    result.stdout.fnmatch_lines(["FAILED test_suite.py::test_second - rank 1: assert 1 == 0*"])


@pytest.mark.slow
def test_stop_at_first_failure_and_rerun(suite: pytest.Pytester) -> None:
    """`-x` stops after the failing test, and `--lf` then runs this test only."""
    result = suite.runpytest_subprocess("-x")
    result.assert_outcomes(passed=1, failed=1)
    result = suite.runpytest_subprocess("--lf")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["collected 1 item*", "*- rank 1: assert 1 == 0", "*= 1 failed in *"])


@pytest.mark.slow
def test_selection(suite: pytest.Pytester) -> None:
    """`-k`, `-m` and a node id select tests in the outer session only."""
    suite.runpytest_subprocess("-k", "first or third").assert_outcomes(passed=2, deselected=1)
    suite.runpytest_subprocess("-m", "not syncheck").assert_outcomes(deselected=3)
    suite.runpytest_subprocess("test_suite.py::test_third").assert_outcomes(passed=1)


@pytest.mark.slow
def test_without_capturing(suite: pytest.Pytester) -> None:
    """`-s` prints the output of the ranks immediately and once, each line after its rank."""
    result = suite.runpytest_subprocess("-s", "-k", "first", "-rA")
    result.stdout.fnmatch_lines_random(["*[[]rank 0[]] worker master on 0", "*[[]rank 1[]] worker master on 1"])
    assert result.stdout.str().count("worker master on 0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "with xdist"])
def test_coverage(suite: pytest.Pytester, workers: list[str]) -> None:
    """pytest-cov counts the lines executed in the ranks."""
    suite.makefile(".toml", pyproject="[tool.coverage.run]\nbranch = true\n")
    result = suite.runpytest_subprocess("--cov=measured", "--cov-report=term-missing", "-k", "first", *workers)
    result.assert_outcomes(passed=1, deselected=0 if workers else 2)
    result.stdout.re_match_lines([r"measured\.py +6 +1 +2 +0 +88% +7"])
    assert list_names(suite.path.glob(".coverage*")) == [".coverage"]


@pytest.mark.parametrize("option", ["--pdb", pytest.param("--trace", marks=pytest.mark.slow)])
def test_debuggers_are_refused(suite: pytest.Pytester, option: str) -> None:
    """A debugger is a usage error if a test on ranks is selected, and works otherwise."""
    result = suite.runpytest_inprocess(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {option}: not supported in tests on several ranks, such as test_suite.py::*"])
    assert suite.runpytest_inprocess(option, "-m", "not syncheck").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_conftest_ini_and_options_reach_the_ranks(pytester: pytest.Pytester) -> None:
    """Ranks have the same rootdir, ini file, conftest, command line and warnings filter."""
    pytester.makeini("[pytest]\nminversion = 8\nmarkers = mine\nfilterwarnings = error\n")
    pytester.makeconftest(
        """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--flavour", default="none")

        @pytest.fixture
        def flavour(request):
            return request.config.getoption("flavour")
        """
    )
    pytester.mkdir("sub").joinpath("test_it.py").write_text(
        """
import os, warnings
import pytest

@pytest.mark.mine
@pytest.mark.syncheck(ranks=2, group=False)
def test_it(flavour, pytestconfig):
    assert flavour == "sweet"
    assert pytestconfig.rootpath == pytestconfig.invocation_params.dir.parent
    assert pytestconfig.inipath.name == "tox.ini"
    with pytest.raises(UserWarning):
        warnings.warn("an error here")
    assert [1, 2] != [1, 3]
"""
    )
    os.chdir("sub")
    result = pytester.runpytest_inprocess("--flavour=sweet", "--strict-markers", "-p", "no:cacheprovider", "-x", ".")
    result.assert_outcomes(passed=1)


def test_ranks_judge_no_checkpoints(pytester: pytest.Pytester) -> None:
    """Checkpoints of the command line are judged by the outer session only; test_ini_checkpoints tests the ini file."""
    pytester.path.joinpath("broken.pth").write_bytes(b"no checkpoint")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.syncheck(ranks=2, group=False)
        def test_it(pytestconfig):
            assert not pytestconfig.pluginmanager.hasplugin("syncheck-checkpoints")
        """
    )
    result = pytester.runpytest_inprocess("--syncheck", "broken.pth", "test_ranks_judge_no_checkpoints.py")
    result.assert_outcomes(passed=1, failed=1)


@pytest.mark.slow
def test_several_files_and_conftests(pytester: pytest.Pytester) -> None:
    """Ranks have the fixtures of all conftests; a file with an error in the ranks fails its own tests only."""
    test = """
        import os, pytest
        if {broken} and "RANK" in os.environ: raise RuntimeError("broken in ranks")

        @pytest.mark.syncheck(ranks=2, group=False)
        def test_it(outer, inner): assert (outer, inner) == ("outer", "{folder}")
    """
    fixture = "import pytest\n@pytest.fixture\ndef {name}(): return '{value}'\n"
    for folder in ("a", "b"):
        created = pytester.mkdir(folder)
        created.joinpath("conftest.py").write_text(fixture.format(name="inner", value=folder))
        for number in range(2):
            text = textwrap.dedent(test).format(broken=folder == "b" and number == 1, folder=folder)
            created.joinpath(f"test_{folder}{number}.py").write_text(text)
    pytester.makeconftest(fixture.format(name="outer", value="outer"))
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["collecting the test failed:", "*RuntimeError: broken in ranks"])


def test_a_test_without_a_run_fails(pytester: pytest.Pytester) -> None:
    """A test fails if a conftest or plugin prevents the ranks from running it."""
    pytester.makepyfile("import pytest\n@pytest.mark.syncheck(ranks=2, group=False)\ndef test_it(): pass\n")
    pytester.makeconftest(
        """
        import os
        def pytest_runtest_protocol():
            return True if "RANK" in os.environ else None
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["not run on ranks 0, 1"])


def test_ranks_without_torch(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, a test with a process group fails with the install command and starts no process."""
    pytester.makepyfile("import pytest\n@pytest.mark.syncheck(ranks=2)\ndef test_it(): pass\n")
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *args: None if name == "torch" else find(name, *args))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["tests on several ranks require torch: pip install 'syncheck[[]live[]]'"])
