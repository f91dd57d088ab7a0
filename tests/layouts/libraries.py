"""What the tests of real layouts need: the libraries that write them, and two processes that train with each."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from required import unavailable

PROGRAMS = Path(__file__).parent / "programs"
# Variables that launchers set; pytest itself may have been started by one.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "ACCELERATE_")


def need(name: str) -> None:
    """Skip the test without this library, or fail where SYNCHECK_REQUIRE names it, as CI does."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        unavailable(name, f"{error}; pip install -e '.[layouts]'")


def train(program: str, folder: Path, *arguments: str, ranks: int = 2, timeout: float = 100) -> None:
    """Run a program of `programs/` as one process on each of `ranks` nodes, with `folder` as its first argument.

    Each is in a session of its own, and none outlives the call.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER)}
    kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "layouts", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, str(PROGRAMS / program), str(folder), *arguments]
    started = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank)}
            log = open(folder / f"log{rank}.txt", "w")  # noqa: SIM115
            with log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=kept | shared | own,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(timeout) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert codes == [0] * ranks, "\n".join((folder / f"log{rank}.txt").read_text()[-3000:] for rank in range(ranks))
