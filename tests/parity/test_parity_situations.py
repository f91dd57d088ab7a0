"""Situations of public threads, rebuilt with the operations of their programs: wrong and named, right and passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity_cases import ManualCase, TokenCase, codes, count_tokens, find
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from syncheck.parity import refinement
from syncheck.parity.check import check_parity

pytestmark = pytest.mark.syncheck(ranks=2)


def test_factors_of_ranks_times_accumulation() -> None:
    """Gradients 8 and 4 times too large are named as ranks times accumulation and as accumulation; 1 passes."""

    class Times(ManualCase):
        times = 8

        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return self.times * super().factor(targets, all_targets)

    for times, match in ((8, "dp (2) * accumulation (4)"), (4, "accumulation (4)")):
        Times.times = times
        report = check_parity(Times(4))
        assert (codes(report), find(report, "MATCHES")["matches"]) == (["SYN441"], (match,))
    Times.times = 1
    assert codes(check_parity(Times(4))) == []


def test_a_mean_that_is_divided_by_all_tokens_again() -> None:
    """A factor of 1 / 55 to the power of two, which is close to zero, is a factor, and no missing gradient."""

    class Again(ManualCase):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return super().factor(targets, all_targets) / count_tokens(all_targets) ** 2

    report = check_parity(Again())
    assert (codes(report), find(report, "FACTOR")["factor"]) == (["SYN441"], pytest.approx(55**-2))


def test_ddp_over_a_group_of_one_rank() -> None:
    """DDP with a process group of one rank reduces nothing."""

    class Alone(TokenCase):
        def parallelize(self, model: Any, mesh: Any) -> Any:
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            return DistributedDataParallel(model, process_group=groups[dist.get_rank()])

    report = check_parity(Alone())
    assert codes(report) == ["SYN443"]
    rows = {fact.parameters["ranks"]: fact.parameters for fact in report.findings[0].facts[:-1]}
    assert {ranks: row["parts"] for ranks, row in rows.items()} == {(0,): ["data rank 0"], (1,): ["data rank 1"]}
    # The loss is multiplied by the number of ranks, by which a group of one does not divide.
    assert {row["weight"] for row in rows.values()} == {"2"}


def test_a_sum_in_the_place_of_an_average() -> None:
    """All-reduce with SUM after a loss for AVG has the factor of the ranks; in one tensor, the tensor is named."""

    class Reduced(ManualCase):
        summed: tuple[str, ...] = ()

        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return dist.get_world_size() * super().factor(targets, all_targets)

        def reduce(self, model: Any) -> None:
            for name, parameter in model.named_parameters():
                is_summed = name.startswith(self.summed)
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM if is_summed else dist.ReduceOp.AVG)

    assert codes(check_parity(Reduced())) == []
    Reduced.summed = ("",)
    report = check_parity(Reduced())
    assert (codes(report), find(report, "MATCHES")["matches"]) == (["SYN441"], ("dp (2)",))
    Reduced.summed = ("up.weight",)
    report = check_parity(Reduced())
    assert (codes(report), report.findings[0].tensors) == (["SYN444"], ("up.weight",))


class Sampled(ManualCase):
    """Nine samples, which torch's sampler divides among two ranks."""

    lengths = (5, 9, 2, 12, 7, 3, 11, 6, 4)
    drops = True

    def micro(self, batch: Any) -> Any:
        sampler = DistributedSampler(range(9), shuffle=False, drop_last=self.drops)  # type: ignore[arg-type]
        return [tuple(part[list(sampler)] for part in batch)]


def test_distributed_sampler() -> None:
    """`drop_last` of DistributedSampler loses the ninth sample; without it, the first sample counts twice."""
    report = check_parity(Sampled())
    assert (codes(report), find(report, "LOST")["parts"]) == (["SYN447"], ["sample 8"])
    Sampled.drops = False
    report = check_parity(Sampled())
    assert (codes(report), find(report, "WEIGHT")["parts"]) == (["SYN447"], ["sample 0"])
    assert find(report, "WEIGHT")["multiple"] == 2


def test_gradients_of_samples_that_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller tensors determine the weights of samples if larger ones do not fit; without any, there is no cause."""
    # Nine samples of a linear layer of 12 x 24 elements in float64.
    monkeypatch.setattr(Sampled, "drops", True)
    for room, expected in ((9 * 12 * 24 * 8, {"SYN447"}), (0, {"SYN449"})):
        monkeypatch.setattr(refinement, "_MOST_BYTES", room)
        assert set(codes(check_parity(Sampled()))) == expected


class DecayInEachGroup(torch.optim.SGD):
    """Decays all parameters once for each of its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            for parameter in parameters:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for parameter in parameters:
            parameter.sub_(self.defaults["lr"] * parameter.grad)


def test_weight_decay_of_two_parameter_groups() -> None:
    """An optimizer that decays all parameters once for each of two groups applies the decay once too often."""

    class Stepped(ManualCase):
        groups = 2

        def optimizer(self, model: Any) -> Any:
            return DecayInEachGroup(model.parameters(), lr=1e-2, weight_decay=0.1)

        def parallel_optimizer(self, model: Any, mesh: Any) -> Any:
            parameters = list(model.parameters())
            groups = [{"params": parameters[number :: self.groups]} for number in range(self.groups)]
            return DecayInEachGroup(groups, lr=1e-2, weight_decay=0.1)

        def finish(self, model: Any, optimizer: Any) -> None:
            optimizer.step()

    report = check_parity(Stepped())
    # A bias of zero does not decay.
    assert (codes(report), len(report.findings[0].tensors)) == (["SYN448"], 8)
    assert find(report, "DECAY")["times"] == pytest.approx(1, rel=0.01)
    Stepped.groups = 1
    assert codes(check_parity(Stepped())) == []
