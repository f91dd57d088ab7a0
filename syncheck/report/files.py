"""The formats of a report, and files of them: the ending names the format, and a file is there whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck import atomic
from syncheck.errors import UsageError
from syncheck.options import ENDINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Report


def version() -> str:
    """Return the installed version of syncheck."""
    from importlib import metadata

    try:
        return metadata.version("syncheck")
    except metadata.PackageNotFoundError:
        return "unknown"


def check_endings(paths: Sequence[str], option: str = "-o") -> None:
    """Raise UsageError for an output file whose ending names no format, before anything is compared.

    option: what the user typed before the path; the error names it.
    """
    for path in paths:
        if _ending(path) not in ENDINGS:
            raise UsageError(f"{option} {path}: the ending names the format; needs one of {', '.join(ENDINGS)}")


def asks_for_histograms(paths: Sequence[str]) -> bool:
    """Whether one of the output files is a page, which draws them."""
    return any(ENDINGS.get(_ending(path)) == "html" for path in paths)


def write_file(path: str, report: Report, option: str = "-o") -> None:
    """Write a report in the format of the file's ending. Either the whole file is there afterwards or the old one.

    Its folder must be there. Raises UsageError, naming the option, when it cannot be written.
    """
    content = drawn(ENDINGS[_ending(path)], report)
    with atomic.convert_write_errors(path, option):
        atomic.replace_file(path, content)


def check_place(path: str, option: str = "-o") -> None:
    """Raise UsageError for a file that cannot be written, if that can be told before there is anything to write."""
    with atomic.convert_write_errors(path, option):
        atomic.check_writable(path)


def _ending(path: str) -> str:
    # splitext sees no ending in a file that is called `.json`.
    name = os.path.basename(path).lower()
    return name[name.rfind(".") :] if "." in name else ""


def drawn(name: str, report: Report) -> str:
    """Return a report in a format of `options.FORMATS` or ENDINGS. Text is as in a pipe, with all rows."""
    # Each is imported when it is asked for: no run needs them all.
    if name == "json":
        from syncheck.report import json_document

        return json_document.render(report, version())
    if name == "junit":
        from syncheck.report import junit

        return junit.render(report)
    if name == "github":
        from syncheck.report import github

        return github.render(report)
    if name == "markdown":
        from syncheck.report import markdown

        return markdown.render(report)
    if name == "html":
        from syncheck.report import html

        return html.render(report, version())
    from syncheck.report import plain, text

    return plain.render(text.comparison(report, 0))
