"""Runs that end early: by Ctrl-C at any moment, by signals, and by kill -9 while a report is written."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_header, save_pth
from support.listings import list_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 2  # seconds until an interrupted run must have ended
SIZE = 1 << 31  # bytes; a comparison of two files of this size takes a second


@contextmanager
def run_syncheck(folder: Path, *arguments: str, python: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Start `python -m syncheck`, and kill the process afterwards."""
    command = [sys.executable, *python, "-m", "syncheck", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Poll a condition almost without pause; return False if the run ends before the condition is true."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.0002)
    return False


def write_large_ranks(folder: Path, size: int = SIZE) -> tuple[str, str]:
    """Write two sparse files of `size` zero bytes each, and return their names."""
    header = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    for rank in range(2):
        path = save_header(folder / f"run_rank{rank}.safetensors", header)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + size)
    return "run_rank0.safetensors", "run_rank1.safetensors"


def write_many_tensors(folder: Path, tensors: int) -> None:
    """Write two ranks with many differing tensors."""
    for rank in range(2):
        tree = {f"layer{i}.weight": np.full(8, rank * i, np.float32) for i in range(tensors)}
        save_pth(folder / f"run_rank{rank}.pth", tree)


@pytest.mark.parametrize(
    "module", ["syncheck.cli", "syncheck.errors", "argparse", "syncheck.cli.parser", "syncheck.readers.find"]
)
def test_interrupted_while_importing(tmp_path: Path, module: str) -> None:
    """Ctrl-C during the imports ends the program without a traceback."""
    write_many_tensors(tmp_path, 3)
    with run_syncheck(tmp_path, "compare", "run_rank0.pth", "run_rank1.pth", python=("-X", "importtime")) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=PATIENCE)
    messages = [line for line in err.splitlines() if not line.startswith("import time:")]
    # A shell reports both exit codes as 130. At most one line is printed.
    assert process.returncode in (130, -signal.SIGINT)
    assert messages in (["syncheck: interrupted"], [])


@pytest.mark.parametrize("jobs", [1, 4])
def test_interrupted_while_comparing(tmp_path: Path, jobs: int) -> None:
    """Ctrl-C during a comparison, in one thread or several, immediately exits with 130 and one line."""
    with run_syncheck(tmp_path, "compare", *write_large_ranks(tmp_path), "--jobs", str(jobs)) as process:
        opened = Path(f"/proc/{process.pid}/fd")
        threads = Path(f"/proc/{process.pid}/task")
        if not opened.exists():
            pytest.skip("no /proc here")

        def comparing() -> bool:
            try:
                names = [str(link.readlink()) for link in opened.iterdir()]
                return (
                    sum(name.endswith(".safetensors") for name in names) == 2 and len(list(threads.iterdir())) >= jobs
                )
            except FileNotFoundError:
                return False

        assert wait_for(comparing, process)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - start < PATIENCE
    assert (process.returncode, out, err) == (130, "", "syncheck: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGKILL])
def test_ended_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """A fatal signal ends the program without a message; SIGPIPE has no effect, because Python ignores it."""
    paths = write_large_ranks(tmp_path, SIZE if number != signal.SIGPIPE else 1 << 20)
    with run_syncheck(tmp_path, "compare", *paths, python=("-X", "importtime")) as process:
        assert process.stderr is not None
        assert any("syncheck.api" in line for line in process.stderr)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert all(line.startswith("import time:") for line in err.splitlines())
    if number == signal.SIGPIPE:
        assert (process.returncode, out.splitlines()[-2]) == (0, "IN SYNC")
    else:
        assert (process.returncode, out) == (-number, "")


def is_writing(process: subprocess.Popen[str], folder: Path) -> bool:
    """Return whether a run has a temporary file in a folder: an open unnamed file, or a file .syncheck-*."""
    with suppress(OSError):  # a file was closed during the loop
        opened = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        return any(path.startswith((f"{folder}/#", f"{folder}/.syncheck-")) for path in opened)
    return any(folder.glob(".syncheck-*"))


def interrupt_writing(folder: Path, number: signal.Signals) -> int | None:
    """Send a signal while a report is written; return the exit code, or None if the signal was too late."""
    with run_syncheck(folder, "compare", "run_rank0.pth", "run_rank1.pth", "-o", "out.json") as process:
        is_in_time = wait_for(lambda: is_writing(process, folder), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    return process.returncode if is_in_time else None


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_ended_while_writing(tmp_path: Path, number: signal.Signals) -> None:
    """The report is complete, old or new; SIGKILL leaves at most a hidden file, and Ctrl-C leaves none."""
    write_many_tensors(tmp_path, 100)
    out = tmp_path / "out.json"
    out.write_text("old")
    for _ in range(5):
        code = interrupt_writing(tmp_path, number)
        content = out.read_text()
        if content != "old":  # the signal came too late
            json.loads(content)
            out.write_text("old")
        visible = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".syncheck-"))
        assert visible == ["out.json", "run_rank0.pth", "run_rank1.pth"]
        if number == signal.SIGINT:
            assert not list(tmp_path.glob(".syncheck-*"))
        if content == "old":
            assert code in ((130, -number) if number == signal.SIGINT else (-number,))
            break
    else:
        pytest.fail("every signal came too late")
    # The next run ignores the hidden file of a killed run.
    with run_syncheck(tmp_path, "report", ".", "-o", "out.json") as process:
        process.communicate(timeout=30)
    assert process.returncode == 1
    assert list_names(json.loads(out.read_text())["groups"]) == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report .", "fingerprint run_rank0.pth"])
