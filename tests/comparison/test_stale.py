"""Stale ranks in real files of several steps: one rank holds the other ranks' state of an earlier step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import list_codes, list_fields, list_names
from support.states import pick

import syncheck
from syncheck import api
from syncheck.readers.fingerprints import fingerprint
from syncheck.readers.fingerprints import write as write_fingerprint
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck import Report
    from syncheck.records import Group


def state(step: int, seed: int = 0) -> dict[str, Any]:
    """Return a checkpoint of a small model and its optimizer at a step. seed: distinguishes ranks."""
    random = np.random.default_rng((step, seed))
    model = {
        name: random.standard_normal(size).astype(np.float32) for name, size in (("fc.weight", 12), ("fc.bias", 3))
    }
    moments = {i: {"exp_avg": value * np.float32(0.1)} for i, value in enumerate(model.values())}
    groups = [{"lr": 0.1, "weight_decay": 0.0, "params": list(moments)}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def write(folder: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    """Write one checkpoint per step and rank."""
    for step, states in steps.items():
        for rank, tree in enumerate(states):
            save_pth(folder / f"step_{step}" / f"rank_{rank}.pth", tree)
    return folder


def stale_ranks(report: Report) -> dict[int | None, dict[int, int]]:
    """Return the stale ranks of each step, with the earlier step of their state."""
    return {group.step: dict(group.evidence.stale) for group in report.groups if group.evidence.stale}


def last_group(report: Report) -> Group:
    """Return the group of the last step."""
    return max(report.groups, key=lambda group: group.step or 0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("then", [2, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_behind(tmp_path: Path, ranks: int, then: int, rank: int) -> None:
    """A rank one or two steps behind is SYN217 with its step, with and without a majority."""
    steps = {step: [state(step)] * ranks for step in (1, 2, 3)}
    steps[3] = [state(then if r == rank else 3) for r in range(ranks)]
    report = syncheck.compare(write(tmp_path, steps))
    assert stale_ranks(report) == {3: {rank: then}}
    (finding,) = last_group(report).findings
    assert (finding.code, finding.ranks) == ("SYN217", (rank,))
    parameters = {"fc.weight", "fc.bias"}
    assert set(finding.tensors) == parameters | {f"optimizer.{name}.exp_avg" for name in parameters}


@pytest.mark.parametrize("ranks", [2, 4])
def test_own_earlier_state_is_not_stale(tmp_path: Path, ranks: int) -> None:
    """A rank that differed before and holds its own state of the step before is not stale."""
    steps = {1: [state(1)] * ranks}
    steps |= {step: [state(step)] * (ranks - 1) + [state(step, seed=1)] for step in (2, 3)}
    steps[3][-1] = steps[2][-1]
    report = syncheck.compare(write(tmp_path, steps))
    assert stale_ranks(report) == {}
    assert "SYN217" not in list_codes(report.findings)


ONE_TENSOR_AHEAD = state(2)
ONE_TENSOR_AHEAD["model"]["fc.bias"] = state(7)["model"]["fc.bias"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Each of several ranks has its own step.
        ({1: [state(1)] * 5, 2: [state(2)] * 5, 3: [state(step) for step in (3, 1, 3, 2, 3)]}, {3: {1: 1, 3: 2}}),
        # One tensor is newer. Only the optimizer's state is old.
        ({2: [state(2)] * 3, 3: [state(3), state(3), ONE_TENSOR_AHEAD]}, {}),
        ({2: [state(2)] * 3, 3: [state(3), state(3), state(2) | {"model": state(3)["model"]}]}, {}),
        # A rank is ahead at the first step; later steps prove nothing about the first step.
        ({1: [state(1), state(1), state(2)], 2: [state(2)] * 3}, {}),
    ],
)
def test_all_differing_tensors_must_be_old(tmp_path: Path, steps: Any, expected: dict[int, dict[int, int]]) -> None:
    """A rank is stale only if all of its differing tensors are from one earlier step."""
    report = syncheck.compare(write(tmp_path, steps))
    assert stale_ranks(report) == expected
    assert not expected or last_group(report).findings[0].ranks == tuple(expected[3])


def test_another_run_is_ignored(tmp_path: Path) -> None:
    """Equal bytes at an earlier step of another run do not make a rank stale."""
    write(tmp_path / "a", {1: [state(1)] * 2})
    write(tmp_path / "b", {2: [state(2), state(1)]})
    assert stale_ranks(syncheck.compare(tmp_path)) == {}


def test_old_parameters_beside_new_state(tmp_path: Path) -> None:
    """A rank with old parameters, from an overlapped gather, is stale even if its optimizer state is new."""
    outlier = state(3) | {"model": state(2)["model"]}
    report = syncheck.compare(write(tmp_path, {2: [state(2)] * 3, 3: [state(3), state(3), outlier]}))
    assert stale_ranks(report) == {3: {2: 2}}
    assert set(last_group(report).findings[0].tensors) == {"fc.weight", "fc.bias"}


SECOND_BEHIND = {1: [state(1)] * 3, 2: [state(2)] * 3, 3: [state(3), state(2), state(3)]}


def test_fingerprints(tmp_path: Path) -> None:
    """A stale rank is identified by the digests of fingerprints too, and SYN217 covers the differing digests."""
    write(tmp_path / "files", SECOND_BEHIND)
    for step in SECOND_BEHIND:
        for rank in range(3):
            name = f"step_{step}/rank_{rank}"
            printed = fingerprint(syncheck.read(str(tmp_path / "files" / f"{name}.pth")))
            write_fingerprint(str(tmp_path / "prints" / f"{name}.fingerprint.json"), printed)
    report = syncheck.compare(tmp_path / "prints")
    assert stale_ranks(report) == {3: {1: 2}}
    assert list_codes(last_group(report).findings) == ["SYN217"]


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--quick`, stored checksums identify a stale rank, and no tensor is read."""
    write(tmp_path, SECOND_BEHIND)
    monkeypatch.setattr(Files, "read", None)
    assert stale_ranks(syncheck.compare(tmp_path, options=api.Options(quick=True))) == {3: {1: 2}}


