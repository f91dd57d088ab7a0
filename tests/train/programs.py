"""Programs that tests start: the trainer's command line, as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scenarios import differing, load
from started import ROOT, Processes

if TYPE_CHECKING:
    from collections.abc import Sequence

Run = subprocess.CompletedProcess[str]

RUN = ROOT / "train" / "run.py"
TRAIN = (sys.executable, RUN)
# A training of a second, which leaves one file per rank.
SHORT = ("--width", 4, "--max-steps", 3, "--save-per-rank", "--progress", "none", "--timeout", 30)

# A training without an end, which prints a line for each epoch of 10 steps.
LONG = ("--width", 4, "--limit-train", 320, "--epochs", 10_000, "--progress", "plain", "--timeout", 30)


class Programs(Processes):
    """The trainer's programs."""

    # The scripts say `python`.
    variables: ClassVar = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def finish(self, process: subprocess.Popen[str], timeout: float = 60) -> Run:
        """Wait for one, and for its output."""
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *command: Any, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Run:
        """Start one and wait for it."""
        return self.finish(self.start(*command, cwd=cwd, **environment), timeout)


def command(pid: int) -> str:
    """Give the command line of a process; empty where there is none of this number."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def environment(pid: int) -> str:
    """Give the variables that a process was started with, each between two NULs; none where there is no process."""
    try:
        return "\0" + Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """List the processes that a process has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            if fields[1] == str(pid) and fields[0] != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def find_ranks(pid: int) -> list[int]:
    """List the ranks that a process has started with --spawn; another child only cleans up after them."""
    return [child for child in children(pid) if "spawn_main" in command(child)]


def wait_until_trains(process: subprocess.Popen[str]) -> None:
    """Wait for the line of the first epoch, which rank 0 prints."""
    assert process.stdout is not None
    while ": epoch" not in (line := process.stdout.readline()):
        assert line, "it has ended"


def imports_torch(pid: int) -> bool:
    """Tell whether a process has come as far as loading torch's libraries, which takes seconds."""
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def assert_trained(out: Path, ranks: int, *, run: str = "ddp") -> None:
    """Check that the ranks' files are there, of these ranks, and equal but for BatchNorm's statistics."""
    files = sorted(out.glob("*.pth"))
    assert [file.name for file in files] == [f"{run}_rank{rank}.pth" for rank in range(ranks)]
    assert {load(file)["step"] for file in files} == {3}
    for file in files[1:]:
        assert {name.rpartition(".")[2] for name in differing(files[0], file)} == {"running_mean", "running_var"}


def errors(runs: Sequence[Run]) -> list[str]:
    """Give the messages on stderr, which must be whole lines and nothing else."""
    lines = [line for run in runs for line in run.stderr.splitlines()]
    assert all(line.startswith("run.py: ") for line in lines), lines
    return [line.removeprefix("run.py: ") for line in lines]
