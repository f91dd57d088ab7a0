"""`syncheck watch` on programs whose ranks form several groups: data-parallel wrappers, tensor parallelism."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import support
from support.started import CLONE, Processes, alive, free_port

from syncheck.report.events import read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(support.__file__).with_name("watched_meshes.py")


class Run(NamedTuple):
    """A finished program: its exit code, its lines, its errors, the lines of syncheck, and code, step and ranks of the
    findings of witnesses."""

    code: int
    out: list[str]
    errors: str
    lines: list[str]
    findings: list[tuple[str, int, list[int]]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Run a program on some ranks, watched or not."""
    processes = Processes(tmp_path)

    def run_program(kind: str, ranks: int, *options: str, watched: bool = True, fails: bool = False) -> Run:
        events = tmp_path / "events.jsonl"
        events.unlink(missing_ok=True)
        watch = ["-m", "syncheck", "watch", "--events", events, *options] if watched else []
        process = processes.start(sys.executable, *watch, PROGRAM, kind, ranks, free_port(), PYTHONPATH=CLONE)
        out, errors = process.communicate(timeout=110)
        assert (process.returncode != 0) is fails, errors
        rows = events.read_text().splitlines() if events.exists() else []
        findings = []
        for event in map(json.loads, rows):
            if event["event"] == "witness":
                findings.append((event["code"], event["step"], event["ranks"]))
        lines = [line for line in errors.splitlines() if line.startswith("syncheck: ")]
        assert not alive(process)
        return Run(process.returncode, sorted(out.splitlines()), errors, lines, findings)

    yield run_program
    processes.kill()


@pytest.mark.slow
def test_groups_of_the_script_come_after_those_of_watching(run: Callable[..., Run]) -> None:
    """Rank 0 trains with rank 1 and with rank 2 in turn, and a group is created after the first wrapper."""
    unwatched, watched = run("two wrappers", 3, watched=False), run("two wrappers", 3)
    assert (watched.out, watched.findings) == (unwatched.out, [])
    # The optimizer of the second wrapper is the first one of rank 2; its steps have one key on both ranks.
    assert any(line.startswith("syncheck: in sync: 8 steps of 2 optimizers watched") for line in watched.lines)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verdict"), [("again", "in sync"), ("again state", "OUT OF SYNC")])
def test_a_second_process_group_at_the_same_address(run: Callable[..., Run], kind: str, verdict: str) -> None:
    """The port is free after the first training, as without watching, and the end of the second one is compared."""
    unwatched, watched = run(kind, 2, watched=False), run(kind, 2)
    assert watched.out == unwatched.out
    last = list_last_lines(watched.lines)[-1]
    assert last.startswith(f"syncheck: {verdict}: 8 steps of 2 optimizers watched, 3 checks")


@pytest.mark.slow
def test_each_set_of_replicas_names_its_ranks(run: Callable[..., Run]) -> None:
    """With two models of two ranks each, the lines of comparisons and the last lines have the ranks."""
    lines = run("two models", 4).lines
    for ranks in ("0, 1", "2, 3"):
        assert any(line.startswith(f"syncheck: ranks {ranks}: in sync: 4 steps watched") for line in lines), lines
        assert any(f"compared on ranks {ranks.replace(', ', '-')}, " in line for line in lines), lines


@pytest.mark.slow
def test_each_set_of_replicas_has_files_of_its_own(run: Callable[..., Run], tmp_path: Path) -> None:
    """A difference of the second set is in its report and its events, and the report of the first set stays."""
    run("two models state", 4, "--output", "page.json")
    verdicts = {}
    for path in tmp_path.glob("page*.json"):
        verdicts[path.name] = json.loads(path.read_text())["verdict"]
    assert verdicts == {"page.json": "in_sync", "page.rank2.json": "out_of_sync"}
    reports = [read_events([tmp_path / name]) for name in ("events.jsonl", "events.rank2.jsonl")]
    assert [report.verdict for report in reports] == ["in_sync", "out_of_sync"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "ddp tp", "fsdp tp", "tp compiled", "sequence", "cp"])
def test_ranks_of_one_model_with_one_batch_have_no_finding(run: Callable[..., Run], kind: str) -> None:
    """Tensor-parallel ranks draw the batch of their replica; sequence-parallel ranks take parts of it by design."""
    ranks = 4 if kind in ("ddp tp", "fsdp tp") else 2
    unwatched, watched = run(kind, ranks, watched=False), run(kind, ranks)
    assert (watched.out, watched.findings) == (unwatched.out, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp faulty", "ddp tp faulty", "fsdp tp faulty", "cp faulty"])
def test_ranks_of_one_model_with_batches_of_their_own_are_named(run: Callable[..., Run], kind: str) -> None:
    """The batches differ within each model from the third forward pass on; the weights stay those of the script."""
    ranks = 2 if kind.startswith(("tp", "cp")) else 4
    unwatched, watched = run(kind, ranks, watched=False), run(kind, ranks)
    assert watched.out == unwatched.out
    models = [[rank, rank + 1] for rank in range(0, ranks, 2)]
    expected = [("SYN406", step, model) for step in (3, 4) for model in models]
    assert sorted(finding for finding in watched.findings if finding[0] == "SYN406") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "verdict", "expected"),
    [
        # Each rank has the only copy of its shard.
        ("fsdp1", 2, "could not tell", []),
        ("fsdp1 hybrid", 4, "trained parameters in sync", []),
        ("fsdp1 hybrid clip", 4, "OUT OF SYNC", [("SYN410", step, [1, 3]) for step in (6, 7, 8)]),
    ],
)
def test_the_first_fsdp_is_held_to_what_its_ranks_showed(
    run: Callable[..., Run], kind: str, ranks: int, verdict: str, expected: list[tuple[str, int, list[int]]]
) -> None:
    """FSDP1 shows no reductions; ranks whose gradients were equal three times hold copies of one shard."""
    unwatched, watched = run(kind, ranks, watched=False), run(kind, ranks)
    assert watched.out == unwatched.out
    assert sorted(finding for finding in watched.findings if finding[0] != "SYN411") == expected
    assert list_last_lines(watched.lines)[-1].startswith(f"syncheck: {verdict}: ")


