"""Coverage inside the ranks, for pytest-cov to combine: it measures no processes of others by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def settings(config: pytest.Config) -> dict[str, Any] | None:
    """Return how pytest-cov measures in this run, None where it does not."""
    controller = getattr(config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    measured = getattr(controller, "cov", None)
    if controller is None or measured is None:
        return None
    return {
        "data_file": os.path.abspath(measured.config.data_file),
        "config_file": controller.cov_config or True,
        "source": controller.cov_source,
        "branch": controller.cov_branch,
    }


def start(wanted: dict[str, Any] | None) -> Any:
    """Measure in this process; return what `save` takes. A measurement that runs already is used."""
    if wanted is None:
        return None
    import coverage

    running = coverage.Coverage.current()
    if running is None:
        running = coverage.Coverage(**wanted, data_suffix=True)
        running.start()
    return running


def save(running: Any) -> None:
    """Write the data now: the process ends without notice."""
    if running is not None:
        running.save()
