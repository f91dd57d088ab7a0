"""Refused options: incompatible options, misspelled names, and numbers out of range."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.programs import RUN
from support.started import ROOT

from train.run import main

if TYPE_CHECKING:
    from support.programs import Programs


pytestmark = pytest.mark.usefixtures("no_launcher")
NEXT = "; add --spawn 2, or start with torchrun"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 0", "--batch-size 0: must be at least 1"),
        ("--batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("--batch-size 1", "--batch-size 1 (global) gives BatchNorm a single sample; use 2 or more"),
        ("--batch-size 2000", "--batch-size 2000 is more than the 1437 training samples"),
        ("--epochs -1", "--epochs -1: must be at least 1"),
        ("--lr inf", "--lr inf: must be a positive number"),
        ("--momentum 1", "--momentum 1.0: must be at least 0 and below 1"),
        ("--weight-decay -1", "--weight-decay -1.0: must be from 0 to 3.4e+38"),
        ("--seed -1", "--seed -1: must be from 0 to 2**63 - 1"),
        ("--timeout nan", "--timeout nan: needs seconds, above 0 and up to 604800"),
        ("--warmup-steps -1", "--warmup-steps -1: must be at least 0"),
        ("--warmup-epochs nan", "--warmup-epochs nan: must be at least 0 and finite"),
        ("--warmup-steps 500", "--warmup-steps: the warm-up takes 500 steps, but the run has 440; shorten it"),
        ("--workers -1", "--workers -1: must be from 0 to 1024"),
        ("--eval-every 0", "--eval-every 0: must be at least 1"),
        ("--log-interval 0", "--log-interval 0: must be at least 1"),
        ("--tensorboard", "--tensorboard: requires --log-dir DIR, the folder to write to"),
        (
            "--log-dir /dev/null/logs",
            "cannot write the log /dev/null/logs/single/rank_0.log: Not a directory",
        ),
        (
            "--data-dir nowhere",
            (
                "--data-dir nowhere: not an existing folder; pass the folder that contains digits.npz, or omit "
                "--data-dir for the file of this clone"
            ),
        ),
        (
            "--method ddp",
            "--method ddp needs a launcher: start with 'torchrun --nproc-per-node 2 train/run.py', or add --spawn 2",
        ),
        ("--method single --spawn 2", "--method single is one process, the launcher started 2"),
        ("--spawn 2 --rank 0", "--spawn and --rank: --spawn sets it for each rank; drop one of the options"),
        (
            "--spawn 2 --port 29500",
            "--spawn and --port: an address needs both --ip and --port; add the other or drop it",
        ),
        ("--spawn 2 --ip ::1 --port 0", "port 0: must be 1 to 65535; see --port and MASTER_PORT"),
        ("--batch_size 0", "--batch-size 0: must be at least 1"),
        ("--batch_size=0", "--batch-size 0: must be at least 1"),
        ("--no_such_option 3", "unrecognized arguments: --no_such_option 3"),
        ("--spawn 2 --batch-size 1", "--batch-size 1 (global) leaves some of 2 ranks empty; use 2 or more"),
        (
            "--rank 0",
            (
                "--rank without --world-size: give each process --rank R --world-size N and "
                "--init-method file:///PATH, or --ip ADDRESS --port PORT"
            ),
        ),
        ("--rank 3 --world-size 2 --ip ::1 --port 1", "--rank 3: must be 0 to 1 with --world-size 2"),
        ("--backend gloo", "--backend gloo: --method single has no process group"),
        ("--gpus x", "--gpus x: must be comma-separated numbers like 0,1, or none for the CPU"),
        (
            "--sync-bn",
            "--sync-bn: not with --method single: a single replica has nothing to synchronize" + NEXT,
        ),
        (
            "--find-unused",
            "--find-unused: not with --method single: a single process reduces no gradients" + NEXT,
        ),
        ("--replicas 2", "--replicas: only for --method dp or hsdp or hsdp_tp, not for single"),
        (
            "--monitor 10",
            "--monitor: not with --method single: a single process has no replica to compare with" + NEXT,
        ),
        (
            "--method dp --monitor 10",
            "--monitor: not with --method dp: a single process has no replica to compare with",
        ),
        ("--spawn 2 --monitor -1", "--monitor -1: must be a number of steps, or 0 for no checks"),
        (
            "--spawn 2 --on-desync raise",
            "--on-desync raise: requires --monitor N, the number of steps between checks",
        ),
        ("--save-per-rank --out /dev/null/ckpts", "cannot write to --out /dev/null/ckpts: Not a directory"),
        ("--epoch 3", "unrecognized arguments: --epoch 3; did you mean --epochs?"),
        ("--warmup-epochs 1e308", "--warmup-epochs: the warm-up takes inf steps, but the run has 440; shorten it"),
        ("--workers 100000", "--workers 100000: must be from 0 to 1024"),
        ("--lr 1e300", "--lr 1e+300: the learning rate would be 1e+300, which exceeds float32"),
        ("--weight-decay 1e300", "--weight-decay 1e+300: must be from 0 to 3.4e+38"),
        ("--width 99999999999999999999", "--width 99999999999999999999: must be at most 65536"),
        ("--accumulate 33", "--batch-size 32 (global) leaves some of 1 rank x 33 micro-batches empty; use 33 or more"),
        ("--modle resnet8", "unrecognized arguments: --modle resnet8; did you mean --model?"),
        ("--gpu 0", "unrecognized arguments: --gpu 0; did you mean --gpus 0?"),
        ("--gpu_devices 0 1", "unrecognized arguments: --gpu_devices 0 1; did you mean --gpus 0,1?"),
        ("--grad_accu_steps=4", "unrecognized arguments: --grad_accu_steps=4; did you mean --accumulate?"),
        (
            "-g 1 -td logs",
            "unrecognized arguments: -g 1 -td logs; did you mean --spawn N for -g, --out for -td?",
        ),
        (
            "--spawn 2 --join --batch-size 31",
            "--join --batch-size 31: must be a multiple of 2, because all batches have one size",
        ),
    ],
)
def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    """A usage error prints exactly one line on stderr and exits with 2."""
    assert main(arguments.split()).code == 2
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
def test_misspelled_name_lists_the_choices(capsys: pytest.CaptureFixture[str], arguments: str, meant: str) -> None:
    """A misspelled name is refused in one line with the valid choices and the closest match."""
    assert main(arguments.split()).code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"invalid choice: '{arguments.split()[1]}' (choose from" in error
    assert meant in error.partition("you mean")[2]


def test_out_of_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model too large for the memory is refused in one line; other RuntimeErrors propagate."""

    def fail(message: str) -> None:
        def start(*_: object, **__: object) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr("torch.nn.init.kaiming_normal_", start)

    fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate 36 bytes")
    assert main(["--limit-train", "64"]).code == 2
    assert capsys.readouterr().err == "run.py: error: --model resnet8: not enough memory on this machine\n"
    fail("something else")
    with pytest.raises(RuntimeError, match="something else"):
        main(["--limit-train", "64"])


def test_a_list_on_a_full_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a list cannot be printed, one line reports the error, and the exit code is 2."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it also fails
    monkeypatch.setattr("sys.stdout", full)
    assert main(["--list-faults"]).code == 2
    assert capsys.readouterr().err == "run.py: error: cannot write to stdout: No space left on device\n"
    with suppress(OSError):
        full.close()


@pytest.mark.parametrize(
    ("program", "prefix"),
    [
        ((RUN,), "run.py: error"),
        (("-m", "train.evaluate", "ckpts"), "evaluate.py"),
        (("-m", "train.bench"), "train.bench: error"),
    ],
)
def test_missing_torch_is_one_line(programs: Programs, program: tuple[object, ...], prefix: str) -> None:
    """Without torch, each program exits with one line that names the install command."""
    done = programs.run(sys.executable, "-S", *program, PYTHONPATH=str(ROOT))  # -S: without site-packages
    message = f"{prefix}: torch is not installed; in this clone: pip install -e '.[train]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