@pytest.mark.slow
@pytest.mark.parametrize(("options", "waits"), [([], True), (["--patience", "0.1"], False)])
def test_raise_waits_no_longer_than_its_patience(run: Callable[..., Run], options: list[str], waits: bool) -> None:
    """With `--on-desync raise`, a rank waits before its step for a rank that is late, or goes on without it."""
    watched = run("late", 2, "--on-desync", "raise", "--every", "0", *options)
    assert f"rank 0 waits: {waits}" in watched.out
    assert watched.findings == []


def list_last_lines(lines: list[str]) -> list[str]:
    """Return the lines without a comparison and without a written file."""
    return [line for line in lines if " compared on " not in line and ": wrote " not in line]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accumulate", "partly", "each", "early alone flat"])
def test_replicated_shards_in_sync_have_no_finding(run: Callable[..., Run], kind: str) -> None:
    """HSDP with accumulation in three ways, and with steps and passes before training; its weights stay the same."""
    unwatched, watched = run(f"hsdp {kind}", 4, watched=False), run(f"hsdp {kind}", 4)
    assert (watched.out, watched.findings) == (unwatched.out, [])
    (last,) = list_last_lines(watched.lines)
    assert last.startswith("syncheck: in sync: ")
    assert "trained parameters equal at the end" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        # Two replicas have no majority: all ranks that hold a shard are named.
        ("clip", 4, [("SYN410", 3, [0, 2]), ("SYN410", 3, [1, 3])]),
        ("clip flat", 3, [("SYN410", 3, [2])]),
        ("accumulate skip", 4, [("SYN214", 3, [2, 3])]),
        ("skip flat", 2, [("SYN214", 3, [1])]),
        ("head", 4, [("SYN212", step, [0, 1, 2, 3]) for step in range(1, 5)]),
        ("batch", 4, [("SYN401", step, ranks) for step in range(1, 5) for ranks in ([0, 2], [1, 3])]),
        # Settings must agree between shards, too.
        ("lr", 4, [("SYN107", step, [1]) for step in (3, 4)]),
    ],
)
def test_faults_of_replicated_shards_are_named(
    run: Callable[..., Run], kind: str, ranks: int, expected: list[tuple[str, int, list[int]]]
) -> None:
    """One replica of HSDP deviates at the third reduction."""
    watched = run(f"hsdp {kind}", ranks)
    # Parameters that differ are the effect.
    assert sorted(finding for finding in watched.findings if finding[0] != "SYN411") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["kill forward flat", "kill step", "error backward", "slow backward", "slow step flat"]
)
def test_the_end_of_a_rank_of_replicated_shards_is_its_own(run: Callable[..., Run], kind: str) -> None:
    """Ranks of HSDP that are killed, have an error or are slow end the watched run as they end the unwatched run."""
    ranks = 2 if kind.endswith("flat") else 4
    fails = not kind.startswith("slow")
    unwatched, watched = [run(f"hsdp {kind}", ranks, watched=watched, fails=fails) for watched in (False, True)]
    assert (watched.code, watched.out, watched.findings) == (unwatched.code, unwatched.out, [])
    error = "ValueError: an error of the script"
    assert watched.errors.count(error) == unwatched.errors.count(error)
    assert not any("watching ends" in line for line in watched.lines)


@pytest.mark.slow
def test_shards_without_replicas_are_said_to_have_no_copy(run: Callable[..., Run]) -> None:
    """With FSDP2 alone, the last line says once that nothing could be compared."""
    watched = run("hsdp sharded", 2)
    assert watched.findings == []
    (last,) = list_last_lines(watched.lines)
    assert last.startswith("syncheck: could not tell: 4 steps watched")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp faulty", "fsdp tp faulty"])
def test_raise_stops_on_different_batches(run: Callable[..., Run], kind: str) -> None:
    """With `--on-desync raise`, all ranks raise before the forward pass with another batch, and none ends training."""
    ranks = 2 if kind.startswith("tp") else 4
    watched = run(kind, ranks, "--on-desync", "raise", "--every", "0", fails=True)
    assert watched.out == []
    assert {finding[:2] for finding in watched.findings} == {("SYN406", 3)}


@pytest.mark.slow
def test_data_parallel_replicas_of_tensor_parallel_ranks_are_compared(run: Callable[..., Run]) -> None:
    """`_pre_dp_module_transform` takes the parameters out of the module; those that DDP holds are compared."""
    watched = run("ddp tp", 4, "--every", "2")
    for ranks in ("0,2", "1,3"):
        assert any(f"step 2: in sync; 5 of 5 tensors compared on ranks {ranks}, " in line for line in watched.lines)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_limited"), [("own optimizer", False), ("split optimizer", True)])
def test_a_rank_with_another_optimizer(run: Callable[..., Run], kind: str, is_limited: bool) -> None:
    """An optimizer of a head of one rank's own changes no pair; one of a part of the model is a limit in one line."""
    unwatched, watched = run(kind, 3, watched=False), run(kind, 3)
    assert watched.out == unwatched.out
    assert [finding for finding in watched.findings if finding[0] == "SYN214"] == []
    assert any("train different parameters" in line for line in watched.lines) is is_limited
    expected = [] if is_limited else [("SYN410", 3, [2])]
    assert [finding for finding in watched.findings if finding[0] == "SYN410"] == expected
