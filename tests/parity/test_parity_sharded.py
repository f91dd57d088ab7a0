"""Sharded, tensor, pipeline and context parallelism: right programs pass, and each fault is named."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.marks import slow
from support.parity_cases import WIDTH, TokenCase, codes, count_tokens, find, token_losses
from support.parity_models import Cp, Ep, Fsdp, Pp, Tp, Transformer
from torch import nn

from syncheck.parity.check import check_parity
from syncheck.parity.sentences import Unexplained
from syncheck.report.words import replica_count

two = pytest.mark.syncheck(ranks=2)
four = pytest.mark.syncheck(ranks=4)


class Hsdp(Fsdp):
    mesh_sizes: ClassVar[dict[str, int]] = {"dp_replicate": 2, "dp_shard": 2}


class FsdpTp(Tp):
    mesh_sizes: ClassVar[dict[str, int]] = {"dp": 2, "tp": 2}
    sequence = True


@two
@pytest.mark.parametrize("micro_batches", [2, *slow(1)])
def test_fsdp(micro_batches: int) -> None:
    """FSDP2 computes the gradient of one process; without the factor of the ranks, it is half of it."""
    assert codes(check_parity(Fsdp(micro_batches))) == []

    class Halved(Fsdp):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return super().factor(targets, all_targets) / 2

    report = check_parity(Halved(micro_batches))
    assert (codes(report), find(report, "FACTOR")["factor"]) == (["SYN441"], pytest.approx(0.5))


@pytest.mark.slow
@four
def test_hsdp_and_group_of_size_one(syncheck_rank: Any) -> None:
    """HSDP passes; a mesh of one rank never reduces, and that of the inner dimension reduces over half of the ranks."""
    assert codes(check_parity(Hsdp(2))) == []

    class Inner(Hsdp):
        shard = "dp_shard"

    report = check_parity(Inner())
    assert codes(report) == ["SYN443"]
    facts = [fact.parameters for fact in report.findings[0].facts if "parts" in fact.parameters]
    rows = {fact["ranks"]: fact["parts"] for fact in facts}
    assert rows == {(0, 1): ["data rank 0", "data rank 1"], (2, 3): ["data rank 2", "data rank 3"]}

    class One(Hsdp):
        mesh_sizes: ClassVar[dict[str, int]] = {"dp": 4, "one": 1}
        shard = "one"

    report = check_parity(One())
    assert codes(report) == ["SYN443"]
    facts = [fact.parameters for fact in report.findings[0].facts if "weight" in fact.parameters]
    assert (len(facts), {fact["weight"] for fact in facts}) == (4, {"4"})


@two
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("loss_parallel", [False, True])
def test_tensor_parallel(sequence: bool, loss_parallel: bool) -> None:
    """Tensor parallelism passes with sequence and loss parallelism."""

    class Chosen(Tp):
        pass

    Chosen.sequence, Chosen.loss_parallel = sequence, loss_parallel
    assert codes(check_parity(Chosen())) == []


class NotReducedNorms(Tp):
    """The norms lose the reduction of their partial gradients."""

    sequence = True

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        super().backward(model, batch, mesh)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                local = parameter.grad.to_local()
                parameter.grad = DTensor.from_local(local, mesh["tp"], [Replicate()], run_check=False)


@two
def test_norms_not_reduced_under_sequence_parallelism() -> None:
    """Partial gradients of norms that nobody adds are named with their dimension."""
    report = check_parity(NotReducedNorms())
    assert codes(report) == ["SYN445"]
    assert {name.split(".")[-2][:4] for name in report.findings[0].tensors} == {"norm"}
    assert len(report.findings[0].tensors) == 10
    assert find(report, "SUM")["dimensions"] == ("tp",)
    assert find(report, "TOTAL")["factor"] == pytest.approx(1)


@two
def test_one_tensor_wrong_under_tensor_parallelism() -> None:
    """A replicated bias with a doubled gradient is named, with the dimension along which it is replicated."""

    class Doubled(Tp):
        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            super().backward(model, batch, mesh)
            model.blocks["1"].down.bias.grad *= 2

    report = check_parity(Doubled())
    assert (codes(report), report.findings[0].tensors) == (["SYN444"], ("blocks.1.down.bias",))
    assert find(report, "DIMENSION")["dimension"] == "tp"

    class DoubledShard(Tp):
        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            super().backward(model, batch, mesh)
            model.blocks["1"].up.weight.grad *= 2

    # No rank holds a copy of a shard, so its factor has no dimension of replication.
    report = check_parity(DoubledShard())
    assert (codes(report), report.findings[0].tensors) == (["SYN444"], ("blocks.1.up.weight",))
    assert "DIMENSION" not in [fact.code.name for fact in report.findings[0].facts]


@pytest.mark.slow
@four
def test_fsdp_with_tensor_parallelism(syncheck_rank: Any) -> None:
    """FSDP2 over tensor parallelism with sequence parallelism passes; strided shards are compared at their position."""
    assert codes(check_parity(FsdpTp())) == []


@two
def test_context_parallelism() -> None:
    """Context parallelism passes; gradients divided by its size, and counted twice, have the factor of the size."""
    assert codes(check_parity(Cp())) == []

    class Divided(Cp):
        divisor = 2

    class Twice(Cp):
        divisor = 0.5

    for case, matches in ((Divided(), "1 / cp (2)"), (Twice(), "cp (2)")):
        report = check_parity(case)
        assert codes(report) == ["SYN441"]
        assert matches in find(report, "MATCHES")["matches"]


@two
@pytest.mark.parametrize("schedule", ["Schedule1F1B", *slow("ScheduleGPipe")])
def test_pipeline(schedule: str) -> None:
    """A pipeline passes; a loss that the schedule divides again by the micro-batches has this factor."""

    class Chosen(Pp):
        pass

    Chosen.schedule = schedule
    assert codes(check_parity(Chosen())) == []
    Chosen.divided_twice = True
    report = check_parity(Chosen())
    assert codes(report) == ["SYN441"]
    assert find(report, "MATCHES")["matches"] == ("1 / accumulation (4)",)
    assert isinstance(Chosen().build(), Transformer)
    assert dist.get_world_size() == 2


class TiedPp(Pp):
    """The first stage holds the embedding, and the last one the same weight as its head."""

    is_reduced = True

    def build(self) -> Any:
        model = super().build()
        model.head.weight = model.embed.weight
        return model

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        super().backward(model, batch, mesh)
        layer = model.head if model.embed is None else model.embed
        if self.is_reduced:
            dist.all_reduce(layer.weight.grad)


@two
def test_tied_weights_of_a_pipeline() -> None:
    """Tied weights of two stages are one tensor; without a sum over the stages, each has a part of its gradient."""
    assert codes(check_parity(TiedPp())) == []
    TiedPp.is_reduced = False
    report = check_parity(TiedPp())
    assert (codes(report), report.findings[0].tensors) == (["SYN445"], ("embed.weight",))
    assert find(report, "SUM")["dimensions"] == ("pp",)


@two
def test_expert_parallelism() -> None:
    """Experts are compared at the slices of `box`; experts averaged over data-parallel ranks have another factor."""
    assert codes(check_parity(Ep())) == []

    class Averaged(Ep):
        scaled = 0.5

    report = check_parity(Averaged())
    assert (codes(report), report.findings[0].tensors) == (["SYN444"], ("weight",))
    assert find(report, "MATCHES")["matches"] == ("1 / dp (2)",)


class SumGradient(torch.autograd.Function):
    """Megatron's f: the identity, whose gradient is added over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SumOutput(torch.autograd.Function):
    """Megatron's g: a sum over the ranks, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        total = hidden.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class HandTp(TokenCase):
    """Tensor parallelism by hand: `up` is split by columns, and `down` by rows."""

    mesh_sizes: ClassVar[dict[str, int]] = {"tp": 2}
    sums_gradient = True
    sums_output = True

    def box(self, name: str, parameter: Any) -> Any:
        half = slice(WIDTH * dist.get_rank(), WIDTH * (dist.get_rank() + 1))
        boxes = {"up.weight": (half, slice(None)), "up.bias": (half,), "down.weight": (slice(None), half)}
        return boxes.get(name)

    def parallelize(self, model: Any, mesh: Any) -> Any:
        for name in ("up.weight", "up.bias", "down.weight"):
            module, key = model.get_submodule(name.split(".")[0]), name.split(".")[1]
            part = getattr(module, key).detach()[self.box(name, None)].clone()
            setattr(module, key, nn.Parameter(part))

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            hidden = model.embed(tokens)
            inputs = model.norm(hidden)
            inputs = SumGradient.apply(inputs) if self.sums_gradient else inputs
            output = F.linear(F.gelu(model.up(inputs)), model.down.weight)
            output = SumOutput.apply(output) if self.sums_output else output
            return model.head(hidden + output + model.down.bias) * model.scale

        model.forward = forward
        return model

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        (token_losses(model(batch[0]), batch[1]).sum() / count_tokens(batch[1])).backward()


class NoInputSum(HandTp):
    sums_gradient = False


class NoOutputSum(HandTp):
    sums_output = False


class OtherSamples(HandTp):
    """Both ranks have all collectives, and each reads its own half of the batch."""

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        super().backward(model, [part[dist.get_rank() :: 2] for part in batch], mesh)


@two
@pytest.mark.parametrize("kind", [NoInputSum, NoOutputSum, OtherSamples])
def test_ranks_of_tensor_parallelism_differ(kind: Any) -> None:
    """A sum that is missing in either pass, and other samples, look alike: the cause names the ranks; no owner does."""
    report = check_parity(HandTp())
    assert (codes(report), replica_count(report.groups[0])) == ([], ", 2 ranks")
    report = check_parity(kind())
    embed = next(finding for finding in report.findings if "embed.weight" in finding.tensors)
    facts = {fact.code: fact.parameters for fact in embed.facts}
    assert (embed.code, facts[Unexplained.SPLIT]["dimensions"]) == ("SYN449", ["tp"])
    assert Unexplained.OWNER not in facts
    assert (embed.cause.code, embed.cause.parameters["dimensions"]) == (Unexplained.CAUSE_SPLIT, ["tp"])
