"""`syncheck watch` is silent about correct programs of unusual shapes, and states what it cannot compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import support
from support.started import CLONE, Processes, alive, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(support.__file__).with_name("watched_limits.py")


class Run(NamedTuple):
    """A finished program: its exit code, the last line of syncheck, all lines, and the events of some kinds."""

    code: int
    last: str
    lines: list[str]
    checks: list[dict[str, Any]]
    findings: list[dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Watch a program on some ranks."""
    processes = Processes(tmp_path)

    def run_program(kind: str, ranks: int, *options: str) -> Run:
        events = tmp_path / "events.jsonl"
        watch = ["-m", "syncheck", "watch", "--events", events, *options]
        process = processes.start(sys.executable, *watch, PROGRAM, kind, ranks, free_port(), PYTHONPATH=CLONE)
        _, errors = process.communicate(timeout=110)
        assert not alive(process)
        rows = list(map(json.loads, events.read_text().splitlines())) if events.exists() else []
        lines = [line for line in errors.splitlines() if line.startswith("syncheck: ") and ": wrote " not in line]
        by_kind = {kind: [row for row in rows if row["event"] == kind] for kind in ("check", "witness")}
        return Run(process.returncode, lines[-1], lines, by_kind["check"], by_kind["witness"])

    yield run_program
    processes.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["average", "sharpness", "decay", "compiled", "optimizer", "closure", "pairs", "ignored"]
)
def test_unusual_programs_in_sync_have_no_finding(run: Callable[..., Run], kind: str) -> None:
    """An average of one rank, SAM, decay by hand, a compiled wrapper, a replaced optimizer, steps with a closure.

    With pairs, each step has two forward passes. A layer that DDP is told to ignore differs between ranks by design.
    """
    watched = run(kind, 2, "--every", "4")
    assert watched.findings == []
    assert {row["verdict"] for row in watched.checks} == {"in_sync"}
    assert watched.last.startswith("syncheck: in sync: 10 steps watched")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("average", [2, 4, 8, 10]),
        ("sharpness", [10]),
        ("decay", [2, 4, 8, 10]),
        ("closure", [2, 4, 8, 10]),
        ("pairs", [2, 4, 8, 10]),
    ],
)
def test_replicas_are_compared_when_they_must_be_equal(run: Callable[..., Run], kind: str, steps: list[int]) -> None:
    """With changes that each rank undoes before its step, no comparison takes place at a reduction."""
    watched = run(kind, 2, "--every", "4")
    assert [row["step"] for row in watched.checks] == steps
    # 6 parameters, 6 momentum buffers and a buffer.
    assert {row["tensors"] for row in watched.checks} == {13}


@pytest.mark.slow
def test_two_forward_passes_of_a_step_are_one_reduction(run: Callable[..., Run]) -> None:
    """The finding has the number of the step, although each step has two forward passes and one backward pass."""
    watched = run("pairs gradient", 3)
    place = "syncheck: reduction 5: SYN410 gradients-differ (error, proved) on rank 1"
    assert place in watched.lines
    assert watched.last.startswith("syncheck: OUT OF SYNC: 10 steps watched, ")


@pytest.mark.slow
def test_parameters_that_replace_those_of_the_wrapper_are_not_reduced(run: Callable[..., Run]) -> None:
    """The first step with the new parameters is named, watching goes on, and the effect is compared."""
    watched = run("assigned", 2, "--every", "4")
    assert watched.findings[0]["code"] == "SYN212"
    assert [row["verdict"] for row in watched.checks[-2:]] == ["out_of_sync"] * 2
    assert watched.last.startswith("syncheck: OUT OF SYNC: 10 steps of 2 optimizers watched, ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compiled buffer", "average buffer", "sharpness buffer"])
def test_a_buffer_that_differs_is_found_at_the_end(run: Callable[..., Run], kind: str) -> None:
    """Without reductions that are seen, and with passing changes, the end is compared in full."""
    watched = run(kind, 2)
    assert watched.last.startswith("syncheck: OUT OF SYNC: 10 steps watched, ")
    (last,) = watched.checks[-1:]
    assert (last["step"], last["verdict"]) == (10, "out_of_sync")
    assert [name for finding in last["findings"] for name in finding["names"]] == ["scale"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names", "codes"),
    [("again", [], set()), ("again buffer", ["scale"], set()), ("again value", ["up.weight"], {"SYN411"})],
)
def test_a_model_that_is_wrapped_again_is_compared_at_the_end(
    run: Callable[..., Run], kind: str, names: list[str], codes: set[str]
) -> None:
    """A frozen layer that changes during the second training is no change after the training."""
    watched = run(kind, 2)
    (last,) = watched.checks[-1:]
    assert (last["step"], [name for finding in last["findings"] for name in finding["names"]]) == (20, names)
    assert {row["code"] for row in watched.findings} == codes
    assert watched.last.startswith("syncheck: OUT OF SYNC: 20 steps" if names else "syncheck: in sync: 20 steps")


@pytest.mark.slow
def test_a_comparison_before_the_last_step_is_not_that_at_the_end(run: Callable[..., Run]) -> None:
    """The last reduction is due for a periodic comparison, which comes before the last step."""
    watched = run("again buffer", 2, "--every", "20")
    assert [(row["step"], row["verdict"]) for row in watched.checks[-2:]] == 2 * [(20, "out_of_sync")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor-parallel", "tensor-parallel shard"])
def test_shards_without_copies_are_named(run: Callable[..., Run], kind: str) -> None:
    """The copies of the norm are equal; nobody knows whether the shards of three parameters are right."""
    watched = run(kind, 2)
    assert watched.last.startswith("syncheck: could not tell for up.weight, up.bias, down.weight, ")


@pytest.mark.slow
def test_two_models_are_told_apart(run: Callable[..., Run]) -> None:
    """The skipped step of the second model has the number of the model, and the history begins with the first check."""
    watched = run("adversarial", 3, "--every", "8")
    places = [line for line in watched.lines if ": SYN214 step-skipped (error, proved) on rank 1" in line]
    assert [place.partition(": SYN214")[0] for place in places] == ["syncheck: wrapper 2 (Model), reduction 5"]
    assert "20 steps of 2 optimizers watched" in watched.last
    assert watched.checks[0]["verdict"] == "in_sync"
    assert not any("at the first check" in line for line in watched.lines)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "codes"), [("alone", set()), ("alone, reduced", {"SYN107", "SYN411"})])
def test_ranks_that_exchange_nothing_are_no_copies(run: Callable[..., Run], kind: str, codes: set[str]) -> None:
    """The ranks of a sweep may begin as equal as copies."""
    watched = run(kind, 2)
    assert {row["code"] for row in watched.findings} <= codes
    assert bool(watched.findings) is bool(codes)
    assert watched.last.startswith("syncheck: could not tell: 10 steps") is not bool(codes)


@pytest.mark.slow
def test_a_repaired_run_names_what_was_repaired(run: Callable[..., Run]) -> None:
    """After `resync`, the last comparison is in sync; the last line still has the finding."""
    watched = run("value", 3, "--every", "4", "--on-desync", "resync")
    assert watched.checks[-1]["verdict"] == "in_sync"
    (code,) = {finding["code"] for row in watched.checks for finding in row["findings"]}
    assert f"checks of all replicas: {code} " in watched.last
