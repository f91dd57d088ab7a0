"""--syncheck-timeout, its ini value, and the marker, which overrides both."""

from __future__ import annotations

import pytest

SLOW = """
import time
import pytest

@pytest.mark.syncheck(ranks=2, group=False)
def test_slow(): time.sleep(1.5)

@pytest.mark.syncheck(ranks=2, group=False, timeout=30)
def test_with_its_own_limit(): time.sleep(1.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "ini", "limit"),
    [
        (["--syncheck-timeout=0.5"], "20", "0.5"),
        pytest.param([], "0.7", "0.7", marks=pytest.mark.slow),
        pytest.param(["--syncheck-timeout=20"], "0.5", None, marks=pytest.mark.slow),
    ],
    ids=["option", "ini", "option over ini"],
)
def test_limit(pytester: pytest.Pytester, option: list[str], ini: str, limit: str | None) -> None:
    """A test beyond the time limit fails with the limit; the option overrides the ini value."""
    pytester.makepyfile(SLOW)
    pytester.makeini(f"[pytest]\nsyncheck_timeout = {ini}\n")
    result = pytester.runpytest_inprocess(*option)
    result.assert_outcomes(passed=2 - (limit is not None), failed=limit is not None)
    if limit is not None:
        result.stdout.fnmatch_lines([f"time limit of {limit} s exceeded*", "ranks 0, 1 of 2 had not finished"])


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
def test_invalid_limits(pytester: pytest.Pytester, given: str) -> None:
    """A value other than a positive number is a usage error."""
    pytester.makepyfile(SLOW)
    result = pytester.runpytest_inprocess(f"--syncheck-timeout={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --syncheck-timeout *: must be a number of seconds above 0"])
