"""pytest plugin: judges checkpoints, and runs test code on several ranks.

Every hook here is thin; what it needs is imported when it is needed, so that a pytest that uses nothing of syncheck
pays for a few small modules and neither for torch nor for numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.pytest_plugin import checkpoints, options, ranks

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncheck.pytest_plugin.fixture import Syncheck
    from syncheck.testing import Rank


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options: https://docs.pytest.org/en/stable/reference/reference.html#initialization-hooks."""
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker and bring in the parts that this run needs."""
    config.addinivalue_line(
        "markers",
        "syncheck(ranks=2, timeout=60): run the test in that many processes with a gloo process group; "
        "ranks=[2, 4] runs it for each",
    )
    config.pluginmanager.register(ranks.RanksPlugin(), "syncheck-ranks")
    checkpoints.configure(config)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each number of ranks that the marker lists."""
    ranks.generate(metafunc)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Say which tensors of two state dicts differ."""
    if op != "==" or not (hasattr(left, "values") and hasattr(right, "values")):
        return None
    from syncheck.pytest_plugin import assertion

    return assertion.explain(left, right)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Help who compared state dicts with ==: Python gives up before pytest can ask for an explanation."""
    report = yield
    # Of exactly these types: other exceptions' own code may raise when it is asked for a text.
    if call.excinfo is not None and type(call.excinfo.value) in (RuntimeError, ValueError):
        from syncheck.pytest_plugin import assertion

        if (text := assertion.help_for(call.excinfo)) is not None:
            report.sections.append(("syncheck", text))
    return report


@pytest.fixture
def syncheck(request: pytest.FixtureRequest) -> Syncheck:
    """Compare replicas: `compare(...)` returns a report, `assert_in_sync(...)` fails the test; see syncheck.testing.

    The run's --syncheck-* options and the project's [tool.syncheck] count, unless a call says else.
    """
    from syncheck.pytest_plugin.fixture import Syncheck

    config = request.config
    return Syncheck(config.rootpath, options.read_options(config))


@pytest.fixture
def _syncheck_ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this test; it stands in the test's id."""
    return int(request.param)


@pytest.fixture
def syncheck_rank(request: pytest.FixtureRequest) -> Rank:
    """Who this process is: rank, world_size, device, group, seed and the folder `shared` by all ranks of the test."""
    return ranks.this_rank(request)
