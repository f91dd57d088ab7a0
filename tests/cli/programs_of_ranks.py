"""Programs of several processes that tests start, as torchrun does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoints import Done

ROOT = Path(__file__).resolve().parents[2]
# Variables that launchers set; pytest itself may have been started by one.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")
COLOURS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
LIMIT = 90  # seconds
SYNCHECK = (sys.executable, "-m", "syncheck")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# What a process that torchrun starts ends with is told by nobody; here it is written into a file. Nor does it end when
# torchrun wants it to, because another one has ended: what it ends with is its own.
NOTED = """trap '' TERM; "$@"; code=$?; echo $code > "code.$RANK"; exit $code"""


class Jobs:
    """Programs in sessions of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"  # torchrun leaves folders behind
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: Any, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start one, in the test's folder unless told; keyword arguments are environment variables."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER) and k not in COLOURS}
        self.temporary.mkdir(exist_ok=True)
        kept |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env=kept | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def ranks(self, *arguments: Any, ranks: int = 2) -> list[subprocess.Popen[str]]:
        """Start `syncheck` as so many ranks, with the variables that torchrun would set, and without torchrun."""
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self.start(*SYNCHECK, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", **common)
            for rank in range(ranks)
        ]

    def torchrun(self, *arguments: Any, ranks: int = 2) -> Done:
        """Run `torchrun ... -m syncheck ...`; each rank notes in code.RANK how it ended."""
        launcher = [*TORCHRUN, "--nproc-per-node", ranks, "--master-port", free_port(), "--no-python"]
        return finished(self.start(*launcher, "bash", "-c", NOTED, "bash", *SYNCHECK, *arguments))

    def codes(self, folder: Path | None = None) -> dict[int, int]:
        """Return what the ranks that torchrun started ended with, by rank."""
        return {int(file.suffix[1:]): int(file.read_text()) for file in (folder or self.folder).glob("code.*")}

    def kill(self) -> None:
        """End all that were started, with all that these have started."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def finished(process: subprocess.Popen[str]) -> Done:
    """Wait for a program, and for its output."""
    out, err = process.communicate(timeout=LIMIT)
    return Done(process.returncode, out, err)


def nothing_left(process: subprocess.Popen[str]) -> bool:
    """Tell whether a program's session is empty, some time after its end."""
    for _ in range(200):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def wait_for(condition: Any) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
