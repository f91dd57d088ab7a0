"""train/minimal.py, the program to copy, computes the gradient of one process in the first step of its own loop."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity_cases import codes, find
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from syncheck.parity.check import check_parity
from syncheck.testing import ParityCase
from train import minimal

pytestmark = pytest.mark.syncheck(ranks=2)
SAMPLES = 16


class _Reached(Exception):
    """The loop is about to clip the gradients of its first step."""


def stop(*_: Any) -> None:
    """Stop the loop, with its gradients complete."""
    raise _Reached


class Minimal(ParityCase):
    """The loop of minimal.py with its model, wrapper, sampler and loss. All of its data is one batch."""

    micro_batches = 2
    loss: Any = minimal.compute_loss

    def __init__(self, method: str) -> None:
        self.method = method

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return minimal.make_model()

    def batch(self) -> Any:
        return minimal.make_data(SAMPLES, seed=1).tensors

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def owner(self, batch: Any) -> Any:
        """The order of the shuffled sampler in the first epoch."""
        ranks, micro_batches = torch.zeros(SAMPLES, dtype=torch.long), torch.zeros(SAMPLES, dtype=torch.long)
        for rank in range(dist.get_world_size()):
            samples = torch.tensor(list(DistributedSampler(range(SAMPLES), rank=rank)))  # type: ignore[arg-type]
            ranks[samples] = rank
            for micro_batch, part in enumerate(samples.chunk(self.micro_batches)):
                micro_batches[part] = micro_batch
        return ranks, micro_batches

    def parallelize(self, model: Any, mesh: Any) -> Any:
        self.module = model
        self.wrapped = minimal.wrap(model, self.method, torch.device("cpu"))
        return self.wrapped

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        arguments = Namespace(
            method=self.method,
            lr=0.1,
            amp="off",
            resume=False,
            checkpoint="unused",
            epochs=1,
            batch_size=SAMPLES,
            accumulate=self.micro_batches,
        )
        with pytest.MonkeyPatch.context() as patch, suppress(_Reached):
            patch.setattr(minimal, "make_data", lambda *_, **__: TensorDataset(*batch))
            patch.setattr(minimal, "make_model", lambda: self.module)
            patch.setattr(minimal, "wrap", lambda *_: self.wrapped)
            patch.setattr(minimal, "compute_loss", self.loss)
            patch.setattr(nn.utils, "clip_grad_norm_", stop)
            minimal.train(arguments, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_minimal(method: str) -> None:
    """The loop itself passes with DDP and FSDP2 and with accumulation; a sum in its loss is found."""
    case = Minimal(method)
    assert codes(check_parity(case)) == []
    case.loss = nn.CrossEntropyLoss(reduction="sum")
    report = check_parity(case)
    # Four samples in each micro-batch.
    assert (codes(report), find(report, "FACTOR")["factor"]) == (["SYN441"], pytest.approx(4))
