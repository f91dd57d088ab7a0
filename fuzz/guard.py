"""Stop and record all forbidden acts of a reader, and measure its time and memory.

A reader must not import, execute, write, delete or connect, and reads only the checkpoint. Python raises an audit event
before each of these acts: https://peps.python.org/pep-0578/. An audit hook cannot be removed, therefore one hook is
installed, which ignores all events while no guard is active.
"""

from __future__ import annotations

import ast
import contextlib
import encodings.cp437  # codec of names in a zip; Python imports codecs at first use
import encodings.unicode_escape  # noqa: F401
import faulthandler  # noqa: F401 - atheris imports it when an input takes long
import importlib
import inspect
import os
import pkgutil
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import syncheck

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

# Limits for files of some kB: seconds of processor time, and bytes.
MAX_SECONDS = 30.0
MAX_MEMORY = 256 << 20
# These packages import torch, pytest or rich. No reader uses them.
_NOT_READERS = ("live", "integrations", "testing", "pytest_plugin", "cli", "__main__")
_FORBIDDEN = frozenset(
    "import exec pickle.find_class os.exec os.fork os.forkpty os.kill os.killpg os.posix_spawn os.spawn os.system "
    "os.startfile os.putenv os.unsetenv os.chdir os.fchdir os.chmod os.chown os.link os.symlink os.mkdir os.remove "
    "os.rename os.rmdir os.truncate os.utime os.setxattr os.removexattr subprocess.Popen webbrowser.open pty.spawn "
    "builtins.breakpoint code.__new__ function.__new__ marshal.loads marshal.load sys.settrace sys.setprofile "
    "signal.pthread_kill resource.setrlimit syslog.openlog".split()
)
_FORBIDDEN_FAMILIES = tuple("socket. ctypes. shutil. tempfile. urllib. http. ftplib. smtplib. sqlite3.".split())
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(RuntimeError):
    """An act that the guard stopped."""


class Guard:
    """A context in which forbidden acts are stopped and recorded. folder: the only folder that may be read."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(os.path.realpath(folder), "")
        self.acts: list[str] = []
        self.seconds, self.memory = 0.0, 0

    def __enter__(self) -> Guard:
        preload()
        self.memory, self.seconds = _peak_memory(), time.process_time()
        _active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _active.remove(self)
        self.memory, self.seconds = _peak_memory() - self.memory, time.process_time() - self.seconds

    def faults(self) -> list[str]:
        """Return all faults, including forbidden acts if the reader hid their errors."""
        faults = [f"it tried to {act}" for act in self.acts]
        if self.seconds > MAX_SECONDS:
            faults.append(f"it takes too long: {self.seconds:.1f} s")
        if self.memory > MAX_MEMORY:
            faults.append(f"it takes too much memory: {self.memory >> 20} MiB")
        return faults

    def check(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check an audit event. Raises Forbidden."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                self._stop(f"open for writing: {path!r:.200}")
            if isinstance(path, (str, bytes)) and not os.path.realpath(os.fsdecode(path)).startswith(self.folder):
                self._stop(f"open outside of the checkpoint: {path!r:.200}")
        elif event in _FORBIDDEN or event.startswith(_FORBIDDEN_FAMILIES):
            self._stop(f"{event} {arguments!r:.200}")

    def _stop(self, act: str) -> NoReturn:
        self.acts.append(act)
        raise Forbidden(act)


_active: list[Guard] = []
_installed: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active:
        _active[-1].check(event, arguments)


def preload() -> None:
    """Import all modules that read and compare, so that any later import is caused by a file."""
    if _installed:
        return
    modules = [module.name for module in pkgutil.walk_packages(syncheck.__path__, "syncheck.", lambda _: None)]
    for name in (*modules, "numpy", "ml_dtypes"):
        if name.partition(".")[2].split(".")[0] not in _NOT_READERS:
            with contextlib.suppress(ImportError):  # matplotlib may be missing
                module = importlib.import_module(name)
                if name in modules:
                    _import_deferred(module)
    sys.addaudithook(_hook)
    _installed.append(True)


def _import_deferred(module: ModuleType) -> None:
    """Import the modules of Python that functions of a module import when they are called."""
    for statement in ast.walk(ast.parse(inspect.getsource(module) or "pass")):
        names: list[str] = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            names = [statement.module]
        for name in names:
            if name.partition(".")[0] in sys.stdlib_module_names:
                importlib.import_module(name)


def _peak_memory() -> int:
    """Return the peak resident memory of this process in bytes, or 0 without /proc.

    getrusage would include the parent's memory.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return 0
    match = re.search(r"VmHWM:\s*(\d+)", status)
    return int(match[1]) << 10 if match else 0
