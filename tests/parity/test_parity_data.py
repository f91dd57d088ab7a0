"""Data parallelism with DDP and manual all-reduce: right programs pass, and each fault is named from its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity_cases import (
    ManualCase,
    TokenCase,
    codes,
    count_tokens,
    find,
)

from syncheck.parity.check import check_parity
from syncheck.records import OutOfSync
from syncheck.testing import Rank, assert_parallel_equals_single

pytestmark = pytest.mark.syncheck(ranks=2)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", [TokenCase, ManualCase])
def test_right_programs_pass(kind: Any, micro_batches: int) -> None:
    """DDP and a manual all-reduce compute the gradient of one process, with accumulation and unequal lengths."""
    report = assert_parallel_equals_single(kind(micro_batches))
    assert (report.command, report.verdict, report.exit_code) == ("parity", "in_sync", 0)
    assert report.counts.close == report.counts.tensors == 9


class MeanPerRank(TokenCase):
    def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 1 / count_tokens(targets)


class NoWorldFactor(TokenCase):
    def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 1 / count_tokens(all_targets)


def test_mean_of_means(syncheck_rank: Rank) -> None:
    """A mean per rank is a mean of means: weights follow the counts of the ranks."""
    with pytest.raises(OutOfSync) as caught:
        assert_parallel_equals_single(MeanPerRank())
    report = caught.value.report
    assert codes(report) == ["SYN442"]
    parts = find(report, "SHARE")["parts"]
    assert [part.parameters["count"] for part in parts] == [25, 30]
    assert [round(part.parameters["weight"], 4) for part in parts] == [1.1, 0.9167]
    assert report.exit_code == 1
    print(caught.value)


def test_mean_per_micro_batch() -> None:
    """A mean per micro-batch, also if the accumulation is not divided, is a mean of means with its factor."""

    class Divided(MeanPerRank):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return super().factor(targets, all_targets) / 2

    report = check_parity(Divided(2))
    assert codes(report) == ["SYN442"]
    assert [part.parameters["count"] for part in find(report, "SHARE")["parts"]] == [7, 18, 21, 9]
    report = check_parity(MeanPerRank(2))
    assert codes(report) == ["SYN442"]
    assert find(report, "FACTOR")["matches"] == ("accumulation (2)", "dp (2)")


def test_gradient_scaled() -> None:
    """A missing factor of the number of ranks, and a sum in the place of an average, are one factor everywhere."""
    report = check_parity(NoWorldFactor())
    assert codes(report) == ["SYN441"]
    assert find(report, "FACTOR")["factor"] == pytest.approx(0.5)
    assert find(report, "MATCHES")["matches"] == ("1 / dp (2)",)

    class Summed(ManualCase):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return 2 * super().factor(targets, all_targets)

    report = check_parity(Summed())
    assert (codes(report), find(report, "MATCHES")["matches"]) == (["SYN441"], ("dp (2)",))


def test_not_reduced() -> None:
    """Without a reduction each rank has its own terms; if it lacks for some tensors, the finding names them."""

    class Local(ManualCase):
        def reduce(self, model: Any) -> None:
            pass

    report = check_parity(Local())
    assert codes(report) == ["SYN443"]
    assert {fact.parameters["ranks"] for fact in report.findings[0].facts} == {(0,), (1,)}

    class HeadOnly(ManualCase):
        def reduce(self, model: Any) -> None:
            for name, parameter in model.named_parameters():
                if not name.startswith("head"):
                    dist.all_reduce(parameter.grad)

    report = check_parity(HeadOnly())
    assert codes(report) == ["SYN443"]
    assert report.findings[0].tensors == ("head.weight",)


def test_some_tensors_summed() -> None:
    """A tensor with another factor than the rest is named, also if it has one element."""

    class Doubled(ManualCase):
        name = "norm.weight"

        def reduce(self, model: Any) -> None:
            super().reduce(model)
            model.get_parameter(self.name).grad *= 2

    report = check_parity(Doubled())
    assert (codes(report), report.findings[0].tensors) == (["SYN444"], ("norm.weight",))
    assert find(report, "DIMENSION")["dimension"] == "dp"
    Doubled.name = "scale"
    report = check_parity(Doubled())
    assert (codes(report), report.findings[0].tensors) == (["SYN444"], ("scale",))
    assert report.findings[0].certainty == "consistent"


def test_lost_samples() -> None:
    """A micro-batch that is reduced twice, one that is lost, and a lost sample are named with their indices."""

    class Twice(ManualCase):
        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            for inputs, targets in self.micro(batch):
                (self.loss_terms(model, (inputs, targets)).sum() / count_tokens(batch[1])).backward()
                self.reduce(model)

    report = check_parity(Twice(2))
    assert (codes(report), find(report, "WEIGHT")["multiple"]) == (["SYN447"], 2)
    assert [part[:27] for part in find(report, "WEIGHT")["parts"]] == [
        "data rank 0, micro-batch 0 ",
        "data rank 1, micro-batch 0 ",
    ]

    class Dropped(ManualCase):
        def micro(self, batch: Any) -> Any:
            return super().micro(batch)[:1]

    assert (codes(check_parity(Dropped(2)))) == ["SYN447"]

    class DropLast(ManualCase):
        """The last two samples are dropped, and the mean is over the others."""

        lengths = (5, 9, 2, 12, 7, 3, 11, 6, 4, 8)

        def micro(self, batch: Any) -> Any:
            return super().micro(tuple(part[:8] for part in batch))

        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return 1 / count_tokens(all_targets[:8])

    report = check_parity(DropLast())
    assert (codes(report), find(report, "LOST")["parts"]) == (["SYN447"], ["sample 8", "sample 9"])
    assert find(report, "USUAL")["usual"] == pytest.approx(67 / 55)
    print(report.findings[0].evidence)


def test_unexplained() -> None:
    """Noise, and weights that follow no rule, are reported without a cause."""

    class Noise(ManualCase):
        def reduce(self, model: Any) -> None:
            super().reduce(model)
            torch.manual_seed(7)
            model.up.weight.grad += 1e-6 * torch.randn_like(model.up.weight)

    report = check_parity(Noise())
    assert (codes(report), report.findings[0].tensors) == (["SYN449"], ("up.weight",))

    class Odd(ManualCase):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return super().factor(targets, all_targets) * (0.9, 1.3)[dist.get_rank()]

    report = check_parity(Odd())
    assert codes(report) == ["SYN449"]
    print(report.findings[0].evidence)
