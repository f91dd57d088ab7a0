"""pytest plugin: judges checkpoints, and runs test code on several ranks.

Every hook here is thin; what it needs is imported when it is needed, so that a pytest that uses nothing of syncheck
pays for a few small modules and neither for torch nor for numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.pytest_plugin import options

if TYPE_CHECKING:
    import pytest


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
