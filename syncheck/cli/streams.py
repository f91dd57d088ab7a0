"""stdin, stdout and stderr as they are found: closed, on a full disk, or led to a reader that has gone.

What cannot be printed changes nothing of what is true of the files, so no failure of a stream may end in an exit code
that is a verdict.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncheck.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TextIO


def reopen() -> None:
    """Let those that are closed lead to the null device, as after `>&-`.

    Their numbers would go to the next files that are opened, and what a library prints into these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one; it is kept for programs started from here.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has no object for a stream that was closed when it started.
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    found: Any = sys.stdout
    own = found is sys.__stdout__
    if own and isinstance(getattr(found, "buffer", None), io.RawIOBase):
        # Unbuffered, as by PYTHONUNBUFFERED=1, Python drops without a word what a disk that fills up does not take.
        sys.stdout = os.fdopen(found.fileno(), "w", 1, encoding=found.encoding, errors=found.errors, closefd=False)


@contextmanager
def printing() -> Iterator[None]:
    """Turn a failure to write to stdout into UsageError. BrokenPipeError passes: the reader has seen enough."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        reason = error.strerror or error
        raise UsageError(f"stdout: cannot write it: {reason}; free some space, or send it elsewhere") from None


def flush() -> None:
    """Write what still waits for stdout. Raises as `printing` does."""
    with printing():
        sys.stdout.flush()


def say(text: str) -> None:
    """Print lines on stderr if it takes them; the exit code tells all the same."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def settle() -> None:
    """Leave nothing to be written when Python ends, which would complain of what fails, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            silence(stream)


def silence(stream: TextIO) -> None:
    """Let a stream that failed lead to the null device, with what still waits for it."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return  # no stream of the system
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
