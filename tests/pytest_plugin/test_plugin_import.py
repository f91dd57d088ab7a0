"""The cost of the plugin for runs without syncheck."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.states import omit

if TYPE_CHECKING:
    from pathlib import Path


def test_an_idle_plugin_imports_next_to_nothing(pytester: pytest.Pytester) -> None:
    """A run that does not use syncheck imports only the declarations of its options, and no torch, numpy or rich."""
    pytester.makepyfile(
        """
        import sys

        def test_it():
            ours = [name for name in sys.modules if name.startswith("syncheck.")]
            assert "syncheck.pytest_plugin" in ours
            others = {name for name in ours if not name.startswith("syncheck.pytest_plugin")}
            assert others == {f"syncheck.{name}" for name in ("options", "option_kinds", "errors", "frozen", "text")}
            assert not {"torch", "numpy", "rich", "ml_dtypes", "matplotlib"} & sys.modules.keys()
        """
    )
    pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:cov").assert_outcomes(passed=1)


@pytest.mark.slow
def test_import_is_a_small_part_of_pytests(tmp_path: Path) -> None:
    """Importing the plugin takes less than a tenth of the import of pytest, in the best of five processes."""
    # As in an installed package, all processes but the first find bytecode.
    environment = omit(os.environ, "PYTHONDONTWRITEBYTECODE")
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    assert any(measure_share(environment) < 0.1 for _ in range(5))


def measure_share(environment: dict[str, str]) -> float:
    """Import pytest, then the plugin; return the time of syncheck's own modules over that of pytest."""
    code = "import pytest, syncheck.pytest_plugin"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    # The first number is the module's own time in microseconds; the second includes its imports.
    rows = re.findall(r"time: +(\d+) \| +(\d+) \| +(syncheck\b|pytest$)", done.stderr, re.MULTILINE)
    is_own = [int(alone) for alone, _, name in rows if name == "syncheck"]
    pytests = [int(with_imports) for _, with_imports, name in rows if name == "pytest"]
    assert len(is_own) > 2
    assert len(pytests) == 1
    return sum(is_own) / pytests[0]
