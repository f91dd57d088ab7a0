"""Causes of buffers, frozen tensors, copies and masks that an independent tester refuted, and near misses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case, diagnose_single
from support.listings import find_all, list_fields
from support.small_model import group, make_diff, moment

from syncheck.diagnose import syn205_buffer_local_state as syn205
from syncheck.diagnose import syn218_frozen_not_broadcast as syn218
from syncheck.diagnose import syn219_averaged_copy_stale as syn219
from syncheck.records import Evidence, FreeRunning
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from syncheck.records import Finding, Group, TensorDiff

LAYERS = {
    f"{layer}.{name}": kind
    for layer in ("bn1", "bn2")
    for name, kind in (
        ("running_mean", "bn_mean"),
        ("running_var", "bn_var"),
        ("num_batches_tracked", "bn_count"),
    )
}
UNSYNCED = Metadata(buffers_synced=False)
GREW = FreeRunning((3, 6, 9), cosine=0.9, growth=1.6, misfit_free=0.5, misfit_lag=1.5)


def outcome(finding: Finding) -> tuple[str, str, tuple[str, ...]]:
    """Return the code, the certainty and the alternatives."""
    return finding.code, finding.certainty, finding.alternatives


def statistics(layers: str, ranks: int = 2, odd: Any = None, **given: Any) -> list[TensorDiff]:
    """Return differing running statistics of some of the two layers."""
    names = [name for name, kind in LAYERS.items() if name[2] in layers and kind != "bn_count"]
    return [make_diff(name, LAYERS[name], ranks, odd, **given) for name in names]


def in_model(*tensors: TensorDiff, ranks: int = 2, **fields: Any) -> Group:
    """Return a group of a model with two BatchNorm layers."""
    return group(*tensors, more=LAYERS, ranks=ranks, **fields)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        # All layers differ on all ranks.
        ([in_model(*statistics("12"))], ("SYN201", "likely", ())),
        ([in_model(*statistics("12", 3, ()), ranks=3)], ("SYN201", "likely", ())),
        ([in_model(*statistics("1", 3, ()), ranks=3)], ("SYN201", "likely", ())),
        # Some layers agree: evaluation mode, or a change on some ranks.
        ([in_model(*statistics("1"))], ("SYN201", "consistent", ("SYN205",))),
        # Most ranks agree.
        ([in_model(*statistics("1", 3), ranks=3)], ("SYN205", "consistent", ("SYN201",))),
        ([in_model(*statistics("12", 3), ranks=3, metadata=UNSYNCED)], ("SYN205", "consistent", ("SYN202",))),
        ([in_model(*statistics("12", 3), ranks=3), in_model(ranks=3, step=5)], ("SYN205", "consistent", ())),
        # A majority in one layer, and none in the other.
        (
            [in_model(*statistics("1", 3), *statistics("2", 3, ()), ranks=3)],
            ("SYN201", "consistent", ("SYN205",)),
        ),
        # All ranks agreed before; before the first step, all statistics are equal.
        ([in_model(*statistics("12")), in_model(step=5)], ("SYN201", "consistent", ("SYN205",))),
        ([in_model(*statistics("12")), in_model(step=0)], ("SYN201", "likely", ())),
        # Metadata and low variances show missing synchronization; the course of the steps does not.
        ([in_model(*statistics("12"), metadata=UNSYNCED)], ("SYN202", "likely", ())),
        ([in_model(*statistics("1"), metadata=UNSYNCED)], ("SYN202", "consistent", ("SYN205",))),
        ([in_model(*statistics("12"), free_running=GREW)], ("SYN202", "consistent", ("SYN201",))),
        ([in_model(*statistics("12"), free_running=replace(GREW, below=5))], ("SYN202", "likely", ())),
        (
            [in_model(*statistics("12")), in_model(*statistics("12", max_abs=0.1), step=5)],
            ("SYN202", "consistent", ("SYN201",)),
        ),
        # Variances alone.
        (
            [in_model(*find_all(statistics("1", 3), kind="bn_var"), ranks=3)],
            ("SYN204", "consistent", ("SYN205", "SYN201")),
        ),
    ],
)
def test_statistics_of_batchnorm(cases: list[Group], expected: tuple[str, str, tuple[str, ...]]) -> None:
    """A majority, equal layers and earlier steps decide on the cause of different running statistics."""
    assert outcome(diagnose_single(*cases)) == expected


def test_statistics_behind_a_damaged_weight_are_not_changed_on_some_ranks() -> None:
    """If a weight of one rank differs, the activations explain its statistics."""
    flip = make_diff("fc.weight", ranks=3, mismatched=1, extent="one", index=(1,))
    flip = replace(flip, evidence=Evidence(flipped_bits=1, bit=3))
    findings = diagnose_case(in_model(flip, *statistics("12", 3), ranks=3))
    assert set(findings) == {"SYN220", "SYN201"}
    assert findings["SYN201"].certainty == "consistent"


def number(name: str, values: dict[int, int], dtype: str = "int64", kind: str = "buffer") -> TensorDiff:
    """Return a differing number with a value for each rank."""
    is_odd = () if len(set(values.values())) == len(values) else None
    return make_diff(
        name, kind, len(values), is_odd, values=values, dtype=dtype, numel=1, shape=(), mismatched=1, extent="one"
    )


@pytest.mark.parametrize(
    ("name", "values", "cause", "certainty", "alternatives"),
    [
        ("rank_id", {0: 0, 1: 1, 2: 2}, syn205.Text.CAUSE_OF_RANK, "proved", ()),
        ("zeta", {0: 0, 1: 1, 2: 2}, syn205.Text.CAUSE_OF_RANK, "proved", ()),
        ("rank_id", {0: 0, 1: 1}, syn205.Text.CAUSE_OF_RANK, "consistent", ("SYN218",)),
        ("rng_seed", {0: 7, 1: 8, 2: 9}, syn205.Text.CAUSE_OF_RANK, "consistent", ("SYN218",)),
        ("data.offset", {0: 37, 1: 1037, 2: 2037}, syn205.Text.CAUSE_OF_RANK, "consistent", ("SYN218",)),
        # A value on most ranks, and a count, are no state of a rank.
        ("rng_seed", {0: 7, 1: 7, 2: 9}, syn205.Text.CAUSE_SOME, "consistent", ("SYN218",)),
        ("zeta", {0: 3, 1: 4, 2: 6}, syn205.Text.CAUSE, "consistent", ("SYN218",)),
        ("zeta", {0: 0, 1: 1}, syn205.Text.CAUSE_SOME, "consistent", ("SYN218",)),
    ],
)
def test_state_of_a_rank(
    name: str, values: dict[int, int], cause: syn205.Text, certainty: str, alternatives: tuple[str, ...]
) -> None:
    """Integers that name a rank, a seed or a position differ by design."""
    finding = diagnose_single(group(number(name, values), more={name: "buffer"}, ranks=len(values)))
    assert outcome(finding) == ("SYN205", certainty, alternatives)
    assert finding.cause.code is cause


def test_state_of_a_rank_beside_a_codebook() -> None:
    """The cause of the codebook comes first, and a fact names the state of the ranks."""
    more = {"rank_id": "buffer", "vq.embed_avg": "buffer"}
    book = make_diff("vq.embed_avg", "buffer", 3, ())
    finding = diagnose_single(group(number("rank_id", {0: 0, 1: 1, 2: 2}), book, more=more, ranks=3))
    assert finding.cause.code is syn205.Text.CAUSE
    assert syn205.Text.OF_RANK(count=1, names=("rank_id",)) in finding.facts


def buffer(ranks: int = 2, odd: Any = None, name: str = "zeta", **given: Any) -> TensorDiff:
    """Return a differing buffer whose values have a common origin on all ranks."""
    return make_diff(name, "buffer", ranks, odd, cosine=0.99, **given)


def of_buffer(*tensors: TensorDiff, ranks: int = 2, step: int = 10, **fields: Any) -> Group:
    """Return a group of a model with a buffer."""
    more = {"zeta": "buffer"} | dict(list_fields(tensors, "name", "kind"))
    return group(*tensors, more=more, ranks=ranks, step=step, **fields)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([of_buffer(buffer())], ("SYN205", "consistent", ("SYN218",))),
        ([of_buffer(buffer(max_abs=0.9)), of_buffer(buffer(max_abs=0.3), step=5)], ("SYN205", "consistent", ())),
        # A difference that shrinks is that of averages.
        (
            [of_buffer(buffer(max_abs=0.3)), of_buffer(buffer(max_abs=0.9), step=5)],
            ("SYN205", "consistent", ("SYN219",)),
        ),
        # All ranks agreed before: with a majority, the others changed; two ranks may have changed both.
        ([of_buffer(buffer(3), ranks=3), of_buffer(ranks=3, step=5)], ("SYN205", "consistent", ())),
        ([of_buffer(buffer()), of_buffer(step=5)], ("SYN205", "consistent", ("SYN218",))),
        # Few elements are damage, unless the tensor is a queue.
        ([of_buffer(buffer(numel=100, mismatched=3, extent="scattered"))], ("SYN299", "consistent", ())),
        (
            [of_buffer(buffer(name="moco.queue", numel=100, mismatched=3, extent="scattered"))],
            ("SYN205", "consistent", ("SYN221",)),
        ),
        # Without known parameters of the optimizer, the tensors may be parameters.
        (
            [of_buffer(replace(buffer(name="vq.embed_avg"), kind="parameter"), optimizer=())],
            ("SYN205", "consistent", ("SYN210",)),
        ),
    ],
)
def test_updates_of_buffers(cases: list[Group], expected: tuple[str, str, tuple[str, ...]]) -> None:
    """Updates are likely only if several steps show a change."""
    code, certainty, alternatives = outcome(diagnose_single(*cases))
    assert (code, certainty) == expected[:2]
    assert code == "SYN299" or alternatives == expected[2]


def test_206_is_no_more_than_consistent() -> None:
    """Names of states of metrics do not show who writes them."""
    names = {"metric.tp": "buffer", "metric.fp": "buffer"}
    tensors = [number(name, {0: 3, 1: 5}) for name in names]
    assert outcome(diagnose_single(group(*tensors, more=names))) == ("SYN206", "consistent", ("SYN205",))


STEM = {"stem.weight": "parameter"}
FROZEN = Metadata(frozen=("stem.weight",), buffers=())
TABLE = {"rope.inv_freq": "buffer"}


def of_stem(*tensors: TensorDiff, **fields: Any) -> Group:
    """Return a group of a model with a frozen stem."""
    return group(*tensors, more=STEM, metadata=FROZEN, **fields)


def stem(**given: Any) -> TensorDiff:
    """Return a frozen weight that differs."""
    return make_diff("stem.weight", cosine=0.1, **given)


@pytest.mark.parametrize(
    ("cases", "cause", "expected"),
    [
        ([of_stem(stem())], syn218.Text.CAUSE, ("likely", ())),
        ([of_stem(stem()), of_stem(stem(), step=5)], syn218.Text.CAUSE, ("likely", ())),
        ([of_stem(stem()), of_stem(step=5)], syn218.Text.CAUSE_CHANGED, ("likely", ())),
        (
            [of_stem(stem()), of_stem(stem(), step=7), of_stem(step=5)],
            syn218.Text.CAUSE_CHANGED,
            ("likely", ()),
        ),
        # An earlier step without the tensor shows nothing.
        ([of_stem(stem()), group(step=5)], syn218.Text.CAUSE, ("likely", ())),
        # Buffers, and tensors that may be buffers, may depend on the data.
        (
            [group(make_diff("rope.inv_freq", "buffer"), more=TABLE)],
            syn218.Text.CAUSE,
            ("consistent", ("SYN205",)),
        ),
        (
            [group(make_diff("rope.inv_freq", "buffer"), more=TABLE), group(more=TABLE, step=5)],
            syn218.Text.CAUSE_CHANGED,
            ("likely", ()),
        ),
        (
            [group(make_diff("zeta", cosine=0.1), more={"zeta": "parameter"})],
            syn218.Text.CAUSE,
            ("consistent", ("SYN205",)),
        ),
    ],
)
def test_218_knows_earlier_steps(cases: list[Group], cause: syn218.Text, expected: tuple[str, Any]) -> None:
    """Tensors that agreed at an earlier step were changed later."""
    cases = [cases[0], *sorted(cases[1:], key=lambda case: case.step or 0)]
    finding = diagnose_single(*cases)
    assert outcome(finding) == ("SYN218", *expected)
    assert finding.cause.code is cause
    assert (finding.fix.code is syn218.Text.FIX_CHANGED) is (cause is syn218.Text.CAUSE_CHANGED)


@pytest.mark.parametrize(
    ("name", "is_copy"),
    [
        *((f"{prefix}.fc.weight", True) for prefix in ("ema_model", "swa_model", "teacher", "target", "shadow")),
        ("schema.proj.weight", False),
        ("retarget.proj.weight", False),
    ],
)
def test_copies_inside_the_model(name: str, is_copy: bool) -> None:
    """A copy of the weights inside the model has no optimizer state, and may have missed updates."""
    finding = diagnose_single(group(make_diff(name, cosine=0.1), more={name: "parameter"}))
    assert outcome(finding) == ("SYN218", "consistent" if is_copy else "likely", ("SYN219",) if is_copy else ())


COPIES = {f"ema.{name}": "ema" for name in ("conv.weight", "bn.weight", "bn.bias", "fc.weight", "fc.bias")}


@pytest.mark.parametrize(
    ("names", "given", "cause"),
    [
        (COPIES, {}, syn219.Text.CAUSE),
        (("ema.conv.weight", "ema.fc.weight", "ema.fc.bias"), {}, syn219.Text.CAUSE),
        (("ema.fc.weight",), {}, syn219.Text.CAUSE_PART),
        (COPIES, {"mismatched": 1, "numel": 100, "extent": "scattered"}, syn219.Text.CAUSE_PART),
    ],
)
def test_a_part_of_a_copy_is_damaged(names: Any, given: Any, cause: syn219.Text) -> None:
    """An update changes all tensors of a copy: a single differing tensor, or a few elements, are no missed update."""
    finding = diagnose_single(group(*(make_diff(name, "ema", **given) for name in names), more=COPIES))
    is_part = cause is syn219.Text.CAUSE_PART
    expected = ("consistent", ("SYN221", "SYN220")) if is_part else ("likely", ())
    assert outcome(finding) == ("SYN219", *expected)
    assert finding.cause.code is cause


def test_231_names_any_unequal_change() -> None:
    """The cause of SYN231 does not claim gradients, because values that a rank loads differ alike."""
    names = ("fc.weight", "optimizer.fc.weight.exp_avg")
    tensors = make_diff(names[0], ranks=4, odd=(3,), cosine=0.99), moment("fc.weight", ranks=4, odd=(3,), cosine=0.9)
    case = group(*tensors, ranks=4)
    replicas = tuple(replace(replica, mesh={"tp": replica.rank}) for replica in case.replicas)
    finding = diagnose_single(replace(case, replicas=replicas))
    assert outcome(finding) == ("SYN231", "likely", ())
    assert "initialized, loaded or changed differently" in str(finding.cause)
