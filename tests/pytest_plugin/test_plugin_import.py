"""The cost of the plugin for runs without syncheck."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def test_imports_of_an_unused_plugin(pytester: pytest.Pytester) -> None:
    """A run without syncheck imports a few modules, and neither torch nor numpy nor rich."""
    pytester.makepyfile(
        """
        import sys

        def test_it():
            ours = [name for name in sys.modules if name.startswith("syncheck.")]
            assert "syncheck.pytest_plugin" in ours
            assert all(name.startswith("syncheck.pytest_plugin") for name in ours), ours
            assert not {"torch", "numpy", "rich", "ml_dtypes", "matplotlib"} & sys.modules.keys()
        """
    )
    pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:cov").assert_outcomes(passed=1)


def test_import_time() -> None:
    """Importing the plugin takes less than a tenth of the time of importing pytest, in the best of five processes."""
    assert min(share() for _ in range(5)) < 0.1


def share() -> float:
    """Import pytest, then the plugin, and return the ratio of the import times."""
    code = "import pytest, syncheck.pytest_plugin"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    # Each module's own time, in microseconds, is the first number; the second has its imports in it.
    rows = re.findall(r"time: +(\d+) \| +(\d+) \| +(syncheck\b|pytest$)", done.stderr, re.MULTILINE)
    own = [int(alone) for alone, _, name in rows if name == "syncheck"]
    pytests = [int(with_imports) for _, with_imports, name in rows if name == "pytest"]
    assert len(own) > 2
    assert len(pytests) == 1
    return sum(own) / pytests[0]
