"""Lines of a monitor on a terminal that the script writes to as well."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest
from support.started import CLONE

COLUMNS = 40
PROGRAM = """
import os
from syncheck.live.reporter import Reporter
reporter = Reporter()
os.write(1, {before!r}.encode())
reporter.print_text("first")
os.write(1, {between!r}.encode())
reporter.print_text("second")
"""


def run_on_terminal(program: str, **environment: str) -> str:
    """Return what a program writes to a terminal."""
    process, terminal = pty.fork()
    if not process:
        os.environ.update(PYTHONPATH=CLONE, TERM="xterm-256color", COLUMNS=str(COLUMNS), **environment)
        os.execv(sys.executable, [sys.executable, "-c", program])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    output = b""
    while True:
        try:
            received = os.read(terminal, 1 << 16)
        except OSError:
            # Linux reports the end of a terminal as an error.
            break
        output += received
    os.close(terminal)
    os.waitpid(process, 0)
    return output.decode()


def draw(output: str) -> list[str]:
    """Return the lines of a terminal, whose cursor goes to the next line before a character after the last column."""
    lines, row, column = [[" "] * COLUMNS], 0, 0
    for character in output:
        if character == "\r":
            column = 0
            continue
        if character == "\n" or column == COLUMNS:
            row += 1
            # The driver of a terminal writes a carriage return before the end of a line.
            column = 0
            if row == len(lines):
                lines.append([" "] * COLUMNS)
        if character != "\n":
            lines[row][column] = character
            column += 1
    texts = ["".join(line).rstrip() for line in lines]
    return [text for text in texts if text]


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("whole\n", ""),
        ("epoch 1:", "\repoch 2:"),
        ("x" * (COLUMNS - 1), ""),
        ("x" * COLUMNS, "y" * (COLUMNS + 1)),
    ],
    ids=["end of a line", "progress bar", "one column left", "full lines"],
)
def test_a_line_begins_below_an_unfinished_line_of_the_script(before: str, between: str) -> None:
    """Wherever the script has left the cursor, its text stays, and each line of syncheck has a line of its own."""
    output = run_on_terminal(PROGRAM.format(before=before, between=between), NO_COLOR="1")
    # Styles are no text.
    for style in ("\x1b[2m", "\x1b[0m"):
        output = output.replace(style, "")
    written = []
    for text in (before, "syncheck: first", between, "syncheck: second"):
        written += [text.strip()[:COLUMNS], text.strip()[COLUMNS:]]
    assert draw(output) == [text for text in written if text]
