"""Reports as files: endings, whole files, and errors that name the option that was typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.errors import UsageError
from syncheck.options import ENDINGS, FORMATS
from syncheck.records import Report
from syncheck.report import files

if TYPE_CHECKING:
    from pathlib import Path

EMPTY = Report("undecided", ())


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_is_written(tmp_path: Path, ending: str) -> None:
    """Each ending that the check lets through has its format's document in the file, in either case of letters."""
    for name in (f"a{ending}", f"b{ending.upper()}"):
        path = tmp_path / name
        files.check_endings([str(path)])
        files.write_file(str(path), EMPTY)
        assert path.read_text() == files.drawn(ENDINGS[ending], EMPTY) != ""


def test_every_format_is_drawn() -> None:
    """Each choice of --format has a drawing of its own, and of the formats of files only HTML is none of stdout's."""
    drawn = {files.drawn(name, EMPTY) for name in FORMATS}
    assert len(drawn) == len(FORMATS)
    assert set(ENDINGS.values()) - set(FORMATS) == {"html"}


def test_errors_name_the_option(tmp_path: Path) -> None:
    """A caller with another option than -o has that one in its errors."""
    known = ", ".join(ENDINGS)
    for option in ("-o", "--syncheck-output"):
        with pytest.raises(UsageError, match=f"^{option} out.pdf: the ending names the format; needs one of {known}$"):
            files.check_endings(["out.md", "out.pdf"], option)
        with pytest.raises(UsageError, match=f"^{option} .*out.md: cannot write it: there is no folder"):
            files.write_file(str(tmp_path / "no" / "out.md"), EMPTY, option)
    with pytest.raises(UsageError, match=r"^-o out: the ending"):
        files.check_endings(["out"])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails midway, the old file is whole and nothing lies beside it."""
    path = tmp_path / "out.txt"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        files.write_file(str(path), EMPTY)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_files_may_be_read_by_others(tmp_path: Path) -> None:
    """A report has the permissions of any new file, not the private ones of a temporary file."""
    (tmp_path / "other").touch()
    files.write_file(str(tmp_path / "out.txt"), EMPTY)
    assert (tmp_path / "out.txt").stat().st_mode == (tmp_path / "other").stat().st_mode
