"""Report formats, and report files: the file extension selects the format."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from syncheck.errors import OptionError
from syncheck.options import EXTENSIONS
from syncheck.suggestions import suggest
from syncheck.versions import list_versions, version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Report


def check_extensions(paths: Sequence[str]) -> None:
    """Raise OptionError for an output file with an unknown extension."""
    for path in paths:
        if _extension(path) not in EXTENSIONS:
            extensions = ", ".join(EXTENSIONS)
            suggestion = suggest(_extension(path), EXTENSIONS)
            raise OptionError(f"unknown file extension; use one of {extensions}{suggestion}", output=path)


def needs_histograms(paths: Sequence[str]) -> bool:
    """Whether one of the output files is an HTML page, the only format with histograms."""
    return any(EXTENSIONS.get(_extension(path)) == "html" for path in paths)


def write_file(path: str, report: Report, settings: Any = None) -> None:
    """Replace a file atomically by a report in the format of its extension.

    settings: the `Options` of the comparison in an HTML page. Raises UsageError if the file cannot be written; its
    folder must exist.
    """
    from syncheck.readers import outputs  # most runs only print

    outputs.write(path, render_format(EXTENSIONS[_extension(path)], report, settings))


def describe_file(path: str) -> str:
    """Return 'wrote report.html, 46.8 kB' for a file that was just written; empty for a stream such as /dev/stdout."""
    if not os.path.isfile(path):
        return ""
    # Only runs with a written file need it.
    from syncheck.report.words import bytes_text

    return f"wrote {path}, {bytes_text(os.path.getsize(path))}"


def _extension(path: str) -> str:
    # os.path.splitext returns no extension for a file named `.json`.
    name = os.path.basename(path).lower()
    return name[name.rfind(".") :] if "." in name else ""


def describe_run(settings: Any) -> list[tuple[str, str]]:
    """Return how a report was made, as labels and texts: time, command, options, environment.

    settings: the `Options` of the comparison. Lists those that differ from the defaults, wherever they come from.
    """
    import shlex
    import sys
    from datetime import datetime

    program, *arguments = sys.argv or [""]
    folder, name = os.path.split(program)
    command = [name]
    if name == "__main__.py":
        command = ["python", "-m", os.path.basename(folder)]

    _, system, libraries, _ = list_versions()
    return [
        ("written", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")),
        ("command", shlex.join([*command, *arguments])),
        ("options", _describe_settings(settings)),
        ("folder", os.getcwd()),
        ("system", system),
        ("libraries", libraries),
    ]


def _describe_settings(settings: Any) -> str:
    """Return the options that differ from their defaults; empty without settings."""
    from dataclasses import fields

    if settings is None:
        return ""

    defaults = type(settings)()
    texts = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value == getattr(defaults, field.name):
            continue
        if isinstance(value, tuple):
            value = ", ".join(map(str, value))
        texts.append(f"{field.name} = {value}")

    return "; ".join(texts)


def render_format(name: str, report: Report, settings: Any = None) -> str:
    """Return a report in a format of FORMATS or EXTENSIONS. Text is not wrapped and lists all groups and tensors.

    settings: the `Options` of the comparison in an HTML page.
    """
    render = _RENDERERS.get(name, _render_text)
    return render(report, settings)


def _render_json(report: Report, _settings: Any) -> str:
    from syncheck.report import json_document

    return json_document.render(report, version())


def _render_junit(report: Report, _settings: Any) -> str:
    from syncheck.report import junit

    return junit.render(report)


def _render_github(report: Report, _settings: Any) -> str:
    from syncheck.report import github

    return github.render(report)


def _render_markdown(report: Report, _settings: Any) -> str:
    from syncheck.report import markdown

    return markdown.render(report)


def _render_html(report: Report, settings: Any) -> str:
    from syncheck.report import html

    return html.render(report, version(), describe_run(settings))


def _render_text(report: Report, _settings: Any) -> str:
    from syncheck.report import plain, text

    return plain.render(text.draw_comparison(report, 0, verbose=True))


_RENDERERS: dict[str, Callable[[Report, Any], str]] = {
    "json": _render_json,
    "junit": _render_junit,
    "github": _render_github,
    "markdown": _render_markdown,
    "html": _render_html,
}
