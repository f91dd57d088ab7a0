"""`syncheck watch`: a program that knows nothing of it, with faults, on real ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import support
from support.started import CLONE, Processes, alive, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(support.__file__).with_name("watched_training.py")
RANKS = 3


class Run(NamedTuple):
    """A finished program."""

    code: int
    out: list[str]
    err: str
    folder: Path

    def list_findings(self) -> list[tuple[str, int, list[int], list[str]]]:
        """Return code, reduction, ranks and tensors of each finding of a witness, from the events."""
        events = self.folder / "events.jsonl"
        rows = events.read_text().splitlines() if events.exists() else []
        findings = []
        for event in map(json.loads, rows):
            if event["event"] == "witness":
                findings.append((event["code"], event["step"], event["ranks"], event["names"]))
        return findings


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Run the training with a fault, with or without `syncheck watch` in front of it."""
    processes = Processes(tmp_path)

    def run_training(fault: str, method: str = "fork", *options: str, watched: bool = True) -> Run:
        (tmp_path / "events.jsonl").unlink(missing_ok=True)
        launcher = [sys.executable]
        if method == "torchrun":
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        watch = ["-m", "syncheck", "watch", "--events", "events.jsonl", *options] if watched else []
        # Each spawned process imports torch again.
        ranks = 2 if method in ("spawn", "forkserver") else RANKS
        command = [*launcher, *watch, str(PROGRAM), fault, method, str(ranks), str(free_port())]
        process = processes.start(*command, PYTHONPATH=CLONE)
        out, err = process.communicate(timeout=110)
        assert not alive(process)
        return Run(process.returncode, sorted(out.splitlines()), err, tmp_path)

    yield run_training
    processes.kill()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["torchrun", "spawn", "fork", "forkserver"])
def test_a_run_in_sync_stays_the_same(run: Callable[..., Run], method: str) -> None:
    """A watched run has the weights, output and exit code of the unwatched run, and no finding, for any launcher."""
    unwatched, watched = run("none", method, watched=False), run("none", method)
    assert watched.out == unwatched.out
    assert (watched.code, unwatched.code, watched.list_findings()) == (0, 0, [])
    assert re.search(r"in sync: (18|24) steps watched", watched.err)


@pytest.mark.slow
def test_accumulation_is_no_fault(run: Callable[..., Run]) -> None:
    """Micro-batches within `no_sync` are no steps, and change no weights."""
    unwatched, watched = run("accumulation", watched=False), run("accumulation")
    assert watched.out == unwatched.out
    assert (watched.code, watched.list_findings()) == (0, [])
    assert "in sync: 9 steps watched" in watched.err


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]
HEAD = ["weight", "bias"]
EVERY_RANK = list(range(RANKS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "method", "expected"),
    [
        ("clip", "torchrun", ("SYN410", 5, [1], ALL)),
        ("one tensor", "fork", ("SYN410", 5, [1], ["2.bias"])),
        ("manual", "fork", ("SYN410", 5, [1], ["2.bias"])),
        ("skip", "fork", ("SYN214", 5, [1], [])),
        ("overflow", "fork", ("SYN216", 5, [1], [])),
        ("lr", "fork", ("SYN107", 1, [1], [])),
        ("head", "fork", ("SYN212", 1, EVERY_RANK, HEAD)),
        ("same-batch", "fork", ("SYN401", 1, EVERY_RANK, [])),
        ("overlap", "fork", ("SYN402", 3, EVERY_RANK, [])),
        ("no-set-epoch", "fork", ("SYN403", 8, EVERY_RANK, [])),
        ("rng", "fork", ("SYN404", 1, EVERY_RANK, [])),
    ],
)
def test_faults_are_named_at_their_step(
    run: Callable[..., Run], fault: str, method: str, expected: tuple[str, int, list[int], list[str]]
) -> None:
    """Each fault is named on its ranks and at its reduction, before the parameters differ; the run goes on."""
    watched = run(fault, method)
    assert watched.code == 0
    assert watched.list_findings()[0] == expected


