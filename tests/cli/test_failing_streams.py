"""Closed, full and unread stdout and stderr: the exit code stays correct, and nothing crashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

    Shell = Callable[[str], tuple[int, str, str]]

COMPARE = "compare run_rank0.pth run_rank1.pth"
# Commands that print on stdout, on stderr, or on both, through syncheck and through argparse.
EVERY_STREAM = {f"{COMPARE} run_rank2.pth --color always": 1, "--help": 0, "compare nothing.pth": 2, "nonsense": 2}
# Commands that print on stdout through other calls.
STDOUT = {
    COMPARE: 1,
    f"{COMPARE} --format json": 1,
    "show run_rank0.pth": 0,
    "show run_rank0.pth --format json": 0,
    "explain SYN201": 0,
    "compare --help": 0,
    "--version": 0,
}
FULL = "syncheck: error: stdout: cannot write it: No space left on device; free some space, or redirect the output\n"
# Nobody reads from this pipe, because its other end is closed before the program starts.
UNREAD = "exec 3> >(exec true); wait $!; syncheck"


def test_a_verdict_without_streams(shell: Shell) -> None:
    """Closed streams keep exit code 1, a full stdout is an error, and errors give exit code 2."""
    assert shell(f"syncheck {COMPARE} >&- 2>&-") == (1, "", "")
    assert shell(f"syncheck {COMPARE} >/dev/full") == (2, "", FULL)
    assert shell("syncheck compare nothing.pth 2>/dev/full") == (2, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", EVERY_STREAM)
def test_streams_closed_full_and_unread(cli: Callable[..., Done], shell: Shell, command: str) -> None:
    """With closed, full and unread streams, the exit code is the usual code, 2, or 141 for an unread stdout."""
    code, out, err = EVERY_STREAM[command], *capture_streams(cli, command)
    only_errors = not out
    assert bool(err) == (code > 0)
    # The user closed the stream on purpose, so the exit code does not change.
    assert shell(f"syncheck {command} >&-") == (code, "", err)
    assert shell(f"syncheck {command} 2>&-") == (code, out, "")
    assert shell(f"syncheck {command} <&- >&- 2>&-") == (code, "", "")
    assert shell(f"syncheck {command} >/dev/full") == (2, "", err if only_errors else err + FULL)
    assert shell(f"syncheck {command} 2>/dev/full") == (code, out, "")
    assert shell(f"syncheck {command} >/dev/full 2>&1") == (2, "", "")
    unread_code = 2 if only_errors else 141
    assert shell(f"{UNREAD} {command} >&3") == (unread_code, "", err)
    assert shell(f"{UNREAD} {command} 2>&3") == (code, out, "")
    assert shell(f"{UNREAD} {command} >&3 2>&3") == (unread_code, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", STDOUT)
def test_stdout_full_and_unread(shell: Shell, command: str) -> None:
    """Every command reports a full stdout in one line with exit code 2, and exits with 141 if nobody reads stdout."""
    assert shell(f"syncheck {command} >/dev/full") == (2, "", FULL)
    assert shell(f"{UNREAD} {command} >&3") == (141, "", "")


def capture_streams(cli: Callable[..., Done], command: str) -> tuple[str, str]:
    """Return stdout and stderr of a command if nothing fails."""
    done = cli(*command.split())
    return done.out, done.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_partially_written_stdout(shell: Shell, tmp_path: Path, unbuffered: str) -> None:
    """If a file accepts only the first kilobyte of stdout, the error is reported, with and without buffering."""
    # Without buffering, Python itself ignores the lost part.
    limit = f"ulimit -f 1; exec env PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED={unbuffered}"
    error = "syncheck: error: stdout: cannot write it: File too large; free some space, or redirect the output\n"
    assert shell(f"trap '' XFSZ; {limit} syncheck {COMPARE} --format json > out.json") == (2, "", error)
    assert (tmp_path / "out.json").stat().st_size == 1024


@pytest.mark.slow
def test_reports_with_closed_streams(shell: Shell, tmp_path: Path) -> None:
    """With all three streams closed, reports are complete, because report files never get a stream's descriptor."""
    assert shell(f"syncheck {COMPARE} -o out.json")[0] == 1
    complete = (tmp_path / "out.json").read_bytes()
    assert shell(f"syncheck {COMPARE} run_rank2.pth -o out.json -o out.txt <&- >&- 2>&-") == (1, "", "")
    assert b"run_rank2.pth" in (tmp_path / "out.json").read_bytes()
    assert shell(f"syncheck {COMPARE} -o out.json <&- >&- 2>&-") == (1, "", "")
    assert (tmp_path / "out.json").read_bytes() == complete


def test_names_outside_the_encoding(shell: Shell, tmp_path: Path) -> None:
    """A file name with non-ASCII characters is printed in escapes if stderr is ASCII only."""
    (tmp_path / "run_rank0.pth").rename(tmp_path / "gewicht\u00e4\u4e2d.pth")
    code, out, err = shell("PYTHONIOENCODING=ascii syncheck fingerprint gew*.pth -o made.json")
    assert (code, out) == (0, "")
    assert ": fingerprint of gewicht\\xe4\\u4e2d.pth, 14 tensors" in err
