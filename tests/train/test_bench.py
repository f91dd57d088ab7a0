"""`python -m train.bench`: its cases, timings and tables."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from bench_rows import MACHINE, epoch, record, row
from programs import children
from started import ROOT, alive, wait_for

from train.bench.__main__ import main
from train.bench.cases import CASES, select_cases
from train.bench.runs import Timing, read_timing
from train.bench.table import as_json, as_markdown, as_text, compute_speed_up
from train.errors import UserError
from train.options import build_parser

if TYPE_CHECKING:
    from pathlib import Path

    from programs import Programs

BENCH = (sys.executable, "-m", "train.bench")
TINY = ("--", "--model", "resnet8", "--width", "4", "--data", "digits", "--limit-train", "128", "--epochs", "2")


def test_excludes_the_first_epoch() -> None:
    """The first epoch is excluded as warm-up; accuracy is the last epoch's, and memory is the maximum."""
    records = [record("start"), epoch(1, 99.0), epoch(2, 2.0, memory=7), epoch(3, 4.0, accuracy=0.9), record("end")]
    timing = read_timing(records, began=990.0)
    assert timing == Timing(10.0, (2.0, 4.0), 10, 320, 0.9, 7)
    assert (timing.epoch_time, timing.throughput) == (3.0, 320 / 3)


def test_includes_a_single_epoch() -> None:
    """The only epoch is timed, although it includes the warm-up."""
    assert read_timing([record("start"), epoch(1, 5.0)], began=999.0).epochs == (5.0,)


def test_excludes_an_incomplete_epoch() -> None:
    """An epoch with fewer steps is excluded, unless it is the only epoch after the first."""
    short = {**epoch(3, 2.0), "step": 25, "samples": 160}
    timing = read_timing([record("start"), epoch(1, 99.0), epoch(2, 4.0), short], began=990.0)
    assert (timing.epochs, timing.steps, timing.samples) == ((4.0,), 10, 320)
    timing = read_timing([record("start"), epoch(1, 99.0), {**short, "epoch": 2, "step": 15}], began=990.0)
    assert (timing.epochs, timing.steps, timing.samples) == ((2.0,), 5, 160)


def test_speed_up_is_over_single() -> None:
    """The speed-up is the throughput relative to `single`, or None if `single` was not measured."""
    rows = [row("single", 4.0, 4.0, 9.0), row("ddp", 1.0, 2.0, 3.0)]
    assert [compute_speed_up(r, rows) for r in rows] == [1.0, 2.0]
    assert compute_speed_up(rows[1], [row("single", problem="refused"), rows[1]]) is None


def test_all_formats_have_equal_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Text, Markdown and JSON have the same medians, and report the case that could not run."""
    rows = [row("single", 4.0), row("ddp", 2.0), row("hsdp", problem="it will not")]
    text, markdown = as_text(rows, MACHINE, width=200), as_markdown(rows, MACHINE)
    document = json.loads(as_json(rows, MACHINE))
    (line,) = (line.split() for line in text.splitlines() if line.startswith("ddp"))
    assert line == ["ddp", "spawn", "2", "3.0", "2.00", "200.0", "160.0", "2.00", "50.0", "100"]
    assert f"| {' | '.join(line)} |" in markdown
    assert "hsdp: it will not" in text
    assert "- `hsdp`: it will not" in markdown
    measured = document["cases"][1]
    assert (measured["batch_time_s"], measured["samples_per_second"], measured["speed_up"]) == (0.2, 160.0, 2.0)
    assert document["cases"][2]["problem"] == "it will not"
    assert document["machine"] == MACHINE


def test_no_number_is_cut_at_80_columns() -> None:
    """A narrow terminal folds names and keeps numbers whole."""
    text = as_text([row("single", 4.0), row("ddp-comm-hook-powersgd", 123.456)], MACHINE, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "12345.6" in text
    assert "400.0" in text
    assert "..." not in text.replace("\N{HORIZONTAL ELLIPSIS}", "...")


@pytest.mark.parametrize("name", CASES)
def test_run_accepts_the_command_line_of_every_case(name: str) -> None:
    """All options and methods of the cases exist in run.py."""
    command = CASES[name].build_command(2, ["--epochs", "2"])
    args = build_parser().parse_args(command[command.index(next(w for w in command if w.endswith("run.py"))) + 1 :])
    assert args.method == CASES[name].method


def test_single_comes_first() -> None:
    """`single` is always the first case, the table's order is fixed, and an unknown case is an error."""
    assert [case.name for case in select_cases(["zero", "ddp"])] == ["single", "ddp", "zero"]
    with pytest.raises(UserError, match=r"dpp.* single, "):
        select_cases(["dpp"])


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["nonsense"], "unknown case nonsense; "),
        (["--processes", "1"], "--processes 1: "),
        (["--rounds", "0"], "--rounds 0: "),
        (["-o", "table.csv"], "-o table.csv: "),
        (["-o", "nowhere/table.md"], "-o nowhere/table.md: "),
        (["-o", "/proc/table.md"], "-o /proc/table.md: "),
        (["ddp", "--model", "resnet8"], "unrecognized arguments: --model resnet8; "),
        (["--", "--modle", "resnet8"], "unrecognized arguments: --modle resnet8; did you mean --model?"),
    ],
    ids=str,
)
def test_invalid_arguments_are_one_line(words: list[str], start: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid argument causes one line and exit code 2, before a case runs."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.bench: error: {start}")


