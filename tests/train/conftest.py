"""Fixtures for the trainer's tests: the context of this rank, and the trainer's command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import started
from support.listings import find_texts
from support.programs import RUN, Programs
from support.started import LAUNCHER

ROOT = Path(__file__).resolve().parents[2]
# `train` is not installed; import it from this clone.
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.programs import Run

    from syncheck.testing import Rank
    from train.launch import RankContext


@pytest.fixture
def ctx(syncheck_rank: Rank) -> RankContext:
    """Return this rank's context, for tests with @pytest.mark.syncheck(ranks=...)."""
    from train.launch import RankContext  # needs the path set above

    rank = syncheck_rank
    return RankContext(rank.rank, rank.world_size, rank.rank, rank.device, "gloo")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove launchers' variables from the environment, and change to an empty folder."""
    for name in find_texts(os.environ, start=LAUNCHER):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Yield a starter of programs in an empty folder, and kill all programs after the test."""
    processes = Programs(tmp_path)
    try:
        yield processes
    finally:
        processes.kill()


@pytest.fixture
def free_port() -> int:
    """Return a port on which no process listens."""
    return started.free_port()


@pytest.fixture
def script(programs: Programs) -> Callable[..., Run]:
    """Return a function that runs `python train/run.py ...` in an empty folder."""

    def run(*arguments: Any, timeout: float = 60, **environment: str) -> Run:
        return programs.run(sys.executable, RUN, *arguments, timeout=timeout, **environment)

    return run


@pytest.fixture
def torchrun(programs: Programs, free_port: int) -> Callable[..., Run]:
    """Return a function that runs `torchrun --nproc-per-node 2 train/run.py ...` in an empty folder, on a free port."""

    def run(*arguments: Any, timeout: float = 60) -> Run:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port]
        return programs.run(sys.executable, *launcher, RUN, *arguments, timeout=timeout)

    return run