@pytest.mark.slow
def test_watching_a_fault_changes_nothing(run: Callable[..., Run]) -> None:
    """A run with a fault, which the judge looks into, has the weights of the unwatched run."""
    assert run("clip").out == run("clip", watched=False).out


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["clip", "skip", "lr"])
def test_raise_ends_all_ranks_before_the_step(run: Callable[..., Run], fault: str) -> None:
    """With `--on-desync raise`, every rank raises, and none ends its training."""
    watched = run(fault, "fork", "--on-desync", "raise", "--every", "0")
    assert watched.err.count("OutOfSync: step ") == RANKS
    assert (watched.code, watched.out) == (1, [])


@pytest.mark.slow
def test_a_comparison_that_raises_is_in_the_summary(run: Callable[..., Run]) -> None:
    """Without witnesses, the comparison after the fault raises on all ranks, and the last line has its verdict."""
    watched = run("clip", "fork", "--on-desync", "raise", "--witnesses", "none", "--every", "4")
    assert watched.err.count("OutOfSync: step 8") == RANKS
    assert re.search(r"syncheck: OUT OF SYNC .*: SYN2", watched.err)
    assert "syncheck: in sync: " not in watched.err


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "is_repaired"), [(3, True), (2, False)])
def test_resync_repairs_or_says_why_not(run: Callable[..., Run], ranks: int, is_repaired: bool) -> None:
    """Of three ranks, the majority repairs the third one; of two, the run goes on watched, and one line says why."""
    watched = run("clip", "fork" if ranks == RANKS else "forkserver", "--on-desync", "resync", "--every", "4")
    ends = {line.partition("with ")[2] for line in watched.out}
    assert (watched.code, len(watched.out)) == (0, ranks)
    assert (len(ends) == 1) is is_repaired
    assert ("no majority" in watched.err) is not is_repaired
    assert "watching ends" not in watched.err
    assert "step 16: " in watched.err


@pytest.mark.slow
def test_save_writes_one_checkpoint_per_rank(run: Callable[..., Run]) -> None:
    """With `--on-desync save`, the first comparison out of sync saves what it saw, once."""
    from syncheck import compare

    watched = run("clip", "fork", "--on-desync", "save", "--every", "8")
    folders = list((watched.folder / "syncheck-desync").iterdir())
    assert len(folders) == 1
    report = compare(str(folders[0] / "rank_*.pth"))
    assert report.verdict == "out_of_sync"
    assert {finding.ranks for finding in report.findings} == {(1,)}


@pytest.mark.slow
def test_strict_and_outputs(run: Callable[..., Run]) -> None:
    """With `--strict`, a finding makes the exit code 1; the report has it beside the comparison."""
    watched = run("clip", "torchrun", "--strict", "--output", "page.json")
    assert watched.code == 1
    document = json.loads((watched.folder / "page.json").read_text())
    assert document["verdict"] == "out_of_sync"
    assert "SYN410" in [finding["code"] for finding in document["groups"][0]["findings"]]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("error", 1), ("exit", 7), ("kill", -9)])
def test_the_end_of_the_script_is_its_own(run: Callable[..., Run], fault: str, code: int) -> None:
    """An error, an exit code and a signal of one rank end the watched run as they end the unwatched run."""
    unwatched, watched = run(fault, "torchrun", watched=False), run(fault, "torchrun")
    assert watched.code == unwatched.code == 1
    for result in (unwatched, watched):
        assert f"exitcode  : {code} " in result.err
    assert ("ValueError: an error of the script" in watched.err) is (fault == "error")
    assert "run_program" not in watched.err


WITHIN = """
import torch
from syncheck.live import watch

if __name__ == "__main__":
    import sys
    watching = watch(every=0)
    sys.path.insert(0, sys.argv[1])
    import watched_training as training
    sys.argv[1:] = ["clip", "torchrun", "3", "0"]
    training.main()
    watching.stop()
    print("found", [finding.code for finding in watching.findings])
"""


@pytest.mark.slow
def test_one_line_in_the_script(run: Callable[..., Run], tmp_path: Path) -> None:
    """`syncheck.live.watch()` in a script sees what the command sees."""
    script = tmp_path / "within.py"
    script.write_text(WITHIN)
    processes = Processes(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    process = processes.start(*launcher, str(script), str(PROGRAM.parent), PYTHONPATH=CLONE)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert sorted(line for line in out.splitlines() if "found" in line) == ["found ['SYN410']", "found []", "found []"]
