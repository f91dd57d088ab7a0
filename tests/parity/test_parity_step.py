"""The step after right gradients: norm, clipping, and the parameters after the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from support.parity_cases import ManualCase, TokenCase, codes, find
from support.parity_models import Fsdp, Tp
from torch import nn

from syncheck.errors import OptionError
from syncheck.messages import Note
from syncheck.parity.check import check_parity
from syncheck.report.words import verdict_line
from syncheck.testing import assert_parallel_equals_single

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


@pytest.mark.parametrize("kind", [TokenCase, ManualCase, *slow(Fsdp, SequenceTp)])
def test_right_steps_pass(kind: Any) -> None:
    """Clipping and AdamW give the parameters of one process."""
    assert codes(check_parity(with_step(kind)())) == []


def test_adam_hides_a_factor_but_parity_does_not() -> None:
    """A factor that AdamW hides is found in the gradient."""

    def halve(self: Any, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 0.5 * ManualCase.factor(self, targets, all_targets)

    assert codes(check_parity(with_step(ManualCase, factor=halve)())) == ["SYN441"]


def test_allowed_findings() -> None:
    """An allowed finding is reported and does not count; a note names the step that was not compared."""

    def halve(self: Any, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 0.5 * ManualCase.factor(self, targets, all_targets)

    case = with_step(ManualCase, factor=halve)()
    report = assert_parallel_equals_single(case, allow="syn441")
    assert (codes(report), report.verdict, report.exit_code) == (["SYN441"], "in_sync", 0)
    assert "ignoring allowed findings (SYN441)" in verdict_line(report)
    assert Note.PARITY_NO_STEP in [note.code for note in report.groups[0].notes]
    report = check_parity(case, allow=["SYN443", "SYN446"])
    assert (codes(report), report.verdict) == (["SYN441"], "out_of_sync")
    # The rounding of bfloat16 is doubtful with and without findings.
    assert check_parity(case, "bfloat16", allow=[f"SYN{number}" for number in range(441, 450)]).verdict == "undecided"
    with pytest.raises(OptionError, match="no such code of parity"):
        check_parity(case, allow="SYN201")


@pytest.mark.slow
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


def clip_by_value(_self: Any, model: Any, optimizer: Any) -> None:
    """Clip each element, and step."""
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()


def test_clipping_by_value() -> None:
    """Clipping by value passes if the case declares it with the same value; otherwise the finding names clip_value."""
    changes = {"finish": clip_by_value, "max_norm": None}
    assert codes(check_parity(with_step(ManualCase, clip_value=1e-3, **changes)())) == []
    report = check_parity(with_step(ManualCase, clip_value=2e-3, **changes)())
    assert (codes(report), find(report, "CLIP_VALUE")) == (["SYN446"], {})
    report = check_parity(with_step(ManualCase, **changes)())
    assert (codes(report), find(report, "CLIP_VALUE")) == (["SYN446"], {})
    assert report.findings[0].certainty == "consistent"


def test_clipping_that_is_not_declared() -> None:
    """A right trainer that clips, with a case without max_norm, is not called wrong for sure: the finding names it."""

    def clip(self: Any, model: Any, optimizer: Any) -> Any:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return norm

    report = check_parity(with_step(ManualCase, finish=clip, max_norm=None)())
    assert (codes(report), find(report, "MAX_NORM")) == (["SYN446"], {})
    assert report.findings[0].certainty == "consistent"
    assert "max_norm or clip_value" in str(report.findings[0].fix)


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


def test_one_rank_without_a_step() -> None:
    """Only the rank that made no step is named, with the numbers of its parameters."""

    def step_on_rank_0(self: Any, model: Any, optimizer: Any) -> None:
        if dist.get_rank() == 0:
            optimizer.step()

    report = check_parity(with_step(ManualCase, finish=step_on_rank_0, max_norm=None)())
    [finding] = report.findings
    assert (finding.code, finding.ranks, find(report, "MISSING")) == ("SYN448", (1,), {})
    tensor = next(tensor for tensor in report.tensors if tensor.name == "norm.weight")
    assert (tensor.mismatched, tensor.clusters) == (tensor.numel, ((0,), (1,)))
    assert tensor.max_abs > 1e-3


def test_zero_redundancy_optimizer() -> None:
    """ZeroRedundancyOptimizer steps each parameter on one rank, and passes."""

    def zero(self: Any, model: Any, mesh: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)

    assert codes(check_parity(with_step(TokenCase, parallel_optimizer=zero)())) == []


def with_optimizers(expected: Any, found: Any, kind: type = ManualCase) -> Any:
    """Return a case with the optimizers of one process and of the program, which make one step without clipping."""

    def step(_self: Any, _model: Any, optimizer: Any) -> None:
        optimizer.step()

    changes = {
        "optimizer": lambda _self, model: expected(model),
        "parallel_optimizer": lambda _self, model, _mesh: found(model),
    }
    return type("Case", (kind,), {"finish": step, **changes})()


def decay_matrices(model: Any, decay_of_biases: float) -> Any:
    """Return AdamW with a second group for biases."""
    groups: dict[bool, list[Any]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        groups[name.endswith("bias")].append(parameter)
    matrices, biases = groups[False], {"params": groups[True], "weight_decay": decay_of_biases}
    return torch.optim.AdamW([{"params": matrices}, biases], lr=1e-2, weight_decay=0.1)


class ZeroBiases(Fsdp):
    """All biases are zero, so that weight decay does not change them in the first step."""

    def build(self) -> nn.Module:
        model = super().build()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        return model


def sgd_with(**settings: Any) -> Any:
    """Return a function that makes SGD with settings."""
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def adam_with(kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    """Return a function that makes an optimizer of a kind with settings."""
    return lambda model: kind(model.parameters(), lr=1e-2, **settings)


@pytest.mark.parametrize(
    ("case", "setting", "texts"),
    [
        (with_optimizers(adam_with(), adam_with(betas=(0.9, 0.95))), "betas", ("(0.9, 0.999)", "(0.9, 0.95)")),
        (with_optimizers(adam_with(), adam_with(amsgrad=True)), "amsgrad", ("False", "True")),
        (with_optimizers(sgd_with(momentum=0.9), sgd_with()), "momentum", ("0.9", "0")),
        (
            with_optimizers(lambda m: decay_matrices(m, 0.0), lambda m: decay_matrices(m, 0.1), ZeroBiases),
            "weight_decay",
            ("0", "0.1"),
        ),
    ],
    ids=["betas", "amsgrad", "momentum", "decay-of-zero"],
)
def test_settings_that_the_first_step_does_not_show(case: Any, setting: str, texts: tuple[str, str]) -> None:
    """Other settings of the optimizer are a finding, although the parameters after the step are right."""
    report = check_parity(case)
    parameters = find(report, "SETTING")
    assert (codes(report), report.exit_code, report.tensors) == (["SYN448"], 1, ())
    assert (parameters["setting"], parameters["expected"], parameters["found"]) == (setting, *texts)
    assert set(parameters["names"]) == set(report.findings[0].tensors)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (adam_with(), adam_with(foreach=False, betas=[0.9, 0.999])),
        (adam_with(weight_decay=0), adam_with(torch.optim.Adam)),
        # The program decays by itself.
        (adam_with(weight_decay=0.1), lambda m: decay_before_step(adam_with(weight_decay=0)(m))),
    ],
    ids=["implementation", "class", "own-decay"],
)
def test_equal_settings(expected: Any, found: Any) -> None:
    """Another implementation of the same step, and a program with a decay of its own, pass."""
    assert codes(check_parity(with_optimizers(expected, found))) == []


@pytest.mark.parametrize(
    ("expected", "found", "differences"),
    [
        (
            adam_with(weight_decay=0.1),
            adam_with(torch.optim.Adam, weight_decay=0.1),
            {"class": ("AdamW", "Adam"), "decoupled_weight_decay": ("True", "False")},
        ),
        (
            adam_with(torch.optim.Adam, weight_decay=0.1),
            adam_with(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
            {"decoupled_weight_decay": ("False", "True")},
        ),
        (
            adam_with(weight_decay=0.1),
            adam_with(torch.optim.RAdam, weight_decay=0.1, decoupled_weight_decay=True),
            {"class": ("AdamW", "RAdam")},
        ),
        (sgd_with(), lambda m: torch.optim.ASGD(m.parameters(), lr=0.1, lambd=0.0), {"class": ("SGD", "ASGD")}),
        # The class is equal, and the learning rate of the program is the only difference.
        (adam_with(), lambda m: zero_redundancy(m, lr=2e-2), {"lr": ("0.01", "0.02")}),
    ],
    ids=["l2", "decoupled", "radam", "asgd", "wrapped"],
)
def test_optimizers_of_other_classes(expected: Any, found: Any, differences: dict[str, Any]) -> None:
    """An optimizer of another class, or with another form of weight decay, is named if its update is wrong."""
    report = check_parity(with_optimizers(expected, found))
    [finding] = report.findings
    facts = [fact.parameters for fact in finding.facts if fact.code.name == "SETTING"]
    assert finding.code == "SYN448"
    assert {fact["setting"]: (fact["expected"], fact["found"]) for fact in facts} == differences


def zero_redundancy(model: Any, **settings: Any) -> Any:
    """Return an optimizer that contains AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)


