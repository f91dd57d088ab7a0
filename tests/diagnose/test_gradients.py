"""Findings on gradients (SYN211, SYN212, SYN213): matching cases and near misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups import facts_of
from small_model import ADAM, DECAY, MODEL, SGD, apart, by_digest, found, group, moment, only, scaled, unreduced

from syncheck.diagnose import syn211_gradients_not_reduced as syn211
from syncheck.diagnose import syn212_outside_the_wrapper as syn212
from syncheck.diagnose import syn213_per_rank_gradient_scale as syn213
from syncheck.diagnose import syn299_unexplained_difference as syn299
from syncheck.diagnose.case import Common
from syncheck.diagnose.gradients import Course
from syncheck.snapshots import Metadata


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("state", "states"), [("exp_avg", ADAM), ("momentum_buffer", SGD)])
def test_211(ranks: int, state: str, states: tuple[str, ...]) -> None:
    """If all trained parameters differ and first moments have different directions, it is SYN211 on all ranks."""
    fitted = only(group(*unreduced(ranks, state), ranks=ranks, optimizer=states, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN211", tuple(range(ranks)))
    certain = state == "exp_avg" or ranks > 2
    summary = syn211.Text.EACH_RANK if certain else syn211.Text.CONSISTENT
    assert fitted.facts[0] == summary(cosine=pytest.approx(0.30))
    assert facts_of(fitted)[Common.PARAMETERS] | {"size": None} == {"count": 5, "total": 5, "size": None}
    assert facts_of(fitted)[syn211.Text.MOMENTS] == {"count": 5, "total": 5}


def test_211_on_one_rank() -> None:
    """If a single rank steps with its own gradients, it is the suspect."""
    fitted = only(group(*unreduced(4, odd=(2,), cosine=0.7), ranks=4))
    assert (fitted.code, fitted.ranks) == ("SYN211", (2,))
    assert fitted.facts[0].code is syn211.Text.SOME_RANKS
    assert fitted.facts[0].parameters["ranks"] == (2,)


def test_211_mentions_other_causes_without_step_counts() -> None:
    """Without step counts a momentum may have been lost, unless no two of three ranks agree."""
    doubt = syn211.Text.UNCOUNTED
    assert doubt not in facts_of(only(group(*unreduced())))
    assert doubt not in facts_of(only(group(*unreduced(3, "momentum_buffer"), ranks=3, optimizer=SGD)))
    uncertain = only(group(*unreduced(2, "momentum_buffer"), optimizer=SGD))
    assert uncertain.facts[0].code is syn211.Text.CONSISTENT
    assert doubt in facts_of(uncertain)


def test_211_is_not_a_skipped_step() -> None:
    """Nearly equal moments were averaged. Without step counts, the first step that differs may be a skipped step."""
    assert "SYN211" not in found(group(*unreduced(cosine=0.995)))
    assert only(group(*unreduced(cosine=0.95))).code == "SYN211"
    assert "SYN211" not in found(group(*unreduced(2, "momentum_buffer", cosine=0.95), optimizer=SGD))
    case = group(*unreduced(2, "momentum_buffer"), optimizer=SGD)
    assert "SYN211" not in found(case, group(step=5, optimizer=SGD))
    counted = apart("optimizer.fc.weight.step", "optimizer_step", max_abs=1)
    assert "SYN211" not in found(group(*unreduced(), counted, stores_progress=True))


def test_211_needs_the_whole_model() -> None:
    """A parameter or moment that agrees, local SGD and a stale rank each exclude SYN211."""
    assert "SYN211" not in found(group(*unreduced()[:4], *unreduced()[5:]))
    assert "SYN211" not in found(group(*unreduced()[:5]))
    assert "SYN211" not in found(group(*unreduced(), metadata=Metadata(averaging={"period": 4})))
    assert "SYN211" not in found(group(*unreduced(), stale={1: 9}))


def test_211_without_moments() -> None:
    """Without moments the finding is "consistent with": the difference grows, or no two of three ranks agree."""
    two = [apart(name, cosine=0.99) for name in MODEL]
    assert "SYN211" not in found(group(*two, optimizer=()))
    smaller = group(*(replace(diff, max_abs=0.1) for diff in two), optimizer=(), step=5)
    fitted = only(group(*two, optimizer=()), smaller)
    assert fitted.code == "SYN211"
    assert fitted.facts[0] == syn211.Text.CONSISTENT_WITHOUT_MOMENTS()
    assert facts_of(fitted)[Course.GREW] == {"step": 5, "ratio": pytest.approx(5.0)}
    assert "SYN211" not in found(group(*two, optimizer=()), group(optimizer=(), step=4), smaller)
    three = [apart(name, ranks=3, odd=(), cosine=0.99) for name in MODEL]
    assert only(group(*three, ranks=3, optimizer=())).ranks == (0, 1, 2)
    odd = [apart(name, ranks=3, cosine=0.99) for name in MODEL]
    assert "SYN211" not in found(group(*odd, ranks=3, optimizer=()))
    elsewhere = [*two[1:], apart("conv.weight", cosine=-0.2)]
    fitted = only(group(*elsewhere, optimizer=()))
    assert facts_of(fitted)[syn211.Text.COSINES] == {"least": pytest.approx(-0.20), "most": pytest.approx(0.99)}


def test_211_by_digests() -> None:
    """Digests cannot show whether one of three ranks clipped its gradients: this difference is unexplained."""
    assert only(group(*map(by_digest, unreduced()))).facts[0] == syn211.Text.CONSISTENT_DIGESTS()
    assert only(group(*map(by_digest, unreduced(3)), ranks=3)).code == "SYN211"
    assert only(group(*map(by_digest, unreduced(3, odd=(1,))), ranks=3)).code == "SYN299"
    sgd = group(*map(by_digest, unreduced(2, "momentum_buffer")), optimizer=SGD)
    assert only(sgd).fix.code is syn299.Text.FIX_DIGESTS


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("state", "states"), [("exp_avg", ADAM), ("momentum_buffer", SGD)])
def test_212(ranks: int, state: str, states: tuple[str, ...]) -> None:
    """A head that differs with its moments, while the rest of the model agrees, is SYN212 with its module."""
    head = [diff for diff in unreduced(ranks, state) if ".fc." in f".{diff.name}"]
    fitted = only(group(*head, ranks=ranks, optimizer=states, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN212", tuple(range(ranks)))
    assert fitted.facts[0] == syn212.Text.NOT_AVERAGED(modules=("fc",))
    facts = facts_of(fitted)
    assert facts[syn212.Text.PARAMETERS] | {"size": None} == {"count": 2, "total": 5, "size": None}
    assert facts[syn212.Text.WITH_STATE] == {"count": 2}
    assert facts[syn212.Text.REST_AGREES] == {"count": 3}


def test_212_is_not_a_head_that_started_unequal() -> None:
    """A part whose optimizer state agrees, or differs by weight decay alone, started unequal and is SYN210."""
    head = [apart("fc.weight", cosine=0.1), apart("fc.bias", cosine=0.1)]
    assert only(group(*head)).code == "SYN210"
    momenta = [moment(diff.name, "momentum_buffer", max_abs=0.002, cosine=0.9) for diff in head]
    assert only(group(*head, *momenta, optimizer=SGD, hyperparameters=DECAY)).code == "SYN210"


def test_212_by_a_name_component() -> None:
    """Adapters in many layers are one part by their name component; as many layers without one are not."""
    layers = {f"layer{i}.attn.{name}.weight": "parameter" for i in range(6) for name in ("base", "lora_A", "lora_B")}
    lora = [name for name in layers if "lora" in name]
    states = {f"optimizer.{name}.exp_avg": "optimizer" for name in lora}
    tensors = [apart(name, cosine=0.9) for name in lora] + [moment(name, cosine=0.3) for name in lora]
    fitted = only(group(*tensors, optimizer=(), more=layers | states))
    assert fitted.code == "SYN212"
    assert fitted.facts[0].parameters["modules"] == ("*.lora_A.*", "*.lora_B.*")
    plain = {f"{part}{i}.weight": "parameter" for i in range(6) for part in ("a", "b")}
    odd = [f"a{i}.weight" for i in range(5)]
    states = {f"optimizer.{name}.exp_avg": "optimizer" for name in plain}
    tensors = [apart(name, cosine=0.9) for name in odd] + [moment(name, cosine=0.3) for name in odd]
    assert "SYN212" not in found(group(*tensors, optimizer=(), more=plain | states))


def test_212_without_moments() -> None:
    """Without optimizer state the difference must grow, because a head that started unequal looks the same."""
    head = [apart("fc.weight", cosine=0.99), apart("fc.bias", cosine=0.99)]
    smaller = group(*(replace(diff, max_abs=0.1) for diff in head), optimizer=(), step=5)
    fitted = only(group(*head, optimizer=()), smaller)
    assert (fitted.code, fitted.facts[0].code) == ("SYN212", syn212.Text.CONSISTENT)
    assert "SYN212" not in found(group(*head, optimizer=()))


def test_212_needs_more_than_a_damaged_element() -> None:
    """A few elements of a tensor and its moment are damage; so is a moment alone."""
    place = {"mismatched": 1, "extent": "one"}
    assert "SYN212" not in found(group(apart("fc.weight", **place), moment("fc.weight", **place)))
    assert "SYN212" not in found(group(moment("fc.weight", cosine=0.5)))


def test_212_by_digests() -> None:
    """Digests of a head and its moments suffice with Adam, but not with SGD, whose momentum contains weight decay."""
    for state, states, fits in (("exp_avg", ADAM, True), ("momentum_buffer", SGD, False)):
        head = [by_digest(diff) for diff in unreduced(4, state) if ".fc." in f".{diff.name}"]
        assert ("SYN212" in found(group(*head, ranks=4, optimizer=states))) is fits


@pytest.mark.parametrize("factor", [0.01, 0.5, 0.8])
@pytest.mark.parametrize(("ranks", "suspect"), [(2, 1), (4, 3)])
def test_213(factor: float, ranks: int, suspect: int) -> None:
    """First moments with equal direction that are shorter on one rank by the same factor are SYN213 on that rank."""
    fitted = only(group(*scaled(factor, ranks), ranks=ranks))
    assert (fitted.code, fitted.ranks) == ("SYN213", (suspect,))
    assert fitted.facts[0] == syn213.Text.CLIPPED(
        ranks=(suspect,), ratio=pytest.approx(factor), others=tuple(range(ranks - 1))
    )
    assert facts_of(fitted)[syn213.Text.COSINE] == {"count": 5, "cosine": pytest.approx(0.99)}


def test_213_suspects_the_odd_rank() -> None:
    """Of two ranks the shorter is the suspect; of more, the rank outside the majority, even if it is longer."""
    assert only(group(*scaled(8.0))).ranks == (0,)
    assert only(group(*scaled(8.0, 4), ranks=4)).ranks == (3,)


def test_213_within_replica_groups() -> None:
    """Shards are compared within their replica group, so that norms of different shards are no scale."""
    groups = ((0, 2), (1, 3))
    norms = {0: 1.0, 2: 0.5, 1: 9.0, 3: 4.5}
    moments = [
        replace(moment(name, ranks=4, odd=(), cosine=0.99, norms=norms), replica_groups=groups) for name in MODEL
    ]
    fitted = only(group(*moments, ranks=4))
    assert (fitted.code, fitted.ranks) == ("SYN213", (2, 3))
    assert fitted.facts[0] == syn213.Text.CLIPPED(ranks=(2, 3), ratio=0.5, others=(0, 1))


def test_213_by_different_factors() -> None:
    """Ranks that clipped by different factors are listed with their factors."""
    norms = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5, 4: 0.25}
    moments = [moment(name, ranks=5, odd=(3, 4), cosine=0.99, norms=norms) for name in MODEL]
    fitted = only(group(*moments, ranks=5))
    assert fitted.facts[0] == syn213.Text.CLIPPED_UNEQUALLY(ranks=(3, 4), ratios={3: 0.5, 4: 0.25}, others=(0, 1, 2))


def test_213_with_sgd() -> None:
    """Momenta that are mostly weight decay are ignored; the others still show the clip."""
    # 0.005 times a norm of 8 is a decay of 0.04: more than a quarter of these momenta.
    large = ("conv.weight", "fc.weight")
    weights = [apart(name, cosine=0.9, norms=dict.fromkeys((0, 1), 8.0 if name in large else 0.1)) for name in MODEL]
    momenta = [
        moment(name, "momentum_buffer", cosine=0.2, norms={0: 1.0, 1: 0.08})
        if name in large
        else moment(name, "momentum_buffer", cosine=0.99, norms={0: 1.0, 1: 0.05})
        for name in MODEL
    ]
    fitted = only(group(*weights, *momenta, optimizer=SGD, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN213", (1,))
    assert fitted.facts[0].code is syn213.Text.CONSISTENT
    facts = facts_of(fitted)
    assert (facts[syn213.Text.COSINE]["count"], facts[syn213.Text.MOSTLY_DECAY]["count"]) == (3, 2)
    assert fitted.cause.code is syn213.Text.CAUSE_UNCOUNTED


def test_213_with_weight_decay_only() -> None:
    """With SGD, momenta that are far shorter than a lost momentum contain only weight decay: SYN213."""
    weights = [apart(name, cosine=0.9, norms={0: 8.0, 1: 8.0}) for name in MODEL]
    for factor, fits in ((0.05, True), (0.09, False)):
        momenta = [moment(name, "momentum_buffer", cosine=0.4, norms={0: 1.0, 1: factor}) for name in MODEL]
        case = group(*weights, *momenta, optimizer=SGD, hyperparameters=DECAY)
        assert ("SYN213" in found(case)) is fits


def test_213_is_not_unreduced_gradients() -> None:
    """Factors on both sides of 1, or different directions, are SYN211."""
    assert only(group(*unreduced(cosine=0.95))).code == "SYN211"
    assert only(group(*scaled(0.7, cosine=0.6))).code == "SYN211"
    assert "SYN213" not in found(group(*scaled(0.95)))


def test_213_is_not_a_lost_momentum() -> None:
    """With SGD a rank that just lost its momentum has shorter moments too, so SYN213 does not match."""
    case = group(*scaled(0.3, state="momentum_buffer", cosine=0.8), optimizer=SGD)
    assert "SYN213" not in found(case)
    alike = group(*scaled(0.5, state="momentum_buffer"), optimizer=SGD)
    assert only(alike).code == "SYN213"
    assert "SYN213" not in found(alike, group(step=5, optimizer=SGD))
    assert "SYN213" not in found(group(*map(by_digest, scaled(0.5))))
