"""SYN205: buffers updated from local data, in contrast to frozen parameters and faults of trained parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case, diagnose_single
from support.groups import facts_of
from support.small_model import HALF, SGD, group, in_head, make_diff, model, moments, unreduced

from syncheck.diagnose import syn213_per_rank_gradient_scale as syn213
from syncheck.diagnose import syn225_not_updated_on_some_ranks as syn225
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from syncheck.records import Group, TensorDiff

CODEBOOK = ("vq.embed", "vq.cluster_size", "vq.embed_avg")
KINDS = dict.fromkeys(CODEBOOK, "parameter")


def local(names: tuple[str, ...], kind: str = "parameter", ranks: int = 2, **given: Any) -> list[TensorDiff]:
    """Return tensors with a different value on each rank."""
    return [make_diff(name, kind, ranks, odd=(), **given) for name in names]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", [("exp_avg", "step"), SGD, ()])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("names", [CODEBOOK, ("queue", "queue_ptr"), ("a.min_val", "a.max_val"), ("gate.expert_bias",)])
def test_205_by_names(names: tuple[str, ...], kind: str, optimizer: tuple[str, ...], ranks: int) -> None:
    """Tensors with names of running statistics are SYN205 on all ranks, whatever their kind and the optimizer."""
    tensors = local(names, kind, ranks, cosine=0.0)
    finding = diagnose_single(group(*tensors, more=dict.fromkeys(names, kind), optimizer=optimizer, ranks=ranks))
    assert (finding.code, finding.ranks) == ("SYN205", tuple(range(ranks)))


EMPTY = Metadata()


def alone(name: str, kind: str = "parameter", metadata: Metadata = EMPTY, step: int = 10, **given: Any) -> Group:
    """Return a group in which only one untrained tensor differs."""
    return group(make_diff(name, kind, **given), more={name: kind}, metadata=metadata, step=step)


NORMALIZER = {"obs.running_mean": "bn_mean", "obs.running_var": "bn_var", "obs.count": "parameter"}
STATISTICS = [make_diff(name, kind, odd=()) for name, kind in NORMALIZER.items() if name != "obs.count"]
FIRST = alone("zeta", cosine=0.1, max_abs=0.3, step=5)


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        # Without a known name, values of one origin and single numbers are updates; independent values are not.
        *(([alone("zeta", kind, cosine=0.9)], "SYN205") for kind in ("parameter", "buffer")),
        *(([alone("zeta", kind, cosine=0.1)], "SYN218") for kind in ("parameter", "buffer")),
        *(([alone("zeta", kind, numel=1, mismatched=1, shape=())], "SYN205") for kind in ("parameter", "buffer")),
        # A difference that changes over the steps proves updates, whatever the name.
        ([alone("zeta", cosine=0.1, max_abs=0.9), FIRST], "SYN205"),
        ([alone("zeta", cosine=0.1, max_abs=0.3), FIRST], "SYN218"),
        # Weights without optimizer state, and parameters listed as frozen in the metadata.
        ([alone("stem.weight", cosine=0.95)], "SYN218"),
        ([alone("head.center", cosine=0.95, metadata=Metadata(frozen=("head.center",), buffers=()))], "SYN218"),
        # Running statistics belong to BatchNorm if a weight or a batch count exists, otherwise to a normalizer.
        ([group(*STATISTICS, more=NORMALIZER)], "SYN205"),
        ([group(*STATISTICS, more=NORMALIZER | {"obs.num_batches_tracked": "bn_count"})], "SYN201"),
        ([group(*STATISTICS, more=NORMALIZER | {"obs.weight": "bn_count"})], "SYN201"),
        # Rows with differences on every rank are local updates; on one rank of four, differing rows are damage.
        ([alone("queue", "buffer", mismatched=2, extent="contiguous")], "SYN205"),
        *(
            ([group(make_diff("queue", "buffer", 4, outlier, mismatched=2, extent="contiguous"), ranks=4)], code)
            for outlier, code in (((), "SYN205"), ((3,), "SYN221"))
        ),
    ],
)
def test_code_of_an_untrained_tensor(cases: list[Group], code: str) -> None:
    """Values, steps and metadata distinguish local updates, missing broadcasts, BatchNorm and damage."""
    assert diagnose_single(*cases).code == code


def test_205_beside_batchnorm() -> None:
    """A codebook and BatchNorm's statistics are separate findings, SYN205 and SYN201."""
    more = KINDS | {"bn.running_mean": "bn_mean", "bn.num_batches_tracked": "bn_count"}
    tensors = *local(CODEBOOK, cosine=0.9), make_diff("bn.running_mean", "bn_mean")
    assert set(diagnose_case(group(*tensors, more=more))) == {"SYN205", "SYN201"}


