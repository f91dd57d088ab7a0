"""Fixtures of the trainer's tests: who this process is, and the command line as a user types it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import started
from programs import RUN, Programs
from started import LAUNCHER

ROOT = Path(__file__).resolve().parents[2]
# `train` is not installed: it is the one of this clone, and of no other.
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from programs import Run

    from syncheck.testing import Rank
    from train.launch import RankContext


@pytest.fixture
def ctx(syncheck_rank: Rank) -> RankContext:
    """This rank as the trainer knows it, for tests with @pytest.mark.syncheck(ranks=...)."""
    from train.launch import RankContext  # here, because it needs the path set above

    rank = syncheck_rank
    return RankContext(rank.rank, rank.world_size, rank.rank, rank.device, "gloo")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the test begin outside any launcher, in an empty folder."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Start programs in an empty folder."""
    started = Programs(tmp_path)
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens."""
    return started.free_port()


@pytest.fixture
def script(programs: Programs) -> Callable[..., Run]:
    """`python train/run.py ...` in an empty folder."""

    def run(*arguments: Any, timeout: float = 60, **environment: str) -> Run:
        return programs.run(sys.executable, RUN, *arguments, timeout=timeout, **environment)

    return run


@pytest.fixture
def torchrun(programs: Programs, free_port: int) -> Callable[..., Run]:
    """`torchrun --nproc-per-node 2 train/run.py ...` in an empty folder, on a port that is free."""

    def run(*arguments: Any, timeout: float = 60) -> Run:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port]
        return programs.run(sys.executable, *launcher, RUN, *arguments, timeout=timeout)

    return run
