"""The code of each package stays within the limits of tools/density.py."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
from support.listings import list_fields

from tools.density import LIMITS, Limit, find_exceeded, main, measure

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [*sorted(path.parent for path in (ROOT / "syncheck").glob("*/__init__.py")), ROOT / "train"]
# The modules directly in syncheck/ are declarations, records and predicates of one line: their bodies have few lines.
LIMITS_OF_MODULES = LIMITS | {"branches": Limit(0, 26)}
# Tests compare with comprehensions, and need fewer comments: a docstring states what they show.
LIMITS_OF_TESTS = LIMITS | {"comprehensions": Limit(0, 8), "comments": Limit(0, 100)}

DENSE_SOURCES = {
    "comprehensions": "def f(x):\n    return [y for y in x]\n",
    "nested": "def f(x):\n    return [z for y in x for z in y]\n",
    "conditionals": "def f(x):\n    return 1 if x else 2\n",
    "branches": "def f(x):\n    return x and x.y and x.z\n",
    "empty names": "def f(place):\n    return place\n",
    "comments": "def f(x):\n    return x\n",
    "over 12": "def f(x):\n" + 13 * "    if x:\n        x += 1\n",
}
PLAIN = '''\
def add(numbers):
    """Return the sum."""
    total = 0
    # A loop has a name for its sum.
    for number in numbers:
        total += number
    report(
        total,
        len(numbers),
    )
    return total
'''


@pytest.mark.parametrize("package", PACKAGES, ids=attrgetter("name"))
@pytest.mark.slow
def test_rates_are_within_the_limits(package: Path) -> None:
    """A package exceeds no limit; a failure lists the functions to open first."""
    density = measure(package)
    exceeded = {name: f"{density.rates[name]:.2f}" for name in find_exceeded(density.rates)}
    densest = list_fields(density.functions[:20], "place")
    assert not exceeded, "\n".join([f"{package.name}: {exceeded}", *densest])


def test_modules_outside_packages_are_within_the_limits() -> None:
    """The modules directly in syncheck/, measured together, exceed no limit."""
    density = measure(*sorted((ROOT / "syncheck").glob("*.py")))
    densest = list_fields(density.functions[:20], "place")
    assert not find_exceeded(density.rates, LIMITS_OF_MODULES), "\n".join([str(density.rates), *densest])


@pytest.mark.slow
def test_tests_are_within_the_limits() -> None:
    """The tests, measured together, exceed no limit."""
    density = measure(ROOT / "tests")
    densest = list_fields(density.functions[:20], "place")
    assert not find_exceeded(density.rates, LIMITS_OF_TESTS), "\n".join([str(density.rates), *densest])


@pytest.mark.parametrize("name", DENSE_SOURCES)
def test_each_rate_has_a_limit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dense function exceeds the limit of its kind, `--max` exits with 1, and the function is listed."""
    path = tmp_path / "dense.py"
    path.write_text(DENSE_SOURCES[name])
    assert name in find_exceeded(measure(path).rates)
    assert main(["--max", "--list", "1", str(tmp_path)]) == 1
    assert f"! {name}" in capsys.readouterr().out
    assert main([str(path)]) == 0


def test_plain_code_is_within_the_limits(tmp_path: Path) -> None:
    """A loop with a comment exceeds no limit; neither does a method with a docstring only."""
    path = tmp_path / "plain.py"
    path.write_text(PLAIN + "\n\ndef hook(call):\n    '''Do nothing.'''\n")
    assert find_exceeded(measure(path).rates) == []
    assert main(["--max", str(path)]) == 0
