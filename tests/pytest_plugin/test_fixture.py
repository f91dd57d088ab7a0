"""The fixture `syncheck`, and explanations of == of two state dicts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

CHECKS = """
import numpy as np
import pytest
from syncheck import UsageError

A = {"weight": np.zeros((2, 3), np.float32), "bias": np.ones(3, np.float32)}
B = {"weight": np.zeros((2, 3), np.float32), "bias": np.array([1, 2, 1.5], np.float32)}

def test_compare_returns(syncheck):
    report = syncheck.compare(A, B)
    assert report.exit_code == 1 and [diff.name for diff in report.groups[0].tensors] == ["bias"]
    assert syncheck.assert_in_sync(A, dict(A)).verdict == "in_sync"

def test_assertion_fails(syncheck):
    syncheck.assert_in_sync(A, B)

def test_a_call_wins(syncheck):
    assert syncheck.compare(A, B, rtol=1.0, atol=1.0).verdict == "in_sync"

def test_misuse(syncheck):
    with pytest.raises(UsageError, match="one object to compare"):
        syncheck.assert_in_sync(A)

def test_equal_signs():
    assert A == B

def test_other_keys():
    assert A == {"weight": A["weight"]}

def test_plain_dicts():
    assert {"a": 1} == {"a": 2}

def test_arrays_alone():
    assert bool(A["weight"] == B["weight"])
"""


def test_fixture_and_assertions(pytester: pytest.Pytester) -> None:
    """A failure contains the table and the caller's line; == is explained for state dicts only."""
    pytester.makepyfile(CHECKS)
    result = pytester.runpytest_inprocess("-v")
    result.assert_outcomes(passed=3, failed=5)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            ">       syncheck.assert_in_sync(A, B)",
            "E       *OutOfSync: replicas are out of sync: SYN299",
            "E *bias*parameter*0 | 1*2 of 3*",
            "E *2 tensors: 1 identical, 0 close, 1 different, 0 not compared",
            "*: OutOfSync",
        ]
    )
    # The == of numpy and torch raises an error. The explanation below it contains the differences and a replacement.
    output = dict(re.findall(r"\n_+ (test_\w+) _+\n(.*?)(?=\n_{9,}|\n={9,})", text, re.DOTALL))
    assert "bias    parameter  0 | 1  2 of 3" in output["test_equal_signs"]
    assert "    assert_in_sync(a, b)" in output["test_equal_signs"]
    assert "    assert_in_sync(a, b)" in output["test_arrays_alone"]
    assert "replicas are out of sync: SYN101" in output["test_other_keys"]
    assert "bias" in output["test_other_keys"]
    assert "sync" not in output["test_plain_dicts"]
    assert "syncheck/testing.py" not in text
    assert "fixture.py" not in text


def test_other_failures_are_unchanged(pytester: pytest.Pytester) -> None:
    """If == cannot be explained or an error cannot be printed, pytest's own failure is unchanged."""
    pytester.makepyfile(
        """
        import numpy as np

        def test_circle():
            a, b = {"x": 1}, {"x": 2}
            a["a"], b["b"] = a, b
            assert a == b

        def test_values_that_fail():
            class Odd(dict):
                def values(self): raise KeyError("odd")
            assert Odd(a=1) == {"a": 2}

        def test_no_text():
            class Mute(ValueError):
                def __str__(self): raise TypeError("mute")
            raise Mute
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=3)
    assert "INTERNALERROR" not in result.stdout.str()
    result.stdout.fnmatch_lines_random(["E       AssertionError: *", "*Mute*"])
    assert "RecursionError" not in result.stdout.str()
    assert "E       KeyError" not in result.stdout.str()


def test_options_of_run_and_project(pytester: pytest.Pytester) -> None:
    """The fixture uses the project's [tool.syncheck], which options of the run override."""
    pytester.makepyfile(CHECKS)
    pytester.makefile(".toml", pyproject='[tool.syncheck]\nexclude = ["bias"]\n[tool.pytest.ini_options]\n')
    result = pytester.runpytest_inprocess("-k", "assertion_fails")
    result.assert_outcomes(passed=1, deselected=7)
    assert "syncheck: options from pyproject.toml: exclude bias" in result.outlines
    result = pytester.runpytest_inprocess("-k", "assertion_fails", "--syncheck-exclude", "nothing")
    result.assert_outcomes(failed=1, deselected=7)
    result = pytester.runpytest_inprocess("-k", "assertion_fails", "--syncheck-allow", "SYN999")
    result.assert_outcomes(errors=1, deselected=7)
