"""pytest plugin: judges checkpoints, and runs test code on several ranks.

Every hook here is thin; what it needs is imported when it is needed, so that a pytest that uses nothing of syncheck
pays for a few small modules and neither for torch nor for numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.pytest_plugin import checkpoints, options, ranks

if TYPE_CHECKING:
    from syncheck.pytest_plugin.ranks.group import Rank


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


@pytest.fixture
def _syncheck_ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this test; it stands in the test's id."""
    return int(request.param)


@pytest.fixture
def syncheck_rank(request: pytest.FixtureRequest) -> Rank:
    """This process's rank, world_size, device, group, seed and the folder `shared` by all ranks of the test."""
    return ranks.this_rank(request)
