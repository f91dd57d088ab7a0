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

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(support.__file__).with_name("watched_training.py")
RANKS = 3
FAULTY_STEP = 5


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
@pytest.mark.parametrize("method", ["torchrun", "spawn", "fork", "forkserver", "file"])
def test_a_run_in_sync_stays_the_same(run: Callable[..., Run], method: str) -> None:
    """A watched run has the weights, output and exit code of the unwatched run, and no finding, for any launcher."""
    unwatched, watched = run("none", method, watched=False), run("none", method)
    assert watched.out == unwatched.out
    assert (watched.code, unwatched.code, watched.list_findings()) == (0, 0, [])
    assert re.search(r"in sync: (18|24) steps watched", watched.err)
    # torch removes the file of a rendezvous when nobody holds its store; the next run would wait at it.
    assert not (watched.folder / "meet").exists()


@pytest.mark.slow
def test_accumulation_is_no_fault(run: Callable[..., Run]) -> None:
    """Micro-batches within `no_sync` are no steps, and change no weights."""
    unwatched, watched = run("accumulation", watched=False), run("accumulation")
    assert watched.out == unwatched.out
    assert (watched.code, watched.list_findings()) == (0, [])
    assert "in sync: 9 steps watched" in watched.err


@pytest.mark.slow
def test_ranks_that_run_out_of_data_are_no_fault(run: Callable[..., Run]) -> None:
    """Within `join()`, ranks without data take part in reductions without steps; the epochs after it count on."""
    unwatched, watched = run("join", watched=False), run("join")
    assert watched.out == unwatched.out
    assert (watched.code, watched.list_findings()) == (0, [])
    assert "in sync: " in watched.err


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
        ("memory", "fork", ("SYN411", 8, [1], ["2.bias"])),
        ("own optimizer", "fork", ("SYN411", 8, [1], ["2.bias"])),
        ("seeds", "fork", ("SYN411", 8, EVERY_RANK, ALL)),
        ("skip", "fork", ("SYN214", 5, [1], [])),
        ("overflow", "fork", ("SYN216", 5, [1], [])),
        ("lr", "fork", ("SYN107", 1, [1], [])),
        ("module", "fork", ("SYN410", 1, EVERY_RANK, ALL)),
        ("no_sync", "file", ("SYN410", FAULTY_STEP - 1, EVERY_RANK, ALL)),
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
@pytest.mark.parametrize(
    ("fault", "start"), [("frozen", "OUT OF SYNC: 18 steps"), ("own head", "could not tell for weight, bias, ")]
)
def test_the_last_line_says_what_is_not_in_sync(run: Callable[..., Run], fault: str, start: str) -> None:
    """A frozen parameter that changes is found at the end, and parameters of which no rank holds a copy are named."""
    watched = run(fault)
    lines = [line for line in watched.err.splitlines() if line.startswith("syncheck: ")]
    assert any(line.startswith(f"syncheck: {start}") for line in lines), watched.err


@pytest.mark.slow
def test_comparisons_include_what_is_trained_beside_the_wrapper(run: Callable[..., Run]) -> None:
    """Without witnesses, a head outside of the wrapper is compared too, and differs."""
    watched = run("head", "fork", "--witnesses", "none", "--every", "5")
    checks = []
    for row in (watched.folder / "events.jsonl").read_text().splitlines():
        event = json.loads(row)
        if event["event"] == "check":
            checks.append(event)
    assert checks[-1]["verdict"] == "out_of_sync"
    assert set(HEAD) <= {row["name"] for row in checks[-1]["worst"]}


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
    assert re.search(r"syncheck: OUT OF SYNC: .*: SYN2", watched.err)
    assert "syncheck: in sync: " not in watched.err


@pytest.mark.slow
def test_one_of_two_ranks_is_named_if_it_alone_changed_gradients(run: Callable[..., Run]) -> None:
    """Two ranks have no majority, but the reduction left equal gradients, which one rank changed."""
    assert run("clip", "forkserver").list_findings()[0] == ("SYN410", 5, [1], ALL)


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
    assert watched.err.count(f"syncheck: wrote syncheck-desync/{folders[0].name}/ (3 files)") == 1


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
    codes = [finding.code for finding in watching.findings]
    sys.stdout.write(f"found {codes}\\n")  # print() writes the end of the line separately, and ranks share the pipe
"""


@pytest.mark.slow
@pytest.mark.parametrize("watch", [[], ["-m", "syncheck", "watch"]], ids=["alone", "watched"])
def test_one_line_in_the_script(tmp_path: Path, watch: list[str]) -> None:
    """`syncheck.live.watch()` in a script sees what the command sees, also beside the command, which watches once."""
    script = tmp_path / "within.py"
    script.write_text(WITHIN)
    processes = Processes(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    process = processes.start(*launcher, *watch, str(script), str(PROGRAM.parent), PYTHONPATH=CLONE)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert err.count(" steps watched") == 1
    assert sorted(line for line in out.splitlines() if "found" in line) == ["found ['SYN410']", "found []", "found []"]


ALONE = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
INTERRUPTED = """
import os, signal
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Settings(dict):
    # The witness of settings reads them within a hook.
    def get(self, *key):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().get(*key)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.param_groups[0] = Settings(optimizer.param_groups[0])
for step in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_one_process_is_told_how_to_start_several(tmp_path: Path) -> None:
    """A script without a launcher gets one line, which names the command."""
    (tmp_path / "alone.py").write_text(ALONE)
    processes = Processes(tmp_path)
    process = processes.start(sys.executable, "-m", "syncheck", "watch", "alone.py", PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    lines = [line for line in errors.splitlines() if line.startswith("syncheck: ")]
    assert (process.returncode, len(lines)) == (0, 1), errors
    assert "torchrun --nproc-per-node" in lines[0]


@pytest.mark.slow
def test_an_interrupt_within_a_hook_is_one_of_the_script(tmp_path: Path) -> None:
    """The traceback of KeyboardInterrupt has no frame of syncheck, and ends in the line of the script."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    processes = Processes(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = processes.start(*launcher, "-m", "syncheck", "watch", "interrupted.py", PYTHONPATH=CLONE)
    _, errors = process.communicate(timeout=110)
    rows = [line for line in errors.splitlines() if "KeyboardInterrupt" in line or "File " in line]
    assert "KeyboardInterrupt" in errors
    assert "interrupted.py" in errors
    folder = str(Path(syncheck.__file__).parent)
    assert [line for line in rows if folder in line or "<syncheck" in line] == []
