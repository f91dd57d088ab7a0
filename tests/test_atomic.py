"""A file is replaced completely or not at all, even if the process is killed or interrupted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_files

from syncheck import atomic

if TYPE_CHECKING:
    from pathlib import Path

# Replaces a file in a process that kills itself when it calls a function of os.
KILLED = """
import os, signal, sys
from syncheck import atomic
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], kill)
atomic.replace_file(sys.argv[1], "new" * 100_000)
"""


def supports_unnamed_files(folder: Path) -> bool:
    """Return whether the file system supports files without a name."""
    try:
        os.close(os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600))
    except (OSError, AttributeError):
        return False
    return os.path.exists("/proc/self/fd")


@pytest.mark.parametrize(("call", "left"), [("fsync", 0), ("link", 0), ("replace", 1)])
def test_kill_leaves_the_old_file(tmp_path: Path, call: str, left: int) -> None:
    """kill -9 during a write leaves only the old file; right before the rename, the complete new file stays too."""
    if not supports_unnamed_files(tmp_path):
        pytest.skip("this file system has no files without a name")
    (tmp_path / "out.json").write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out.json"), call], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out.json").read_text() == "old"
    beside = [path for path in tmp_path.iterdir() if path.name != "out.json"]
    assert [path.read_text() for path in beside] == ["new" * 100_000] * left
    atomic.replace_file(str(tmp_path / "out.json"), "newer")  # a left-over file does not prevent the next write
    assert (tmp_path / "out.json").read_text() == "newer"


@pytest.mark.parametrize("lacking", ["open", "link"])
def test_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Without unnamed files or /proc, a temporary file with a name has the same result."""
    if not supports_unnamed_files(tmp_path):
        pytest.skip("this file system has no files without a name, so that every other test writes files with one")
    real, refused = getattr(os, lacking), list[Any]()

    def fails(*arguments: Any, **named: Any) -> Any:
        if lacking == "link" or arguments[1] & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(arguments)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(*arguments, **named)

    (tmp_path / "out.json").touch(mode=0o600)
    monkeypatch.setattr(os, lacking, fails)
    atomic.replace_file(str(tmp_path / "out.json"), "new")
    assert refused
    assert (tmp_path / "out.json").read_text() == "new"
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o600
    assert list_files(tmp_path) == ["out.json"]


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
def test_ctrl_c_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Ctrl-C at any step leaves only the old file."""
    if call == "link" and not supports_unnamed_files(tmp_path):
        pytest.skip("this file system has no files without a name")
    (tmp_path / "out.json").write_text("old")
    real = getattr(os, call)

    def interrupted(*arguments: Any, **named: Any) -> None:
        if call == "link":
            real(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.replace_file(str(tmp_path / "out.json"), "new")
    assert list_files(tmp_path) == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "old"
