"""A loop with Accelerate and its monitor, on two gloo ranks, with planted faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from libraries import need
from outcomes import Outcomes, assert_nothing_changed, assert_stopped_alike, assert_told_once, outcomes

from syncheck.errors import UsageError
from syncheck.integrations.accelerate import monitor

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "accelerate_loops.py"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of five loops, the last of which a planted fault ends."""
    need("accelerate")
    folder = tmp_path_factory.mktemp("accelerate")
    return outcomes(PROGRAM, folder, "plain", "healthy", "accumulated", "scaled", "weight")


def test_a_healthy_loop_is_in_sync(quick: Outcomes) -> None:
    """Each rank checks every fourth step and at the end, and finds model and optimizer in sync."""
    assert quick.of("healthy")[0]["steps"] == [4, 6]
    for rank in quick.of("healthy"):
        assert (rank["checks"], rank["verdict"], rank["tensors"], rank["error"]) == (2, "in_sync", 6 + 3 * 6, "")


def test_the_monitor_changes_nothing(quick: Outcomes) -> None:
    """Parameters, optimizer states and random numbers are to the bit those of a loop without the monitor."""
    assert_nothing_changed(quick)


def test_accumulated_batches_are_one_step(quick: Outcomes) -> None:
    """With three batches a step, six batches are two steps, and a check every two steps is one check."""
    assert quick.steps("accumulated") == [2]


def test_the_accelerators_scaler_is_compared(quick: Outcomes) -> None:
    """A gradient scaler that scales by another factor on rank 1 is named as the cause."""
    assert [rank["codes"] for rank in quick.of("scaled")] == [["SYN216"]] * 2


def test_a_planted_fault_stops_all_ranks(quick: Outcomes) -> None:
    """One weight that changes on rank 1 is found at the next check; all ranks raise one error and exit with 1."""
    assert_stopped_alike(quick, "weight", "SYN220", ["2.weight"], 5)


def test_options_reach_the_monitor() -> None:
    """A wrong option is refused when the monitor is made, in the words of SyncMonitor."""
    with pytest.raises(UsageError, match="every=0: must be an integer, at least 1"):
        monitor(SimpleNamespace(scaler=None), None, every=0)


@pytest.mark.slow
def test_drift_of_batchnorm_stops_all_ranks(tmp_path: Path) -> None:
    """Statistics that drift under DDP are found at the first check."""
    need("accelerate")
    found = outcomes(PROGRAM, tmp_path, "drift")
    assert_stopped_alike(found, "drift", "SYN201", ["1.running_mean", "1.running_var"], 3)


@pytest.mark.slow
def test_a_single_process_is_told_once(tmp_path: Path) -> None:
    """Without other ranks there is nothing to compare: one line says so, and the loop goes on."""
    need("accelerate")
    assert_told_once(outcomes(PROGRAM, tmp_path, "single", ranks=1), "single")
