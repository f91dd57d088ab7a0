"""Report files: extensions, atomic replacement, and errors with the option of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.errors import UsageError
from syncheck.options import EXTENSIONS, FORMATS
from syncheck.records import Report
from syncheck.report import formats

if TYPE_CHECKING:
    from pathlib import Path

EMPTY = Report("undecided", ())


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_each_extension_selects_its_format(tmp_path: Path, extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file contains the format of its extension, in lower or upper case."""
    # A page states the second in which it was written, and two pages may be written in two seconds.
    monkeypatch.setattr(formats, "describe_run", lambda settings: [("written", "2026-11-26 12:00:00")])
    for name in (f"a{extension}", f"b{extension.upper()}"):
        path = tmp_path / name
        formats.check_extensions([str(path)])
        formats.write_file(str(path), EMPTY)
        assert path.read_text() == formats.render_format(EXTENSIONS[extension], EMPTY) != ""


def test_formats_are_distinct() -> None:
    """Each choice of --format renders differently, and HTML is the only format for files alone."""
    rendered = {formats.render_format(name, EMPTY) for name in FORMATS}
    assert len(rendered) == len(FORMATS)
    assert set(EXTENSIONS.values()) - set(FORMATS) == {"html"}


def test_errors_name_the_option(tmp_path: Path) -> None:
    """An error starts with the option and the path, and for an unknown extension lists the known extensions."""
    known_values = ", ".join(EXTENSIONS)
    with pytest.raises(UsageError, match=f"^output='out.pdf': .* {known_values}$"):
        formats.check_extensions(["out.md", "out.pdf"])
    path = tmp_path / "no" / "out.md"
    with pytest.raises(UsageError, match=f"^output='{path}': .*{path.parent}"):
        formats.write_file(str(path), EMPTY)
    with pytest.raises(UsageError, match=r"^output='out': "):
        formats.check_extensions(["out"])
