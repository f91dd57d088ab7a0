"""Atomic file replacement: a file has its old or its new content, never a part."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from syncheck.errors import OptionError
from syncheck.text import system_reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


@contextmanager
def convert_errors(path: str, option: str = "output") -> Iterator[None]:
    """Convert errors of writing into OptionError.

    option: the field of the path's option.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = system_reason(error)
        if isinstance(error, FileNotFoundError):
            folder = os.path.dirname(path) or os.curdir
            if not os.path.lexists(folder):
                reason = f"the folder {folder} does not exist; create it first"
        raise OptionError(f"cannot be written: {reason}", **{option: path}) from None


def check_writable(path: str) -> None:
    """Raise OSError or ValueError if `replace_file` would fail, as far as can be known without writing."""
    target, _ = _resolve(path)
    folder = os.path.dirname(target)
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(number, os.strerror(number))


def replace_file(path: str, content: str) -> None:
    """Write a temporary file in the same folder and rename it to `path`.

    A symbolic link is followed, and the target keeps its permissions. On Linux the temporary file has no name until it
    is complete, so a killed process leaves nothing behind. On other systems, and for the instant before the rename,
    a killed process leaves a hidden file `.syncheck-*.tmp`.
    Raises OSError or ValueError if the file cannot be written or is not a regular file.
    """
    target, mode = _resolve(path)
    # Not derived from the target's name, which may have the maximum length already.
    temporary = os.path.join(os.path.dirname(target), f".syncheck-{os.urandom(8).hex()}.tmp")
    # The replacement of a private file must not be readable by others while it is written.
    initial_mode = 0o666 if mode is None else 0o600
    try:
        if not _write_unnamed(temporary, content, initial_mode, mode):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, initial_mode), "w", encoding="utf-8") as file:
                _write(file, content, mode)
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def is_stream(path: str) -> bool:
    """Whether a path is a pipe, a character device, or stdout or stderr, also if these are redirected to a file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    is_device = stat.S_IFMT(status.st_mode) in (stat.S_IFIFO, stat.S_IFCHR)
    return is_device or _find_standard_stream(status) is not None


def write_stream(path: str, content: str) -> None:
    """Write to a pipe, a device or a standard stream, without truncating a file. Raises OSError."""
    descriptor = _find_standard_stream(os.stat(path))
    # If a redirected stream were opened again, it would have its own position, and the output that follows would
    # overwrite the content.
    copy = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if descriptor is None else os.dup(descriptor)
    with os.fdopen(copy, "w", encoding="utf-8") as file:
        file.write(content)


def _find_standard_stream(status: os.stat_result) -> int | None:
    """Return the descriptor of stdout or stderr if it is this file, otherwise None."""
    for descriptor in (1, 2):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
    return None


def append(path: str, content: str) -> None:
    """Append to a file. Raises OSError."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(content)


def _write_unnamed(path: str, content: str, initial_mode: int, mode: int | None) -> bool:
    """Write an unnamed file (O_TMPFILE), then link it to `path`. Return False if this is not supported."""
    try:
        descriptor = os.open(os.path.dirname(path), os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, initial_mode)
    except (OSError, AttributeError):  # no O_TMPFILE on NFS and on other systems than Linux
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        _write(file, content, mode)
        try:
            # Python follows the link in /proc only if src_dir_fd is given. Any descriptor will do, because the path is
            # absolute. See O_TMPFILE in open(2).
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
        except (OSError, NotImplementedError):  # no /proc
            return False
    return True


def _write(file: TextIO, content: str, mode: int | None) -> None:
    file.write(content)
    file.flush()
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())


def _resolve(path: str) -> tuple[str, int | None]:
    """Return the target of a path and its permissions, or None if it does not exist."""
    if path.endswith(os.sep):  # realpath would remove the slash
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:  # or a dangling link
        return os.path.realpath(path), None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        # Replacing /dev/null by a file would break the whole system.
        raise OSError(errno.EINVAL, "not a regular file but a pipe, socket or device")
    return os.path.realpath(path), stat.S_IMODE(mode) & 0o777
