"""What the head of a run says before anything is judged: what is not judged, and which options the project sets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.pytest_plugin import options

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from syncheck.pytest_plugin.checkpoints.arguments import Asked


class Header:
    """Adds lines to the head of a run; where there is nothing to say, none."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        """Tell what would be missed in silence, and options that excuse differences where nobody remembers them."""
        lines = [
            f"syncheck: only tests are taken from {path}: --syncheck {path} judges its checkpoints too"
            for path in self.asked.passed
        ]
        if self.asked.unused:
            lines.append(f"syncheck_checkpoints: not judged, {self.asked.unused}")
        lines += _of_the_project(config)
        if not lines:
            return []
        from syncheck.errors import one_line

        return [one_line(line) for line in lines]


def _of_the_project(config: pytest.Config) -> list[str]:
    """Name the options of [tool.syncheck]: the fixture takes them, and so do the tests of checkpoints."""
    if not any(map(_mentions_us, (config.rootpath, *config.rootpath.parents))):
        return []  # as in most projects, and then nothing is imported
    from syncheck import config as project
    from syncheck.errors import SyncheckError

    try:
        found = project.load(config.rootpath)
    except SyncheckError as error:
        return [f"syncheck: {error}"]  # what needs the options fails; nothing else has to
    parts = [
        f"{key} {options.written(found.values[key.replace('-', '_')])}"
        for key in project.applied(found, **options.given(config))
    ]
    if not parts or found.path is None:
        return []
    return [f"syncheck: options from {os.path.relpath(found.path, config.rootpath)}: {'; '.join(parts)}"]


def _mentions_us(folder: Path) -> bool:
    try:
        return b"syncheck" in (folder / "pyproject.toml").read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
