"""Optimizer state in parts, as ZeRO deals it out: counted as sharded, and missed where a rank has lost its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import network, save_pth

import syncheck
from syncheck.messages import Detail
from syncheck.records import Reason

if TYPE_CHECKING:
    from pathlib import Path

OWN = (["fc.weight"], ["fc.bias"])


def rank_file(folder: Path, rank: int, state: dict[str, Any], *, sharded: bool = True, own: Any = OWN) -> Path:
    """Write a rank's file. state: moments by parameter, which need not be those that the rank says are its own."""
    model = network()
    parameters = own[rank]
    block = syncheck.metadata(run="zero", run_id="1", rank=rank, world_size=2, optimizer_sharded=sharded)
    block["optimizer_parameters"] = parameters
    moments = {parameters.index(name): {"exp_avg": array} for name, array in state.items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(range(len(parameters)))}]}
    return save_pth(folder / f"zero_rank{rank}.pth", {"model": model, "optimizer": optimizer, "syncheck": block})


def moments(name: str, value: float = 1.0) -> dict[str, Any]:
    """State of one parameter."""
    return {name: np.full_like(network()[name], value)}


def test_parts_are_not_missing(tmp_path: Path) -> None:
    """Each rank's own state is counted as sharded, and the model in both files is in sync."""
    files = [rank_file(tmp_path, rank, moments(OWN[rank][0])) for rank in range(2)]
    report = syncheck.compare(*files)
    (group,) = report.groups
    (finding,) = group.findings
    assert (report.verdict, finding.code, finding.fails) == ("in_sync", "SYN104", False)
    (shards,) = group.shards
    assert (shards.kind, shards.tensors, shards.compared, shards.replica_groups) == ("optimizer", 2, 0, ())
    assert {diff.name: (diff.reason, diff.detail) for diff in group.tensors} == {
        "optimizer.fc.weight.exp_avg": (Reason.SHARDED, Detail.PARTITIONED(ranks=(0,))),
        "optimizer.fc.bias.exp_avg": (Reason.SHARDED, Detail.PARTITIONED(ranks=(1,))),
    }
    assert group.counts.not_compared == 2


@pytest.mark.parametrize("whose", ["own", "shared"])
def test_lost_state_is_missing(tmp_path: Path, whose: str) -> None:
    """A rank whose file names a parameter among its own, and lacks its state, has lost it: SYN101."""
    own = OWN if whose == "own" else (["fc.weight"], ["fc.weight", "fc.bias"])
    first = {**moments("fc.weight")}
    files = [rank_file(tmp_path, 0, first, own=own), rank_file(tmp_path, 1, {}, own=own)]
    report = syncheck.compare(*files)
    assert report.verdict == "out_of_sync"
    (group,) = report.groups
    (finding,) = (finding for finding in group.findings if finding.fails)
    lost = {f"optimizer.{name}.exp_avg" for name in own[1]}  # though of fc.bias no file holds anything
    assert (finding.code, set(finding.tensors)) == ("SYN101", lost)
    details = {diff.name: diff.detail for diff in group.tensors}
    assert details["optimizer.fc.bias.exp_avg"] == Detail.OWN_PART_MISSING(rank=1)
    if whose == "shared":
        assert details["optimizer.fc.weight.exp_avg"] == Detail.MISSING(ranks=(1,))


def test_state_that_nobody_keeps_is_not_missing(tmp_path: Path) -> None:
    """Plain SGD keeps no state on any rank, and a parameter that had no gradient has none: nothing is lost."""
    nobody = [rank_file(tmp_path / "sgd", rank, {}) for rank in range(2)]
    own = (["fc.weight"], ["fc.bias", "conv.weight"])
    unused = [rank_file(tmp_path / "unused", rank, moments(own[rank][0]), own=own) for rank in range(2)]
    for files in (nobody, unused):
        assert syncheck.compare(*files).verdict == "in_sync"


def test_the_flag_on_one_rank_excuses_nothing(tmp_path: Path) -> None:
    """Where only one file says that state is in parts, the other's is missing from it: SYN101."""
    files = [rank_file(tmp_path, rank, moments(OWN[rank][0]), sharded=rank == 0) for rank in range(2)]
    report = syncheck.compare(*files)
    assert report.verdict == "out_of_sync"
    assert [finding.code for finding in report.groups[0].findings] == ["SYN101"]


def test_state_on_both_is_compared(tmp_path: Path) -> None:
    """What two ranks hold all the same, unequal, is a difference."""
    own = (["fc.weight"], ["fc.weight"])
    files = [rank_file(tmp_path, rank, moments("fc.weight", rank), own=own) for rank in range(2)]
    (group,) = syncheck.compare(*files).groups
    assert group.verdict == "out_of_sync"
    assert [diff.name for diff in group.tensors] == ["optimizer.fc.weight.exp_avg"]
