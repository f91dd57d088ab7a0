"""Low precision: right programs are within the derived bound, and faults are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from support.parity_cases import ManualCase, TokenCase, codes, count_tokens, find
from support.parity_models import Fsdp, Tp
from torch import nn

from syncheck.messages import Note, Undecided
from syncheck.parity.check import check_parity
from syncheck.parity.measurements import Solution, TensorWeights
from syncheck.parity.precision import find_threshold, unit_roundoff
from syncheck.parity.resolution import find_doubt
from syncheck.parity.step import Step
from syncheck.report.words import verdict_line

two = pytest.mark.syncheck(ranks=2)


@two
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
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


class NormsAveraged(Tp):
    """The partial gradients of the norms are averaged instead of added."""

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        super().backward(model, batch, mesh)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.grad *= 0.5


class Slightly(ManualCase):
    """Weights 1.1 and 0.917, as in a mean of means, and a gradient 1.05 times too large."""

    def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 1.05 / 2 / count_tokens(targets)


@two
@pytest.mark.parametrize("kind", [ManualCase, *slow(NormsAveraged, Slightly)])
def test_bfloat16_never_proves_a_gradient_right(kind: Any) -> None:
    """Faults within the rounding of bfloat16 are undecided, as right programs are; float32 and float64 decide."""
    report = check_parity(kind(), "bfloat16")
    assert (report.verdict, report.exit_code) == ("undecided", 2)
    assert "bfloat16 cannot tell" in verdict_line(report)
    assert "check with dtype='float64' or float32" in verdict_line(report)
    expected = "in_sync" if kind is ManualCase else "out_of_sync"
    assert [check_parity(kind(), dtype).verdict for dtype in ("float32", "float64")] == [expected, expected]


@two
def test_bfloat16_proves_no_cause() -> None:
    """A missing reduction of one tensor is found in bfloat16, and no cause is called proved."""

    class Skipped(ManualCase):
        def reduce(self, model: Any) -> None:
            for name, parameter in model.named_parameters():
                if name != "head.weight":
                    dist.all_reduce(parameter.grad)

    report = check_parity(Skipped(), "bfloat16")
    assert report.verdict == "out_of_sync"
    assert {finding.certainty for finding in report.findings} == {"consistent"}
    assert "SYN445" not in codes(report)
    assert (codes(check_parity(Skipped())), check_parity(Skipped()).findings[0].certainty) == (["SYN443"], "proved")


@two
def test_a_tiny_gradient_is_named() -> None:
    """A gradient below rounding is not called right: a note names the tensor; one slightly above it is undecided."""

    class Tiny(ManualCase):
        size = 1e-9

        def build(self) -> nn.Module:
            model = super().build()
            model.tiny = nn.Linear(1, 1, bias=False)
            return model

        def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
            return super().loss_terms(model, batch) + self.size * model.tiny.weight.sum()

        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            for part in self.micro(batch):
                terms = self.loss_terms(model, part)[part[1] != -100]
                (terms.sum() / count_tokens(batch[1])).backward()
            self.reduce(model)

    report = check_parity(Tiny(), "float32")
    (note,) = [note for note in report.groups[0].notes if note.code is Note.PARITY_TINY]
    assert (report.verdict, note.parameters["names"]) == ("in_sync", ["tiny.weight"])
    Tiny.size = 3e-6
    report = check_parity(Tiny(), "float32")
    assert (report.verdict, report.groups[0].evidence.doubt.parameters["names"]) == ("undecided", ["tiny.weight"])
    assert check_parity(Tiny()).verdict == "in_sync"


def test_a_coarse_step_is_undecided() -> None:
    """If rounding changes an update by more than one percent, a right step is not proved."""
    solution = Solution((1.0,), 0.0, 0.0, 1e-9, size=1.0)
    tensors = {"weight": TensorWeights("weight", (8,), {0: solution}, {})}
    for threshold, expected in ((0.02, Undecided.PARITY_STEP), (0.001, None)):
        doubt = find_doubt(tensors, {0: Step(), 1: Step(threshold=threshold)}, 1e-6, "float32")
        assert (doubt and doubt.code) == expected


def test_the_bound_grows_with_the_parts() -> None:
    """The bound of the reduction is gamma(k + 1), and never the only part of the threshold."""
    assert unit_roundoff("float64") == 2.0**-53
    assert unit_roundoff("bfloat16") == 2.0**-8
    few, many = (find_threshold(0.0, parts, "bfloat16") for parts in (2, 64))
    assert few < many <= 1 + 64 * 2.0**-8
    assert find_threshold(1e-8, 4, "float64") > 1e-8
