"""The benchmark with failing runs, unwritable files, and settings that the bare loop does not support."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bench_rows import epoch, record, row
from programs import command

from train.bench.__main__ import main, write_file
from train.bench.overhead import check_settings, measure_overhead
from train.bench.parts import format_parts
from train.bench.runs import run_case
from train.engine import train_epoch
from train.errors import UserError
from train.launch import RankContext
from train.settings import Settings

if TYPE_CHECKING:
    from train.job import Job
    from train.recorders.logbook import Logbook
    from train.schedule import Position


def fake_runs(folder: Path, *codes: int) -> list[list[str]]:
    """Command lines that record 10 steps, or end with a code and a line; the bench adds the folder to write to."""
    lines = [json.dumps(line) for line in (record("start"), epoch(1, 9.0), epoch(2, 4.0))]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    good = (
        "import pathlib, sys; run = pathlib.Path(sys.argv[2]) / 'ddp'; run.mkdir(); "
        f"(run / 'metrics.jsonl').write_text(pathlib.Path({str(folder / 'metrics.jsonl')!r}).read_text())"
    )
    bad = "import sys; sys.exit(sys.stderr.write('run.py: error: no\\n') and {code})"
    return [[sys.executable, "-c", bad.format(code=code) if code else good] for code in codes]


def test_a_measured_case_is_not_refused(tmp_path: Path) -> None:
    """A case that is refused at first is no failure; one that dies in its second round is, and keeps its first run."""
    refused, dies = row("ddp"), row("zero")
    for turn, words in enumerate(fake_runs(tmp_path, 0, 2)):
        (tmp_path / f"logs{turn}").mkdir()
        run_case(dies, words, tmp_path / f"logs{turn}", 1, 60)
    run_case(refused, fake_runs(tmp_path, 2)[0], tmp_path / "logs0", 1, 60)
    assert (refused.refused, refused.problem, refused.timings) == (True, "no", [])
    assert (dies.refused, dies.problem, len(dies.timings)) == (False, "no", 1)


@pytest.mark.slow
def test_processes_in_sessions_of_their_own_are_ended(tmp_path: Path) -> None:
    """As torchrun's are: after --timeout they are gone too, and nobody waits for them."""
    inner = "import os, pathlib, time; pathlib.Path(r'{}').write_text(str(os.getpid())); time.sleep(300)".format(
        tmp_path / "pid"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    case = row("ddp")
    run_case(case, [sys.executable, "-c", outer], tmp_path, 1, 10)
    assert case.problem == "not finished after 10 s"
    assert not command(int((tmp_path / "pid").read_text()))


def test_a_table_that_cannot_be_written_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name was taken by a folder meanwhile: the text goes elsewhere, and one line says where."""
    (tmp_path / "t.json").mkdir()
    assert not write_file(tmp_path / "t.json", "all of it")
    (line,) = capsys.readouterr().err.splitlines()
    found = re.search(r"cannot write .*t\.json: .* (\S+)$", line)
    assert found
    kept = Path(found[1])
    assert kept.read_text() == "all of it"
    kept.unlink()
    assert main(["-o", str(tmp_path / "t.json")]) == 2
    assert "t.json: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"accumulate": 2}, "not with --accumulate"),
        ({"batch_size": 65}, "--batch-size 65 "),
    ],
    ids=str,
)
def test_overhead_refuses_unsupported_settings(changes: dict[str, Any], says: str) -> None:
    """Refused is what the bare loop does not do, and shares that are not even."""
    check_settings(Settings(), RankContext(world_size=2))
    with pytest.raises(UserError, match=says):
        check_settings(Settings(**changes), RankContext(world_size=2))


def test_every_timed_epoch_of_the_trainer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rounds than --epochs there is still work in each: all epochs make their steps."""
    made: list[int] = []

    def counting(job: Job, position: Position, logbook: Logbook) -> None:
        before = position.step
        train_epoch(job, position, logbook)
        made.append(position.step - before)

    monkeypatch.setattr("train.bench.overhead.train_epoch", counting)
    settings = Settings(width=2, limit_train=64, batch_size=32, epochs=1, max_steps=1)
    assert len(measure_overhead(settings, RankContext(), 3)["ratios"]) == 3
    assert made == [2, 2, 2, 2]


def test_parts_are_compared_with_one_process() -> None:
    """Each part has its speed-up over one process with the global batch; DDP also has the time not hidden."""
    found = {"whole": 1.0, "share": 0.5, "together": 0.6, "ddp": 0.8, "reduce": 0.1, "gradient_bytes": 44_700_000}
    lines = format_parts(found, 2).splitlines()
    assert [line.split(" ms per step ")[1].split()[0] for line in lines[:4]] == ["1.00", "2.00", "1.67", "1.25"]
    assert "25.0 % of the step waits for the all-reduce" in lines[3]
    assert lines[4].startswith("all-reduce of 44.7 MB")
