"""Where output goes: a terminal of some width, a pipe, a file."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from syncheck.cli import streams
from syncheck.errors import logged, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.report.parts import Part


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


def ascii_only() -> bool:
    """Whether stdout may lack characters beyond ASCII: by its encoding, or because the user asks for the C locale.

    Python writes UTF-8 in the C locale (PEP 538), but the terminal need not show it.
    """
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    try:
        "\u2500\u2588\u00b7".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return True
    return locale in ("C", "POSIX")


def tell(text: str) -> None:
    """Print a line on stderr."""
    streams.say(f"syncheck: {logged(one_line(text))}")


def write(parts: Sequence[Part], color: str) -> None:
    """Print parts on stdout, drawn for where it leads."""
    width, colored = terminal_width(), color_wanted(color)
    if width is None and not colored:
        from syncheck.report import plain

        write_text(plain.render(parts))
    else:
        from syncheck.report import terminal  # rich is imported here, for terminals only

        write_text(terminal.render(parts, width, colored, ascii_only=ascii_only()))


def write_text(drawn: str) -> None:
    """Print on stdout. Characters that its encoding lacks are replaced: a verdict must come out under LANG=C.

    Raises UsageError where stdout takes nothing more.
    """
    encoding = sys.stdout.encoding or "utf-8"
    with streams.printing():
        sys.stdout.write(drawn.encode(encoding, "replace").decode(encoding))
