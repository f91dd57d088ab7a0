"""Fixtures of the trainer's tests: who this process is, and the command line as a user types it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `train` is not installed: it is the one of this clone, and of no other.
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.testing import Rank
    from train.launch import RankContext

Run = subprocess.CompletedProcess[str]


@pytest.fixture
def ctx(syncheck_rank: Rank) -> RankContext:
    """This rank as the trainer knows it, for tests with @pytest.mark.syncheck(ranks=...)."""
    from train.launch import RankContext  # here, because it needs the path set above

    rank = syncheck_rank
    return RankContext(rank.rank, rank.world_size, rank.rank, rank.device, "gloo")


def _run(command: list[str], folder: Path, timeout: float) -> Run:
    """Run a command in a process group of its own, which is killed as a whole when it takes too long."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Run]:
    """`python train/run.py ...` in an empty folder."""

    def run(*arguments: Any, timeout: float = 60) -> Run:
        return _run([sys.executable, str(ROOT / "train/run.py"), *map(str, arguments)], tmp_path, timeout)

    return run


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Run]:
    """`torchrun --nproc-per-node 2 train/run.py ...` in an empty folder, on a port that is free."""

    def run(*arguments: Any, timeout: float = 60) -> Run:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        command = [sys.executable, *launcher, str(ROOT / "train/run.py"), *map(str, arguments)]
        return _run(command, tmp_path, timeout)

    return run
