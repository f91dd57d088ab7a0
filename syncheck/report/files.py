"""Report formats, and report files: the file extension selects the format."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck import atomic
from syncheck.errors import UsageError
from syncheck.options import EXTENSIONS

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


def check_extensions(paths: Sequence[str], option: str = "-o") -> None:
    """Raise UsageError for an output file with an unknown extension. option: named in the error."""
    for path in paths:
        if _extension(path) not in EXTENSIONS:
            raise UsageError(f"{option} {path}: unknown file extension; use one of {', '.join(EXTENSIONS)}")


def needs_histograms(paths: Sequence[str]) -> bool:
    """Whether one of the output files is an HTML page, the only format with histograms."""
    return any(EXTENSIONS.get(_extension(path)) == "html" for path in paths)


def write_file(path: str, report: Report, option: str = "-o") -> None:
    """Replace a file atomically by a report in the format of its extension.

    Raises UsageError, with the option, if the file cannot be written; its folder must exist.
    """
    content = render_format(EXTENSIONS[_extension(path)], report)
    with atomic.convert_errors(path, option):
        atomic.replace_file(path, content)


def check_writable(path: str, option: str = "-o") -> None:
    """Raise UsageError if a file is certainly not writable, before time is spent on the comparison."""
    with atomic.convert_errors(path, option):
        atomic.check_writable(path)


def _extension(path: str) -> str:
    # os.path.splitext returns no extension for a file named `.json`.
    name = os.path.basename(path).lower()
    return name[name.rfind(".") :] if "." in name else ""


def render_format(name: str, report: Report) -> str:
    """Return a report in a format of FORMATS or EXTENSIONS. Text is not wrapped and lists all tensors."""
    # Local imports, because each run needs one module only.
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
