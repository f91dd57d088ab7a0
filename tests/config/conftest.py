"""Where the tests of [tool.syncheck] write their pyproject.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that is the top of a repository, so that nothing above it is looked at."""
    (tmp_path / ".git").mkdir()
    return tmp_path
