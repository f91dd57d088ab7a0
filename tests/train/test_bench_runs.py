"""The benchmark with failing runs, unwritable files, and settings that the bare loop does not support."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.bench_rows import epoch, record, row
from support.programs import command

from benchmarks.trainer import check_settings, format_parts, measure_overhead
from train.bench.__main__ import main, write_file
from train.bench.runs import run_case
from train.engine import train_epoch
from train.errors import UserError
from train.launch import RankContext
from train.settings import Settings

if TYPE_CHECKING:
    from train.engine import Job
    from train.schedule import Position


def fake_runs(folder: Path, *codes: int) -> list[list[str]]:
    """Return one command line per code: 0 records 10 steps, and other codes print an error and exit."""
    lines = [json.dumps(line) for line in (record("start"), epoch(1, 9.0), epoch(2, 4.0))]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    good = (
        "import pathlib, sys; run = pathlib.Path(sys.argv[2]) / 'ddp'; run.mkdir(); "
        f"(run / 'metrics.jsonl').write_text(pathlib.Path({str(folder / 'metrics.jsonl')!r}).read_text())"
    )
    bad = "import sys; sys.exit(sys.stderr.write('run.py: error: no\\n') and {code})"
    return [[sys.executable, "-c", bad.format(code=code) if code else good] for code in codes]


def test_a_measured_case_is_not_refused(tmp_path: Path) -> None:
    """Exit code 2 in the first round is a refusal; in a later round it is a failure, and the first timing is kept."""
    refused, failed = row("ddp"), row("zero")
    for turn, words in enumerate(fake_runs(tmp_path, 0, 2)):
        (tmp_path / f"logs{turn}").mkdir()
        run_case(failed, [words], tmp_path / f"logs{turn}", 1, 60)
    run_case(refused, fake_runs(tmp_path, 2), tmp_path / "logs0", 1, 60)
    assert (refused.refused, refused.problem, refused.timings) == (True, "no", [])
    assert (failed.refused, failed.problem, len(failed.timings)) == (False, "no", 1)


@pytest.mark.slow
def test_timeout_ends_processes_in_other_sessions(tmp_path: Path) -> None:
    """After --timeout, processes in their own session, such as torchrun's, have ended too."""
    inner = "import os, pathlib, time; pathlib.Path(r'{}').write_text(str(os.getpid())); time.sleep(300)".format(
        tmp_path / "pid"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    case = row("ddp")
    run_case(case, [[sys.executable, "-c", outer]], tmp_path, 1, 10)
    assert case.problem == "not finished after 10 s"
    assert not command(int((tmp_path / "pid").read_text()))


def test_an_unwritable_table_is_saved_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the output path has become a folder, the table is saved in another file, and one line names this file."""
    (tmp_path / "t.json").mkdir()
    assert not write_file(tmp_path / "t.json", "all of it")
    (line,) = capsys.readouterr().err.splitlines()
    match = re.search(r"cannot write .*t\.json: .* (\S+)$", line)
    assert match
    retained = Path(match[1])
    assert retained.read_text() == "all of it"
    retained.unlink()
    assert main(["-o", str(tmp_path / "t.json")]) == 2
    assert "t.json: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 2}, "not with --accumulate"),
        ({"batch_size": 65}, "--batch-size 65 "),
    ],
    ids=str,
)
def test_overhead_refuses_unsupported_settings(changes: dict[str, Any], message: str) -> None:
    """`overhead` refuses --accumulate, and a batch size that does not divide evenly over the ranks."""
    check_settings(Settings(), RankContext(world_size=2))
    with pytest.raises(UserError, match=message):
        check_settings(Settings(**changes), RankContext(world_size=2))


def test_every_timed_epoch_of_the_trainer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """All timed epochs train the same number of steps, even if there are more rounds than --epochs."""
    steps: list[int] = []

    def counting(job: Job, position: Position) -> None:
        before = position.step
        train_epoch(job, position)
        steps.append(position.step - before)

    monkeypatch.setattr("benchmarks.trainer.train_epoch", counting)
    settings = Settings(width=2, limit_train=64, batch_size=32, epochs=1, max_steps=1)
    assert "(3 pairs of epochs of 2 steps, " in measure_overhead(settings, RankContext(), 3)
    assert steps == [2, 2, 2, 2]


def test_parts_are_compared_with_one_process() -> None:
    """Each part has its speed-up over one process with the global batch, and DDP has the all-reduce's share of time."""
    timings = {"whole": 1.0, "share": 0.5, "together": 0.6, "ddp": 0.8, "reduce": 0.1}
    lines = format_parts(timings, 44.7, 2).splitlines()
    assert [line.split(" ms per step ")[1].split()[0] for line in lines[:4]] == ["1.00", "2.00", "1.67", "1.25"]
    assert "25.0 % of the step waits for the all-reduce" in lines[3]
    assert lines[4].startswith("all-reduce of 44.7 MB")
