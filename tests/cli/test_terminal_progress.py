"""The progress on a terminal: bytes, rate and remaining time on stderr, after a delay, and nothing left at the end."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.marks import slow

from syncheck.cli import progress

ROOT = Path(__file__).resolve().parents[2]
# Reads 2 GB in one second, without files, and prints a report.
READING = """\
import time
from syncheck.cli import progress
from syncheck.tensors.traffic import TRAFFIC
progress._DELAY, progress._INTERVAL = {delay}, 0.05
with progress.show_progress(quiet={quiet}):
    TRAFFIC.expected = 2_000_000_000
    for _ in range(10):
        TRAFFIC.read += 200_000_000
        time.sleep(0.1)
    {last}
print("the report")
"""
# A command without the delay, which small files need.
COMMAND = """\
import sys
from syncheck.cli import main, progress
progress._DELAY = progress._INTERVAL = 0.01
sys.exit(main(sys.argv[1:]))
"""


def run_in_terminal(*arguments: str, folder: Path = ROOT, **variables: str) -> tuple[int, str]:
    """Run Python with a terminal of 100 columns; return the exit code and everything that was drawn."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = os.environ | {"COLUMNS": "100", "TERM": "xterm", "PYTHONPATH": str(ROOT)} | variables
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    drawn = b""
    try:
        while block := os.read(terminal, 1 << 16):
            drawn += block
    except OSError:
        # The end of the terminal.
        pass
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), drawn.decode()


def find_remaining(drawn: str) -> str:
    """Return what is visible below the line that was erased last."""
    return drawn.rpartition("\x1b[2K")[2]


def run_reading(*, delay: float = 0, quiet: bool = False, last: str = "pass", **variables: str) -> tuple[int, str]:
    """Run the program that reads for a second."""
    return run_in_terminal("-c", READING.format(delay=delay, quiet=quiet, last=last), **variables)


def test_bytes_rate_and_remaining_time() -> None:
    """The line has the bytes with their total, the rate and the remaining time, and is erased before the report."""
    code, drawn = run_reading()
    assert code == 0
    for part in ("reading", "/2.0 GB", "B/s", "0:00:0"):
        assert part in drawn, drawn
    assert find_remaining(drawn).strip() == "the report"
    # A hidden cursor would remain hidden if a signal ended the process.
    assert "\x1b[?25l" not in drawn


@pytest.mark.parametrize(
    ("expected", "read", "measured"),
    [(876_800, 500_000, (500_000, 876_800)), (876_800, 1_743_900, (1_743_900, 1_743_900)), (0, 5, (5, None))],
)
def test_the_total_is_at_least_what_was_read(
    monkeypatch: pytest.MonkeyPatch, expected: int, read: int, measured: tuple[int, int | None]
) -> None:
    """From the first line on, bytes that are read twice count in the total too."""
    monkeypatch.setattr(progress, "TRAFFIC", SimpleNamespace(expected=expected, read=read))
    assert progress._measure() == measured


def test_ascii_in_the_c_locale() -> None:
    """In the C locale, the line has ASCII characters only."""
    _, drawn = run_reading(LC_ALL="C")
    assert "reading -" in re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert drawn.isascii()


def test_a_short_comparison_draws_nothing() -> None:
    """Nothing is drawn and rich is not imported before the delay."""
    check = "import sys; assert 'rich' not in sys.modules"
    assert run_reading(delay=60, last=check) == (0, "the report\r\n")


@pytest.mark.parametrize("settings", [{"TERM": "dumb"}, *slow({"quiet": True})], ids=str)
def test_no_progress(settings: dict[str, object]) -> None:
    """`--quiet` and a terminal without cursor draw nothing."""
    assert run_reading(**settings) == (0, "the report\r\n")  # type: ignore[arg-type]


def test_no_progress_without_a_terminal() -> None:
    """Nothing is written to a pipe."""
    command = [sys.executable, "-c", READING.format(delay=0, quiet=False, last="pass")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("the report\n", "")


def test_an_error_erases_the_line() -> None:
    """After an exception or Ctrl-C, the line is erased before the message."""
    code, drawn = run_reading(last="raise KeyboardInterrupt")
    assert code != 0
    assert "reading" in drawn
    assert "reading" not in find_remaining(drawn)


@pytest.mark.parametrize("command", ["compare", *slow("report", "diff", "fingerprint")])
@pytest.mark.slow
def test_each_command(tmp_path: Path, command: str) -> None:
    """Each command that reads tensors shows its progress, which is gone when its output begins."""
    size = 400 << 20
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    paths = []
    for rank in range(2):
        # The file has holes, which take no space.
        with (tmp_path / f"run_rank{rank}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size)
            paths.append(file.name)
    options = ["-o", "made/"] if command == "fingerprint" else ["--color", "never"]
    code, drawn = run_in_terminal("-c", COMMAND, command, *paths, *options, folder=tmp_path)
    assert code == 0, drawn
    assert "reading" in drawn
    assert "reading" not in find_remaining(drawn)
    assert ("IN SYNC" if command != "fingerprint" else "wrote made/") in find_remaining(drawn)