def test_broken_earlier_file(tmp_path: Path) -> None:
    """If an earlier file breaks after opening, the file is listed once, and the other files identify a stale rank."""
    write(tmp_path, {1: [state(1)] * 4, 2: [state(2)] * 4, 3: [state(3), state(3), state(3), state(2)]})
    inputs = api.find(tmp_path)
    broken = tmp_path / "step_2" / "rank_0.pth"
    broken.write_bytes(broken.read_bytes()[:-40])
    report = api.judge(inputs)
    assert list_fields(report.unreadable, "path") == [str(broken)]
    assert stale_ranks(report) == {3: {3: 2}}
    assert report.verdict == "out_of_sync"


def test_unreadable_earlier_file(tmp_path: Path) -> None:
    """If the only other file of the earlier step cannot be opened, the file is listed, and no rank is stale."""
    write(tmp_path, {2: [state(2)] * 2, 3: [state(3), state(2)]})
    broken = tmp_path / "step_2" / "rank_0.pth"
    broken.write_bytes(broken.read_bytes()[:100])
    report = syncheck.compare(tmp_path)
    assert list_fields(report.unreadable, "path") == [str(broken)]
    assert stale_ranks(report) == {}
    assert report.verdict == "out_of_sync"


def owned_state(step: int, rank: int) -> dict[str, Any]:
    """Return a checkpoint whose optimizer state is on the owners of the parameters: ranks 0 and 1, or ranks 2 and 3.

    Only on ranks 2 and 3, the shapes show which parameters the numbers stand for.
    """
    random = np.random.default_rng(step)
    sizes = {"a.weight": 12, "a.bias": 3, "b.weight": 12, "c.weight": 5}
    model = {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    moments = {number: {"exp_avg": value * np.float32(0.1)} for number, value in enumerate(model.values())}
    owned_numbers = (0, 1) if rank < 2 else (2,)
    states = pick(moments, owned_numbers)
    groups = [{"lr": 0.1, "weight_decay": 0.0, "params": [0, 1, 2]}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}}


def test_names_of_another_rank(tmp_path: Path) -> None:
    """A stale rank is identified if its parameters of the optimizer have names on other ranks only."""
    steps = {step: [owned_state(step, rank) for rank in range(4)] for step in (1, 2, 3)}
    steps[3][1] = owned_state(2, 1)
    report = syncheck.compare(write(tmp_path, steps))
    assert "optimizer.a.weight.exp_avg" in list_names(last_group(report).tensors)
    assert stale_ranks(report) == {3: {1: 2}}
