"""`python -m train.bench`: its cases, timings and tables."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.bench_rows import MACHINE, epoch, record, row
from support.listings import index_by, list_fields, list_names, list_starts, measure_width
from support.namespaces import two_hosts
from support.programs import children
from support.started import ROOT, alive, wait_for

from benchmarks.trainer import main as measure_trainer
from train.bench.__main__ import main
from train.bench.cases import CASES, LAUNCHERS, RUN, select_cases
from train.bench.runs import Timing, read_timing
from train.bench.table import as_json, as_markdown, as_text, compute_speed_up
from train.errors import UserError
from train.methods import METHODS
from train.options import build_parser

if TYPE_CHECKING:
    from support.programs import Programs

BENCH = (sys.executable, "-m", "train.bench")
MEASURE = (sys.executable, "-m", "benchmarks.trainer")
TINY = ("--", "--model", "resnet8", "--width", "4", "--data", "digits", "--limit-train", "128", "--epochs", "2")


def list_namespaces() -> set[str]:
    """List the network namespaces that the benchmark has created."""
    return set(list_names(Path("/run/netns").glob("train-*")))


def test_excludes_the_first_epoch() -> None:
    """The first epoch is excluded as warm-up; accuracy is the last epoch's, and memory is the maximum."""
    records = [record("start"), epoch(1, 99.0), epoch(2, 2.0, memory=7), epoch(3, 4.0, accuracy=0.9), record("end")]
    timing = read_timing(records, began=990.0)
    assert timing == Timing(10.0, (2.0, 4.0), 10, 320, 0.9, 7, gpu_utilization=(92.5, 10.0))
    assert (timing.epoch_time_s, timing.samples_per_second) == (3.0, 320 / 3)


def test_includes_a_single_epoch() -> None:
    """The only epoch is timed, although it includes the warm-up."""
    assert read_timing([record("start"), epoch(1, 5.0)], began=999.0).epoch_times_s == (5.0,)


def test_excludes_an_incomplete_epoch() -> None:
    """An epoch with fewer steps is excluded, unless it is the only epoch after the first."""
    short = {**epoch(3, 2.0), "step": 25, "samples": 160}
    timing = read_timing([record("start"), epoch(1, 99.0), epoch(2, 4.0), short], began=990.0)
    assert (timing.epoch_times_s, timing.steps, timing.samples) == ((4.0,), 10, 320)
    timing = read_timing([record("start"), epoch(1, 99.0), {**short, "epoch": 2, "step": 15}], began=990.0)
    assert (timing.epoch_times_s, timing.steps, timing.samples) == ((2.0,), 5, 160)


def test_speed_up_is_over_single_of_the_same_round() -> None:
    """The speed-up is the median of the rounds' throughputs relative to `single`, or None without `single`."""
    rows = [row("single", 4.0, 4.0, 9.0), row("ddp", 1.0, 2.0, 3.0)]  # ratios 4, 2, 3; the ratio of medians is 2
    assert [compute_speed_up(r, rows) for r in rows] == [1.0, 3.0]
    assert compute_speed_up(rows[1], [row("single", problem="refused"), rows[1]]) is None
    second = replace(rows[0], case=CASES["single-moe"], model="gpt-tiny-moe")
    assert compute_speed_up(replace(rows[1], model="gpt-tiny-moe"), [rows[0]]) is None
    assert compute_speed_up(replace(rows[1], model="gpt-tiny-moe"), [rows[0], second]) == 3.0


