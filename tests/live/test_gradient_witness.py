"""The witness of gradients: which differences it sees, and what it says of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncheck.diagnose import syn212_outside_the_wrapper as syn212
from syncheck.live.witnesses.copies import Details
from syncheck.live.witnesses.gradients import (
    Disagreement,
    GradientWitness,
    compare_details,
    describe_disagreement,
)
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.live.witnesses.rules import make_finding
from syncheck.sentences import Part
from syncheck.tensors.kinds import make_selector


def make_parameters(*gradients: Any) -> list[torch.nn.Parameter]:
    """Return parameters with the given gradients, None for no gradient."""
    parameters = []
    for gradient in gradients:
        shape = (6, 3) if gradient is None else gradient.shape
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32 if gradient is None else gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def make_layout(gradients: list[Any], *, reduces: bool = True) -> Any:
    """Return what steps. reduces: a wrapper reduces the gradients."""
    return SimpleNamespace(
        key="clock/0",
        clock=SimpleNamespace(name="clock", reduces=reduces, keeps_gradients_local=bool, ticks=1, local_passes=0),
        posted=0,
        signature="all",
        find_place=lambda: 1,
        find_replicas=lambda _rank: (0, 1, 2),
        hides_reductions=False,
        numbers_steps=reduces,
        is_reduced=reduces,
        parameters=make_parameters(*gradients),
        names=[f"layer{number}" for number in range(len(gradients))],
        copied=list(range(len(gradients))),
        sharded=[],
    )


def judge(*gradients_of_ranks: list[Any]) -> Disagreement | None:
    """Return how the gradients of ranks differ, None if their digests agree."""
    digests = []
    details = {}
    for rank, gradients in enumerate(gradients_of_ranks):
        witness = GradientWitness()
        digests.append(witness.observe("step", make_layout(gradients)))
        told = witness.tell("step")
        assert told is not None
        details[rank] = Details(*told)
    if all(digest == digests[0] for digest in digests):
        return None
    return compare_details(details, range(len(gradients_of_ranks[0])))


GRADIENTS = [torch.arange(1.0, 25.0).reshape(4, 6) * (number + 1) for number in range(5)]
# Of this tensor, every eighth element is compared.
GRADIENTS.append(torch.arange(1.0, 289.0).reshape(12, 24))


def scaled(factor: float, *numbers: int) -> list[torch.Tensor]:
    """Return the gradients, some of them times a factor."""
    return [gradient * (factor if number in numbers else 1) for number, gradient in enumerate(GRADIENTS)]


def spoil(gradient: torch.Tensor, value: float) -> torch.Tensor:
    """Return a gradient with another value as the last element, which no sample has."""
    spoiled = gradient.clone()
    spoiled[-1, -1] = value
    return spoiled


def one_deviates(*tensors: int, ratio: float | None = None, missing: tuple[int, ...] = (), **further: Any) -> Any:
    """Return that rank 1 has other gradients."""
    return Disagreement((1,), tensors, missing, ratio, (1,), is_local=False, total=6, **further)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (scaled(0.25, *range(6)), one_deviates(*range(6), ratio=0.25)),
        (scaled(2.0, 1), one_deviates(1, ratio=2.0)),
        (scaled(2.0, 5), one_deviates(5, ratio=2.0)),
        (scaled(0.5, *range(5)), one_deviates(*range(5), ratio=0.5)),
        ([*scaled(0.5, *range(5))[:5], GRADIENTS[5] * 3], one_deviates(*range(6), ratio=0.5, others=(5,))),
        # Rounded by a clip to the same norm.
        ([gradient * (1 + 2**-22) for gradient in GRADIENTS], one_deviates(*range(6))),
        ([*GRADIENTS[:5], spoil(GRADIENTS[5], 4)], one_deviates(5)),
        ([*scaled(0.5, *range(5))[:5], spoil(GRADIENTS[5], 4)], one_deviates(*range(6), ratio=0.5, unsampled=(5,))),
        ([*GRADIENTS[:5], spoil(GRADIENTS[5], float("nan"))], one_deviates(5, not_finite=(5,))),
        ([*GRADIENTS[:5], None], one_deviates(5, missing=(5,))),
    ],
    ids=[
        "all scaled",
        "one scaled",
        "last scaled",
        "most scaled",
        "two factors",
        "rounded",
        "no sample",
        "most sampled",
        "nan",
        "without gradient",
    ],
)
def test_one_rank_of_three_deviates(changed: list[Any], expected: Disagreement) -> None:
    """The rank, its tensors and a factor are named; a factor only if elements of a different tensor show it."""
    assert judge(GRADIENTS, changed, GRADIENTS) == expected


@pytest.mark.parametrize("numbers", [range(6), (2,)], ids=["all", "one"])
def test_gradients_of_zero_were_cleared(numbers: Any) -> None:
    """A factor of zero is no clip: the fix names `zero_grad` and a detached loss."""
    disagreement = judge(GRADIENTS, scaled(0.0, *numbers), GRADIENTS)
    assert disagreement is not None
    suspicion = describe_disagreement(make_layout(GRADIENTS), disagreement)
    assert (suspicion.code, suspicion.ranks, suspicion.variant) == ("SYN410", (1,), "_ZERO")
    fix = str(make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant).fix)
    assert "zero_grad" in fix
    assert "detached" in fix


ZEROS = torch.zeros(8)


@pytest.mark.parametrize(
    ("first", "second", "is_found"),
    [
        (ZEROS, -ZEROS, False),
        (torch.tensor([0.0, 2.0]), torch.tensor([-0.0, 2.0]), False),
        (torch.tensor([0.0, 2.0]), torch.tensor([-0.0, 3.0]), True),
        (torch.tensor([float("nan")]), torch.tensor([-float("nan")]), True),
        # Elements between the sampled elements may differ.
        (torch.zeros(64), -torch.zeros(64), True),
        (ZEROS, None, True),
    ],
    ids=["zeros", "one zero", "another element", "nan", "many elements", "no gradient"],
)
def test_the_sign_of_zero_is_no_difference(first: Any, second: Any, is_found: bool) -> None:
    """0.0 equals -0.0, as in comparisons; gradients whose elements are not all known are different by their bytes."""
    observations, details = {}, {}
    for rank, gradient in enumerate((first, second, first)):
        witness = GradientWitness()
        observations[rank] = witness.observe("step", make_layout([gradient]))
        details[rank] = witness.tell("step")
    layout = make_layout([first])
    assert bool(GradientWitness().judge(layout, observations, lambda: details)) == is_found  # type: ignore[return-value]


@pytest.mark.parametrize(("factor", "variant"), [(0.5, "_SCALED"), (1.0001, "_SAMPLED"), (0.97, "_SAMPLED")])
def test_a_factor_near_one_may_be_the_effect_of_another_change(factor: float, variant: str) -> None:
    """A rank that clears some rows before a clip of all ranks has all other gradients times nearly one."""
    disagreement = judge(GRADIENTS, GRADIENTS, scaled(factor, *range(6)))
    assert disagreement is not None
    assert describe_disagreement(make_layout(GRADIENTS), disagreement).variant == variant


@pytest.mark.parametrize(
    ("factors", "variant", "groups"),
    [
        ((1, 1, 3, 3), "_WITHIN", "ranks 0, 1 and ranks 2, 3"),
        ((1, 3, 1, 3, 5, 5), "_WITHIN", "ranks 0, 2 and ranks 1, 3 and ranks 4, 5"),
        ((1, 1, 1, 3, 3), "_WITHIN", "ranks 0, 1, 2 and ranks 3, 4"),
        ((1, 1, 3), "", ""),
        ((1, 1, 3, 5), "", ""),
    ],
)
def test_groups_of_ranks_that_agree_are_named(factors: tuple[int, ...], variant: str, groups: str) -> None:
    """A reduction within groups leaves equal gradients in each group, and the cause names the process group."""
    disagreement = judge(*([gradient.roll(factor) for gradient in GRADIENTS] for factor in factors))
    assert disagreement is not None
    suspicion = describe_disagreement(make_layout(GRADIENTS), disagreement)
    finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
    assert suspicion.variant == variant
    assert ("process group" in str(finding.cause)) == bool(groups)
    assert groups in "; ".join(map(str, finding.facts))


@pytest.mark.parametrize("gradient", [None, torch.zeros(4, 6)], ids=["removed", "kept"])
def test_a_gradient_on_some_ranks_only_has_several_causes(gradient: Any) -> None:
    """One rank removes a gradient, or keeps zeros where the other ranks have no gradient."""
    other = None if gradient is not None else GRADIENTS[5]
    disagreement = judge([*GRADIENTS[:5], other], [*GRADIENTS[:5], gradient], [*GRADIENTS[:5], other])
    assert disagreement is not None
    suspicion = describe_disagreement(make_layout(GRADIENTS), disagreement)
    finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
    for cause in ("`.grad = None`", "`zero_grad(set_to_none=False)`", "different parameters"):
        assert cause in finding.cause.render(lambda text, part: f"`{text}`" if part is Part.CODE else text)


def test_two_ranks_have_no_majority() -> None:
    """Of two ranks, both are named, and the factor between them."""
    assert judge(GRADIENTS, scaled(0.5, *range(6))) == Disagreement(
        (0, 1), tuple(range(6)), (), 0.5, (1,), is_local=False, suspicion="UNDECIDED", total=6
    )


@pytest.mark.parametrize("broken", [0, 1])
def test_of_two_ranks_the_one_with_nan_deviates(broken: int) -> None:
    """A reduction leaves NaN on all ranks, so the rank that alone holds NaN is named, and nothing is unknown."""
    gradients = [GRADIENTS, GRADIENTS]
    gradients[broken] = [*GRADIENTS[:5], spoil(GRADIENTS[5], float("nan"))]
    disagreement = judge(*gradients)
    assert disagreement is not None
    suspicion = describe_disagreement(make_layout(GRADIENTS), disagreement)
    assert (suspicion.ranks, suspicion.variant) == ((broken,), "_NOT_FINITE")
    assert "unknown" not in " ".join(map(str, suspicion.facts))


@pytest.mark.parametrize(
    ("changing", "suspects", "suspicion"),
    [((0,), (0,), "CHANGED"), ((1,), (1,), "CHANGED"), ((0, 1), (0, 1), "UNDECIDED"), ((), (), "")],
)
def test_the_rank_that_changed_its_gradients_after_the_reduction(
    changing: tuple[int, ...], suspects: tuple[int, ...], suspicion: str
) -> None:
    """Of two ranks, the one that alone clips what the reduction left is named, and both if both do."""
    digests = []
    details = {}
    for rank in range(2):
        witness = GradientWitness()
        layout = make_layout([gradient.clone() for gradient in GRADIENTS])
        layout.clock.list_reduced = lambda layout=layout: layout.parameters
        witness.see_reduction(layout.clock)
        if rank in changing:
            torch.nn.utils.clip_grad_norm_(layout.parameters, 1.0 + rank)
        digests.append(witness.observe("step", layout))
        details[rank] = Details(*witness.tell("step") or ())
    assert (digests[0] != digests[1]) is bool(changing)
    disagreement = compare_details(details, range(len(GRADIENTS)))
    if changing:
        assert (disagreement.ranks, disagreement.suspicion, disagreement.scaled) == (suspects, suspicion, suspects[-1:])
        # The factor is that of the clip.
        assert disagreement.ratio is not None
        assert (disagreement.ratio < 1) is (suspicion == "CHANGED")


def test_a_rank_without_gradients_skips_the_step() -> None:
    """Of two ranks, the one without any gradient is named."""
    disagreement = judge(GRADIENTS, [None] * len(GRADIENTS))
    assert disagreement is not None
    assert (disagreement.ranks, disagreement.empty) == ((0, 1), (1,))


def sparse(*rows: int) -> torch.Tensor:
    """Return a sparse gradient of 6 x 3 with equal values in some rows."""
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), 3), (6, 3))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (sparse(0, 1), sparse(0, 2)),
        (torch.ones(3, dtype=torch.complex64), torch.full((3,), 1j)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])),
        (torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(3, 2)),
    ],
    ids=["indices", "complex", "sign of zero", "nan", "strides"],
)
def test_gradients_of_all_kinds_differ(first: torch.Tensor, second: torch.Tensor) -> None:
    """Gradients with the same values at other indices, or with other bits, are different; equal ones are not."""
    assert judge([first], [first.clone()], [first]) is None
    disagreement = judge([first], [second], [first])
    assert disagreement is not None
    assert (disagreement.ranks, disagreement.tensors) == ((1,), (0,))


def make_judging() -> GradientWitness:
    """Return the witness of the judging rank, in a program whose ranks exchange messages between their steps."""
    judging = GradientWitness()
    judging.messages.were_sent = True
    return judging


def watch_steps(*steps: list[list[Any]], reduces: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """Return code and ranks of what a judge finds at steps, each with the gradients of all ranks."""
    judging = make_judging()
    findings = []
    for gradients_of_ranks in steps:
        witnesses = [GradientWitness() for _ in gradients_of_ranks]
        observations = {}
        layout = None
        for rank, gradients in enumerate(gradients_of_ranks):
            layout = make_layout(gradients, reduces=reduces)
            observations[rank] = witnesses[rank].observe("step", layout)
        details = {rank: witness.tell("step") for rank, witness in enumerate(witnesses)}
        for suspicion in judging.judge(layout, observations, lambda details=details: details):  # type: ignore[misc]
            findings.append((suspicion.code, suspicion.ranks))
    return findings


def agree(number: int, ranks: int = 3) -> list[list[Any]]:
    """Return equal gradients of all ranks, others at each step."""
    return [scaled(1.0 + number, *range(6)) for _ in range(ranks)]


DEVIATING = [GRADIENTS, GRADIENTS, scaled(3.0, 2)]


def test_without_a_wrapper_ranks_are_held_to_what_they_showed() -> None:
    """Ranks with equal gradients at three steps reduce together by hand; a later difference is a fault."""
    assert watch_steps(agree(1), agree(2), agree(3), agree(4), DEVIATING) == [("SYN410", (2,))]
    assert watch_steps(agree(1), DEVIATING, agree(2), DEVIATING) == []


def part_at(step: int, kind: str) -> list[list[Any]]:
    """Return the gradients of two ranks that are never equal in all tensors."""
    first, second = scaled(1.0 + step, *range(6)), scaled(1.0 + step, *range(6))
    if kind == "one left out":
        second[3] = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    elif kind == "scaled":
        second = [gradient * 0.3 for gradient in second]
    elif kind == "one in common":
        second = [second[0], *(gradient + step * index for index, gradient in enumerate(first[1:], 1))]
    else:  # one that does not change, as the bias after a mean
        second = [GRADIENTS[0], *(gradient + step * index for index, gradient in enumerate(first[1:], 1))]
        first[0] = GRADIENTS[0]
    return [first, second]


@pytest.mark.parametrize(
    ("kind", "starts_equal", "expected"),
    [
        ("one left out", True, [("SYN410", "_NEVER", ("layer3",))]),
        # Experts of each rank.
        ("one left out", False, []),
        ("scaled", True, [("SYN410", "_SCALED", tuple(f"layer{number}" for number in range(6)))]),
        ("one in common", True, []),
        ("one constant", True, []),
    ],
)
def test_without_a_wrapper_parts_show_copies(kind: str, starts_equal: bool, expected: list[Any]) -> None:
    """Ranks that were never equal in all tensors hold copies if most gradients are equal, or one factor apart."""
    judging = make_judging()
    judging.follower = SimpleNamespace(were_equal=lambda *_: starts_equal)
    found = []
    for step in range(1, 7):
        observations = {}
        details = {}
        layout: Any = None
        for rank, gradients in enumerate(part_at(step, kind)):
            witness = GradientWitness()
            layout = make_layout(gradients, reduces=False)
            observations[rank] = witness.observe("step", layout)
            details[rank] = witness.tell("step")
        found.append(judging.judge(layout, observations, lambda details=details: details))
    # Two steps in a row are compared, the second of which is the fifth.
    assert [bool(suspicions) for suspicions in found] == [False] * 4 + [bool(expected)] * 2
    seen = [(suspicion.code, suspicion.variant, suspicion.names) for suspicion in found[4]]
    assert seen == expected


def test_excluded_parameters_are_not_compared() -> None:
    """Experts that each rank keeps for itself are excluded by name."""
    observations = []
    for factor in (1.0, 2.0):
        witness = GradientWitness()
        witness.is_selected = make_selector(frozenset(), (), ("*2",))
        observations.append(witness.observe("step", make_layout(scaled(factor, 2))))
    assert observations[0] == observations[1]


@pytest.mark.parametrize("gradients", [[torch.zeros(3)], [None]], ids=["zeros", "none"])
def test_gradients_that_are_equal_by_chance_show_nothing(gradients: list[Any]) -> None:
    """Ranks that train alone may begin with equal zeros, or without gradients."""
    alone = [[torch.ones(3)], [torch.full((3,), 2.0)]]
    assert watch_steps(*[[gradients, gradients]] * 5, alone) == []


@pytest.mark.parametrize(
    ("steps_of_ranks", "expected"),
    [
        ([(5, 6, 5), (6, 7, 6)], [("SYN410", (1,)), ("SYN214", (1,))]),
        ([(5, 7, 5), (6, 8, 6), (7, 9, 7)], [("SYN410", (1,)), ("SYN410", (1,)), ("SYN214", (1,))]),
        ([(5, 5, 4), (6, 6, 5)], [("SYN410", (2,)), ("SYN214", (2,))]),
        ([(5, 6), (6, 7)], [("SYN410", (0, 1)), ("SYN214", (0, 1))]),
        ([(5, 15, 5), (6, 16, 6)], [("SYN410", (1,)), ("SYN410", (1,))]),
        ([(5, 5, 5), (6, 6), (7, 7)], []),
    ],
    ids=["one skips", "one skips two", "one steps again", "of two", "others", "one has ended"],
)
def test_without_a_wrapper_steps_may_be_shifted(steps_of_ranks: list[tuple[int, ...]], expected: list[Any]) -> None:
    """A rank that skips a step has the gradients that the other ranks have later, which is no change of gradients."""
    ranks = len(steps_of_ranks[0])
    steps = [agree(number, ranks) for number in range(1, 5)]
    for gradients_of_ranks in steps_of_ranks:
        steps.append([scaled(1.0 + number, *range(6)) for number in gradients_of_ranks])
    assert watch_steps(*steps) == expected


def test_a_cause_is_only_likely_if_steps_may_be_shifted() -> None:
    """Without reductions, the number of a step shows nothing, unless one factor explains all gradients."""
    certainties = []
    for reduces, gradients in itertools.product((True, False), (scaled(2.0, 1, 2), scaled(2.0, *range(6)))):
        disagreement = judge(GRADIENTS, gradients, GRADIENTS)
        assert disagreement is not None
        suspicion = describe_disagreement(make_layout(GRADIENTS, reduces=reduces), disagreement)
        finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
        certainties.append(finding.certainty)
    assert certainties == ["proved", "proved", "likely", "proved"]


def test_parameters_outside_of_the_wrapper_have_no_other_cause() -> None:
    """A wrapper that does not reduce the parameters is the only cause that a proved SYN212 states."""
    disagreement = judge(GRADIENTS, scaled(2.0, 1, 2), GRADIENTS)
    assert disagreement is not None
    layout = make_layout(GRADIENTS, reduces=True)
    layout.is_reduced, layout.clock.ranks = False, (0, 1, 2)
    suspicion = describe_disagreement(layout, disagreement)
    finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
    assert (finding.code, finding.certainty, finding.cause) == ("SYN212", "proved", syn212.Text.CAUSE_OUTSIDE())


def test_a_wrapper_is_judged_from_its_first_step() -> None:
    """With a wrapper, the first step counts."""
    assert watch_steps(DEVIATING, reduces=True) == [("SYN410", (2,))]


def test_a_step_without_any_gradient_is_a_skipped_step() -> None:
    """A rank that removes its gradients and calls the optimizer takes no step."""
    assert watch_steps([GRADIENTS, GRADIENTS, [None] * 6], reduces=True) == [("SYN214", (2,))]
    disagreement = judge(GRADIENTS, GRADIENTS, [None] * 6)
    assert disagreement is not None
    suspicion = describe_disagreement(make_layout(GRADIENTS), disagreement)
    finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
    assert "zero_grad()" in str(finding.cause)
    assert "fewer" not in str(finding.cause)


def test_ranks_with_other_shards_are_not_compared() -> None:
    """With two sets of equal shards, the set that differs is judged alone."""
    layout = make_layout([torch.ones(3)])
    layout.replicas = ((0, 2), (1, 3))
    digests = {0: ["copies 0", ""], 1: ["copies 1", ""], 2: ["copies 0", ""], 3: ["other", ""]}
    suspicions = GradientWitness().compare(layout, digests, dict)
    assert [suspicion.ranks for suspicion in suspicions] == [(1, 3)]
    # The shards of HSDP are copies within each set.
    digests = {0: ["", "shards 0"], 1: ["", "shards 1"], 2: ["", "other"], 3: ["", "shards 1"]}
    suspicions = GradientWitness().compare(layout, digests, dict)
    assert [suspicion.ranks for suspicion in suspicions] == [(0, 2)]


def test_shards_are_not_named_beside_copies_that_differ() -> None:
    """Of tensor-parallel ranks, the shards always differ; only the copies that differ are named, and counted."""
    judging = make_judging()
    suspicions = []
    for step in range(1, 6):
        observations = {}
        answers = {}
        layout: Any = None
        for rank in range(2):
            is_faulty = rank == 1 and step == 5
            copies = [torch.full((4,), step * (0.5 if is_faulty else 1.0)), torch.full((4,), float(step))]
            layout = make_layout([torch.full((4,), step + rank / 2), *copies], reduces=False)
            layout.copied, layout.sharded = [1, 2], [0]
            witness = GradientWitness()
            observations[rank] = witness.observe("step", layout)
            answers[rank] = witness.tell("step")
        suspicions += judging.judge(layout, observations, lambda answers=answers: answers)
    (suspicion,) = suspicions
    assert (suspicion.names, suspicion.clusters) == (("layer1",), ((0,), (1,)))
    assert suspicion.facts[0].parameters["total"] == 2


def test_a_rank_that_tells_no_details_is_named_by_its_digest() -> None:
    """A process that has ended cannot tell how its gradients differ, but which rank deviates is known."""
    observations = {}
    for rank in range(3):
        layout = make_layout(scaled(1.0 + (rank == 1), *range(6)))
        observations[rank] = GradientWitness().observe("step", layout)
    (suspicion,) = GradientWitness().judge(layout, observations, dict)
    assert suspicion.ranks == (1,)


def test_unequal_parameters_are_placed_between_two_comparisons() -> None:
    """Parameters are compared at every eighth step, so the first difference is known to be between two of them."""
    judging = ParameterWitness()
    suspicions = []
    for step in (8, 16, 24):
        observations, answers = {}, {}
        for rank in range(3):
            layout = make_layout(GRADIENTS)
            layout.clock.ticks, layout.posted, layout.repeated, layout.is_moved = step, step - 1, 0, False
            layout.find_place = lambda step=step: step
            layout.parameters[0].data += step if step < 24 else rank // 2
            witness = ParameterWitness()
            observations[rank] = witness.observe("step", layout)
            answers[rank] = witness.tell("step")
        suspicions += judging.judge(layout, observations, lambda answers=answers: answers)
    (suspicion,) = suspicions
    assert suspicion.ranks == (2,)
    assert suspicion.facts[1].parameters == {"equal": 16, "unequal": 24}


def test_parameters_that_an_optimizer_trains_later_have_a_start_of_their_own() -> None:
    """A head that is added later is compared before its first step; earlier steps say nothing about it."""
    judging = ParameterWitness()
    facts = []
    for step, signature, posted in ((8, "body", 0), (9, "body and head", 0), (16, "body and head", 15)):
        observations, answers = {}, {}
        for rank in range(3):
            layout = make_layout(GRADIENTS)
            layout.clock.ticks, layout.posted, layout.repeated, layout.is_moved = step, posted, 0, False
            layout.find_place = lambda step=step: step
            layout.signature = signature
            layout.parameters[0].data += rank * (step == 9) + rank // 2 * (step == 16)
            witness = ParameterWitness()
            observations[rank] = witness.observe("step", layout)
            answers[rank] = witness.tell("step")
        for suspicion in judging.judge(layout, observations, lambda answers=answers: answers):
            facts.append([fact.code.name for fact in suspicion.facts])
    assert facts == [["FACT", "START"], ["FACT", "START"]]


def test_parameters_that_differed_before_are_lasting() -> None:
    """A difference is lasting from the second comparison on, until a comparison in sync."""
    judging = ParameterWitness()
    lasting: list[list[bool]] = []
    for step, change in ((8, 1.0), (16, 2.0), (24, 0.0), (32, 1.0)):
        observations, answers = {}, {}
        for rank in range(3):
            layout = make_layout(GRADIENTS)
            layout.clock.ticks, layout.posted, layout.repeated, layout.is_moved = step, step - 1, 0, False
            layout.parameters[0].data += step + change * (rank == 2)
            witness = ParameterWitness()
            observations[rank] = witness.observe("step", layout)
            answers[rank] = witness.tell("step")
        suspicions = judging.judge(layout, observations, lambda answers=answers: answers)
        lasting.append([suspicion.is_lasting for suspicion in suspicions])
    assert lasting == [[False], [True], [], [False]]
