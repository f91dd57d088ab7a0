"""Processes for tests with real training libraries."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from support.listings import list_codes
from support.required import unavailable
from support.started import CLONE, ROOT
from support.states import omit_prefixes

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ROOT / "tests" / "frameworks" / "programs"
# Variables set by launchers; a launcher may have started pytest itself.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "ACCELERATE_")


def need(name: str) -> None:
    """Skip the test without this library, or fail if SYNCHECK_REQUIRE names the library, as in CI."""
    if find_spec(name) is None:  # not imported, which would take seconds
        unavailable(name, "it is not installed; pip install -e '.[frameworks]'")


class Ended(NamedTuple):
    """The end of a process. left: whether its child processes remained."""

    code: int
    output: str
    left: bool


def run(program: Path, folder: Path, *arguments: str, ranks: int = 2, timeout: float = 100) -> list[Ended]:
    """Run a program as one process on each of `ranks` nodes, with `folder` as its first argument.

    A single process gets no variables of a launcher. Each process has its own session, and all end with the call.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    retained = omit_prefixes(os.environ, LAUNCHER)
    retained |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    retained["PYTHONPATH"] = f"{CLONE}:{retained.get('PYTHONPATH', '')}"  # syncheck of this clone
    retained["WAIT_FOR_GLOO"] = "1"  # at the exit of the program: tests/quick_start
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "layouts", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, str(program), str(folder), *arguments]
    started = []
    logs = [folder / f"log{rank}.txt" for rank in range(ranks)]
    try:
        for rank in range(ranks):
            own_values = {"RANK": str(rank), "GROUP_RANK": str(rank)} | shared if ranks > 1 else {}
            with open(logs[rank], "w") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=retained | own_values,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(timeout) for process in started]
        remaining = [_alive(process.pid) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outputs = [log.read_text() for log in logs]
    return list(map(Ended, codes, outputs, remaining))


def _alive(session: int) -> bool:
    """Return whether a session still has processes five seconds after the end of its first process."""
    for _ in range(100):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def train(program: str, folder: Path, *arguments: str, ranks: int = 2, timeout: float = 100) -> None:
    """Run a program of `frameworks/programs/` and assert exit code 0 on all ranks."""
    done = run(PROGRAMS / program, folder, *arguments, ranks=ranks, timeout=timeout)
    assert list_codes(done) == [0] * ranks, "\n".join(each.output[-3000:] for each in done)
