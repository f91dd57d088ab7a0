"""Files that are written whole or not at all."""

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
def writing(path: str, option: str = "-o") -> Iterator[None]:
    """Turn a failure to write a file into OptionError.

    option: the spelling of the path's option, or `{baseline}`, which each surface spells.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        folder = os.path.dirname(path)
        if folder and isinstance(error, FileNotFoundError) and not os.path.lexists(folder):
            reason = f"there is no folder {folder}; create it first"
        raise OptionError(f"{option} {path}: cannot write it: {reason}", "baseline") from None


def check_place(path: str) -> None:
    """Raise OSError or ValueError where `replace_file` could not write, as far as that shows beforehand."""
    place, _ = _place(path)
    folder = os.path.dirname(place)
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number))


def replace_file(path: str, content: str) -> None:
    """Write a text beside a file and put it in its place, so that the whole new one is there or the old one.

    A link stays, and the file that it leads to is replaced, whose permissions are kept. What is not whole has no name
    where the system can do that, so that a process that is killed leaves nothing; elsewhere, and in the instant before
    the new file takes its place, it leaves a hidden file `.syncheck-*.tmp`.
    Raises OSError or ValueError when it cannot be written, also where something lies there that is no file.
    """
    place, mode = _place(path)
    # A name of its own length: that of the file may be as long as a name can be.
    beside = os.path.join(os.path.dirname(place), f".syncheck-{os.urandom(8).hex()}.tmp")
    # What replaces a private file is never readable by others, not even while it is written.
    first = 0o666 if mode is None else 0o600
    try:
        if not _named_when_whole(beside, content, first, mode):
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, first)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                _fill(file, content, mode)
        os.replace(beside, place)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def _named_when_whole(path: str, content: str, first: int, mode: int | None) -> bool:
    """Write a text into a file without a name, and give it one; False where the system or the file system cannot.

    first, mode: permissions that it has at first, and in the end. Raises OSError where it cannot be written.
    """
    try:
        descriptor = os.open(os.path.dirname(path), os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, first)
    except (OSError, AttributeError):  # as on NFS; beyond Linux there is no such flag
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        _fill(file, content, mode)
        try:
            # Only if a folder is given does Python follow the link to the file; that it is none does not matter, for
            # the path begins at the top. See open(2) on O_TMPFILE.
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
        except (OSError, NotImplementedError):  # without /proc
            return False
    return True


def _fill(file: TextIO, content: str, mode: int | None) -> None:
    file.write(content)
    file.flush()
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())


def _place(path: str) -> tuple[str, int | None]:
    """Return where a path leads, and the permissions of the file there; None where there is none yet."""
    try:
        found = os.stat(path).st_mode
    except FileNotFoundError:  # also for a link that leads nowhere yet
        return os.path.realpath(path), None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found):
        # To put a file in the place of /dev/null would take it from the whole machine.
        raise OSError(errno.EINVAL, "a pipe, socket or device lies there; needs a file")
    return os.path.realpath(path), stat.S_IMODE(found) & 0o777
