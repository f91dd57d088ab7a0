"""Reports as files: the ending names the format, and a file is there whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.atomic import replace_file
from syncheck.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Report

ENDINGS = (".html", ".json", ".md", ".txt")


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
        if not path.lower().endswith(ENDINGS):
            raise UsageError(f"{option} {path}: the ending names the format; needs one of {', '.join(ENDINGS)}")


def write_file(path: str, report: Report, option: str = "-o") -> None:
    """Write a report in the format of the file's ending. Either the whole file is there afterwards or the old one.

    Its folder must be there. Raises UsageError, naming the option, when it cannot be written.
    """
    try:
        replace_file(path, _drawn(path.lower(), report))
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot write it: {error.strerror or error}") from None


def _drawn(path: str, report: Report) -> str:
    if path.endswith(".json"):
        from syncheck.report import json_document

        return json_document.render(report, version())
    if path.endswith(".html"):
        from syncheck.report import html

        return html.render(report, version())
    if path.endswith(".md"):
        from syncheck.report import markdown

        return markdown.render(report)
    from syncheck.report import plain, text

    return plain.render(text.comparison(report, 0))
