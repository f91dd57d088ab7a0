"""Gradients that were not averaged or were scaled (SYN211, SYN212, SYN213): matching cases and near misses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case, diagnose_single
from support.groups import facts_of
from support.listings import find_texts
from support.small_model import (
    ADAM,
    DECAY,
    MODEL,
    SGD,
    by_digest,
    group,
    in_head,
    make_diff,
    model,
    moment,
    moments,
    scaled,
    unreduced,
)  # fmt: skip

from syncheck.diagnose import syn211_gradients_not_reduced as syn211
from syncheck.diagnose import syn212_outside_the_wrapper as syn212
from syncheck.diagnose import syn213_per_rank_gradient_scale as syn213
from syncheck.diagnose import syn299_unexplained_difference as syn299
from syncheck.diagnose.statements import Common, Course
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from syncheck.records import Group

MOMENTUM = "momentum_buffer"
OPTIMIZERS = pytest.mark.parametrize(("state", "states"), [("exp_avg", ADAM), (MOMENTUM, SGD)])
COUNTED = make_diff("optimizer.fc.weight.step", "optimizer_step", max_abs=1)
CLIPPED, TWO = scaled(0.5, state=MOMENTUM), model(cosine=0.99)


def smaller(*tensors: Any, **fields: Any) -> Group:
    """Return the group of an earlier step, with smaller differences."""
    return group(*(replace(diff, max_abs=0.1) for diff in tensors), step=5, **fields)


@pytest.mark.parametrize("ranks", [2, 4])
@OPTIMIZERS
def test_211(ranks: int, state: str, states: tuple[str, ...]) -> None:
    """Differences in all trained parameters, with first moments in different directions, are SYN211 on all ranks."""
    fitted = diagnose_single(group(*unreduced(ranks, state), ranks=ranks, optimizer=states, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN211", tuple(range(ranks)))
    # Without step counts, a rank may have lost its momentum, unless no two of three ranks agree.
    certain = state == "exp_avg" or ranks > 2
    summary = syn211.Text.EACH_RANK if certain else syn211.Text.CONSISTENT
    assert fitted.facts[0] == summary(cosine=pytest.approx(0.30))
    facts = facts_of(fitted)
    assert (facts[Common.PARAMETERS]["count"], facts[Common.PARAMETERS]["total"]) == (5, 5)
    assert facts[syn211.Text.MOMENTS] == {"count": 5, "total": 5}
    assert (syn211.Text.UNCOUNTED in facts) is not certain


def test_211_on_one_rank() -> None:
    """A single rank with unreduced gradients is the suspect of SYN211."""
    fitted = diagnose_single(group(*unreduced(4, odd=(2,), cosine=0.7), ranks=4))
    assert (fitted.code, fitted.ranks) == ("SYN211", (2,))
    assert fitted.facts[0].code is syn211.Text.SOME_RANKS
    assert fitted.facts[0].parameters["ranks"] == (2,)


@pytest.mark.parametrize(
    "cases",
    [
        # Equal second moments belong to equal gradients, and nearly equal momenta were averaged. Without step counts,
        # the first difference may be a skipped step.
        [group(*model(cosine=0.99), *moments(cosine=0.5))],
        [group(*unreduced(2, MOMENTUM, cosine=0.95), optimizer=SGD)],
        [group(*unreduced(2, MOMENTUM), optimizer=SGD), group(step=5, optimizer=SGD)],
        [group(*unreduced(), COUNTED, stores_progress=True)],
        # An equal parameter, an equal moment, local SGD, and a stale rank.
        [group(*unreduced()[:4], *unreduced()[5:])],
        [group(*unreduced()[:5])],
        [group(*unreduced(), metadata=Metadata(averaging={"period": 4}))],
        [group(*unreduced(), stale={1: 9})],
        # Without moments, the difference must grow, or no two of three ranks may agree.
        [group(*TWO, optimizer=())],
        [group(*TWO, optimizer=()), group(optimizer=(), step=4), smaller(*TWO, optimizer=())],
        [group(*model(ranks=3, cosine=0.99), ranks=3, optimizer=())],
    ],
)
def test_not_211(cases: list[Group]) -> None:
    """A skipped step, a part of the model, local SGD and a stale rank are not SYN211."""
    assert "SYN211" not in diagnose_case(*cases)


def test_211_long_ago() -> None:
    """Second moments show a single step with separate gradients, after the first moments have converged."""
    # The gradients are equal again, so that one step is as possible as a change after the average.
    assert diagnose_single(group(*unreduced(3, cosine=0.9999), ranks=3)).certainty == "consistent"
    # Two ranks may have clipped by their local norms, and one of three ranks may have had a disturbed gradient.
    assert diagnose_single(group(*unreduced(cosine=0.9999))).certainty == "consistent"
    assert diagnose_single(group(*unreduced(3, odd=(1,), cosine=0.9), ranks=3)).certainty == "consistent"


def test_211_without_moments() -> None:
    """Without moments, growth or three unequal ranks are only consistent with SYN211."""
    fitted = diagnose_single(group(*TWO, optimizer=()), smaller(*TWO, optimizer=()))
    assert fitted.code == "SYN211"
    assert fitted.facts[0] == syn211.Text.CONSISTENT_WITHOUT_MOMENTS()
    assert facts_of(fitted)[Course.GREW] == {"step": 5, "ratio": pytest.approx(5.0)}
    assert diagnose_single(group(*model(ranks=3, odd=(), cosine=0.99), ranks=3, optimizer=())).ranks == (0, 1, 2)
    fitted = diagnose_single(group(*TWO[1:], make_diff("conv.weight", cosine=-0.2), optimizer=()))
    assert facts_of(fitted)[syn211.Text.COSINES] == {"least": pytest.approx(-0.20), "most": pytest.approx(0.99)}


def test_211_by_digests() -> None:
    """Digests are SYN211 only if no two ranks agree, because digests cannot exclude clipping on one rank."""
    assert diagnose_single(group(*map(by_digest, unreduced()))).facts[0] == syn211.Text.CONSISTENT_DIGESTS()
    assert diagnose_single(group(*map(by_digest, unreduced(3)), ranks=3)).code == "SYN211"
    assert diagnose_single(group(*map(by_digest, unreduced(3, odd=(1,))), ranks=3)).code == "SYN299"
    sgd = group(*map(by_digest, unreduced(2, MOMENTUM)), optimizer=SGD)
    assert diagnose_single(sgd).fix.code is syn299.Text.FIX_DIGESTS


def test_code_of_unequal_gradients() -> None:
    """Direction, length and state of the moments distinguish SYN210, SYN211 and SYN213."""
    assert diagnose_single(group(*unreduced(cosine=0.95))).code == "SYN211"
    assert diagnose_single(group(*scaled(1.4, cosine=0.6))).code == "SYN211"
    assert diagnose_single(group(*CLIPPED, optimizer=SGD)).code == "SYN213"
    # Equal optimizer state, or a difference by weight decay alone, proves an unequal start.
    head, momenta = in_head(model(cosine=0.1)), in_head(moments(MOMENTUM, max_abs=0.002, cosine=0.9))
    assert diagnose_single(group(*head)).code == "SYN210"
    assert diagnose_single(group(*head, *momenta, optimizer=SGD, hyperparameters=DECAY)).code == "SYN210"


@pytest.mark.parametrize("ranks", [2, 4])
@OPTIMIZERS
def test_212(ranks: int, state: str, states: tuple[str, ...]) -> None:
    """A head that differs together with its moments, in an otherwise equal model, is SYN212, which names the module."""
    head = in_head(unreduced(ranks, state))
    fitted = diagnose_single(group(*head, ranks=ranks, optimizer=states, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN212", tuple(range(ranks)))
    assert fitted.facts[0] == syn212.Text.NOT_AVERAGED(modules=("fc",))
    facts = facts_of(fitted)
    assert (facts[syn212.Text.PARAMETERS]["count"], facts[syn212.Text.PARAMETERS]["total"]) == (2, 5)
    assert facts[syn212.Text.WITH_STATE] == {"count": 2}
    assert facts[syn212.Text.REST_AGREES] == {"count": 3}
    # With SGD, digests do not suffice, because the momentum contains weight decay.
    digests = diagnose_case(group(*map(by_digest, head), ranks=ranks, optimizer=states))
    assert ("SYN212" in digests) is (state == "exp_avg")


def layers(odd: list[str], names: list[str], with_state: list[str]) -> Group:
    """Return a group with differing parameters and moments. odd: the names of the differing parameters."""
    kinds = dict.fromkeys(names, "parameter") | {f"optimizer.{name}.exp_avg": "optimizer" for name in with_state}
    tensors = [make_diff(name, cosine=0.9) for name in odd] + [moment(name, cosine=0.3) for name in odd]
    return group(*tensors, optimizer=(), more=kinds)


def test_changed_part_of_some_ranks() -> None:
    """If other ranks agree, a part that differs with its moments was averaged, and changed afterwards: SYN211."""
    noise = {"ranks": 4, "odd": (1,)}
    fitted = diagnose_single(group(*in_head(unreduced(**noise)), ranks=4))
    assert (fitted.code, fitted.ranks, fitted.certainty) == ("SYN211", (1,), "consistent")
    assert fitted.facts[0].code is syn211.Text.CHANGED
    assert "SYN213" in fitted.alternatives
    # Two of four ranks, each with noise of its own.
    assert diagnose_single(group(*in_head(unreduced(4, odd=(1, 2))), ranks=4)).code == "SYN211"
    # Without an average, all ranks differ.
    assert diagnose_single(group(*in_head(unreduced(4)), ranks=4)).code == "SYN212"
    # Two ranks do not show whether there was an average.
    assert "SYN211" in diagnose_single(group(*in_head(unreduced()))).alternatives
    # Without moments, too, agreeing ranks exclude a part outside of the wrapper.
    grown = in_head(model(ranks=3, cosine=0.99))
    stateless = {"ranks": 3, "optimizer": ()}
    finding = diagnose_single(group(*grown, **stateless), smaller(*grown, **stateless))
    assert (finding.code, finding.alternatives[0]) == ("SYN299", "SYN211")


STATISTICS = ("bn.running_mean", "bn.running_var", "fc.1.running_mean", "ema.bn.running_mean", "ema.fc.1.running_mean")


def test_212_beside_local_statistics() -> None:
    """Statistics of agreeing layers and of their averages are SYN201 or SYN202; those of the part belong to SYN212."""
    kinds = {}
    for name in STATISTICS:
        kinds[name] = "ema" if name.startswith("ema") else f"bn_{name[-4:].removeprefix('_')}"
    statistics = [make_diff(name, kind, odd=()) for name, kind in kinds.items()]
    for synced, code in ((True, "SYN201"), (False, "SYN202")):
        case = group(*in_head(unreduced()), *statistics, more=kinds, metadata=Metadata(buffers_synced=synced))
        fitted = diagnose_case(case)
        assert set(fitted) == {"SYN212", code}
        assert set(STATISTICS).intersection(fitted["SYN212"].tensors) == {"fc.1.running_mean", "ema.fc.1.running_mean"}
        assert set(fitted[code].tensors) == {"bn.running_mean", "bn.running_var", "ema.bn.running_mean"}


def test_212_by_a_name_component() -> None:
    """Differing adapters with a common name component are SYN212; layers without a common component are not."""
    names = [f"layer{i}.attn.{name}.weight" for i, name in product(range(6), ("base", "lora_A", "lora_B"))]
    lora = find_texts(names, "lora")
    assert diagnose_single(layers(lora, names, lora)).code == "SYN211"  # the whole of the trained parameters
    fitted = diagnose_single(layers(lora, names, names))
    assert fitted.code == "SYN212"
    assert fitted.facts[0].parameters["modules"] == ("*.lora_A.*", "*.lora_B.*")
    plain = [f"{part}{i}.weight" for i, part in product(range(6), ("a", "b"))]
    assert "SYN212" not in diagnose_case(layers([f"a{i}.weight" for i in range(5)], plain, plain))


def test_212_without_moments() -> None:
    """Without optimizer state, SYN212 requires growth, because a different initialization looks the same."""
    head = in_head(model(cosine=0.99))
    fitted = diagnose_single(group(*head, optimizer=()), smaller(*head, optimizer=()))
    assert (fitted.code, fitted.facts[0].code) == ("SYN212", syn212.Text.CONSISTENT)
    first = {"mismatched": 1, "extent": "one"}  # a damaged element and its moment
    damaged = make_diff("fc.weight", **first), moment("fc.weight", **first)
    for case in (group(*head, optimizer=()), group(*damaged), group(moment("fc.weight", cosine=0.5))):
        assert "SYN212" not in diagnose_case(case)


@pytest.mark.parametrize("factor", [0.01, 0.5, 0.8])
@pytest.mark.parametrize(("ranks", "suspect"), [(2, 1), (4, 3)])
def test_213(factor: float, ranks: int, suspect: int) -> None:
    """First moments of equal direction, shorter by one factor on one rank, are SYN213 on that rank."""
    fitted = diagnose_single(group(*scaled(factor, ranks), ranks=ranks))
    assert (fitted.code, fitted.ranks) == ("SYN213", (suspect,))
    remaining = tuple(range(ranks - 1))
    assert fitted.facts[0] == syn213.Text.CLIPPED(ranks=(suspect,), ratio=pytest.approx(factor), others=remaining)
    assert facts_of(fitted)[syn213.Text.COSINE] == {"count": 5, "cosine": pytest.approx(0.99)}


LION = ("exp_avg", "step")  # an optimizer without second moments
SHARDED = moments(ranks=4, odd=(), cosine=0.99, norms={0: 1.0, 2: 0.5, 1: 9.0, 3: 4.5})
UNEQUAL = moments(ranks=5, odd=(3, 4), cosine=0.99, norms={0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5, 4: 0.25})


@pytest.mark.parametrize(
    ("case", "ranks", "summary"),
    [
        # With two ranks, the shorter is the suspect; with more, the rank outside the majority, even if longer.
        (group(*scaled(8.0)), (0,), None),
        (group(*scaled(8.0, 4), ranks=4), (3,), None),
        # Norms of different shards are not comparable.
        (
            group(*(replace(diff, replica_groups=((0, 2), (1, 3))) for diff in SHARDED), ranks=4, optimizer=LION),
            (2, 3),
            syn213.Text.CONSISTENT(ranks=(2, 3), ratio=0.5, others=(0, 1)),
        ),
        (
            group(*UNEQUAL, ranks=5, optimizer=LION),
            (3, 4),
            syn213.Text.CONSISTENT_UNEQUALLY(ranks=(3, 4), ratios={3: 0.5, 4: 0.25}, others=(0, 1, 2)),
        ),
    ],
)
def test_suspects_of_213(case: Group, ranks: tuple[int, ...], summary: Any) -> None:
    """SYN213 compares ranks within their replica group, and lists the suspects with their factors.

    All parameters agree, so a scale is no fact.
    """
    fitted = diagnose_single(case)
    assert (fitted.code, fitted.ranks) == ("SYN213", ranks)
    assert summary is None or fitted.facts[0] == summary


def test_213_with_sgd() -> None:
    """SYN213 ignores momenta with mostly weight decay; the remaining momenta show the clipping."""
    # 0.005 times a norm of 8 is a decay of 0.04: more than a quarter of rank 1's large momenta.
    tensors = []
    for name in MODEL:
        large = name in ("conv.weight", "fc.weight")
        tensors.append(make_diff(name, cosine=0.9, norms=dict.fromkeys((0, 1), 8.0 if large else 0.1)))
        norms = {0: 1.0, 1: 0.08 if large else 0.05}
        tensors.append(moment(name, MOMENTUM, cosine=0.2 if large else 0.99, norms=norms))
    fitted = diagnose_single(group(*tensors, optimizer=SGD, hyperparameters=DECAY))
    assert (fitted.code, fitted.ranks) == ("SYN213", (1,))
    assert fitted.facts[0].code is syn213.Text.CONSISTENT
    facts = facts_of(fitted)
    assert (facts[syn213.Text.COSINE]["count"], facts[syn213.Text.MOSTLY_DECAY]["count"]) == (3, 2)
    assert fitted.cause.code is syn213.Text.CAUSE_UNCOUNTED


@pytest.mark.parametrize(("factor", "fits"), [(0.05, True), (0.09, False)])
def test_213_with_weight_decay_only(factor: float, fits: bool) -> None:
    """With SGD, momenta far shorter than a lost momentum contain only weight decay and are SYN213."""
    momenta = moments(MOMENTUM, cosine=0.4, norms={0: 1.0, 1: factor})
    weights = model(cosine=0.9, norms={0: 8.0, 1: 8.0})
    assert ("SYN213" in diagnose_case(group(*weights, *momenta, optimizer=SGD, hyperparameters=DECAY))) is fits


@pytest.mark.parametrize(
    "cases",
    [
        [group(*scaled(0.95, state=MOMENTUM), optimizer=SGD)],
        [group(*map(by_digest, scaled(0.5)))],
        # A rank that just lost its momentum has shorter moments too.
        [group(*scaled(0.3, state=MOMENTUM, cosine=0.8), optimizer=SGD)],
        [group(*CLIPPED, optimizer=SGD), group(step=5, optimizer=SGD)],
    ],
)
def test_not_213(cases: list[Group]) -> None:
    """Nearly equal lengths, digests and a lost momentum are not SYN213."""
    assert "SYN213" not in diagnose_case(*cases)


@pytest.mark.parametrize(("share", "alternatives"), [(1.0, ("SYN215",)), (0.0, ("SYN211", "SYN215"))])
def test_213_of_second_moments_alone(share: float, alternatives: tuple[str, ...]) -> None:
    """Moments on one side in another direction may be of a state that was reset or loaded some steps before."""
    cosine = 0.5 if share else 0.97
    squares = moments("exp_avg_sq", smaller={1: share}, norms={0: 1.0, 1: 0.7 if share else 1.5})
    finding = diagnose_case(group(*model(), *moments(cosine=cosine, norms={0: 1.0, 1: 1.02}), *squares))["SYN213"]
    assert (finding.certainty, finding.alternatives) == ("consistent", alternatives)
    assert finding.facts[0].code is syn213.Text.SCALED_CONSISTENT


@pytest.mark.parametrize("zero", [0, 1])
def test_213_with_moments_of_zero(zero: int) -> None:
    """A rank that never had a gradient has moments of length zero, which are no factor and no crash."""
    norms = {zero: 0.0, 1 - zero: 1.0}
    squares = moments("exp_avg_sq", norms=norms, smaller={1: float(zero)})
    fitted = diagnose_case(group(*model(), *moments(norms=norms), *squares))
    assert set(fitted) & {"SYN213", "SYN299", "SYN211"}


def test_212_needs_equal_states_outside_the_part() -> None:
    """Second moments of all parameters differ if all gradients did, although Adafactor has no first moments."""
    states = ("variance",)
    alone = group(*in_head(model()), *in_head(moments("variance")), optimizer=states)
    everywhere = group(*in_head(model()), *moments("variance"), optimizer=states)
    grew = smaller(*in_head(model()), *in_head(moments("variance")), optimizer=states)
    assert "SYN212" in diagnose_case(alone, grew)
    assert "SYN212" not in diagnose_case(everywhere, grew)


def test_299_of_copies_in_pipeline_stages() -> None:
    """A tied weight that differs between pipeline stages alone has a cause of its own."""
    staged = group(make_diff("fc.weight"))
    replicas = tuple(replace(replica, mesh={"pp": replica.rank}) for replica in staged.replicas)
    causes = [diagnose_case(case)["SYN299"].cause.code for case in (replace(staged, replicas=replicas), staged)]
    assert causes[0] is syn299.Text.CAUSE_STAGES
    assert causes[1] is not syn299.Text.CAUSE_STAGES
