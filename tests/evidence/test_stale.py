"""A rank whose file holds what the others held at an earlier step: real files of several steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import save_pth

import syncheck
from syncheck import api, readers
from syncheck.fingerprint import fingerprint
from syncheck.fingerprint import write as write_fingerprint
from syncheck.kernel.blocks import Files

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck import Report
    from syncheck.records import Group


def state(step: int, seed: int = 0) -> dict[str, Any]:
    """Return a checkpoint of a small model with an optimizer as it is after so many steps. seed: of another rank."""
    random = np.random.default_rng((step, seed))
    model = {
        name: random.standard_normal(size).astype(np.float32) for name, size in (("fc.weight", 12), ("fc.bias", 3))
    }
    moments = {i: {"exp_avg": value * np.float32(0.1)} for i, value in enumerate(model.values())}
    groups = [{"lr": 0.1, "weight_decay": 0.0, "params": list(moments)}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def write(folder: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    """Write each step's checkpoints, one for each rank."""
    for step, states in steps.items():
        for rank, tree in enumerate(states):
            save_pth(folder / f"step_{step}" / f"rank_{rank}.pth", tree)
    return folder


def stale(report: Report) -> dict[int | None, dict[int, int]]:
    """Return which ranks of which step are where the others were earlier."""
    return {group.step: dict(group.evidence.stale) for group in report.groups if group.evidence.stale}


def last(report: Report) -> Group:
    """Return the group of the last step."""
    return max(report.groups, key=lambda group: group.step or 0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("then", [2, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_behind(tmp_path: Path, ranks: int, then: int, rank: int) -> None:
    """A rank one or two steps behind the others is found with that step, with and without a majority, and named."""
    steps = {step: [state(step)] * ranks for step in (1, 2, 3)}
    steps[3] = [state(then if r == rank else 3) for r in range(ranks)]
    report = syncheck.compare(write(tmp_path, steps))
    assert stale(report) == {3: {rank: then}}
    (finding,) = last(report).findings
    assert (finding.code, finding.ranks) == ("SYN217", (rank,))
    parameters = {"fc.weight", "fc.bias"}
    assert set(finding.tensors) == parameters | {f"optimizer.{name}.exp_avg" for name in parameters}


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_own_earlier_file_is_not_the_others(tmp_path: Path, ranks: int) -> None:
    """A rank that went apart before, and whose file is its own of the step before, is not where the others were."""
    steps = {1: [state(1)] * ranks}
    steps |= {step: [state(step)] * (ranks - 1) + [state(step, seed=1)] for step in (2, 3)}
    steps[3][-1] = steps[2][-1]
    report = syncheck.compare(write(tmp_path, steps))
    assert stale(report) == {}
    assert "SYN217" not in {finding.code for group in report.groups for finding in group.findings}


ONE_TENSOR_AHEAD = state(2)
ONE_TENSOR_AHEAD["model"]["fc.bias"] = state(7)["model"]["fc.bias"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Each of several ranks has its own step.
        ({1: [state(1)] * 5, 2: [state(2)] * 5, 3: [state(step) for step in (3, 1, 3, 2, 3)]}, {3: {1: 1, 3: 2}}),
        # One tensor moved on. Only the optimizer's state is old.
        ({2: [state(2)] * 3, 3: [state(3), state(3), ONE_TENSOR_AHEAD]}, {}),
        ({2: [state(2)] * 3, 3: [state(3), state(3), state(2) | {"model": state(3)["model"]}]}, {}),
        # A rank is ahead at the first step; later steps prove nothing about it.
        ({1: [state(1), state(1), state(2)], 2: [state(2)] * 3}, {}),
    ],
)
def test_all_tensors_are_of_an_earlier_step(tmp_path: Path, steps: Any, expected: dict[int, dict[int, int]]) -> None:
    """A rank is stale if all of its differing tensors are those of an earlier step, and the finding names it."""
    report = syncheck.compare(write(tmp_path, steps))
    assert stale(report) == expected
    assert not expected or last(report).findings[0].ranks == tuple(expected[3])


def test_another_run_is_no_history(tmp_path: Path) -> None:
    """The earlier step of another run is not this run's, though the bytes are equal."""
    write(tmp_path / "a", {1: [state(1)] * 2})
    write(tmp_path / "b", {2: [state(2), state(1)]})
    assert stale(syncheck.compare(tmp_path)) == {}


def test_old_parameters_beside_new_state(tmp_path: Path) -> None:
    """Parameters of the step before, from an overlapped gather, are a stale rank, whatever state the optimizer has."""
    odd = state(3) | {"model": state(2)["model"]}
    report = syncheck.compare(write(tmp_path, {2: [state(2)] * 3, 3: [state(3), state(3), odd]}))
    assert stale(report) == {3: {2: 2}}
    assert set(last(report).findings[0].tensors) == {"fc.weight", "fc.bias"}


SECOND_BEHIND = {1: [state(1)] * 3, 2: [state(2)] * 3, 3: [state(3), state(2), state(3)]}


def test_fingerprints(tmp_path: Path) -> None:
    """Of fingerprints the digests tell it, and what differs by digest is covered."""
    write(tmp_path / "files", SECOND_BEHIND)
    for step in SECOND_BEHIND:
        for rank in range(3):
            name = f"step_{step}/rank_{rank}"
            printed = fingerprint(readers.read(str(tmp_path / "files" / f"{name}.pth")))
            write_fingerprint(str(tmp_path / "prints" / f"{name}.fingerprint.json"), printed)
    report = syncheck.compare(tmp_path / "prints")
    assert stale(report) == {3: {1: 2}}
    assert [finding.code for finding in last(report).findings] == ["SYN217"]


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --quick the stored checksums tell it, and no tensor is read."""
    write(tmp_path, SECOND_BEHIND)
    monkeypatch.setattr(Files, "read", None)
    assert stale(syncheck.compare(tmp_path, options=api.Options(quick=True))) == {3: {1: 2}}


def test_a_broken_earlier_file(tmp_path: Path) -> None:
    """An earlier file that breaks between opening and comparing is listed once, and the other ranks' still tell."""
    write(tmp_path, {1: [state(1)] * 4, 2: [state(2)] * 4, 3: [state(3), state(3), state(3), state(2)]})
    found = api.find(tmp_path)
    broken = tmp_path / "step_2" / "rank_0.pth"
    broken.write_bytes(broken.read_bytes()[:-40])
    report = api.judge(found)
    assert [file.path for file in report.unreadable] == [str(broken)]
    assert stale(report) == {3: {3: 2}}
    assert report.verdict == "out_of_sync"


def test_an_earlier_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """Where the only other file of the step before cannot be opened, nothing is claimed, and the file is listed."""
    write(tmp_path, {2: [state(2)] * 2, 3: [state(3), state(2)]})
    broken = tmp_path / "step_2" / "rank_0.pth"
    broken.write_bytes(broken.read_bytes()[:100])
    report = syncheck.compare(tmp_path)
    assert [file.path for file in report.unreadable] == [str(broken)]
    assert stale(report) == {}
    assert report.verdict == "out_of_sync"
