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
from syncheck.parity.sentences import NotReduced
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
    assert {fact.parameters["ranks"] for fact in report.findings[0].facts[:-1]} == {(0,), (1,)}

    class HeadOnly(ManualCase):
        def reduce(self, model: Any) -> None:
            for name, parameter in model.named_parameters():
                if not name.startswith("head"):
                    dist.all_reduce(parameter.grad)

    report = check_parity(HeadOnly())
    assert codes(report) == ["SYN443"]
    assert report.findings[0].tensors == ("head.weight",)
    assert find(report, "TENSORS") == {"count": 1, "total": 9, "names": ["head.weight"]}
    # The wrapper works, so its mesh is not to blame.
    assert report.findings[0].fix == NotReduced.FIX_SOME()


class Contiguous(ManualCase):
    """Ranks read contiguous halves of the batch, which the default of `owner` does not say."""

    def micro(self, batch: Any) -> Any:
        return [tuple(part.chunk(2)[dist.get_rank()] for part in batch)]


def test_another_split_than_the_owners() -> None:
    """Without owners that fit, a missing reduction is not proved, and the finding asks for `owner`."""

    class Local(Contiguous):
        def reduce(self, model: Any) -> None:
            pass

    class MeanOfHalf(Contiguous):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return 0.5 / count_tokens(targets)

    assert codes(check_parity(Contiguous())) == []
    # The tensor with one element has a finding of its own.
    report = check_parity(Local())
    finding = report.findings[0]
    assert (finding.code, finding.certainty, finding.alternatives) == ("SYN443", "consistent", ("SYN445",))
    assert "define owner and micro_batches of the case" in finding.evidence
    report = check_parity(MeanOfHalf())
    finding = report.findings[0]
    assert (finding.code, finding.certainty) == ("SYN449", "consistent")
    assert "define owner and micro_batches of the case" in finding.evidence
    assert {finding.certainty for finding in report.findings} == {"consistent"}


class Weighted(ManualCase):
    """Samples with weights; `count` is their sum."""

    lengths = (6,) * 8

    def batch(self) -> Any:
        return (*super().batch(), torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 0.25, 4.0]))

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        return super().loss_terms(model, batch[:2]).sum(1) * batch[2]

    def ignored(self, batch: Any) -> None:
        return None

    def count(self, batch: Any) -> Any:
        return batch[2].sum()

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        share = [part[dist.get_rank() :: 2] for part in batch]
        (self.loss_terms(model, share).sum() / self.divide(share, batch)).backward()
        self.reduce(model)

    def divide(self, share: Any, batch: Any) -> Any:
        return batch[2].sum()


def test_mean_of_weighted_means() -> None:
    """A weighted mean per rank is a mean of means: weights follow the sums of the weights of the samples."""

    class MeanPerSum(Weighted):
        def divide(self, share: Any, batch: Any) -> Any:
            return 2 * share[2].sum()

    assert codes(check_parity(Weighted())) == []
    report = check_parity(MeanPerSum())
    assert codes(report) == ["SYN442"]
    assert [part.parameters["count"] for part in find(report, "SHARE")["parts"]] == [2.75, 10]
    assert find(report, "SHARE")["amount"] == "part of the count"

    class Constant(MeanPerSum):
        """The sum of the weights as a number, whose shares syncheck cannot know."""

        def count(self, batch: Any) -> float:
            return 12.75

    report = check_parity(Constant())
    assert (codes(report), find(report, "RECIPROCALS")) == (["SYN449"], {})


def test_no_gradient_at_all() -> None:
    """A program whose gradients are cleared is told so, and not that 0 is a product of sizes."""

    class Cleared(ManualCase):
        def reduce(self, model: Any) -> None:
            model.zero_grad()
            # A gradient of zeros is no other fault than no gradient.
            model.norm.weight.grad = torch.zeros(12, dtype=torch.float64)

    report = check_parity(Cleared())
    assert (codes(report), find(report, "NONE")["count"]) == (["SYN441"], 9)


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


def test_all_ranks_read_the_same_data() -> None:
    """The samples of rank 0 count twice, and those of rank 1 are lost."""

    class SameData(ManualCase):
        lengths = (6,) * 8

        def micro(self, batch: Any) -> Any:
            return [tuple(part[::2] for part in batch)]

    report = check_parity(SameData())
    assert codes(report) == ["SYN447"]
    assert (find(report, "WEIGHT")["multiple"], find(report, "WEIGHT")["parts"]) == (
        2,
        ["data rank 0, micro-batch 0 (samples 0, 2, 4, 6)"],
    )
    assert find(report, "LOST")["parts"] == ["data rank 1, micro-batch 0 (samples 1, 3, 5, 7)"]


class Changed(ManualCase):
    """Changes the gradient of one tensor on rank 1 after the reduction."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value = value

    def reduce(self, model: Any) -> None:
        super().reduce(model)
        parameter = model.up.weight
        if dist.get_rank() == 1 and self.value is None:
            parameter.grad = None
        elif dist.get_rank() == 1:
            parameter.grad[3, 2] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite(value: float) -> None:
    """A NaN or an infinite element is reported with its tensor and its rank."""
    report = check_parity(Changed(value))
    [finding] = report.findings
    assert (finding.code, finding.ranks, finding.tensors) == ("SYN449", (1,), ("up.weight",))
    assert find(report, "NOT_FINITE")["ranks"] == (1,)
    [tensor] = report.tensors
    assert (tensor.mismatched, tensor.max_abs, tensor.clusters) == (1, None, ((0,), (1,)))


def test_gradient_that_is_missing_on_one_rank() -> None:
    """A rank whose gradient is None is named."""
    report = check_parity(Changed(None))
    [finding] = report.findings
    assert (finding.code, finding.ranks, finding.tensors) == ("SYN449", (1,), ("up.weight",))
    assert (find(report, "MISSING")["ranks"], find(report, "MISSING")["names"]) == ((1,), ["up.weight"])


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
