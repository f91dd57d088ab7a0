"""Accelerate loops with a monitor on two gloo ranks, with injected faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.libraries import need
from support.listings import list_fields
from support.outcomes import Outcomes, assert_nothing_changed, assert_stopped_alike, assert_warned_once, outcomes

from syncheck.errors import UsageError
from syncheck.integrations.accelerate import monitor

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "accelerate_loops.py"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of six loops; an injected fault ends the last loop."""
    need("accelerate")
    folder = tmp_path_factory.mktemp("accelerate")
    return outcomes(PROGRAM, folder, "plain", "healthy", "accumulated", "scaled", "drift", "weight")


def test_a_healthy_loop_is_in_sync(quick: Outcomes) -> None:
    """Each rank checks every fourth step and at the end, and finds model and optimizer in sync."""
    assert quick.of("healthy")[0]["steps"] == [4, 6]
    for rank in quick.of("healthy"):
        assert (rank["checks"], rank["verdict"], rank["tensors"], rank["error"]) == (2, "in_sync", 6 + 3 * 6, "")


def test_the_monitor_changes_nothing(quick: Outcomes) -> None:
    """Parameters, optimizer states and RNG states are bitwise equal to a loop without the monitor."""
    assert_nothing_changed(quick)


def test_accumulated_batches_are_one_step(quick: Outcomes) -> None:
    """Accumulated batches count as one step."""
    assert quick.steps("accumulated") == [2]


def test_the_accelerators_scaler_is_compared(quick: Outcomes) -> None:
    """A gradient scaler with another factor on rank 1 is reported as the cause."""
    assert list_fields(quick.of("scaled"), "codes") == [["SYN216"]] * 2


def test_an_injected_fault_stops_all_ranks(quick: Outcomes) -> None:
    """A changed weight on rank 1 is found at the next check; all ranks raise the same error and exit with 1."""
    assert_stopped_alike(quick, "weight", "SYN220", ["2.weight"], 5)


def test_options_reach_the_monitor() -> None:
    """An invalid option raises SyncMonitor's error when the monitor is created."""
    with pytest.raises(UsageError, match="every=0: must be an integer, at least 1"):
        monitor(SimpleNamespace(scaler=None), None, every=0)


def test_drift_of_batchnorm_is_found(quick: Outcomes) -> None:
    """Statistics that drift under DDP are found at each check."""
    assert quick.steps("drift") == [3, 6]
    result = list_fields(quick.of("drift"), "codes", "names")
    assert result == [(["SYN201"], ["1.running_mean", "1.running_var"])] * 2


@pytest.mark.slow
def test_a_single_process_warns_once(tmp_path: Path) -> None:
    """In a single process the monitor warns once, and the loop continues."""
    need("accelerate")
    assert_warned_once(outcomes(PROGRAM, tmp_path, "single", ranks=1), "single")
