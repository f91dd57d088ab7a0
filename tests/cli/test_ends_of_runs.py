"""Runs that are ended from outside: by Ctrl-C at any moment, by signals, by kill -9 while a report is written."""

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
from checkpoints import save_header, save_pth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 2  # seconds, in which a run that is interrupted must have ended
SIZE = 1 << 31  # bytes; to compare two such files takes a second


@contextmanager
def started(folder: Path, *arguments: str, python: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Give a run of `python -m syncheck`, which is gone afterwards."""
    command = [sys.executable, *python, "-m", "syncheck", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Wait until something is so, almost without a pause. False where the run ends before it is."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.0002)
    return False


def large(folder: Path, size: int = SIZE) -> tuple[str, str]:
    """Write two files of zeros of so many bytes, which take next to no room on the disk."""
    header = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    for rank in range(2):
        path = save_header(folder / f"run_rank{rank}.safetensors", header)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + size)
    return "run_rank0.safetensors", "run_rank1.safetensors"


def many(folder: Path, tensors: int) -> None:
    """Write two ranks that differ in many tensors."""
    for rank in range(2):
        tree = {f"layer{i}.weight": np.full(8, rank * i, np.float32) for i in range(tensors)}
        save_pth(folder / f"run_rank{rank}.pth", tree)


@pytest.mark.parametrize(
    "module", ["syncheck.cli", "syncheck.errors", "argparse", "syncheck.cli.parser", "syncheck.paths"]
)
def test_interrupted_while_importing(tmp_path: Path, module: str) -> None:
    """Ctrl-C while the program is still being imported ends it without a traceback."""
    many(tmp_path, 3)
    with started(tmp_path, "compare", "run_rank0.pth", "run_rank1.pth", python=("-X", "importtime")) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=PATIENCE)
    told = [line for line in err.splitlines() if not line.startswith("import time:")]
    # By its code or by the signal, which a shell reports alike. What could be printed before is one line.
    assert process.returncode in (130, -signal.SIGINT)
    assert told in (["syncheck: interrupted"], [])


@pytest.mark.parametrize("jobs", [1, 4])
def test_interrupted_while_comparing(tmp_path: Path, jobs: int) -> None:
    """Ctrl-C while tensors are compared, in one thread and in several, is 130 and one line, at once."""
    with started(tmp_path, "compare", *large(tmp_path), "--jobs", str(jobs)) as process:
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
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - began < PATIENCE
    assert (process.returncode, out, err) == (130, "", "syncheck: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGKILL])
def test_ended_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """A signal that ends programs ends this one, silently; SIGPIPE, which Python ignores, does nothing."""
    paths = large(tmp_path, SIZE if number != signal.SIGPIPE else 1 << 20)
    with started(tmp_path, "compare", *paths, python=("-X", "importtime")) as process:
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
    """Whether a run has a file of its own in a folder open, which has no name yet or one beside the report's."""
    with suppress(OSError):  # what is closed meanwhile
        opened = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        return any(path.startswith((f"{folder}/#", f"{folder}/.syncheck-")) for path in opened)
    return any(folder.glob(".syncheck-*"))


def ended_while_writing(folder: Path, number: signal.Signals) -> int | None:
    """Send a signal as soon as a report is being written; returns the exit code, None if the signal came too late."""
    with started(folder, "compare", "run_rank0.pth", "run_rank1.pth", "-o", "out.json") as process:
        found = wait_for(lambda: is_writing(process, folder), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    return process.returncode if found else None


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_ended_while_writing(tmp_path: Path, number: signal.Signals) -> None:
    """The old report is there, or the whole new one; beside it at most a hidden file, and after Ctrl-C none."""
    many(tmp_path, 100)
    out = tmp_path / "out.json"
    out.write_text("old")
    for _ in range(5):
        code = ended_while_writing(tmp_path, number)
        content = out.read_text()
        if content != "old":  # the signal came too late
            json.loads(content)
            out.write_text("old")
        shown = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".syncheck-"))
        assert shown == ["out.json", "run_rank0.pth", "run_rank1.pth"]
        if number == signal.SIGINT:
            assert not list(tmp_path.glob(".syncheck-*"))
        if content == "old":
            assert code in ((130, -number) if number == signal.SIGINT else (-number,))
            break
    else:
        pytest.fail("every signal came too late")
    # What a killed run leaves is no checkpoint of the folder, and nothing that stands in the way of the next.
    with started(tmp_path, "report", ".", "-o", "out.json") as process:
        process.communicate(timeout=30)
    assert process.returncode == 1
    assert [group["name"] for group in json.loads(out.read_text())["groups"]] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report .", "fingerprint run_rank0.pth"])
def test_killed_at_any_moment(tmp_path: Path, command: str) -> None:
    """Ten runs killed at random moments, from the start to beyond the end: the output is complete, or the old one."""
    many(tmp_path, 100)
    arguments, out = [*command.split(), "-o", "out.json"], tmp_path / "out.json"
    began = time.monotonic()
    with started(tmp_path, *arguments) as process:
        process.communicate()
    lasts = time.monotonic() - began
    draw, seen = random.Random(7), {"old": 0, "new": 0}
    for moment in (0.0, *(draw.uniform(0, 1.2) for _ in range(8)), math.inf):
        out.write_text("old")
        with started(tmp_path, *arguments) as process:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=moment * lasts if math.isfinite(moment) else None)
            process.kill()
        content = out.read_text()
        assert content == "old" or json.loads(content)
        seen["old" if content == "old" else "new"] += 1
        shown = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".syncheck-")}
        assert shown == {out.name, "run_rank0.pth", "run_rank1.pth"}
    assert all(seen.values()), seen


WRITER = """
import os, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import numpy as np
from checkpoints import save_pth
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
    step += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_compared_while_written(tmp_path: Path, how: str) -> None:
    """While ranks that never agree are being saved, ten runs find a difference or cannot tell, and none crashes."""
    many(tmp_path, 2)
    seen = []
    command = [sys.executable, "-c", WRITER, how, *sys.path]
    with subprocess.Popen(command, cwd=tmp_path) as writer:
        try:
            for i in range(10):
                arguments = ("compare", "run_rank0.pth", "run_rank1.pth") if i % 2 else ("report", ".")
                with started(tmp_path, *arguments, "-o", "out.json") as process:
                    out, err = process.communicate(timeout=60)
                assert process.returncode in (1, 2), out + err
                assert all(line.startswith("syncheck: error: ") for line in err.splitlines())
                assert err or out
                seen.append(process.returncode)
            assert writer.poll() is None
        finally:
            writer.kill()
    assert how == "in place" or 1 in seen
