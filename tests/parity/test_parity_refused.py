"""Cases that parity refuses: exit 2, with the reason, and the same error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.parity_cases import ManualCase, TokenCase, Tokens, codes, refusal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.parity.check import check_parity
from syncheck.testing import ParityCase, sampler_order

ranks = pytest.mark.syncheck(ranks=2)


class Contrastive(ManualCase):
    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        vectors = model(batch[0]).mean(1)
        return F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)), reduction="none")

    def ignored(self, batch: Any) -> None:
        return None


class Images(ParityCase):
    """A network with BatchNorm."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def batch(self) -> Any:
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().sum(1)

    def parallelize(self, model: Any, mesh: Any) -> Any:
        return DistributedDataParallel(model)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        self.loss_terms(model, batch[dist.get_rank() :: 2]).mean().backward()


class Dropped(Images):
    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))


class Evaluated(Images):
    def build(self) -> nn.Module:
        return super().build().eval()


class Mean(Images):
    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        return super().loss_terms(model, batch).mean()


class Unseeded(Evaluated):
    def build(self) -> nn.Module:
        model = super().build()
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(5 + dist.get_rank()))
        return model


class Wrong(Evaluated):
    def owner(self, batch: Any) -> Any:
        return sampler_order(5, 2)


class Failing(Evaluated):
    def batch(self) -> Any:
        raise ValueError("no\ndata")


class Bfloat(Evaluated):
    def parallelize(self, model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@ranks
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Contrastive, "not a sum of terms: the terms of a sample depend on other samples"),
        (Images, "because of BatchNorm; use SyncBatchNorm"),
        (Dropped, "because of dropout"),
        (Mean, "must return one loss per sample or token"),
        (Unseeded, "has other values on rank"),
        (Wrong, "do not fit terms of shape [8]"),
        (Failing, "ValueError: no\\ndata"),
        (ParityCase, "override build"),
        (Bfloat, "mixed precision (param_dtype=torch.bfloat16, reduce_dtype=None)"),
    ],
)
def test_refused_with_a_reason(kind: Any, part: str, syncheck_rank: Any) -> None:
    """Losses that are no sums of terms, random losses, mixed precision and errors of the user are one line."""
    text = refusal(kind())
    assert part in text
    assert "\n" not in text


@ranks
def test_a_failure_on_one_rank_reaches_all(syncheck_rank: Any) -> None:
    """If the case fails on one rank only, all ranks raise this error."""

    class FailsOnOne(Evaluated):
        def batch(self) -> Any:
            if dist.get_rank() == 1:
                raise ValueError("no data")
            return super().batch()

    assert "rank 1: FailsOnOne: ValueError: no data" in refusal(FailsOnOne())


@ranks
def test_batch_norm_in_evaluation_passes() -> None:
    """BatchNorm with fixed statistics does not couple samples; autocast of the program is switched off."""

    class Autocast(Evaluated):
        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                super().backward(model, batch, mesh)

    assert codes(check_parity(Evaluated())) == []
    assert codes(check_parity(Autocast())) == []


@ranks
def test_invalid_arguments() -> None:
    """A dtype that is not supported and an object that is no case are refused."""
    assert "must be one of float64, float32, bfloat16" in refusal(TokenCase(), "float16")
    assert "expected an instance of a subclass of ParityCase" in refusal(TokenCase)  # type: ignore[arg-type]


def test_one_process() -> None:
    """A program without a process group is compared as well, and its accumulation may be wrong."""

    class Single(TokenCase):
        factor_of_micro_batch = 1.0

        def parallelize(self, model: Any, mesh: Any) -> Any:
            return model

        def micro(self, batch: Any) -> Any:
            return list(zip(batch[0].tensor_split(2), batch[1].tensor_split(2), strict=True))

        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return self.factor_of_micro_batch / 55

    case = Single(2)
    assert isinstance(case.build(), Tokens)
    assert codes(check_parity(case)) == []
    case.factor_of_micro_batch = 2.0
    report = check_parity(case)
    assert codes(report) == ["SYN441"]
    assert "accumulation (2)" in report.findings[0].evidence
