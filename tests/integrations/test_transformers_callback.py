"""The transformers Trainer with the callback on two gloo ranks, with injected faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.libraries import need
from support.listings import list_fields
from support.outcomes import (
    Outcomes,
    assert_not_checked_after_an_error,
    assert_nothing_changed,
    assert_stopped_alike,
    assert_warned_once,
    outcomes,
)

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "transformers_trainings.py"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of some trainings; an injected fault ends the last training."""
    need("transformers")
    need("accelerate")
    folder = tmp_path_factory.mktemp("transformers")
    return outcomes(PROGRAM, folder, "plain", "healthy", "accumulated", "evaluated", "resumed", "scaled", "weight")


def test_a_healthy_training_is_in_sync(quick: Outcomes) -> None:
    """Each rank checks every fourth step and after the last step, and finds model and optimizer in sync."""
    assert quick.steps("healthy") == [4, 6]
    for rank in quick.of("healthy"):
        assert (rank["verdict"], rank["tensors"], rank["error"]) == ("in_sync", 6 + 3 * 6, "")
    assert quick.of("healthy")[0]["ended"] == [None]


def test_the_callback_changes_nothing(quick: Outcomes) -> None:
    """Parameters, optimizer states and RNG states are bitwise equal to a training without the callback."""
    assert_nothing_changed(quick)


def test_accumulated_batches_are_one_step(quick: Outcomes) -> None:
    """Accumulated batches count as one step."""
    assert quick.steps("accumulated") == [2, 3]


def test_the_last_check_comes_before_the_last_evaluation(quick: Outcomes) -> None:
    """BatchNorm drift is found after the last step, before the evaluation that would hide it."""
    assert quick.steps("evaluated") == [12]
    result = list_fields(quick.of("evaluated"), "codes", "names")
    assert result == [(["SYN201"], ["net.1.running_mean", "net.1.running_var"])] * 2


def test_a_resumed_training_continues_counting(quick: Outcomes) -> None:
    """A training that resumes after three steps checks at step 5 with every=5."""
    assert quick.steps("resumed") == [5, 6]


def test_the_accelerators_scaler_is_compared(quick: Outcomes) -> None:
    """A gradient scaler with another factor on rank 1 is reported as the cause."""
    assert list_fields(quick.of("scaled"), "codes") == [["SYN216"]] * 2


def test_an_injected_fault_stops_all_ranks(quick: Outcomes) -> None:
    """A changed weight on rank 1 is found at the next check; all ranks raise the same error and exit with 1."""
    assert_stopped_alike(quick, "weight", "SYN220", ["net.2.weight"], 5)
    assert quick.of("weight")[0]["ended"] == ["OutOfSync"]


def test_a_desync_is_not_saved(quick: Outcomes) -> None:
    """The checkpoint after the step of a failed check is not written."""
    assert list((quick.folder / "weight.run").glob("checkpoint-*")) == []
    assert list((quick.folder / "saved.run").glob("checkpoint-*")) == [quick.folder / "saved.run" / "checkpoint-3"]


@pytest.mark.slow
def test_no_check_after_an_exception(tmp_path: Path) -> None:
    """If rank 1 raises in a step, no rank waits for a check: rank 1's error ends the program."""
    need("transformers")
    assert_not_checked_after_an_error(outcomes(PROGRAM, tmp_path, "raise"), "raise")


@pytest.mark.slow
def test_a_single_process_warns_once(tmp_path: Path) -> None:
    """In a single process the callback warns once, and the training continues."""
    need("transformers")
    assert_warned_once(outcomes(PROGRAM, tmp_path, "single", ranks=1), "single")
