"""What the plugin costs those who do not use it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def test_an_idle_plugin_imports_next_to_nothing(pytester: pytest.Pytester) -> None:
    """A run that uses nothing of syncheck imports no other part of it, and neither torch nor numpy nor rich."""
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


def test_import_is_a_small_part_of_pytests() -> None:
    """Importing the plugin takes less than a tenth of what importing pytest takes, in the best of five processes."""
    assert min(share() for _ in range(5)) < 0.1


def share() -> float:
    """Import pytest, then the plugin; return what the plugin's own modules took, over what all of pytest took."""
    code = "import pytest, syncheck.pytest_plugin"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    # Each module's own time, in microseconds, is the first number; the second has its imports in it.
    rows = re.findall(r"time: +(\d+) \| +(\d+) \| +(syncheck\b|pytest$)", done.stderr, re.MULTILINE)
    own = [int(alone) for alone, _, name in rows if name == "syncheck"]
    pytests = [int(with_imports) for _, with_imports, name in rows if name == "pytest"]
    assert len(own) > 2
    assert len(pytests) == 1
    return sum(own) / pytests[0]
