"""Low precision: right programs are within the derived bound, and faults are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.parity_cases import ManualCase, TokenCase, codes, find
from support.parity_models import Fsdp, Tp
from torch import nn

from syncheck.parity.check import check_parity
from syncheck.parity.precision import find_threshold, unit_roundoff
from train import minimal

two = pytest.mark.syncheck(ranks=2)


@two
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision(dtype: str) -> None:
    """Right programs pass in float32 and bfloat16, and a factor of 2 is found with its value."""
    for kind in (TokenCase, ManualCase, Fsdp, Tp):
        assert codes(check_parity(kind(), dtype)) == []

    class Twice(ManualCase):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return 2 * super().factor(targets, all_targets)

    report = check_parity(Twice(), dtype)
    assert len(codes(report)) == 1
    if dtype == "float32":
        assert (codes(report), find(report, "MATCHES")["matches"]) == (["SYN441"], ("dp (2)",))


def test_the_bound_grows_with_the_parts() -> None:
    """The bound of the reduction is gamma(k + 1), and never the only part of the threshold."""
    assert unit_roundoff("float64") == 2.0**-53
    assert unit_roundoff("bfloat16") == 2.0**-8
    few, many = (find_threshold(0.0, parts, "bfloat16") for parts in (2, 64))
    assert few < many <= 1 + 64 * 2.0**-8
    assert find_threshold(1e-8, 4, "float64") > 1e-8


class Minimal(TokenCase):
    """The pieces of train/minimal.py: its model, wrapper, and loss, with accumulation."""

    method = "ddp"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return minimal.make_model()

    def batch(self) -> Any:
        return minimal.make_data(16, seed=1).tensors

    def ignored(self, batch: Any) -> None:
        return None

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def parallelize(self, model: Any, mesh: Any) -> Any:
        return minimal.wrap(model, self.method, torch.device("cpu"))

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        parts = self.micro(batch)
        for number, (inputs, targets) in enumerate(parts, 1):
            if self.method == "fsdp":
                model.set_requires_gradient_sync(number == len(parts))
            with self.accumulating(model, is_last=number == len(parts)):
                (minimal.compute_loss(model(inputs), targets) / len(parts)).backward()


@two
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_minimal(method: str) -> None:
    """The program to copy computes the gradient of one process, with DDP and FSDP, and with accumulation."""
    case = Minimal(2)
    case.method = method
    assert codes(check_parity(case)) == []
