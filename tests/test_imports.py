"""A library that fails during its own import skips the tests that need it, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.imports import import_or_skip

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("error", ["ImportError('no libcudart.so')", "RuntimeError('operator does not exist')"])
def test_a_broken_library_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Both errors of a library for another torch skip, with the text of the error."""
    (tmp_path / "broken_vision.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(pytest.skip.Exception, match=r"no libcudart\.so|operator does not exist"):
        import_or_skip("broken_vision")


def test_a_missing_library_skips_and_another_is_imported() -> None:
    """A missing library skips, and an installed library is returned."""
    with pytest.raises(pytest.skip.Exception):
        import_or_skip("no_such_library")
    assert import_or_skip("json").loads("[1]") == [1]
