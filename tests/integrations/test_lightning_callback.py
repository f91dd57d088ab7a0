"""Lightning's trainer with the callback, on two gloo ranks, with planted faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from libraries import need
from outcomes import (
    Outcomes,
    assert_not_checked_after_an_error,
    assert_nothing_changed,
    assert_stopped_alike,
    assert_told_once,
    outcomes,
)

from syncheck.diagnose import syn201_bn_local_stats

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "lightning_fits.py"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of four fits, the last of which a planted fault ends."""
    need("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    return outcomes(PROGRAM, folder, "plain", "healthy", "accumulated", "weight")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of the fits that take other paths and end well."""
    need("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    return outcomes(PROGRAM, folder, "two_epochs", "max_steps", "manual", "stopped", "resumed", "scaled", "sharded")


def test_a_healthy_fit_is_in_sync(quick: Outcomes) -> None:
    """Each rank checks every fifth step and after the last one, and finds model and optimizer in sync."""
    assert quick.steps("healthy") == [5, 6]
    for rank in quick.of("healthy"):
        assert (rank["verdict"], rank["tensors"], rank["error"]) == ("in_sync", 6 + 3 * 6, "")
    assert quick.of("healthy")[0]["ended"] == [None]


def test_the_callback_changes_nothing(quick: Outcomes) -> None:
    """Parameters, optimizer states and random numbers are to the bit those of a fit without the callback."""
    assert_nothing_changed(quick)


def test_accumulated_batches_are_one_step(quick: Outcomes) -> None:
    """With three batches a step, six batches are two steps, and a check every two steps is one check."""
    assert quick.steps("accumulated") == [2]


def test_numbers_go_to_tensorboard(quick: Outcomes) -> None:
    """Rank 0 writes scalars of each check to the trainer's TensorBoard logger, and no other rank does."""
    first, second = (rank["scalars"] for rank in quick.of("healthy"))
    assert ["syncheck/out_of_sync", 0, 5] in first
    assert ["syncheck/out_of_sync", 0, 6] in first
    assert second == []


def test_a_planted_fault_stops_all_ranks(quick: Outcomes) -> None:
    """One weight that changes on rank 1 is found at the next check; all ranks raise one error and exit with 1."""
    assert_stopped_alike(quick, "weight", "SYN220", ["net.2.weight"], 5)
    assert quick.of("weight")[0]["ended"] == ["OutOfSync"]


def test_what_is_out_of_sync_is_not_saved(quick: Outcomes) -> None:
    """A checkpoint that is due after the batch of a failed check is not written; the one before was."""
    assert [path.name for path in quick.folder.glob("weight.*.ckpt")] == ["weight.step=4.ckpt"]


@pytest.mark.slow
def test_drift_of_batchnorm_is_found_before_validation(tmp_path: Path) -> None:
    """Statistics that drift under DDP are found after the last batch; the validation that follows would hide it."""
    need("lightning")
    found = outcomes(PROGRAM, tmp_path, "drift")
    assert_stopped_alike(found, "drift", "SYN201", ["net.1.running_mean", "net.1.running_var"], 6)
    # Known from DDP itself, which is watched and not the module in it.
    assert str(syn201_bn_local_stats.Text.SYNCHRONIZED()) in found.of("drift")[0]["evidence"][0]


@pytest.mark.slow
def test_the_last_check_comes_before_the_last_validation(more: Outcomes) -> None:
    """A fit that ends by max_epochs or max_steps is checked once, after its last batch."""
    more.ended_well()
    assert more.steps("two_epochs") == [12]
    assert more.steps("max_steps") == [8]
    assert [rank["codes"] for rank in more.of("max_steps")] == [["SYN201"]] * 2


@pytest.mark.slow
def test_a_fit_that_is_stopped_is_checked_at_its_end(more: Outcomes) -> None:
    """What early stopping ends, after a validation, is checked once the training has ended."""
    assert more.steps("stopped") == [6]
    assert [rank["verdict"] for rank in more.of("stopped")] == ["in_sync"] * 2


@pytest.mark.slow
def test_optimizers_stepped_by_hand_are_all_watched(more: Outcomes) -> None:
    """Two optimizers that step in one batch make one step, and both states are compared."""
    assert more.steps("manual") == [3, 6]
    assert [rank["tensors"] for rank in more.of("manual")] == [6 + 4] * 2


@pytest.mark.slow
def test_a_resumed_fit_counts_on(more: Outcomes) -> None:
    """A fit that resumes after six steps checks at steps 8 and 12 where every fourth one is checked."""
    assert more.steps("resumed") == [8, 12]


@pytest.mark.slow
def test_the_scaler_of_mixed_precision_is_compared(more: Outcomes) -> None:
    """A gradient scaler that scales by another factor on rank 1 is named as the cause."""
    assert more.steps("scaled") == [3, 6]
    assert [rank["codes"] for rank in more.of("scaled")] == [["SYN216"]] * 2


@pytest.mark.slow
def test_shards_are_not_compared(more: Outcomes) -> None:
    """Under FSDP2 each rank holds shards of its own: nothing can be told, which is said and never raised."""
    assert more.steps("sharded") == [5, 6]
    assert [(rank["verdict"], rank["codes"]) for rank in more.of("sharded")] == [("undecided", ["SYN104"])] * 2
    assert "could not tell: every rank holds its own shards" in more.ended[0].output


@pytest.mark.slow
def test_no_check_after_an_exception(tmp_path: Path) -> None:
    """Where rank 1 raises in a batch no rank waits for a check: rank 1's own error ends the program."""
    need("lightning")
    assert_not_checked_after_an_error(outcomes(PROGRAM, tmp_path, "raise"), "raise")


@pytest.mark.slow
def test_ranks_that_lightning_starts_stop_too(tmp_path: Path) -> None:
    """With devices=2 Lightning starts rank 1 itself: the same fault ends both, and leaves no process behind."""
    need("lightning")
    found = outcomes(PROGRAM, tmp_path, "launched", ranks=1)
    assert_stopped_alike(found, "launched", "SYN220", ["net.2.weight"], 5)


@pytest.mark.slow
def test_ranks_that_are_spawned_are_watched(tmp_path: Path) -> None:
    """The callback can be sent to processes that Lightning spawns, and checks there."""
    need("lightning")
    found = outcomes(PROGRAM, tmp_path, "spawned", ranks=1)
    found.ended_well()
    assert found.of("spawned")[0]["steps"] == [5, 6]


@pytest.mark.slow
def test_a_single_process_is_told_once(tmp_path: Path) -> None:
    """Without other ranks there is nothing to compare: one line says so, and the fit goes on."""
    need("lightning")
    assert_told_once(outcomes(PROGRAM, tmp_path, "single", ranks=1), "single")


@pytest.mark.slow
def test_pytorch_lightning_is_served_too(tmp_path: Path) -> None:
    """With the package pytorch_lightning, which has classes of its own, the fault is found too."""
    need("pytorch_lightning")
    found = outcomes(PROGRAM, tmp_path, "healthy", "weight", "old")
    assert found.steps("healthy") == [5, 6]
    assert_stopped_alike(found, "weight", "SYN220", ["net.2.weight"], 5)