def test_killed_at_any_moment(tmp_path: Path, command: str) -> None:
    """Ten runs killed at random moments leave either the old output or the complete new output."""
    write_many_tensors(tmp_path, 100)
    arguments, out = [*command.split(), "-o", "out.json"], tmp_path / "out.json"
    start = time.monotonic()
    with run_syncheck(tmp_path, *arguments) as process:
        process.communicate()
    duration = time.monotonic() - start
    rng, outcomes = random.Random(7), {"old": 0, "new": 0}
    for moment in (0.0, *(rng.uniform(0, 1.2) for _ in range(8)), math.inf):
        out.write_text("")  # an empty file may be replaced by every output
        with run_syncheck(tmp_path, *arguments) as process:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=moment * duration if math.isfinite(moment) else None)
            process.kill()
        content = out.read_text()
        assert not content or json.loads(content)
        outcomes["new" if content else "old"] += 1
        visible = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".syncheck-")}
        assert visible == {out.name, "run_rank0.pth", "run_rank1.pth"}
    assert all(outcomes.values()), outcomes


WRITER = """
import os, random, sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import numpy as np
from support.checkpoints import save_pth
step = 0
while True:
    for rank in range(2):
        # No step of one rank equals any step of the other.
        tree = {f"layer{i}.weight": np.full(3000, 2 * step + rank, np.float32) for i in range(40)}
        path = Path(f"run_rank{rank}.pth")
        if sys.argv[1] == "in place":
            save_pth(path, tree)
        else:
            os.replace(save_pth(Path(f".beside{rank}"), tree), path)
            time.sleep(random.uniform(0, 1))  # some comparisons end before the next file
    step += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in place", "replaced"])
def test_compared_while_written(tmp_path: Path, mode: str) -> None:
    """While two unequal ranks are being rewritten, ten runs exit with 1 or 2 and print no traceback."""
    write_many_tensors(tmp_path, 2)
    codes = []
    command = [sys.executable, "-c", WRITER, mode, *sys.path]
    with subprocess.Popen(command, cwd=tmp_path) as writer:
        try:
            for i in range(10):
                arguments = ("compare", "run_rank0.pth", "run_rank1.pth") if i % 2 else ("report", ".")
                with run_syncheck(tmp_path, *arguments, "-o", "out.json") as process:
                    out, err = process.communicate(timeout=60)
                assert process.returncode in (1, 2), out + err
                assert all(line.startswith(("syncheck: error: ", "syncheck: wrote ")) for line in err.splitlines())
                assert err or out
                codes.append(process.returncode)
            assert writer.poll() is None
        finally:
            writer.kill()
    assert mode == "in place" or 1 in codes
