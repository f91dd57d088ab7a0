"""Handle stdin, stdout and stderr that are closed, on a full disk, or a broken pipe.

A failure to print must not change the exit code to a different verdict.
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

CLOSED = 141  # the exit code of a process killed by SIGPIPE, as shells report it


def reopen_closed() -> None:
    """Open the null device for each closed standard stream, as after `>&-`.

    Otherwise, the next opened file would get the descriptor of the stream, and the output of libraries.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # os.open returns the lowest free descriptor, which is this one. Child processes need it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python sets a stream to None if it is closed at start-up.
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    stdout: Any = sys.stdout
    replaceable = stdout is sys.__stdout__
    if replaceable and isinstance(getattr(stdout, "buffer", None), io.RawIOBase):
        # Unbuffered streams (PYTHONUNBUFFERED=1) silently drop the rest of a partial write, as on a full disk.
        sys.stdout = os.fdopen(stdout.fileno(), "w", 1, encoding=stdout.encoding, errors=stdout.errors, closefd=False)


@contextmanager
def convert_write_errors() -> Iterator[None]:
    """Raise UsageError if stdout cannot be written. BrokenPipeError is not converted, because it is not an error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        redirect_to_null(sys.stdout)
        reason = error.strerror or error
        raise UsageError(f"stdout: cannot write it: {reason}; free some space, or redirect the output") from None


def flush() -> None:
    """Flush stdout. Raises UsageError as `convert_write_errors` does."""
    with convert_write_errors():
        sys.stdout.flush()


def print_stderr(text: str) -> None:
    """Print lines on stderr. A failure is ignored, because the exit code is the result."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        redirect_to_null(sys.stderr)


def flush_before_exit() -> None:
    """Flush stdout and stderr, because a failure during Python's own flush at exit would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            redirect_to_null(stream)


def redirect_to_null(stream: TextIO) -> None:
    """Redirect a failed stream, including its buffered text, to the null device."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        # Replaced by an object without a descriptor, as in tests.
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
