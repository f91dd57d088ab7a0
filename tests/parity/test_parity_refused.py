"""Cases that parity refuses: exit 2, with the reason, and the same error on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.parity_cases import ManualCase, TokenCase, Tokens, codes, find, refusal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.errors import UsageError
from syncheck.parity.check import _check_coverage, check_parity
from syncheck.parity.measurements import Solution, TensorWeights
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


class Trains(Dropped):
    """The definition has no dropout; the program calls `train()`, as trainers do."""

    def build(self) -> nn.Module:
        return super().build().eval()

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        model.train()
        super().backward(model, batch, mesh)


class Adds(Images):
    """Only the program has dropout.

    rate: of the dropout.
    """

    rate = 0.1

    def build(self) -> nn.Module:
        return super().build().eval()

    def parallelize(self, model: Any, mesh: Any) -> Any:
        model[2].register_module("drop", nn.Dropout1d(self.rate))
        model[2].register_forward_pre_hook(lambda module, inputs: module.drop(*inputs))
        return DistributedDataParallel(model)


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
        (Trains, "the program runs Dropout with p=0.5"),
        (Adds, "the program runs Dropout1d with p=0.1"),
        (Mean, "must return one loss per sample or token"),
        (Unseeded, "has other values on rank"),
        (Wrong, "do not fit terms of shape [8]"),
        (Failing, "ValueError: no\\ndata"),
        (ParityCase, "override build and batch and loss_terms and parallelize and backward of ParityCase"),
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

    assert "rank 1: FailsOnOne.batch (test_parity_refused.py:" in refusal(FailsOnOne())


def make(name: str, value: Any) -> Any:
    """Return a case with another attribute, or with a method that returns a value."""
    is_attribute = name in ("mesh_sizes", "micro_batches", "max_norm")
    return type("Case", (Evaluated,), {name: value if is_attribute else lambda *_: value})()


@ranks
@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("owner", (torch.full((8,), 7), torch.zeros(8, dtype=torch.long)), "owner: data ranks 7 to 7"),
        ("owner", (torch.full((8,), -1), torch.zeros(8, dtype=torch.long)), "owner: data ranks -1 to -1"),
        ("owner", (torch.zeros(8, dtype=torch.long), torch.full((8,), -2)), "owner: micro-batch -2"),
        ("owner", (torch.zeros(8), torch.zeros(8)), "owner: found torch.float32"),
        ("owner", torch.zeros(8, dtype=torch.long), "owner: found Tensor; return two integer tensors"),
        ("owner", ([0, 1], [0, 0]), "owner: found list in the tuple"),
        ("owner", None, "owner: found NoneType"),
        ("count", "8", "count: must return a positive number; found '8'"),
        ("count", 0, "count: must return a positive number"),
        ("count", float("nan"), "count: must return a positive number"),
        ("mesh_sizes", {"dp": 1}, "the sizes {'dp': 1} are of 1 ranks, and the program has 2"),
        ("mesh_sizes", [2], "mesh_sizes: must be an attribute with a dictionary of sizes by name"),
        ("mesh_sizes", lambda _: {"dp": 2}, "mesh_sizes: must be an attribute with a dictionary of sizes by name"),
        ("mesh_sizes", {"dp": "2"}, "mesh_sizes['dp']: must be a positive integer; found '2'"),
        ("micro_batches", 2.0, "micro_batches: must be a positive integer; found 2.0"),
        ("max_norm", -1, "max_norm: must be a positive number; found -1"),
        ("loss_terms", None, "loss_terms: must return a tensor [samples, ...]; found NoneType"),
        ("loss_terms", torch.zeros(24), "loss_terms: must return [samples, ...] for the 8 samples of the batch"),
        ("ignored", torch.zeros(8), "ignored: must return a boolean tensor; found torch.float32"),
        ("ignored", torch.zeros(5, dtype=torch.bool), "ignored: returned [5], which does not fit"),
        ("build", None, "build: must return a torch.nn.Module; found NoneType"),
        ("parallelize", None, "parallelize: returned None; return the parallel model"),
        ("parallelize", 5, "parallelize: must return a module, or a list or dictionary of modules; found int"),
        ("finish", "done", "finish: must return the gradient norm before clipping; found 'done'"),
    ],
)
def test_results_are_checked(name: str, value: Any, part: str, syncheck_rank: Any) -> None:
    """A method that returns an unusable result, and an unusable attribute, are one line with class and name."""
    text = refusal(make(name, value))
    assert text.startswith("Case.")
    assert part in text
    assert "\n" not in text


@ranks
def test_a_missing_method_is_named(syncheck_rank: Any) -> None:
    """A case without `backward` names this method, and an exception its method, file and line."""

    class Unfinished(Evaluated):
        backward = ParityCase.backward

    class Raises(Evaluated):
        def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
            return model(batch["x"])

    assert refusal(Unfinished()).startswith("Unfinished: override backward of ParityCase")
    assert refusal(Raises()).startswith("Raises.loss_terms (test_parity_refused.py:")


@ranks
def test_batch_norm_in_evaluation_passes() -> None:
    """BatchNorm with fixed statistics does not couple samples; autocast is switched off; dropout of zero drops none."""

    class Autocast(Evaluated):
        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                super().backward(model, batch, mesh)

    assert codes(check_parity(Evaluated())) == []
    assert codes(check_parity(type("Zero", (Adds,), {"rate": 0.0})())) == []
    # Autocast never changes float64.
    assert codes(check_parity(Autocast(), "float32")) == []


@ranks
def test_tied_weights_of_two_stages_on_a_rank() -> None:
    """If a rank holds one tied weight twice, both copies need the whole gradient."""

    class Twins(ManualCase):
        both = True

        def build(self) -> nn.Module:
            model = super().build()
            model.head.weight = model.embed.weight
            return model

        def parallelize(self, model: Any, mesh: Any) -> Any:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
            return model

        def reduce(self, model: Any) -> None:
            total = model.embed.weight.grad + model.head.weight.grad
            model.embed.weight.grad = total
            if self.both:
                model.head.weight.grad = total.clone()
            super().reduce(model)

    assert codes(check_parity(Twins())) == []
    Twins.both = False
    report = check_parity(Twins())
    assert (codes(report), report.findings[0].tensors) == (["SYN445"], ("embed.weight",))
    assert find(report, "UNTIED")["names"] == ("embed.weight", "head.weight")


def test_a_hole_between_overlapping_boxes() -> None:
    """Boxes that overlap leave a hole, although they have as many elements as the tensor."""
    solution = Solution((1.0,), 0.0, 0.0, 1e-9)
    for second, is_complete in ((((2, 2), (4, 1)), True), (((1, 3),), False)):
        boxes = {0: (((0, 2),),), 1: ((second),)}
        tensor = TensorWeights("weight", (5,), dict.fromkeys(boxes, solution), boxes)
        with nullcontext() if is_complete else pytest.raises(UsageError, match="no rank has the gradient of all"):
            _check_coverage({"weight": tensor}, "Case")


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
    assert "nothing parallel to check in one process" in refusal(Single(1))
    case.factor_of_micro_batch = 2.0
    report = check_parity(case)
    assert codes(report) == ["SYN441"]
    assert "accumulation (2)" in report.findings[0].evidence
