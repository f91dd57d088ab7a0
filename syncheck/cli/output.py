"""Where output goes: a terminal of some width, a pipe, a file."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from syncheck.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Report
    from syncheck.report.parts import Part

__all__ = ["check_endings", "color_wanted", "one_line", "terminal_width", "write", "write_file"]

ENDINGS = (".html", ".json", ".txt")


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, None where it is none."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return shutil.get_terminal_size().columns


def color_wanted(choice: str) -> bool:
    """Decide on colour: the option, then NO_COLOR (no-color.org) and FORCE_COLOR, then whether stdout is a terminal."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or terminal_width() is not None


def write(parts: Sequence[Part], color: str) -> None:
    """Print parts on stdout. Characters that its encoding lacks are replaced: a verdict must come out under LANG=C."""
    width, colored = terminal_width(), color_wanted(color)
    if width is None and not colored:
        from syncheck.report import plain

        drawn = plain.render(parts)
    else:
        from syncheck.report import terminal  # rich is imported here, for terminals only

        drawn = terminal.render(parts, width, colored)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(drawn.encode(encoding, "replace").decode(encoding))


def check_endings(paths: Sequence[str]) -> None:
    """Raise UsageError for an output file whose ending names no format, before anything is compared."""
    for path in paths:
        if not path.lower().endswith(ENDINGS):
            raise UsageError(f"-o {path}: the ending names the format; needs one of {', '.join(ENDINGS)}")


def write_file(path: str, report: Report) -> None:
    """Write a report in the format of the file's ending. Either the whole file is there afterwards or the old one.

    Raises UsageError when it cannot be written.
    """
    try:
        _replace(path, _drawn(path.lower(), report))
    except OSError as error:
        raise UsageError(f"-o {path}: cannot write it: {error.strerror or error}") from None


def _drawn(path: str, report: Report) -> str:
    from syncheck.cli.parser import version

    if path.endswith(".json"):
        from syncheck.report import json_document

        return json_document.render(report, version())
    if path.endswith(".html"):
        from syncheck.report import html

        return html.render(report, version())
    from syncheck.report import plain, text

    return plain.render(text.comparison(report, 0))


def _replace(path: str, content: str) -> None:
    import tempfile

    folder, name = os.path.split(path)
    descriptor, beside = tempfile.mkstemp(dir=folder or ".", prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)  # mkstemp's files are private, a report is not
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