@pytest.mark.slow
def test_launchers_side_by_side(programs: Programs, tmp_path: Path) -> None:
    """Runs on one process, with --spawn, torchrun and torch.distributed.launch are recorded as JSON and Markdown."""
    names = ["ddp", "ddp-torchrun", "ddp-launch"]
    files = ["-o", tmp_path / "t.json", "-o", tmp_path / "t.md"]
    done = programs.run(*BENCH, *names, "--rounds", 1, *files, *TINY, cwd=ROOT, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    cases = {case["case"]: case for case in json.loads((tmp_path / "t.json").read_text())["cases"]}
    assert list(cases) == ["single", *names]
    assert [case["processes"] for case in cases.values()] == [1, 2, 2, 2]
    assert cases["single"]["speed_up"] == 1
    for case in cases.values():
        (run,) = case["runs"]
        assert (run["steps"], run["samples"], len(run["epoch_times_s"])) == (4, 128, 1)
        assert case["samples_per_second"] == pytest.approx(128 / case["epoch_time_s"])
        assert run["peak_memory_bytes"] > 10**7
    # The launcher has no influence on the result of the training.
    assert len({cases[name]["runs"][0]["test_accuracy"] for name in names}) == 1
    assert (tmp_path / "t.md").read_text().count("\n| ") == 5


@pytest.mark.slow
def test_refusals_are_printed_below_the_table(programs: Programs) -> None:
    """A refused case is a line below the table; if no case was measured, the exit code is 2."""
    done = programs.run(*BENCH, "ddp", "--rounds", 1, *TINY, "--no-buffer-sync", cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "single: --no-buffer-sync: " in done.stdout
    assert re.search(r"^ddp +spawn +2 ", done.stdout, re.MULTILINE)
    words = ("ddp-torchrun", "--rounds", 1, *TINY, "--fault", "variance-only-bn")
    done = programs.run(*BENCH, *words, cwd=ROOT, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "ddp-torchrun: --fault variance-only-bn: " in done.stdout


@pytest.mark.slow
def test_kills_a_case_after_its_timeout(programs: Programs) -> None:
    """After --timeout, all processes of the case have ended, the table reports the timeout, and the exit code is 1."""
    process = programs.start(*BENCH, "ddp", "--rounds", 1, "--timeout", 0.5, *TINY, cwd=ROOT)
    done = programs.finish(process, 60)
    assert done.returncode == 1
    assert "ddp: not finished after 0.5 s" in done.stdout
    assert not alive(process)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_signals_have_their_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """SIGINT and SIGTERM end the benchmark with the table so far and the exit code of the signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("train.bench.__main__.run_rounds", lambda *_: (signal.raise_signal(number), time.sleep(5)))
    try:
        assert main(["ddp"]) == code
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "samples" in captured.out


@pytest.mark.slow
def test_a_signal_prints_the_table_so_far(programs: Programs) -> None:
    """A terminated benchmark prints the table so far, and leaves no process."""
    process = programs.start(*BENCH, "ddp", "--rounds", 99, *TINY, cwd=ROOT)
    wait_for(lambda: children(process.pid), 30)
    (first,) = children(process.pid)
    wait_for(lambda: children(process.pid) not in ([], [first]), 60)  # `single` was measured, `ddp` is running
    time.sleep(1)
    running = children(process.pid)
    process.terminate()
    done = programs.finish(process, 30)
    assert done.returncode == 143
    assert "interrupted" in done.stderr
    assert re.search(r"^single +python +1 ", done.stdout, re.MULTILINE)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in running), 10)


@pytest.mark.slow
def test_measures_parts_and_overhead(programs: Programs) -> None:
    """--parts measures the parts of a ddp step, and --overhead compares the trainer with a bare loop."""
    done = programs.run(*BENCH, "--parts", "--rounds", 1, *TINY, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()][3] == "2 processes, DDP"
    done = programs.run(*BENCH, "--overhead", "--rounds", 2, *TINY, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["single", "ddp"]
    assert done.stdout.count("2 pairs of epochs of 4 steps") == 2
