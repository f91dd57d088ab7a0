"""Coverage inside the ranks, which pytest-cov combines. By itself it does not measure these processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def settings(config: pytest.Config) -> dict[str, Any] | None:
    """Return the settings of pytest-cov in this run, or None if it is not active."""
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


def start(settings: dict[str, Any] | None) -> Any:
    """Start or reuse a measurement of this process and return it; None without settings."""
    if settings is None:
        return None
    import coverage

    running = coverage.Coverage.current()
    if running is None:
        running = coverage.Coverage(**settings, data_suffix=True)
        running.start()
    return running


def save(running: Any) -> None:
    """Write the data now, because the process may be killed later."""
    if running is not None:
        running.save()
