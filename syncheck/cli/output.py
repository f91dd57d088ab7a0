"""Print reports and messages, with color and width to suit a terminal, a pipe or a file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from syncheck.cli import streams
from syncheck.text import logged, one_line, options_as_typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.report.parts import Part


def is_first_process() -> bool:
    """Whether this process writes the report. Several processes compare together under torchrun only."""
    return os.environ.get("RANK", "0") == "0"


def terminal_width() -> int | None:
    """Return the number of columns of the terminal, or None if stdout is not a terminal."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    # Imports the modules of archives.
    import shutil

    return shutil.get_terminal_size().columns


def use_color(choice: str) -> bool:
    """Whether to color: by the option, then NO_COLOR (no-color.org) and FORCE_COLOR, then if stdout is a terminal."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or terminal_width() is not None


def needs_ascii() -> bool:
    """Whether to print ASCII only, because of the encoding of stdout or the C locale.

    In the C locale, Python writes UTF-8 (PEP 538), but the terminal may not display it.
    """
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    try:
        "\u2500\u2588\u00b7".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return True
    return locale in ("C", "POSIX")


def print_message(text: str) -> None:
    """Print a line on stderr."""
    streams.print_stderr(f"syncheck: {logged(one_line(text))}")


def print_error(error: object, path: str = "") -> None:
    """Print an error on stderr, with its options as they are typed. path: the file that it is about."""
    with options_as_typed():
        text = str(error)
    print_message(f"error: {path}: {text}" if path else f"error: {text}")


def confirm_file(path: str, *, quiet: bool, content: str = "") -> None:
    """Print a line on stderr about a written file. content: of the file, if its name does not show it."""
    if quiet:
        return
    from syncheck.report.formats import describe_file

    text = describe_file(path)
    if text:
        print_message(f"{text}: {content}" if content else text)


def print_parts(parts: Sequence[Part], color: str) -> None:
    """Render the parts of a report, and print them on stdout."""
    width, colored = terminal_width(), use_color(color)
    if width is None and not colored:
        from syncheck.report import plain

        print_text(plain.render(parts))
    else:
        # Imports rich, which only terminals need.
        from syncheck.report import terminal

        print_text(terminal.render(parts, width, colored, ascii_only=needs_ascii()))


def print_text(text: str) -> None:
    """Print text on stdout. Characters outside its encoding are replaced, so that LANG=C never hides a verdict.

    Raises UsageError if stdout cannot be written.
    """
    encoding = sys.stdout.encoding or "utf-8"
    with streams.convert_write_errors():
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
