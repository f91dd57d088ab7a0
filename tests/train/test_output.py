"""Console output: the bar, messages about unusual settings, and a stdout that fails."""

from __future__ import annotations

import sys
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from support.programs import TRAIN

from train.launch import RankContext
from train.recorders.base import Start
from train.recorders.progress import Output, describe_surprises, make_progress
from train.schedule import Plan
from train.settings import Settings

if TYPE_CHECKING:
    from support.programs import Programs

PLAN = Plan("ddp", epochs=10, steps=440, steps_per_epoch=44)


def make_start(shares: tuple[int, ...], settings: Settings | None = None, peak: float = 0.1) -> Start:
    """Return the record of a run's start."""
    return Start(PLAN, settings or Settings(), RankContext(), shares, 1234, 1437, peak)


class Full(StringIO):
    """A file on a full disk."""

    def flush(self) -> None:
        """Raise the error of a full disk."""
        raise OSError(28, "No space left on device")


def test_output_keeps_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failed write, Output keeps the error and writes nothing more; a closed pipe is raised."""
    output = Output()
    monkeypatch.setattr(sys, "stdout", Full())
    for _ in range(2):
        assert output.write("text\n") == 5
    assert output.lost is not None
    assert output.lost.strerror == "No space left on device"
    assert sys.stdout.getvalue() == "text\n"  # type: ignore[attr-defined]

    class Closed(StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        Output().write("text\n")


def test_bar_draws_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar and text written beside it reach the terminal, although rich replaces sys.stdout."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with make_progress("bar", is_main=True) as progress:
        progress.start(make_start((11, 11, 10)))
        assert progress.console is not None
        assert progress.console.is_terminal
        sys.stdout.write("beside\n")
    out = capsys.readouterr().out
    assert "beside" in out
    assert "32 samples a step over 3 ranks: 11, 11, 10" in out


def test_describe_surprises() -> None:
    """Uneven shares are listed or, for many ranks, counted; a scaled rate and --compile are described too."""
    assert describe_surprises(make_start((16, 16))) == []
    assert describe_surprises(make_start((11, 11, 10))) == ["32 samples a step over 3 ranks: 11, 11, 10"]
    text = "32 samples a step over 10 ranks: 4 on each of the first 2 ranks, 3 on each other rank"
    assert describe_surprises(make_start((4,) * 2 + (3,) * 8)) == [text]
    scaled = make_start((16, 16), Settings(lr_scale="linear"), 0.2)
    assert describe_surprises(scaled) == ["learning rate 0.2: 0.1 x 2 (--lr-scale linear)"]
    assert describe_surprises(make_start((16, 16), Settings(compile=True)))[0].startswith("--compile: the first step")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("--spawn", 2)], ids=["single", "spawn"])
def test_a_full_stdout_does_not_end_the_run(programs: Programs, ranks: tuple[object, ...]) -> None:
    """With stdout on a full disk, the run saves its checkpoints, then ends with one line and exit code 2."""
    full = ("bash", "-c", '"$@" > /dev/full', "bash")
    run = programs.run(*full, *TRAIN, *ranks, "--width", 4, "--max-steps", 3, "--save-per-rank")
    assert run.returncode == 2
    reason = "cannot write to stdout: No space left on device; the training itself has come to its end"
    assert run.stderr == f"run.py: error: {reason}\n"
    assert len(list((programs.folder / "ckpts").glob("*.pth"))) == (2 if ranks else 1)
