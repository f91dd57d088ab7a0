"""A rank that ends, stops or stays away during a check: every other rank raises, none waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mortal import PLACES, SHORT

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).with_name("mortal.py")
ROOT = PROGRAM.parents[2]
ENDING = [place for place, (_, _, timeout) in PLACES.items() if timeout != SHORT]
SILENT = [place for place in PLACES if place not in ENDING]
Told = dict[str, dict[str, str]]


def told(places: list[str], folder: Path) -> Iterator[Told]:
    """Run the program in a session of its own, of which nothing is left after the tests."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *places],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        yield json.loads(out)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What the others of three ranks told where one was killed."""
    yield from told(ENDING, tmp_path_factory.mktemp("ended"))


@pytest.fixture(scope="module")
def fell_silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What the others of three ranks told where one no longer answered."""
    yield from told(SILENT, tmp_path_factory.mktemp("silent"))


def assert_told(found: dict[str, str], place: str) -> None:
    """Check that the two ranks that are left raised one clear line each."""
    left = [rank for rank in range(3) if rank != PLACES[place][0]]
    assert list(found) == [str(rank) for rank in left]
    for rank, text in found.items():
        assert text.startswith(f"RankFailed: rank {rank} got no message through: ")
        assert text.endswith(
            "; a rank has ended, or did not make this call within the group's timeout: see what the others printed last"
        )
        assert "\n" not in text
        assert ".cc" not in text  # no place in torch's sources


@pytest.mark.slow
@pytest.mark.parametrize("place", ENDING)
def test_the_others_of_a_rank_that_is_killed_raise(ended: Told, place: str) -> None:
    """Wherever in a check a rank is killed, both others raise RankFailed with one line, and none hangs."""
    assert_told(ended[place], place)


@pytest.mark.slow
@pytest.mark.parametrize("place", SILENT)
def test_the_others_of_a_rank_that_falls_silent_raise(fell_silent: Told, place: str) -> None:
    """Where a rank stops in a check, or never makes the call, both others raise RankFailed at the group's timeout."""
    assert_told(fell_silent[place], place)
    assert any("Timed out" in text for text in fell_silent[place].values())
