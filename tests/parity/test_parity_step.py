"""The step after right gradients: norm, clipping, and the parameters after the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity_cases import ManualCase, TokenCase, codes, find
from support.parity_models import Fsdp, Tp
from torch import nn

from syncheck.parity.check import check_parity

pytestmark = pytest.mark.syncheck(ranks=2)


class SequenceTp(Tp):
    """All parameters are DTensors, as clip_grad_norm_ needs."""

    sequence = True


def clip_and_step(self: Any, model: Any, optimizer: Any) -> Any:
    """Clip and step as most trainers do."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def adamw(_self: Any, model: Any) -> Any:
    """Return an optimizer whose steps hide a factor of the gradient."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def with_step(kind: type, **changes: Any) -> Any:
    """Return a case with an optimizer and clipping."""
    return type(kind.__name__, (kind,), {"finish": clip_and_step, "optimizer": adamw, "max_norm": 0.1, **changes})


@pytest.mark.parametrize("kind", [TokenCase, ManualCase, Fsdp, SequenceTp])
def test_right_steps_pass(kind: Any) -> None:
    """Clipping and AdamW give the parameters of one process."""
    assert codes(check_parity(with_step(kind)())) == []


def test_adam_hides_a_factor_but_parity_does_not() -> None:
    """A factor that AdamW hides is found in the gradient."""

    def halve(self: Any, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 0.5 * ManualCase.factor(self, targets, all_targets)

    assert codes(check_parity(with_step(ManualCase, factor=halve)())) == ["SYN441"]


def test_norm_counts_replicas() -> None:
    """A norm that counts replicated tensors on each tensor-parallel rank is named; so is the norm of local shards."""

    def squares_of_all_ranks(self: Any, model: Any, optimizer: Any) -> Any:
        gradients = [p.grad.redistribute(placements=p.placements).to_local() for p in model.parameters()]
        square = sum(gradient.square().sum() for gradient in gradients)
        dist.all_reduce(square)
        return square.sqrt()

    report = check_parity(with_step(SequenceTp, finish=squares_of_all_ranks, max_norm=None)())
    assert codes(report) == ["SYN446"]
    assert find(report, "NORM")["ratio"] > 1.02
    assert find(report, "COPIES")["dimensions"] == ("tp",)

    def local_norm(self: Any, model: Any, optimizer: Any) -> Any:
        return sum(p.grad.to_local().square().sum() for p in model.parameters()).sqrt()

    report = check_parity(with_step(Fsdp, finish=local_norm, max_norm=None)())
    assert (codes(report), find(report, "SHARD")) == (["SYN446"], {})


def test_nothing_is_clipped() -> None:
    """A right norm without an effect on the gradients is named, with the expected factor."""

    def only_report(self: Any, model: Any, optimizer: Any) -> Any:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        return norm

    report = check_parity(with_step(ManualCase, finish=only_report)())
    assert codes(report) == ["SYN446"]
    assert set(find(report, "CLIP")["values"].values()) == {1.0}
    assert 0 < find(report, "CLIP")["expected"] < 1


def test_weight_decay_twice() -> None:
    """Weight decay that two parameter groups apply is named as a multiple of the decay."""

    def decay_again(self: Any, model: Any, optimizer: Any) -> Any:
        norm = clip_and_step(self, model, optimizer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("weight"):
                    parameter.mul_(1 - 1e-2 * 0.1)
        return norm

    report = check_parity(with_step(ManualCase, finish=decay_again)())
    assert codes(report) == ["SYN448"]
    assert "scale" not in report.findings[0].tensors
    assert find(report, "DIFFERS")["optimizer"] == "AdamW"
    assert 0.9 < find(report, "DECAY")["times"] < 1.1


def test_other_settings() -> None:
    """Another learning rate is a multiple of the update; a parameter missing in the optimizer does not change."""

    def faster(self: Any, model: Any, mesh: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.3)

    def sgd(self: Any, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    report = check_parity(with_step(ManualCase, optimizer=sgd, parallel_optimizer=faster)())
    assert (codes(report), find(report, "RATIO")["ratio"]) == (["SYN448"], pytest.approx(3))

    def without_head(self: Any, model: Any, mesh: Any) -> Any:
        return torch.optim.SGD([p for name, p in model.named_parameters() if name != "head.weight"], lr=0.1)

    report = check_parity(with_step(ManualCase, optimizer=sgd, parallel_optimizer=without_head)())
    assert (codes(report), report.findings[0].tensors) == (["SYN448"], ("head.weight",))
    assert find(report, "MISSING") == {}


def test_zero_redundancy_optimizer() -> None:
    """ZeroRedundancyOptimizer steps each parameter on one rank, and passes."""

    def zero(self: Any, model: Any, mesh: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)

    assert codes(check_parity(with_step(TokenCase, parallel_optimizer=zero)())) == []
