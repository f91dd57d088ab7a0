"""stdout and stderr that are closed, full, or read by nobody: the exit code stays true, and nothing is a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ranks = Callable[..., list[Path]]

COMPARE = "compare run_rank0.pth run_rank1.pth"
# Each command, and its exit code where it can print.
COMMANDS = {
    COMPARE: 1,
    f"{COMPARE} --format json": 1,
    f"{COMPARE} run_rank2.pth --color always": 1,
    "show run_rank0.pth": 0,
    "show run_rank0.pth --format json": 0,
    "fingerprint run_rank0.pth -o made.json": 0,
    "explain SYN201": 0,
    "--help": 0,
    "compare --help": 0,
    "--version": 0,
    "compare nothing.pth": 2,
    "compare": 2,
    "nonsense": 2,
}
# Commands that print on stderr only, which no failure of stdout concerns.
ERRORS_ONLY = [command for command, code in COMMANDS.items() if code == 2]
FULL = "syncheck: error: stdout: cannot write it: No space left on device; free some space, or redirect the output\n"


def check(shell: Callable[[str], tuple[int, str, str]], command: str) -> None:
    """Run a command with each of its streams spoilt in each way."""
    code = COMMANDS[command]
    _, out, err = shell(f"syncheck {command}")
    only_errors = command in ERRORS_ONLY
    assert bool(err) == (only_errors or "run_rank2" in command)
    # Who closes a stream does not want it, and gets the exit code.
    assert shell(f"syncheck {command} >&-") == (code, "", err)
    assert shell(f"syncheck {command} 2>&-") == (code, out, "")
    assert shell(f"syncheck {command} <&- >&- 2>&-") == (code, "", "")
    # Who sends it to a full disk does not get what was asked for.
    assert shell(f"syncheck {command} >/dev/full") == (2, "", err if only_errors else err + FULL)
    assert shell(f"syncheck {command} 2>/dev/full") == (code, out, "")
    assert shell(f"syncheck {command} >/dev/full 2>&1") == (2, "", "")
    # Nobody reads what goes into a pipe whose other end is closed before the program starts.
    closed = f"exec 3> >(exec true); wait $!; syncheck {command}"
    unread = 2 if only_errors else 141
    assert shell(f"{closed} >&3") == (unread, "", err)
    assert shell(f"{closed} 2>&3") == (code, out, "")
    assert shell(f"{closed} >&3 2>&3") == (unread, "", "")


def test_a_verdict_without_streams(shell: Callable[[str], tuple[int, str, str]]) -> None:
    """Out of sync stays 1 without streams, what cannot be printed is 2 in one line, and an error never looks like 1."""
    assert shell(f"syncheck {COMPARE} >&- 2>&-") == (1, "", "")
    assert shell(f"syncheck {COMPARE} >/dev/full") == (2, "", FULL)
    assert shell("syncheck compare nothing.pth 2>/dev/full") == (2, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_without_streams(shell: Callable[[str], tuple[int, str, str]], command: str) -> None:
    """Every command, with stdout and stderr closed, full and unread: the code it has else, or 2, or 141 for a pipe."""
    check(shell, command)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_that_takes_a_part(
    shell: Callable[[str], tuple[int, str, str]], tmp_path: Path, unbuffered: str
) -> None:
    """Where a file takes only the first kilobyte, what is lost is told: unbuffered, Python would say nothing of it."""
    limit = f"ulimit -f 1; exec env PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED={unbuffered}"
    told = "syncheck: error: stdout: cannot write it: File too large; free some space, or redirect the output\n"
    assert shell(f"trap '' XFSZ; {limit} syncheck {COMPARE} --format json > out.json") == (2, "", told)
    assert (tmp_path / "out.json").stat().st_size == 1024


def test_a_report_is_no_stream(shell: Callable[[str], tuple[int, str, str]], tmp_path: Path) -> None:
    """With all three streams closed a report is whole: its file has none of their numbers."""
    assert shell(f"syncheck {COMPARE} -o out.json")[0] == 1
    whole = (tmp_path / "out.json").read_bytes()
    assert shell(f"syncheck {COMPARE} run_rank2.pth -o out.json -o out.txt <&- >&- 2>&-") == (1, "", "")
    assert b"run_rank2.pth" in (tmp_path / "out.json").read_bytes()
    assert shell(f"syncheck {COMPARE} -o out.json <&- >&- 2>&-") == (1, "", "")
    assert (tmp_path / "out.json").read_bytes() == whole


def test_names_that_the_encoding_lacks(shell: Callable[[str], tuple[int, str, str]], tmp_path: Path) -> None:
    """A fingerprint of a file with a name beyond ASCII is told of where stdout knows ASCII only."""
    (tmp_path / "run_rank0.pth").rename(tmp_path / "gewicht\u00e4\u4e2d.pth")
    code, out, err = shell("PYTHONIOENCODING=ascii syncheck fingerprint gew*.pth -o made.json")
    assert (code, err) == (0, "")
    assert out.startswith("made.json: fingerprint of gewicht??.pth, 14 tensors")
