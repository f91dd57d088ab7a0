"""Lightning's Trainer with the callback on two gloo ranks, with injected faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.libraries import need
from support.listings import list_fields, list_names
from support.outcomes import (
    Outcomes,
    assert_not_checked_after_an_error,
    assert_nothing_changed,
    assert_stopped_alike,
    assert_warned_once,
    outcomes,
)

from syncheck.diagnose import syn201_bn_local_stats

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "lightning_fits.py"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of four fits; an injected fault ends the last fit."""
    need("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    return outcomes(PROGRAM, folder, "plain", "healthy", "accumulated", "weight")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return one run of further fits that succeed."""
    need("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    return outcomes(PROGRAM, folder, "two_epochs", "max_steps", "manual", "stopped", "resumed", "scaled", "sharded")


def test_a_healthy_fit_is_in_sync(quick: Outcomes) -> None:
    """Each rank checks every fifth step and after the last step, and finds model and optimizer in sync."""
    assert quick.steps("healthy") == [5, 6]
    for rank in quick.of("healthy"):
        assert (rank["verdict"], rank["tensors"], rank["error"]) == ("in_sync", 6 + 3 * 6, "")
    assert quick.of("healthy")[0]["ended"] == [None]


def test_the_callback_changes_nothing(quick: Outcomes) -> None:
    """Parameters, optimizer states and RNG states are bitwise equal to a fit without the callback."""
    assert_nothing_changed(quick)


def test_accumulated_batches_are_one_step(quick: Outcomes) -> None:
    """Accumulated batches count as one step."""
    assert quick.steps("accumulated") == [2]


def test_scalars_go_to_tensorboard(quick: Outcomes) -> None:
    """Only rank 0 writes scalars of each check to the trainer's TensorBoard logger."""
    first, second = list_fields(quick.of("healthy"), "scalars")
    assert ["syncheck/out_of_sync", 0, 5] in first
    assert ["syncheck/out_of_sync", 0, 6] in first
    assert second == []


def test_an_injected_fault_stops_all_ranks(quick: Outcomes) -> None:
    """A changed weight on rank 1 is found at the next check; all ranks raise the same error and exit with 1."""
    assert_stopped_alike(quick, "weight", "SYN220", ["net.2.weight"], 5)
    assert quick.of("weight")[0]["ended"] == ["OutOfSync"]


def test_a_desync_is_not_saved(quick: Outcomes) -> None:
    """The checkpoint after the batch of a failed check is not written; the previous checkpoint exists."""
    assert list_names(quick.folder.glob("weight.*.ckpt")) == ["weight.step=4.ckpt"]


@pytest.mark.slow
def test_the_last_check_comes_before_the_last_validation(more: Outcomes) -> None:
    """A fit that ends by max_epochs or max_steps is checked once, before validation would hide drift of BatchNorm."""
    more.ended_well()
    for case, step in (("two_epochs", 12), ("max_steps", 8)):
        assert more.steps(case) == [step]
        matches = list_fields(more.of(case), "codes", "names")
        assert matches == [(["SYN201"], ["net.1.running_mean", "net.1.running_var"])] * 2
        # Known from DDP itself, which is watched and not the module in it.
        assert str(syn201_bn_local_stats.Text.SYNCHRONIZED()) in more.of(case)[0]["evidence"][0]


@pytest.mark.slow
def test_a_stopped_fit_is_checked_at_its_end(more: Outcomes) -> None:
    """A fit that early stopping ends is checked after its last validation."""
    assert more.steps("stopped") == [6]
    assert list_fields(more.of("stopped"), "verdict") == ["in_sync"] * 2


@pytest.mark.slow
def test_manual_optimization(more: Outcomes) -> None:
    """With manual optimization, two optimizers in one batch make one step, and both states are compared."""
    assert more.steps("manual") == [3, 6]
    assert list_fields(more.of("manual"), "tensors") == [6 + 4] * 2


@pytest.mark.slow
def test_a_resumed_fit_continues_counting(more: Outcomes) -> None:
    """A fit that resumes after six steps checks at steps 8 and 12 with every=4."""
    assert more.steps("resumed") == [8, 12]


@pytest.mark.slow
def test_the_scaler_of_mixed_precision_is_compared(more: Outcomes) -> None:
    """A gradient scaler with another factor on rank 1 is reported as the cause."""
    assert more.steps("scaled") == [3, 6]
    assert list_fields(more.of("scaled"), "codes") == [["SYN216"]] * 2


@pytest.mark.slow
def test_shards_are_not_compared(more: Outcomes) -> None:
    """Under FSDP2 each rank has its own shards: a warning about an undecided check, and no error."""
    assert more.steps("sharded") == [5, 6]
    assert list_fields(more.of("sharded"), "verdict", "codes") == [("undecided", ["SYN104"])] * 2
    assert "could not tell: every rank holds its own shards" in more.ended[0].output


@pytest.mark.slow
def test_no_check_after_an_exception(tmp_path: Path) -> None:
    """If rank 1 raises in a batch, no rank waits for a check: rank 1's error ends the program."""
    need("lightning")
    assert_not_checked_after_an_error(outcomes(PROGRAM, tmp_path, "raise"), "raise")


@pytest.mark.slow
def test_ranks_started_by_lightning_stop(tmp_path: Path) -> None:
    """With devices=2 Lightning starts rank 1: the fault ends both ranks, and no process remains."""
    need("lightning")
    result = outcomes(PROGRAM, tmp_path, "launched", ranks=1)
    assert_stopped_alike(result, "launched", "SYN220", ["net.2.weight"], 5)


@pytest.mark.slow
def test_a_single_process_and_spawned_ranks(tmp_path: Path) -> None:
    """In a single process the callback warns once; it can be pickled for processes that Lightning spawns."""
    need("lightning")
    result = outcomes(PROGRAM, tmp_path, "single", "spawned", ranks=1)
    assert_warned_once(result, "single")
    assert result.of("spawned")[0]["steps"] == [5, 6]


@pytest.mark.slow
def test_pytorch_lightning(tmp_path: Path) -> None:
    """The callback works with the package pytorch_lightning."""
    need("pytorch_lightning")
    result = outcomes(PROGRAM, tmp_path, "healthy", "weight", "old")
    assert result.steps("healthy") == [5, 6]
    assert_stopped_alike(result, "weight", "SYN220", ["net.2.weight"], 5)
