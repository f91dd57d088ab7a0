"""What the name of a plain value tells about it."""

from __future__ import annotations

import pytest

from syncheck.tensors.value_kinds import is_aside


@pytest.mark.parametrize("name", "time_scale loss_weight note_embedding_scale loss_temperature bias".split())
def test_names_of_parts_of_the_model(name: str) -> None:
    """The last word decides: the weight of a loss is a constant of the model."""
    assert not is_aside(name)


@pytest.mark.parametrize("name", "best_loss val_acc_top1 time_taken loss note logs.scale args.weight date_2".split())
def test_names_of_the_run(name: str) -> None:
    """Losses, times and notes describe the run, as does everything in a container of logs or settings."""
    assert is_aside(name)
