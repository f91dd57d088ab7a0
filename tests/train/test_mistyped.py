"""Names that are misspelt, and numbers that no machine could take, are told in one line."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import RUN
from started import ROOT

from train.run import main

if TYPE_CHECKING:
    from programs import Programs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--warmup-epochs 1e308", "--warmup-epochs: the warm-up takes inf steps and the run has 440: shorten it"),
        ("--workers 100000", "--workers 100000: needs 0 to 1024"),
        ("--lr 1e300", "--lr 1e+300: the learning rate would be 1e+300, more than float32 holds"),
        ("--weight-decay 1e300", "--weight-decay 1e+300: needs 0 or a positive number up to 3.4e+38"),
        ("--width 99999999999999999999", "--width 99999999999999999999: needs 65536 or less"),
        ("--accumulate 33", "--batch-size 32 (global) leaves some of 1 rank x 33 micro-batches empty; use 33 or more"),
        ("--modle resnet8", "unrecognized arguments: --modle resnet8; did you mean --model?"),
        (
            "--spawn 2 --join --batch-size 31",
            "--join --batch-size 31: every rank's batches are of one size; use a multiple of 2",
        ),
    ],
)
def test_numbers_out_of_reach(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    """What would overflow, or stop the machine, is refused before anything is built, with what is allowed."""
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"run.py: error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("--model resnet9", "resnet8"),
        ("--data minst", "mnist"),
        ("--data cifar", "cifar10"),
        ("--fault bitflip-weight", "bit-flip-weight"),
        ("--method fsdpp", "fsdp"),
    ],
)
def test_misspelt_name_lists_the_known(capsys: pytest.CaptureFixture[str], arguments: str, meant: str) -> None:
    """A misspelt name is answered with the names there are, and with the one that was probably meant."""
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"invalid choice: '{arguments.split()[1]}' (choose from" in error
    assert meant in error.partition("you mean")[2]


def test_too_large_a_model_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for which there is no memory is refused in one line; other errors of torch are not hidden."""

    def fail(message: str) -> None:
        def start(*_: object, **__: object) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr("torch.nn.init.kaiming_normal_", start)

    fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate 36 bytes")
    assert main(["--limit-train", "64"]) == 2
    assert capsys.readouterr().err == "run.py: error: --model resnet8: not enough memory on this machine\n"
    fail("something else")
    with pytest.raises(RuntimeError, match="something else"):
        main(["--limit-train", "64"])


def test_a_list_on_a_full_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that cannot be printed is one line and exit code 2."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 - to close it fails, too
    monkeypatch.setattr("sys.stdout", full)
    assert main(["--list-faults"]) == 2
    assert capsys.readouterr().err == "run.py: error: cannot write to stdout: No space left on device\n"
    with suppress(OSError):
        full.close()


@pytest.mark.parametrize(
    ("program", "speaker"),
    [
        ((RUN,), "run.py: error"),
        (("-m", "train.evaluate", "ckpts"), "evaluate.py"),
        (("-m", "train.bench"), "train.bench: error"),
    ],
)
def test_without_torch_it_says_what_to_install(programs: Programs, program: tuple[object, ...], speaker: str) -> None:
    """Where only syncheck was installed the trainer is one line, not the end of an import."""
    done = programs.run(sys.executable, "-S", *program, PYTHONPATH=str(ROOT))  # -S: without site-packages
    message = f"{speaker}: torch is not installed; in this clone: pip install -e '.[train]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
