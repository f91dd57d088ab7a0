"""Write files atomically: a reader sees the old content or the complete new content."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from syncheck.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


@contextmanager
def convert_write_errors(path: str, option: str = "-o") -> Iterator[None]:
    """Raise OptionError for a file that cannot be written.

    option: the option with the path, as the user wrote it, or `{baseline}`, which each surface spells differently.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        folder = os.path.dirname(path)
        if folder and isinstance(error, FileNotFoundError) and not os.path.lexists(folder):
            reason = f"there is no folder {folder}; create it first"
        raise OptionError(f"{option} {path}: cannot write it: {reason}", "baseline") from None


def check_writable(path: str) -> None:
    """Raise OSError or ValueError if it is clear in advance that `replace_file` will fail."""
    target, _ = _resolve_target(path)
    folder = os.path.dirname(target)
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number))


def replace_file(path: str, content: str) -> None:
    """Write a temporary file, then rename it to the path.

    A link is kept, and its target is replaced. The permissions of an existing file are kept. The temporary file has no
    name until it is complete, so that a killed process leaves no file behind; where unnamed files are not supported,
    and just before the rename, it is the hidden file `.syncheck-*.tmp`.
    Raises OSError or ValueError if the path cannot be written, or is a folder, pipe, socket or device.
    """
    target, mode = _resolve_target(path)
    # Not derived from the target's name, which may already have the maximum length.
    temporary = os.path.join(os.path.dirname(target), f".syncheck-{os.urandom(8).hex()}.tmp")
    # The replacement of a private file must stay private while it is written.
    first_mode = 0o666 if mode is None else 0o600
    try:
        if not _write_unnamed(temporary, content, first_mode, mode):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, first_mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                _write_content(file, content, mode)
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _write_unnamed(path: str, content: str, first_mode: int, mode: int | None) -> bool:
    """Write an unnamed file, then link it to the path; return False if the system does not support this.

    first_mode, mode: permissions during and after writing. Raises OSError if writing fails.
    """
    try:
        descriptor = os.open(os.path.dirname(path), os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, first_mode)
    except (OSError, AttributeError):  # unsupported by the file system, such as NFS, or by the operating system
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        _write_content(file, content, mode)
        try:
            # Python follows the /proc link only with src_dir_fd. Any descriptor will do, because the path is absolute.
            # See open(2) on O_TMPFILE.
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
        except (OSError, NotImplementedError):  # without /proc
            return False
    return True


def _write_content(file: TextIO, content: str, mode: int | None) -> None:
    file.write(content)
    file.flush()
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())


def _resolve_target(path: str) -> tuple[str, int | None]:
    """Return the path without links, and the permissions of an existing file. Raises OSError unless it is a file."""
    try:
        found = os.stat(path).st_mode
    except FileNotFoundError:  # also for a dangling link
        return os.path.realpath(path), None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found):
        # Replacing /dev/null by a file would break the whole machine.
        raise OSError(errno.EINVAL, "a pipe, socket or device; must be a file")
    return os.path.realpath(path), stat.S_IMODE(found) & 0o777
