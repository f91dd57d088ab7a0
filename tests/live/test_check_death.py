"""If a rank exits, stops or stays away during a check, every other rank raises and none waits forever."""

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
from support.listings import find_texts
from support.mortal import PLACES, SHORT
from support.started import CLONE

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parents[1] / "support" / "mortal.py"
ENDING = [place for place, (_, _, timeout) in PLACES.items() if timeout != SHORT]
SILENT = [place for place in PLACES if place not in ENDING]
Told = dict[str, dict[str, str]]


def told(places: list[str], folder: Path) -> Iterator[Told]:
    """Run the program in its own session and kill the session after the tests."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *places],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": CLONE},
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
    """The outcomes of the remaining ranks after one of three ranks was killed."""
    yield from told(ENDING, tmp_path_factory.mktemp("ended"))


@pytest.fixture(scope="module")
def fell_silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The outcomes of the remaining ranks after one of three ranks stopped responding."""
    yield from told(SILENT, tmp_path_factory.mktemp("silent"))


def assert_raised(found: dict[str, str], place: str) -> None:
    """Check that both remaining ranks raised one clear line each."""
    remaining = [rank for rank in range(3) if rank != PLACES[place][0]]
    assert list(found) == [str(rank) for rank in remaining]
    for rank, text in found.items():
        repair = "resync failed during the repair: " if place == "during a repair" else ""
        assert text.startswith(f"RankFailed: {repair}rank {rank} cannot communicate: ")
        assert ("Some tensors may be copied already; calling it again with source=0 is safe" in text) == bool(repair)
        assert "another rank has exited" in text
        assert "\n" not in text
        assert ".cc" not in text  # no source location of torch


@pytest.mark.slow
@pytest.mark.parametrize("place", ENDING)
def test_peers_of_a_killed_rank_raise(ended: Told, place: str) -> None:
    """If a rank is killed at any point of a check or a repair, both other ranks raise a one-line RankFailed."""
    assert_raised(ended[place], place)


@pytest.mark.slow
@pytest.mark.parametrize("place", SILENT)
def test_peers_of_an_unresponsive_rank_raise(fell_silent: Told, place: str) -> None:
    """If a rank stops during a check or never calls it, both other ranks raise RankFailed at the group's timeout."""
    assert_raised(fell_silent[place], place)
    assert find_texts(fell_silent[place].values(), "Timed out")