def test_all_formats_have_equal_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Text, Markdown and JSON have the same medians, and report the case that could not run."""
    rows = [row("single", 4.0), row("ddp", 2.0, gpus=(97.0, 96.0)), row("hsdp", problem="it will not")]
    text, markdown = as_text(rows, MACHINE, width=200), as_markdown(rows, MACHINE)
    document = json.loads(as_json(rows, MACHINE))
    (line,) = (line.split() for line in text.splitlines() if line.startswith("ddp"))
    start = ["ddp", "spawn", "resnet8", "digits", "2", "3.0", "9.0", "2.00", "10", "200.0"]
    assert line == [*start, "160.0", "2.00", "50.0", "100", "97/96"]
    assert f"| {' | '.join(line)} |" in markdown
    assert "hsdp: it will not" in text
    assert "- `hsdp`: it will not" in markdown
    measured = document["cases"][1]
    assert (measured["batch_time_s"], measured["samples_per_second"], measured["speed_up"]) == (0.2, 160.0, 2.0)
    assert document["cases"][2]["problem"] == "it will not"
    assert (measured["model"], measured["data"], measured["total_s"]) == ("resnet8", "digits", 9.0)
    assert measured["runs"][0]["gpu_utilization"] == [97.0, 96.0]
    assert document["machine"] == MACHINE


def test_a_narrow_table_has_parts() -> None:
    """On a narrow terminal the table has parts with whole names and numbers; 200 columns need a single part."""
    rows = [row("single", 4.0), row("ddp-comm-hook-powersgd", 123.456, gpus=(100.0,) * 8)]
    parts = [part.splitlines() for part in as_text(rows, MACHINE, width=80).split("\n\n")[1:-1]]
    assert len(parts) == 3
    assert measure_width(chain.from_iterable(parts)) <= 80
    assert all(list_starts(part) == ["case", "single", "ddp-comm-hook-powersgd"] for part in parts)
    (wide,) = (part.splitlines() for part in as_text(rows, MACHINE, width=200).split("\n\n")[1:-1])
    cells = [part[2].split()[1:] for part in parts]
    assert list(chain.from_iterable(cells)) == wide[2].split()[1:]


@pytest.mark.parametrize("name", CASES)
def test_run_accepts_the_command_lines_of_every_case(name: str) -> None:
    """All options and methods of the cases exist in run.py, and every rank is started once."""
    case = CASES[name]
    commands = case.build_commands(2, ["--epochs", "2"], Path("/tmp"))
    parsed = [build_parser().parse_args(command[command.index(str(RUN)) + 1 :]) for command in commands]
    assert set(list_fields(parsed, "method")) == {case.method}
    if "{rank}" in LAUNCHERS[case.launcher]:
        assert list_fields(parsed, "rank") == list(range(case.count_processes(2)))
    else:
        assert len(parsed) == 1


def test_single_comes_first() -> None:
    """`single` is always the first case, the table's order is fixed, lists are expanded, and an unknown case fails."""
    assert list_names(select_cases(["zero", "ddp"])) == ["single", "ddp", "zero"]
    assert list_names(select_cases(["all"])) == list(CASES)
    methods = select_cases(["methods"])
    assert set(list_fields(methods, "method")) == set(METHODS)
    assert all(case.options in ((), ("--model", "gpt-tiny-moe")) for case in methods)
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
@pytest.mark.timeout(300)
def test_launchers_side_by_side(programs: Programs, tmp_path: Path) -> None:
    """Runs on one process, with --spawn, torchrun, torch.distributed.launch and by hand are recorded in files."""
    names = ["ddp", "ddp-torchrun", "ddp-launch", "ddp-file"]
    files = ["-o", tmp_path / "t.json", "-o", tmp_path / "t.md"]
    done = programs.run(*BENCH, *names, "--rounds", 1, *files, *TINY, cwd=ROOT, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    cases = index_by(json.loads((tmp_path / "t.json").read_text())["cases"], "case")
    assert list(cases) == ["single", *names]
    assert list_fields(cases.values(), "processes") == [1, 2, 2, 2, 2]
    assert cases["single"]["speed_up"] == 1
    for case in cases.values():
        (run,) = case["runs"]
        assert (run["steps"], run["samples"], len(run["epoch_times_s"])) == (4, 128, 1)
        assert case["samples_per_second"] == pytest.approx(128 / case["epoch_time_s"])
        assert run["peak_memory_bytes"] > 10**7
        assert run["total_s"] > run["start_s"] + case["epoch_time_s"]
        assert (case["model"], case["data"], run["gpu_utilization"]) == ("resnet8", "digits", [])
    # The launcher has no influence on the result of the training.
    assert len({cases[name]["runs"][0]["test_accuracy"] for name in names}) == 1
    assert (tmp_path / "t.md").read_text().count("\n| ") == 6


@pytest.mark.slow
def test_two_nodes(programs: Programs) -> None:
    """Four processes on two nodes are measured, and the network namespaces are removed afterwards."""
    with two_hosts():  # skips the test without the rights
        before = list_namespaces()
    done = programs.run(
        *MEASURE, "nodes", "--rounds", 1, *TINY,
        "--gpus", "none", cwd=ROOT, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    measured = re.findall(r"^(\S+) +(?:python|torchrun|file|tcp) +resnet8 +digits +(\d)", done.stdout, re.MULTILINE)
    assert measured == [
        ("single", "1"), ("ddp-nodes", "2"), ("ddp-nodes-file", "2"), ("ddp-nodes-tcp", "2"), ("ddp-nodes-4", "4")
    ]  # fmt: skip
    assert not list_namespaces() - before


def test_nodes_without_rights_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the program `ip`, nothing is run, and the exit code is 2."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert measure_trainer(["nodes", "--", "--gpus", "none"]) == 2
    assert "there is no program ip" in capsys.readouterr().err


@pytest.mark.slow
def test_refusals_are_printed_below_the_table(programs: Programs) -> None:
    """A refused case is a line below the table; if no case was measured, the exit code is 2."""
    done = programs.run(*BENCH, "ddp", "--rounds", 1, *TINY, "--no-buffer-sync", cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "single: --no-buffer-sync: " in done.stdout
    assert re.search(r"^ddp +spawn +resnet8 +digits +2 ", done.stdout, re.MULTILINE)
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
        for known_values, handler in before.items():
            signal.signal(known_values, handler)
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "samples" in captured.out


@pytest.mark.slow
def test_a_signal_prints_the_table_so_far(programs: Programs) -> None:
    """A terminated benchmark prints the table so far, and leaves no process."""
    process = programs.start(*BENCH, "ddp", "--rounds", 99, *TINY, cwd=ROOT)
    wait_for(children, process.pid, timeout=30)
    (first,) = children(process.pid)
    wait_for(lambda: children(process.pid) not in ([], [first]), timeout=60)  # `single` was measured, `ddp` is running
    time.sleep(1)
    running = children(process.pid)
    process.terminate()
    done = programs.finish(process, 30)
    assert done.returncode == 143
    assert "interrupted" in done.stderr
    assert re.search(r"^single +python +resnet8 +digits +1 ", done.stdout, re.MULTILINE)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in running), timeout=10)


@pytest.mark.slow
def test_measures_parts_and_overhead(programs: Programs) -> None:
    """`parts` measures the parts of a ddp step, and `overhead` compares the trainer with a bare loop."""
    done = programs.run(*MEASURE, "parts", "--rounds", 1, *TINY, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert list_starts(done.stdout.splitlines(), "  ")[3] == "2 processes, DDP"
    done = programs.run(*MEASURE, "overhead", "--rounds", 2, *TINY, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert list_starts(done.stdout.splitlines(), ":") == ["single", "ddp"]
    assert done.stdout.count("2 pairs of epochs of 4 steps") == 2
