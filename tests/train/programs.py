"""Programs that tests start: the trainer's command line, as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scenarios import differing, load

if TYPE_CHECKING:
    from collections.abc import Sequence

Run = subprocess.CompletedProcess[str]

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "train" / "run.py"
TRAIN = (sys.executable, RUN)
# A training of a second, which leaves one file per rank.
SHORT = ("--width", 4, "--max-steps", 3, "--save-per-rank", "--progress", "none", "--timeout", 30)
# Variables that launchers set; pytest itself may have been started by one.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")


class Programs:
    """Programs as a user starts them, each in a session of its own; none outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"  # torchrun, for one, leaves folders behind
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: Any, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start one outside any launcher, in the test's folder; keyword arguments are environment variables."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)}
        self.temporary.mkdir(exist_ok=True)
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"  # the scripts say `python`
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout: float = 60) -> Run:
        """Wait for one, and for its output."""
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *command: Any, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Run:
        """Start one and wait for it."""
        return self.finish(self.start(*command, cwd=cwd, **environment), timeout)

    def kill(self) -> None:
        """End all that were started, with all that these have started."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def alive(process: subprocess.Popen[str]) -> bool:
    """Tell whether anything is left of a program's session, some time after it."""
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def wait_for(condition: Any, timeout: float = 30, pause: float = 0.02) -> None:
    """Wait until a function returns something true, asking it again after each pause."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)


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
