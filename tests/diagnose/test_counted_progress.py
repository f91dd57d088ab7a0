"""Certainty of SYN106, SYN203, SYN214, SYN215 and SYN225: what else fits lagging counters, and what decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_single
from support.listings import find_texts, index_by, join_fields
from support.progress_cases import batches, group, statistics, trained

import syncheck
from syncheck.diagnose import syn106_different_progress as syn106
from syncheck.diagnose import syn203_bn_count_mismatch as syn203
from syncheck.diagnose import syn214_step_skipped as syn214
from syncheck.diagnose import syn215_optimizer_state_not_restored as syn215
from syncheck.diagnose import syn225_not_updated_on_some_ranks as syn225
from syncheck.diagnose.rules import diagnose
from syncheck.records import Counts, ValueDiff

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Finding, Group, TensorDiff

torch = pytest.importorskip("torch")


def verdict(finding: Finding) -> tuple[str, str, tuple[str, ...]]:
    """Return code, certainty and alternatives of a finding."""
    return finding.code, finding.certainty, finding.alternatives


def progress(**values: Any) -> tuple[ValueDiff, ...]:
    """Return progress recorded by two ranks. values: of both ranks, by name."""
    return tuple(ValueDiff(name, dict(enumerate(each)), counts=True, kind="progress") for name, each in values.items())


SKIPPED = ("SYN106", "consistent", ("SYN214",))
PROVED = ("SYN106", "proved", ())


@pytest.mark.parametrize(
    ("values", "counts", "expected"),
    [
        (progress(step=(100, 99)), {0: 100, 1: 99}, SKIPPED),
        (progress(global_step=(100, 90)), {0: 100, 1: 90}, SKIPPED),
        # With gradient accumulation, a step has several iterations.
        (progress(iteration=(800, 784)), {0: 100, 1: 98}, SKIPPED),
        (progress(step=(100, 89)), {0: 100, 1: 89}, PROVED),
        (progress(epoch=(5, 4), step=(100, 99)), {0: 100, 1: 99}, PROVED),
    ],
)
def test_106_beside_a_skipped_step(values: Any, counts: dict[int, float], expected: Any) -> None:
    """A rank that skips a step before it counts the step records the same, unless an epoch or many steps differ."""
    finding = diagnose_single(group(*trained(counts), values=values))
    assert verdict(finding) == expected
    assert (finding.cause.code is syn106.Text.CAUSE_UNCOUNTED) is (expected is SKIPPED)


def test_106_with_a_growing_lag() -> None:
    """A lag that was smaller at an earlier step grows by skipped steps, however large it is."""
    now = group(*trained({0: 100, 1: 60}), values=progress(step=(100, 60)))
    earlier = group(*trained({0: 50, 1: 30}), values=progress(step=(50, 30)), step=50)
    assert verdict(diagnose_single(now, earlier)) == SKIPPED
    assert verdict(diagnose_single(now)) == PROVED


@pytest.mark.parametrize("counts", [{0: 100, 1: 98}, {0: 100, 1: 93}, {0: 100, 1: 10}])
def test_equal_parameters_have_skipped_no_step(counts: dict[int, float]) -> None:
    """If all parameters agree, lagging optimizer state was loaded or lost: SYN215 and not SYN214."""
    state = [diff for diff in trained(counts) if diff.kind != "parameter"]
    finding = diagnose_single(group(*state))
    assert verdict(finding) == ("SYN215", "proved", ())
    assert syn215.Text.NO_STEP_SINCE() in finding.facts


@pytest.mark.parametrize(
    ("counts", "step", "ranks", "cause"),
    [
        # The majority counted the stored step, or the step after a stored step that starts at 0.
        ({0: 40, 1: 41, 2: 40}, 40, (1,), "CAUSE_EXTRA"),
        ({0: 40, 1: 39, 2: 40}, 39, (1,), "CAUSE"),
        ({0: 40, 1: 41, 2: 40}, 3, (1,), "CAUSE_EXTRA"),
        # The stored step decides against the majority.
        ({0: 40, 1: 41, 2: 40}, 41, (0, 2), "CAUSE"),
        ({0: 40, 1: 41}, 41, (0,), "CAUSE"),
        ({0: 40, 1: 41}, 39, (1,), "CAUSE_EXTRA"),
        # Nothing decides between two ranks.
        ({0: 40, 1: 41}, 40, (0,), "CAUSE_UNEQUAL"),
        ({0: 40, 1: 41}, 7, (0,), "CAUSE_UNEQUAL"),
    ],
)
def test_214_of_an_extra_step(counts: dict[int, float], step: int, ranks: tuple[int, ...], cause: str) -> None:
    """The stored step or a majority shows whether a rank took a step less or more."""
    finding = diagnose_single(group(*trained(counts), ranks=len(counts), step=step))
    assert verdict(finding) == ("SYN214", "consistent", ("SYN215",))
    assert (finding.ranks, finding.cause.code) == (ranks, syn214.Text[cause])
    extra = cause == "CAUSE_EXTRA"
    assert finding.facts[0].code is (syn214.Text.COUNTED_EXTRA if extra else syn214.Text.COUNTED_SKIPPED)
    assert finding.fix.code.name.startswith("FIX_EXTRA" if extra else "FIX")


def test_214_if_the_lag_grew() -> None:
    """A lag that grew shows repeatedly skipped steps, and nothing else."""
    now = group(*trained({0: 100, 1: 98}))
    assert verdict(diagnose_single(now, group(*trained({0: 50, 1: 49}), step=50))) == (
        "SYN214",
        "consistent",
        ("SYN217",),
    )
    assert verdict(diagnose_single(now, group(*trained({0: 50, 1: 48}), step=50)))[1] == "consistent"


@pytest.mark.parametrize(
    ("counts", "earlier", "expected"),
    [
        ({0: 100, 1: 3}, None, ("consistent", ("SYN214",))),
        ({0: 100, 1: 94}, None, ("consistent", ("SYN214",))),
        # A rank may skip a few steps in a row, but not many.
        ({0: 100, 1: 94}, {0: 50, 1: 44}, ("consistent", ("SYN214",))),
        ({0: 100, 1: 70}, {0: 80, 1: 50}, ("consistent", ("SYN214",))),
        # A rank that takes two steps per batch is ahead of the stored step.
        ({0: 100, 1: 200}, None, ("consistent", ("SYN214",))),
    ],
)
def test_215_beside_skipped_steps(counts: Any, earlier: Any, expected: Any) -> None:
    """A large lag is lost state, unless a rank may have skipped or repeated so many steps."""
    before = () if earlier is None else (group(*trained(earlier), step=50),)
    assert verdict(diagnose_single(group(*trained(counts)), *before)) == ("SYN215", *expected)


@pytest.mark.parametrize("lag", [1, 2, 10, 70])
def test_215_if_no_rank_skipped_a_step(lag: int) -> None:
    """A watched run that saw no skipped step excludes it, also as an alternative, however small the lag is."""
    case = group(*trained({0: 100, 1: 100 - lag}))
    (finding,) = diagnose(case, impossible=frozenset({"SYN214"}))
    assert verdict(finding) == ("SYN215", "consistent", ())
    assert finding.ranks in ((0, 1), (1,))
    assert syn215.Text.NONE_SKIPPED in [fact.code for fact in finding.facts]
    assert diagnose(case)[0].code == ("SYN214" if lag < 5 else "SYN215")


def whole_model(*tensors: TensorDiff) -> Group:
    """Return a group in which all layers of BatchNorm differ in their counts."""
    case = group(*tensors)
    layers = len([tensor for tensor in tensors if tensor.kind == "bn_count"])
    return replace(case, kinds={**case.kinds, "bn_count": Counts(layers, different=layers)})


@pytest.mark.parametrize(
    ("counts", "agreeing", "certainty"),
    [
        ([{0: 20, 1: 21}], 0, "proved"),
        ([{0: 20, 1: 21}, {0: 20, 1: 21}], 0, "proved"),
        # Two models, of which one computes twice as often.
        ([{0: 20, 1: 21}, {0: 40, 1: 42}], 0, "proved"),
        ([{0: 20, 1: 25}, {0: 20, 1: 21}], 0, "consistent"),
        ([{0: 20, 1: 25}, {0: 20, 1: 21}, {0: 40, 1: 42}], 0, "consistent"),
        ([{0: 20, 1: 25}], 1, "consistent"),
    ],
)
def test_203_of_some_layers(counts: list[dict[int, float]], agreeing: int, certainty: str) -> None:
    """A forward pass counts in all layers; a count that differs in some layers only may be edited or loaded."""
    layers = []
    for number, by_rank in enumerate(counts):
        layers.append(replace(batches(by_rank), name=f"bn{number}.num_batches_tracked"))
    case = whole_model(*layers, *statistics({0: 1, 1: 2}))
    identical = Counts(len(counts) + agreeing, agreeing, different=len(counts))
    finding = diagnose_single(replace(case, kinds={**case.kinds, "bn_count": identical}))
    is_part = certainty == "consistent"
    assert verdict(finding) == ("SYN203", certainty, ("SYN205",) if is_part else ())
    assert finding.cause.code is (syn203.Text.CAUSE_PART if is_part else syn203.Text.CAUSE)


def test_203_of_the_count_alone() -> None:
    """Equal statistics did not come from different data."""
    counts = batches({0: 20, 1: 21})
    alone = diagnose_single(group(counts))
    assert verdict(alone) == ("SYN203", "consistent", ("SYN205",))
    assert (alone.cause.code, alone.fix.code) == (syn203.Text.CAUSE_COUNT_ALONE, syn203.Text.FIX_COUNT_ALONE)
    both = diagnose_single(whole_model(counts, *statistics({0: 1, 1: 2})))
    assert (verdict(both), both.cause.code) == (("SYN203", "proved", ()), syn203.Text.CAUSE)


class Rank:
    """A model with two optimizers on one rank."""

    def __init__(self, make: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in ("g", "d")})
        self.optimizers = [make(self.model[name].parameters()) for name in ("g", "d")]

    def step(self, number: int, skipped: str = "", zeroed: str = "") -> None:
        """Step with equal gradients. skipped: the layer whose optimizer takes no step. zeroed: without gradient."""
        numbers = torch.Generator().manual_seed(number)
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=numbers) * (not zeroed or zeroed not in name)
        for name, optimizer in zip(("g", "d"), self.optimizers, strict=True):
            if name != skipped:
                optimizer.step()

    def save(self, path: Path) -> None:
        """Write the file of this rank."""
        path.parent.mkdir(exist_ok=True)
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers}, path)


def find(folder: Path) -> dict[str, Finding]:
    """Return the findings of the last step by code."""
    return index_by(syncheck.compare(folder).groups[-1].findings, "code")


@pytest.mark.parametrize("skips", [1, 4])
def test_one_of_two_optimizers_skips(tmp_path: Path, skips: int) -> None:
    """All counters of an optimizer lag: a skipped step of this optimizer (SYN214), and not SYN225."""
    ranks = [Rank(torch.optim.Adam) for _ in range(3)]
    for number in range(20):
        for rank, each in enumerate(ranks):
            each.step(number, "d" if rank == 1 and number < skips else "")
    for rank, each in enumerate(ranks):
        each.save(tmp_path / f"rank{rank}.pth")
    findings = find(tmp_path)
    assert set(findings) == {"SYN214"}
    assert (findings["SYN214"].certainty, findings["SYN214"].ranks) == ("consistent", (1,))
    assert "SYN225" in findings["SYN214"].alternatives


def test_state_of_a_layer_was_reset(tmp_path: Path) -> None:
    """Counters of a part of the parameters lag by lost state too, although each step updated them."""
    for rank in range(3):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in "abc"})
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(12):
            numbers = torch.Generator().manual_seed(number)
            if rank == 1 and number == 8:
                optimizer.state.pop(model["b"].weight)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=numbers)
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"rank{rank}.pth")
    findings = find(tmp_path)
    assert verdict(findings["SYN225"]) == ("SYN225", "consistent", ("SYN215",))
    assert findings["SYN225"].cause.code is syn225.Text.CAUSE_BEHIND


@pytest.mark.parametrize(
    ("updates", "deviating", "behind"),
    [
        ({"b": (4, 8, 4)}, (1,), ["ranks 0, 2 counted fewer steps of b"]),
        ({"b": (8, 4, 8)}, (1,), ["rank 1 counted fewer steps of b"]),
        ({"b": (8, 4)}, (1,), ["rank 1 counted fewer steps of b"]),
        ({"b": (4, 8, 4), "c": (8, 4, 8)}, (1,), ["ranks 0, 2 counted fewer steps of b", "rank 1 counted fewer st"]),
        ({"b": (4, 6, 8)}, (0, 1), ["ranks 0, 1 counted fewer steps of b"]),
    ],
    ids=["more on one rank", "fewer on one rank", "two ranks", "both", "three counts"],
)
def test_ranks_with_fewer_steps_are_those_not_updated(
    tmp_path: Path, updates: dict[str, tuple[int, ...]], deviating: tuple[int, ...], behind: list[str]
) -> None:
    """A rank with gradients of zeros takes more steps than the majority, whose ranks were not updated."""
    for rank in range(len(updates["b"])):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6, bias=False) for name in "abc"})
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(8):
            numbers = torch.Generator().manual_seed(number)
            for name, layer in model.items():
                gradient = torch.randn(layer.weight.shape, generator=numbers)
                layer.weight.grad = gradient if number < updates.get(name, (8,) * 3)[rank] else None
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"rank{rank}.pth")
    finding = find(tmp_path)["SYN225"]
    assert finding.ranks == deviating
    assert finding.fix.code is syn225.Text.FIX_BEHIND
    facts = [str(fact).lower() for fact in finding.facts if "fewer" in str(fact)]
    assert [fact.startswith(start) for fact, start in zip(facts, behind, strict=True)] == [True] * len(behind)


def test_zero_gradients_without_counters(tmp_path: Path) -> None:
    """SGD does not change a parameter with a zero gradient, which looks like a parameter without a gradient."""
    ranks = [Rank(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) for _ in range(3)]
    for number in range(4):
        for rank, each in enumerate(ranks):
            each.step(number, zeroed="d.weight" if rank == 1 and number == 3 else "")
            if number >= 2:
                each.save(tmp_path / f"step_{number}" / f"rank{rank}.pth")
    findings = find(tmp_path)
    assert verdict(findings["SYN225"]) == ("SYN225", "consistent", ("SYN217", "SYN218"))
    assert findings["SYN225"].cause.code is syn225.Text.CAUSE_UNCOUNTED


def test_lbfgs_returned_early(tmp_path: Path) -> None:
    """LBFGS stops at a zero gradient: its counters are no settings, and its shifted history is not exchanged."""
    torch.manual_seed(0)
    for rank in range(2):
        parameter = torch.nn.Parameter(torch.zeros(12))
        optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=1, history_size=4)
        for number in range(9):
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(12, generator=generator) * (0 if rank and number == 6 else 1)
            optimizer.step(lambda: torch.tensor(1.0))
        torch.save({"model": {"w": parameter.data}, "optimizer": optimizer.state_dict()}, tmp_path / f"rank{rank}.pth")
    findings = find(tmp_path)
    assert not {"SYN107", "SYN224", "SYN214"} & set(findings)
    assert find_texts(join_fields(findings.values(), "values"), "n_iter")
