"""Findings on gradients: each fires on its signature, and is silent beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_model import ADAM, DECAY, MODEL, SGD, apart, by_digest, found, group, moment, only, scaled, unreduced

from syncheck.snapshots import Metadata


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("state", "states"), [("exp_avg", ADAM), ("momentum_buffer", SGD)])
def test_211(ranks: int, state: str, states: tuple[str, ...]) -> None:
    """Everything trained differs, and first moments point in directions of their own: SYN211 on all ranks."""
    fitted = only(group(*unreduced(ranks, state), ranks=ranks, optimizer=states, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN211", tuple(range(ranks)))
    assert "5 of 5 parameters differ" in fitted.evidence
    assert "so do all 5 first moments, of median cosine 0.30" in fitted.evidence


def test_211_on_one_rank() -> None:
    """A rank that steps with its own gradient where the others average theirs is named."""
    fitted = only(group(*unreduced(4, odd=(2,), cosine=0.7), ranks=4))
    assert (fitted.code, fitted.ranks) == ("SYN211", (2,))


def test_211_says_how_sure_it_is() -> None:
    """With counted steps, or with three ranks of which no two agree, it claims; else momentum may have been lost."""
    doubt = "momentum that was lost, just before looks alike"
    assert doubt not in only(group(*unreduced())).evidence
    assert doubt not in only(group(*unreduced(3, "momentum_buffer"), ranks=3, optimizer=SGD)).evidence
    assert doubt in only(group(*unreduced(2, "momentum_buffer"), optimizer=SGD)).evidence


def test_211_is_not_a_step_left_out() -> None:
    """Moments that are nearly alike are averaged; where steps are not counted, so may be those that just went apart."""
    assert "SYN211" not in found(group(*unreduced(cosine=0.995)))
    assert only(group(*unreduced(cosine=0.95))).code == "SYN211"
    assert "SYN211" not in found(group(*unreduced(2, "momentum_buffer", cosine=0.95), optimizer=SGD))
    case = group(*unreduced(2, "momentum_buffer"), optimizer=SGD)
    assert "SYN211" not in found(case, group(step=5, optimizer=SGD))
    counted = apart("optimizer.fc.weight.step", "optimizer_step", max_abs=1)
    assert "SYN211" not in found(group(*unreduced(), counted, stores_progress=True))


def test_211_needs_the_whole_model() -> None:
    """Parameters, or their moments, that agree rule it out; so does local SGD, and a rank of an earlier step."""
    assert "SYN211" not in found(group(*unreduced()[:4], *unreduced()[5:]))
    assert "SYN211" not in found(group(*unreduced()[:5]))
    assert "SYN211" not in found(group(*unreduced(), metadata=Metadata(averaging={"period": 4})))
    assert "SYN211" not in found(group(*unreduced(), stale={1: 9}))


def test_211_without_moments() -> None:
    """Of parameters alone it says "consistent with": where the gap grows, or all of three ranks are apart."""
    two = [apart(name, cosine=0.99) for name in MODEL]
    assert "SYN211" not in found(group(*two, optimizer=()))
    smaller = group(*(replace(diff, max_abs=0.1) for diff in two), optimizer=(), step=5)
    fitted = only(group(*two, optimizer=()), smaller)
    assert fitted.code == "SYN211"
    assert "consistent with gradients that are not averaged; the gap grew 5.0 times since step 5" in fitted.evidence
    assert "SYN211" not in found(group(*two, optimizer=()), group(optimizer=(), step=4), smaller)
    three = [apart(name, ranks=3, odd=(), cosine=0.99) for name in MODEL]
    assert only(group(*three, ranks=3, optimizer=())).ranks == (0, 1, 2)
    odd = [apart(name, ranks=3, cosine=0.99) for name in MODEL]
    assert "SYN211" not in found(group(*odd, ranks=3, optimizer=()))
    elsewhere = [*two[1:], apart("conv.weight", cosine=-0.2)]
    assert "cosines of -0.20 to 0.99" in only(group(*elsewhere, optimizer=())).evidence


def test_211_by_digests() -> None:
    """Digests show that all is apart, not that one rank clips: with an odd rank of three it is unexplained."""
    assert "by digests alone" in only(group(*map(by_digest, unreduced()))).evidence
    assert only(group(*map(by_digest, unreduced(3)), ranks=3)).code == "SYN211"
    assert only(group(*map(by_digest, unreduced(3, odd=(1,))), ranks=3)).code == "SYN299"
    sgd = group(*map(by_digest, unreduced(2, "momentum_buffer")), optimizer=SGD)
    assert str(only(sgd).fix).startswith("Compare the checkpoints themselves")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("state", "states"), [("exp_avg", ADAM), ("momentum_buffer", SGD)])
def test_212(ranks: int, state: str, states: tuple[str, ...]) -> None:
    """A head that differs with its moments while the rest agrees is SYN212, with its module and its share."""
    head = [diff for diff in unreduced(ranks, state) if ".fc." in f".{diff.name}"]
    fitted = only(group(*head, ranks=ranks, optimizer=states, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN212", tuple(range(ranks)))
    assert "2 of 5 trained parameters differ, with their optimizer state: all under fc," in fitted.evidence
    assert "the other 3 parameters agree" in fitted.evidence


def test_212_is_not_a_head_of_another_start() -> None:
    """A part whose optimizer state agrees, or is apart by weight decay alone, started unequal and is SYN210."""
    head = [apart("fc.weight", cosine=0.1), apart("fc.bias", cosine=0.1)]
    assert only(group(*head)).code == "SYN210"
    momenta = [moment(diff.name, "momentum_buffer", max_abs=0.002, cosine=0.9) for diff in head]
    assert only(group(*head, *momenta, optimizer=SGD, hyperparameters=DECAY)).code == "SYN210"


def test_212_by_its_mark() -> None:
    """Adapters all over a model are one part by their mark; as many layers without one are not."""
    layers = {f"layer{i}.attn.{name}.weight": "parameter" for i in range(6) for name in ("base", "lora_A", "lora_B")}
    lora = [name for name in layers if "lora" in name]
    states = {f"optimizer.{name}.exp_avg": "optimizer" for name in lora}
    tensors = [apart(name, cosine=0.9) for name in lora] + [moment(name, cosine=0.3) for name in lora]
    fitted = only(group(*tensors, optimizer=(), more=layers | states))
    assert fitted.code == "SYN212"
    assert "those under *.lora_A.*, *.lora_B.*" in fitted.evidence
    plain = {f"{part}{i}.weight": "parameter" for i in range(6) for part in ("a", "b")}
    odd = [f"a{i}.weight" for i in range(5)]
    states = {f"optimizer.{name}.exp_avg": "optimizer" for name in plain}
    tensors = [apart(name, cosine=0.9) for name in odd] + [moment(name, cosine=0.3) for name in odd]
    assert "SYN212" not in found(group(*tensors, optimizer=(), more=plain | states))


def test_212_without_moments() -> None:
    """Without optimizer state a head must grow apart over the steps to be told from one that started unequal."""
    head = [apart("fc.weight", cosine=0.99), apart("fc.bias", cosine=0.99)]
    smaller = group(*(replace(diff, max_abs=0.1) for diff in head), optimizer=(), step=5)
    assert only(group(*head, optimizer=()), smaller).code == "SYN212"
    assert "SYN212" not in found(group(*head, optimizer=()))


def test_212_needs_more_than_a_damaged_place() -> None:
    """Few elements of one tensor and its moment are damage; so is a moment alone."""
    place = {"mismatched": 1, "extent": "one"}
    assert "SYN212" not in found(group(apart("fc.weight", **place), moment("fc.weight", **place)))
    assert "SYN212" not in found(group(moment("fc.weight", cosine=0.5)))


def test_212_by_digests() -> None:
    """Digests of a head and its moments are enough with Adam, and not with SGD, which may hold weight decay."""
    for state, states, fits in (("exp_avg", ADAM, True), ("momentum_buffer", SGD, False)):
        head = [by_digest(diff) for diff in unreduced(4, state) if ".fc." in f".{diff.name}"]
        assert ("SYN212" in found(group(*head, ranks=4, optimizer=states))) is fits


@pytest.mark.parametrize("factor", [0.01, 0.5, 0.8])
@pytest.mark.parametrize(("ranks", "suspect"), [(2, 1), (4, 3)])
def test_213(factor: float, ranks: int, suspect: int) -> None:
    """First moments of one direction, shorter on one rank by one factor, are SYN213 on that rank, however mild."""
    fitted = only(group(*scaled(factor, ranks), ranks=ranks))
    assert (fitted.code, fitted.ranks) == ("SYN213", (suspect,))
    assert f"median cosine 0.990, and are {factor} times as long on rank {suspect} as on rank" in fitted.evidence


def test_213_names_the_odd_rank() -> None:
    """Of two ranks the shorter is the suspect; of more, the one outside the majority, also if it is the longer."""
    assert only(group(*scaled(8.0))).ranks == (0,)
    assert only(group(*scaled(8.0, 4), ranks=4)).ranks == (3,)


def test_213_within_replica_groups() -> None:
    """Parts of a tensor are compared with their own copies: norms of unlike parts are no scale."""
    groups = ((0, 2), (1, 3))
    norms = {0: 1.0, 2: 0.5, 1: 9.0, 3: 4.5}
    moments = [
        replace(moment(name, ranks=4, odd=(), cosine=0.99, norms=norms), replica_groups=groups) for name in MODEL
    ]
    fitted = only(group(*moments, ranks=4))
    assert (fitted.code, fitted.ranks) == ("SYN213", (2, 3))
    assert "are 0.5 times as long on rank 2, 0.5 times as long on rank 3 as on ranks 0, 1" in fitted.evidence


def test_213_with_sgd() -> None:
    """Momenta that are mostly weight decay are left out; those above it still tell."""
    # 0.005 times a norm of 8 is 0.04 of decay: more than a quarter of what is left of these momenta.
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
    assert "of 3 parameters (2 that hold mostly weight decay aside)" in fitted.evidence


def test_213_where_decay_is_all_that_is_left() -> None:
    """With SGD a rank whose momenta are far shorter than a lost one could be holds weight decay only, and is named."""
    weights = [apart(name, cosine=0.9, norms={0: 8.0, 1: 8.0}) for name in MODEL]
    for factor, fits in ((0.05, True), (0.09, False)):
        momenta = [moment(name, "momentum_buffer", cosine=0.4, norms={0: 1.0, 1: factor}) for name in MODEL]
        case = group(*weights, *momenta, optimizer=SGD, hyperparameters=DECAY)
        assert ("SYN213" in found(case)) is fits


def test_213_is_not_unreduced_gradients() -> None:
    """Factors on both sides of 1, or directions of their own, are SYN211."""
    assert only(group(*unreduced(cosine=0.95))).code == "SYN211"
    assert only(group(*scaled(0.7, cosine=0.6))).code == "SYN211"
    assert "SYN213" not in found(group(*scaled(0.95)))


def test_213_is_not_a_momentum_that_was_lost() -> None:
    """With SGD a rank that lost its momentum just before has shorter ones too: nothing is claimed."""
    case = group(*scaled(0.3, state="momentum_buffer", cosine=0.8), optimizer=SGD)
    assert "SYN213" not in found(case)
    alike = group(*scaled(0.5, state="momentum_buffer"), optimizer=SGD)
    assert only(alike).code == "SYN213"
    assert "SYN213" not in found(alike, group(step=5, optimizer=SGD))
    assert "SYN213" not in found(group(*map(by_digest, scaled(0.5))))
