"""Run the command line for tests: in this process, in a shell, on ranks with one file each, and as programs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from support.checkpoints import Done, changed, network, save
from support.programs_of_ranks import Jobs
from support.states import omit

from syncheck.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from syncheck.testing import Rank


def raise_system_exit(code: int) -> NoReturn:
    """Replace os._exit, which would end the process of the tests."""
    raise SystemExit(code)


@dataclass
class RankCli:
    """One rank of a test that runs `syncheck compare` together with the other ranks."""

    rank: int
    ranks: int
    folder: Path
    member: Rank
    capsys: pytest.CaptureFixture[str]

    @property
    def path(self) -> str:
        """The path argument, which stands for each rank's own file."""
        return f"{self.folder}/run_rank{{rank}}.pth"

    def save(self, name: str = "run_rank{}.pth", by: float = 0.0, **entries: Any) -> Path:
        """Write this rank's file, with `by` added to a weight on the last rank and `entries` beside the tensors."""
        state = changed(network(), "fc.weight", by=by if self.rank == self.ranks - 1 else 0.0)
        return save(self.folder / name.format(self.rank), state | entries)

    def compare(self, *arguments: Any) -> list[Done]:
        """Run `syncheck compare` on all ranks; return on each rank how the command ended on all ranks."""
        self.member.barrier()
        try:
            code = main(["compare", *map(str, arguments)])
        except SystemExit as stopped:
            code = int(str(stopped.code))
        captured = self.capsys.readouterr()
        ended: list[Done] = self.member.gather(Done(code, captured.out, captured.err))
        return ended


@pytest.fixture
def rank_cli(
    syncheck_rank: Rank, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RankCli:
    """Return this rank of a test with @pytest.mark.syncheck(ranks=...), in an empty working folder."""
    monkeypatch.setattr(os, "_exit", raise_system_exit)
    monkeypatch.chdir(tmp_path)
    return RankCli(syncheck_rank.rank, syncheck_rank.world_size, syncheck_rank.shared, syncheck_rank, capsys)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Start programs in the test's folder, and kill them after the test."""
    started = Jobs(tmp_path)
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
def two_ranks(tmp_path: Path) -> None:
    """Write run_rank0.pth and run_rank1.pth into the test's folder; 2 of 14 tensors differ, the running means."""
    for rank in range(2):
        save(tmp_path / f"run_rank{rank}.pth", changed(network(), "running_mean", by=rank))


@pytest.fixture
def shell(tmp_path: Path, two_ranks: None) -> Callable[..., tuple[int, str, str]]:
    """Run a line of bash in the folder of two_ranks; return exit code, stdout and stderr.

    `syncheck` in the line is the syncheck of this Python, started with the Python options `python`. Keyword arguments
    are environment variables.
    """

    def run_line(line: str, python: str = "", **environment: str) -> tuple[int, str, str]:
        line = line.replace("syncheck", f"{sys.executable} {python} -m syncheck", 1)
        colours = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")
        inherited = omit(os.environ, *colours)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
            check=False,
            env=inherited | environment,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run_line
