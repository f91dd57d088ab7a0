"""SYN205: buffers that each rank updates from its own data, frozen parameters, and faults of trained parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from small_model import MODEL, SGD, apart, found, group, moment, only

from syncheck.records import ValueDiff
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODEBOOK = ("vq.embed", "vq.cluster_size", "vq.embed_avg")
NORMALIZER = ("obs.running_mean", "obs.running_var", "obs.count")
EVERY = (2, 4)


def local(names: tuple[str, ...], kind: str, ranks: int = 2, **given: Any) -> list[TensorDiff]:
    """Return tensors of which each rank has its own."""
    return [apart(name, kind, ranks, odd=(), **given) for name in names]


def unreduced(state: str = "exp_avg", **given: Any) -> list[TensorDiff]:
    """Return all parameters and their first moments, of each rank's own gradients."""
    return [*(apart(name, cosine=0.9, **given) for name in MODEL), *(moment(name, state, cosine=0.3) for name in MODEL)]


@pytest.mark.parametrize("ranks", EVERY)
@pytest.mark.parametrize("optimizer", [("exp_avg", "step"), SGD, ()])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("names", [CODEBOOK, ("queue", "queue_ptr"), ("a.min_val", "a.max_val"), ("gate.expert_bias",)])
def test_205_by_names(names: tuple[str, ...], kind: str, optimizer: tuple[str, ...], ranks: int) -> None:
    """Known running statistics are SYN205 in any direction, with metadata and without."""
    case = group(
        *local(names, kind, ranks, cosine=0.0), more=dict.fromkeys(names, kind), optimizer=optimizer, ranks=ranks
    )
    assert (only(case).code, only(case).ranks) == ("SYN205", tuple(range(ranks)))


@pytest.mark.parametrize(("given", "code"), [
    ({"cosine": 0.9}, "SYN205"), ({"cosine": 0.1}, "SYN218"), ({"numel": 1, "mismatched": 1, "shape": ()}, "SYN205"),
])  # fmt: skip
def test_205_by_values(given: dict[str, Any], code: str) -> None:
    """Without a known name, values of one origin and single numbers are updated; independent ones were never sent."""
    fields = {key: given[key] for key in ("numel", "mismatched", "shape") if key in given}
    diff = replace(apart("zeta", cosine=given.get("cosine")), **fields)
    assert only(group(diff, more={"zeta": "parameter"})).code == code
    assert only(group(replace(diff, kind="buffer"), more={"zeta": "buffer"})).code == code


def test_205_by_growth() -> None:
    """A gap that changes over the steps shows the updates, whatever the name; one that stays does not."""
    more = {"zeta": "parameter"}
    later, first = apart("zeta", cosine=0.1, max_abs=0.9), apart("zeta", cosine=0.1, max_abs=0.3)
    assert only(group(later, more=more), group(first, more=more, step=5)).code == "SYN205"
    assert only(group(first, more=more), group(first, more=more, step=5)).code == "SYN218"


def test_205_is_not_frozen_weights() -> None:
    """A weight without state in the optimizer is a frozen one, and so is what the metadata calls frozen."""
    stem = apart("stem.weight", cosine=0.95)
    assert only(group(stem, more={"stem.weight": "parameter"})).code == "SYN218"
    center = apart("head.center", cosine=0.95)
    frozen = Metadata(frozen=("head.center",), buffers=())
    assert only(group(center, more={"head.center": "parameter"}, metadata=frozen)).code == "SYN218"


def test_205_is_not_batchnorm() -> None:
    """Running statistics with a weight or a count of batches are BatchNorm's; those without are a normalizer's."""
    kinds = dict(zip(NORMALIZER, ("bn_mean", "bn_var", "parameter"), strict=True))
    stats = [apart(name, kinds[name], odd=()) for name in NORMALIZER[:2]]
    assert only(group(*stats, more=kinds)).code == "SYN205"
    for counts in ("obs.num_batches_tracked", "obs.weight"):
        assert only(group(*stats, more=kinds | {counts: "bn_count"})).code == "SYN201"


def test_205_beside_batchnorm() -> None:
    """A codebook and BatchNorm's statistics are two findings."""
    more = dict.fromkeys(CODEBOOK, "parameter") | {"bn.running_mean": "bn_mean", "bn.num_batches_tracked": "bn_count"}
    fitted = found(group(*local(CODEBOOK, "parameter", cosine=0.9), apart("bn.running_mean", "bn_mean"), more=more))
    assert set(fitted) == {"SYN205", "SYN201"}


