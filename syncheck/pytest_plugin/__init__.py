"""pytest plugin: judges checkpoints, and runs tests on several ranks.

Hooks import their implementation on first use. A pytest run without syncheck imports a few small modules, and neither
torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.pytest_plugin import models, options
from syncheck.pytest_plugin.checkpoints import plugin as checkpoints
from syncheck.pytest_plugin.ranks import plugin as ranks

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncheck.pytest_plugin.fixture import Syncheck
    from syncheck.testing import Rank


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options: https://docs.pytest.org/en/stable/reference/reference.html#initialization-hooks."""
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker and register the plugins of this run."""
    config.addinivalue_line(
        "markers",
        "syncheck(ranks=2, timeout=60): run the test on this number of ranks, each a process in a gloo process group; "
        "ranks=[2, 4] runs the test once with 2 and once with 4 ranks",
    )
    config.pluginmanager.register(ranks.RanksPlugin(), "syncheck-ranks")
    models.configure(config)
    checkpoints.configure(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return warnings about ignored checkpoints, and the options in pyproject.toml."""
    return checkpoints.header_lines(config)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create a test for each number of ranks in the marker."""
    ranks.parametrize_ranks(metafunc)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Explain a failed `==` of two state dicts."""
    if op != "==" or not (hasattr(left, "values") and hasattr(right, "values")):
        return None
    from syncheck.pytest_plugin import assertion

    return assertion.explain(left, right)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add help if `==` of state dicts raised an error, for which pytest calls no pytest_assertrepr_compare."""
    report = yield
    # No subclasses, because converting other exceptions to text may raise.
    if call.excinfo is not None and type(call.excinfo.value) in (RuntimeError, ValueError):
        from syncheck.pytest_plugin import assertion

        if (text := assertion.explain_error(call.excinfo)) is not None:
            report.sections.append(("syncheck", text))
    return report


@pytest.fixture
def syncheck(request: pytest.FixtureRequest) -> Syncheck:
    """Compare replicas: `compare(...)` returns a report, `assert_in_sync(...)` fails the test; see syncheck.testing.

    The defaults are the run's --syncheck-* options and the project's [tool.syncheck].
    """
    from syncheck.pytest_plugin.fixture import Syncheck

    config = request.config
    return Syncheck(config.rootpath, options.read_options(config))


@pytest.fixture
def _syncheck_ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this test; a part of the test's id."""
    return int(request.param)


@pytest.fixture
def syncheck_rank(request: pytest.FixtureRequest) -> Rank:
    """Rank, world_size, device, group and seed of this process, and the folder `shared` by all ranks of the test."""
    return ranks.get_rank(request)
