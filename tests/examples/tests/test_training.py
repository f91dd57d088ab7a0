"""Does training keep the ranks in sync?"""

import pytest
import torch
import torch.distributed as dist
import trainer

from syncheck.testing import assert_in_sync


@pytest.fixture
def trained():
    """A trained model and its optimizer, on every rank."""
    return trainer.train()


@pytest.mark.syncheck(ranks=2)
def test_parameters_stay_equal(trained):
    """DDP keeps parameters and momentum equal on all ranks."""
    assert_in_sync(*trained, only=["params", "optimizer"])


@pytest.mark.syncheck(ranks=[2, 3])
def test_sum_over_ranks(syncheck_rank):
    """A sum counts each rank once."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == syncheck_rank.world_size


@pytest.mark.syncheck(ranks=2)
def test_fine_tuning_stays_in_sync(trained):
    """The new layer is the same on all ranks."""
    assert_in_sync(trainer.fine_tune(trained[0]))
