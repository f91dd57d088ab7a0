"""--spawn: this process starts the others, and answers for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import SHORT, TRAIN, alive, assert_trained, children, wait_for

from train.launch import Ending
from train.launch.spawn import verdict

if TYPE_CHECKING:
    import subprocess

    from programs import Programs, Run

LONG = ("--width", 4, "--epochs", 10_000, "--progress", "plain", "--timeout", 30)
MISTAKE, ALIKE = Ending(2, "only here"), Ending(2, "everywhere", alike=True)
LOST, DONE = Ending(1, "lost another rank"), Ending()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def workers(parent: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, in their order; the other child only cleans up after them."""
    return [pid for pid in children(parent.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def start_long(programs: Programs) -> subprocess.Popen[str]:
    """Start two ranks, and wait until they train."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ddp: epoch")
    assert len(workers(process)) == 2
    return process


def finished(programs: Programs, process: subprocess.Popen[str], temporary: Path) -> Run:
    """Wait for the end, which leaves neither a process nor a file."""
    run = programs.finish(process)
    assert not alive(process)
    assert list(temporary.glob("train-*")) == []
    return run


def test_trains(programs: Programs, tmp_path: Path, temporary: Path) -> None:
    """Two processes train ddp as torchrun's do, without any launcher; nothing of them is left."""
    run = finished(programs, programs.start(*TRAIN, "--spawn", 2, *SHORT), temporary)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[1] == "saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth"
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--spawn", 2, "--method", "single"), "--method single is one process, the launcher started 2"),
        (("--spawn", 3, "--batch-size", 2), "--batch-size 2 (global) leaves some of 3 ranks empty; use 3 or more"),
        (
            ("--spawn", 2, "--save-per-rank", "--out", "/dev/null/x"),
            "cannot write to --out /dev/null/x: Not a directory",
        ),
    ],
    ids=["before", "settings", "inside"],
)
def test_mistakes_are_one_line(
    programs: Programs, temporary: Path, arguments: tuple[str | int, ...], message: str
) -> None:
    """What the ranks refuse is said once, before they start or after, with exit code 2."""
    run = finished(programs, programs.start(*TRAIN, *arguments), temporary)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"run.py: error: {message}\n")


@pytest.mark.slow
def test_a_killed_rank_is_named(programs: Programs, temporary: Path) -> None:
    """A rank ended with -9 is named with its signal in one line, not the ones that lost it; exit code 1."""
    process = start_long(programs)
    os.kill(workers(process)[1], signal.SIGKILL)
    run = finished(programs, process, temporary)
    assert (run.returncode, run.stderr) == (1, "run.py: error: rank 1 was ended by signal 9 (SIGKILL)\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_all(programs: Programs, temporary: Path, number: int, name: str) -> None:
    """Ctrl-C, which all processes of a terminal get, and a signal to the parent end all in one line."""
    process = start_long(programs)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    run = finished(programs, process, temporary)
    assert (run.returncode, run.stderr) == (128 + number, f"run.py: ended by {name}\n")


@pytest.mark.slow
def test_no_rank_outlives_its_parent(programs: Programs, temporary: Path) -> None:
    """When the parent is killed, the ranks notice, remove what it cannot, and end."""
    process = start_long(programs)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    assert not alive(process)
    assert list(temporary.glob("train-*")) == []


@pytest.mark.parametrize(
    ("codes", "notes", "expected"),
    [
        ([0, 0], [DONE, DONE], DONE),
        ([2, 2], [ALIKE, ALIKE], ALIKE),
        ([2, 2], [ALIKE, MISTAKE], ALIKE),
        ([None, 2], [None, MISTAKE], MISTAKE),
        ([1, 2], [LOST, MISTAKE], MISTAKE),
        ([1, 1], [LOST, LOST], LOST),
        ([1, -9], [LOST, None], Ending(1, "rank 1 was ended by signal 9 (SIGKILL)")),
        ([1, -40], [LOST, None], Ending(1, "rank 1 was ended by signal 40")),
        ([1, 1], [LOST, None], Ending(1, "rank 1 ended with code 1; its own message stands above")),
        ([0, None], [DONE, None], DONE),
    ],
)
def test_the_cause_is_chosen(codes: list[int | None], notes: list[Ending | None], expected: Ending) -> None:
    """Who died comes before who refused, and that before who lost another; the first to end does not matter."""
    assert verdict(codes, notes) == expected


@pytest.mark.slow
def test_no_traceback_at_a_signal_while_starting(programs: Programs, temporary: Path) -> None:
    """Ctrl-C while the ranks still import their modules ends all as quietly."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(workers(process)) == 2)
    os.killpg(process.pid, signal.SIGINT)
    run = finished(programs, process, temporary)
    assert (run.returncode, run.stderr) == (130, "run.py: ended by SIGINT\n")
