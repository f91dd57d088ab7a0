"""What reading a checkpoint must never do: import, run, write, delete, connect, or read beyond its own folder.

Python tells an audit hook of each such act before it happens: https://peps.python.org/pep-0578/. A hook cannot be taken
away again, so that there is one, which heeds nothing while no guard is open.
"""

from __future__ import annotations

import contextlib
import encodings.cp437  # a zip's names may be in it; codecs are imported when they are first asked for
import encodings.unicode_escape  # noqa: F401
import importlib
import os
import pkgutil
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import syncheck

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

# What needs torch, pytest or a terminal; no reader comes near them.
_APART = ("live", "integrations", "testing", "pytest_plugin", "cli", "__main__")
_REFUSED = frozenset(
    "import exec pickle.find_class os.exec os.fork os.forkpty os.kill os.killpg os.posix_spawn os.spawn os.system "
    "os.startfile os.putenv os.unsetenv os.chdir os.fchdir os.chmod os.chown os.link os.symlink os.mkdir os.remove "
    "os.rename os.rmdir os.truncate os.utime os.setxattr os.removexattr subprocess.Popen webbrowser.open pty.spawn "
    "builtins.breakpoint code.__new__ function.__new__ marshal.loads marshal.load sys.settrace sys.setprofile "
    "signal.pthread_kill resource.setrlimit syslog.openlog".split()
)
_REFUSED_FAMILIES = (
    "socket.",
    "ctypes.",
    "shutil.",
    "tempfile.",
    "urllib.",
    "http.",
    "ftplib.",
    "smtplib.",
    "sqlite3.",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(RuntimeError):
    """An act that was stopped."""


class Guard:
    """While it is open, what a reader must not do is stopped and noted. folder: all that may be read."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(os.path.realpath(folder), "")
        self.acts: list[str] = []
        """What was tried. The reader may have taken the error for one of the file's, so this is what counts."""

    def __enter__(self) -> Guard:
        preload()
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _open.remove(self)

    def heed(self, event: str, given: tuple[Any, ...]) -> None:
        """Look at one act. Raises Refused."""
        if event == "open":
            path, _, flags = given
            if isinstance(flags, int) and flags & _WRITES:
                self._stop(f"open for writing: {path!r:.200}")
            if isinstance(path, (str, bytes)) and not os.path.realpath(os.fsdecode(path)).startswith(self.folder):
                self._stop(f"open outside of the checkpoint: {path!r:.200}")
        elif event in _REFUSED or event.startswith(_REFUSED_FAMILIES):
            self._stop(f"{event} {given!r:.200}")

    def _stop(self, act: str) -> NoReturn:
        self.acts.append(act)
        raise Refused(act)


_open: list[Guard] = []
_hooked: list[bool] = []


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if _open:
        _open[-1].heed(event, given)


def preload() -> None:
    """Import all of syncheck that reads and compares, so that no import is left to come from a file."""
    if not _hooked:
        for name in (*_modules(), "numpy", "ml_dtypes"):
            with contextlib.suppress(ImportError):  # of what draws pages, where matplotlib is not installed
                importlib.import_module(name)
        sys.addaudithook(_hook)
        _hooked.append(True)


def _modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(syncheck.__path__, "syncheck.", onerror=lambda _: None):
        if module.name.split(".")[1] not in _APART:
            yield module.name