def decay_before_step(optimizer: Any) -> Any:
    """Return an optimizer that decays its parameters in a hook, as its groups do not say."""

    def decay(*_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(1 - 1e-2 * 0.1)

    optimizer.register_step_pre_hook(decay)
    return optimizer


def test_settings_at_the_step() -> None:
    """A scheduler that changes the betas after the step changes nothing, and one that does so before it is found."""

    def change(optimizer: Any) -> None:
        optimizer.param_groups[0]["betas"] = (0.85, 0.999)

    class Changed(ManualCase):
        order = ("step", "change")

        def optimizer(self, model: Any) -> Any:
            return adam_with()(model)

        def finish(self, model: Any, optimizer: Any) -> None:
            for name in self.order:
                optimizer.step() if name == "step" else change(optimizer)

    assert codes(check_parity(Changed())) == []
    Changed.order = ("change", "step")
    assert codes(check_parity(Changed())) == ["SYN448"]


def test_an_optimizer_without_the_parameters() -> None:
    """An optimizer whose groups hold other tensors is not compared, and a note says so."""

    class Wrapped:
        """Hides the groups of an optimizer."""

        def __init__(self, optimizer: Any) -> None:
            self.step = optimizer.step
            self.register_step_pre_hook = optimizer.register_step_pre_hook

    report = check_parity(with_optimizers(adam_with(), lambda m: Wrapped(adam_with(betas=(0.9, 0.95))(m))))
    assert codes(report) == []
    assert Note.PARITY_NO_SETTINGS in [note.code for note in report.groups[0].notes]
