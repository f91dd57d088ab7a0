"""Start the trainer in tests with the command lines of a user."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from support.fork_server import SERVER, SPAWNED
from support.listings import list_fields, list_names
from support.scenarios import differing, load
from support.started import ROOT, Processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Run = subprocess.CompletedProcess[str]

RUN = ROOT / "train" / "run.py"
TRAIN = (sys.executable, RUN)
# Trains for about a second, and saves one file per rank.
SHORT = ("--width", 4, "--max-steps", 3, "--save-per-rank", "--progress", "none", "--timeout", 30)

# Trains until it is stopped, and prints a line for each epoch of 10 steps.
LONG = ("--width", 4, "--limit-train", 320, "--epochs", 10_000, "--progress", "plain", "--timeout", 30)


class Programs(Processes):
    """Starts the trainer's programs."""

    # The scripts call `python`.
    variables: ClassVar = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def finish(self, process: subprocess.Popen[str], timeout: float = 60) -> Run:
        """Wait for a process, and return its output and exit code."""
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def finish_all(self, processes: Iterable[subprocess.Popen[str]], timeout: float = 60) -> list[Run]:
        """Wait for processes in this order, and return their outputs and exit codes."""
        return [self.finish(process, timeout) for process in processes]

    def run(self, *command: Any, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Run:
        """Start a program, wait for its end, and return its output and exit code."""
        return self.finish(self.start(*command, cwd=cwd, **environment), timeout)


def command(pid: int) -> str:
    """Return the command line of a process, or an empty string if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def name(pid: int) -> str:
    """Return the name of a process, or an empty string if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def environment(pid: int) -> str:
    """Return the initial variables of a process, each between two NULs, or an empty string if it does not exist."""
    try:
        return "\0" + Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """List the child processes of a process, except zombies and servers of forks."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            start, _, rest = path.read_text().rpartition(") ")
            fields = rest.split()
            if fields[1] == str(pid) and fields[0] != "Z" and not start.endswith(SERVER):
                pids.append(int(path.parent.name))
    return sorted(pids)


def find_ranks(pid: int) -> list[int]:
    """List the ranks that a process has started with --spawn, without multiprocessing's resource tracker."""
    return [child for child in children(pid) if SPAWNED in command(child) or SPAWNED in name(child)]


def wait_until_trains(process: subprocess.Popen[str]) -> None:
    """Wait until rank 0 has printed the line of the first epoch."""
    assert process.stdout is not None
    while ": epoch" not in (line := process.stdout.readline()):
        assert line, "it has ended"


def imports_torch(pid: int) -> bool:
    """Return whether a process has begun to load torch's libraries, which takes seconds."""
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def assert_trained(out: Path, ranks: int, *, run: str = "ddp") -> None:
    """Check that exactly these ranks have saved step 3, and that they differ only in BatchNorm's statistics."""
    files = sorted(out.glob("*.pth"))
    assert list_names(files) == [f"{run}_rank{rank}.pth" for rank in range(ranks)]
    assert {load(file)["step"] for file in files} == {3}
    for file in files[1:]:
        assert {name.rpartition(".")[2] for name in differing(files[0], file)} == {"running_mean", "running_var"}


def errors(runs: Sequence[Run]) -> list[str]:
    """Return the messages on stderr, and check that each line is a message of run.py."""
    lines = "".join(list_fields(runs, "stderr")).splitlines()
    assert all(line.startswith("run.py: ") for line in lines), lines
    return [line.removeprefix("run.py: ") for line in lines]