@pytest.mark.parametrize("differing", [True, False])
def test_a_buffer_leaves_the_cause(differing: bool) -> None:
    """With a codebook in the model, gradients that are not reduced are SYN211 and not SYN212, and a flip is SYN220."""
    more = dict.fromkeys(CODEBOOK, "parameter")
    own = local(CODEBOOK, "parameter", cosine=0.9) if differing else []
    assert only(group(*unreduced(), *own, more=more)).code == "SYN211"
    assert only(group(*unreduced("momentum_buffer"), *own, more=more, optimizer=SGD)).code == "SYN211"
    head = [d for d in unreduced() if ".fc." in f".{d.name}"]
    assert only(group(*head, *own, more=more)).code == "SYN212"
    bit = apart("fc.weight", mismatched=1, extent="one")
    assert set(found(group(bit, *own, more=more))) == {"SYN220"} | ({"SYN205"} if differing else set())


def test_ids_without_names_and_a_buffer() -> None:
    """Where ids have no names, as many states as parameters that differ are all that is trained: SYN211."""
    states = {f"optimizer.{i}.exp_avg": "optimizer" for i in range(5)}
    moments = [apart(name, "optimizer", cosine=0.3) for name in states]
    case = group(
        *(apart(name, cosine=0.9) for name in MODEL), *moments, optimizer=(), more=states | {"freq": "parameter"}
    )
    assert only(case).code == "SYN211"


@pytest.mark.parametrize("state", ["exp_avg", "momentum_buffer"])
def test_settings_that_differ_come_first(state: str) -> None:
    """A learning rate of a rank's own is reported first, also if the moments show that gradients differ too."""
    value = ValueDiff("optimizer.param_groups.0.lr", {0: 0.1, 1: 0.05}, counts=True, kind="setting")
    tensors = unreduced(state)
    optimizer = SGD if state == "momentum_buffer" else ("exp_avg", "step")
    for part in (tensors, [d for d in tensors if ".fc." in f".{d.name}"]):
        case = group(*part, optimizer=optimizer, values=(value,))
        assert next(iter(found(case))) == "SYN107"


def test_modules_called_scaler_or_ema() -> None:
    """A matrix called scaler is no loss scaler, and one called ema no average without its original in the model."""
    scaler, ema = apart("scaler.weight", "scaler"), apart("ema.proj.weight", "ema")
    fitted = found(group(scaler, ema, more={"scaler.weight": "scaler", "ema.proj.weight": "ema"}))
    assert not {"SYN216", "SYN219"} & set(fitted)
    scale = replace(apart("scaler.scale", "scaler", 4, odd=(1,), values={0: 8.0, 1: 4.0, 2: 8.0, 3: 8.0}), numel=1)
    assert only(group(scale, more={"scaler.scale": "scaler"}, ranks=4)).ranks == (1,)
    scale = replace(scale, name="scaler._growth_tracker")
    assert only(group(scale, more={scale.name: "scaler"}, ranks=4)).ranks == (1,)


def test_large_counts_are_printed_whole() -> None:
    """Counters of a million steps keep their last digit."""
    step = apart("optimizer.fc.weight.step", "optimizer_step", values={0: 1_000_000.0, 1: 1_000_001.0})
    step = replace(step, numel=1, shape=(), mismatched=1, extent="one")
    (fitted,) = found(group(step, apart("fc.weight", cosine=0.99))).values()
    assert "1000000 on rank 0 and 1000001 on rank 1" in fitted.evidence


def test_213_without_counters_is_hedged() -> None:
    """SGD counts no steps, so a shorter momentum may as well be one that was lost."""
    ratio = {0: 1.0, 1: 0.5}
    moments = [moment(name, "momentum_buffer", cosine=0.97, norms=ratio) for name in MODEL]
    fitted = only(group(*moments, *(apart(name, cosine=0.99) for name in MODEL), optimizer=SGD))
    assert fitted.code == "SYN213"
    assert "lost its momentum" in str(fitted.cause)


@pytest.mark.parametrize(("ranks", "odd", "code"), [(2, None, "SYN205"), (4, (), "SYN205"), (4, (3,), "SYN221")])
def test_rows_of_a_queue(ranks: int, odd: tuple[int, ...] | None, code: str) -> None:
    """Rows that differ on every rank are filled by each; on one rank of four they are damage."""
    diff = apart("queue", "buffer", ranks, odd=odd, mismatched=2, extent="contiguous")
    assert only(group(diff, more={"queue": "buffer"}, ranks=ranks)).code == code