@pytest.mark.parametrize("own", [local(CODEBOOK, cosine=0.9), []])
def test_buffers_do_not_hide_other_causes(own: list[TensorDiff]) -> None:
    """With a codebook in the model, unreduced gradients are still SYN211 or SYN212, and a bit flip is still SYN220."""
    assert diagnose_single(group(*unreduced(), *own, more=KINDS)).code == "SYN211"
    assert diagnose_single(group(*unreduced(state="momentum_buffer"), *own, more=KINDS, optimizer=SGD)).code == "SYN211"
    assert diagnose_single(group(*in_head(unreduced()), *own, more=KINDS)).code == "SYN212"
    bit = make_diff("fc.weight", mismatched=1, extent="one")
    assert set(diagnose_case(group(bit, *own, more=KINDS))) == {"SYN220"} | ({"SYN205"} if own else set())


def test_211_with_unnamed_optimizer_ids() -> None:
    """If optimizer ids have no names and as many states as parameters differ, the finding is SYN211."""
    states = {f"optimizer.{i}.exp_avg": "optimizer" for i in range(5)}
    tensors = model(cosine=0.9) + [make_diff(name, "optimizer", cosine=0.3) for name in states]
    assert diagnose_single(group(*tensors, optimizer=(), more=states | {"freq": "parameter"})).code == "SYN211"


@pytest.mark.parametrize(("state", "optimizer"), [("exp_avg", ("exp_avg", "step")), ("momentum_buffer", SGD)])
def test_different_settings_come_first(state: str, optimizer: tuple[str, ...]) -> None:
    """A different learning rate is the first finding, even if the moments show different gradients."""
    for tensors in (unreduced(state=state), in_head(unreduced(state=state))):
        assert next(iter(diagnose_case(group(*tensors, optimizer=optimizer, values=(HALF,))))) == "SYN107"


def test_modules_named_scaler_or_ema() -> None:
    """Only single numbers named scaler are loss scalers (SYN216), and only copies of model tensors are averages."""
    more = {"scaler.weight": "scaler", "ema.proj.weight": "ema"}
    assert not {"SYN216", "SYN219"} & set(
        diagnose_case(group(*(make_diff(name, kind) for name, kind in more.items()), more=more))
    )
    scales = {0: 8.0, 1: 4.0, 2: 8.0, 3: 8.0}
    for name in ("scaler.scale", "scaler._growth_tracker"):
        value = make_diff(name, "scaler", 4, odd=(1,), values=scales, numel=1)
        finding = diagnose_single(group(value, more={name: "scaler"}, ranks=4))
        assert (finding.code, finding.ranks) == ("SYN216", (1,))


def test_large_counts_are_exact() -> None:
    """Counters of a million steps keep all digits in facts and in text."""
    counts = {0: 1_000_000.0, 1: 1_000_001.0}
    step = make_diff("optimizer.fc.weight.step", "optimizer_step", values=counts, numel=1, shape=(), mismatched=1)
    (finding,) = diagnose_case(group(replace(step, extent="one"), make_diff("fc.weight", cosine=0.99))).values()
    assert facts_of(finding)[syn225.Text.LESS_OFTEN]["steps"] == counts
    assert {"1000000", "1000001"} <= set(finding.evidence.split())


def test_213_without_counters_is_hedged() -> None:
    """With SGD, which counts no steps, the cause of SYN213 includes a lost momentum."""
    momenta = moments("momentum_buffer", cosine=0.97, norms={0: 1.0, 1: 0.5})
    finding = diagnose_single(group(*momenta, *model(cosine=0.99), optimizer=SGD))
    assert (finding.code, finding.cause.code) == ("SYN213", syn213.Text.CAUSE_UNCOUNTED)
