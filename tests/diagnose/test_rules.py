"""Every rule matches its injected fault and does not match a near miss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from groups import make_group

from syncheck import diagnose
from syncheck.diagnose import (
    RULES,
    syn101_missing_tensors,
    syn102_shape_or_dtype_mismatch,
    syn103_prefix_normalized,
    syn104_sharded_by_design,
    syn105_tie_broken,
    syn106_different_progress,
    syn201_bn_local_stats,
    syn203_bn_count_mismatch,
)
from syncheck.diagnose.bn import Statistics
from syncheck.messages import Detail
from syncheck.records import Counts, Finding, Group, Replica, Severity, Shards, TensorDiff, Tie, ValueDiff
from syncheck.snapshots import Metadata

HOME = Path(diagnose.__file__).parent
# DESIGN's order of precedence; rules that cover nothing have no place in it.
PRECEDENCE = """101 102 223 222 220 221 217 106 215 214 216 107 231 230 240 205 203 204 202 201 219 218 212 213 210 211
241 299""".split()
TOTALS = {"parameter": 10, "bn_mean": 4, "bn_var": 4, "bn_count": 4, "optimizer": 20, "optimizer_step": 10}


def diff(name: str, kind: str, clusters: Any = ((0,), (1,)), **changes: Any) -> TensorDiff:
    """Return a tensor that differs."""
    minority = tuple(r for found in clusters[1:] for r in found) if len(clusters[0]) > len(clusters[1]) else ()
    fields = {"status": "different", "mismatched": 4, "numel": 4, "max_abs": 0.5, "index": (1,), "extent": "all"}
    return TensorDiff(name, kind, "float32", (4,), clusters=clusters, minority=minority, **fields | changes)


def group(*tensors: TensorDiff, ranks: int = 2, step: int | None = 10, **fields: Any) -> Group:
    """Return a group in which these tensors are not identical, and TOTALS are there."""
    replicas = tuple(Replica(f"rank{i}.pth", i, "torch-zip", 52, 1000) for i in range(ranks))
    kinds = {}
    for kind, total in TOTALS.items():
        odd = [found for found in tensors if found.kind == kind]
        different = sum(found.status == "different" for found in odd)
        kinds[kind] = Counts(total, total - len(odd), different=different, not_compared=len(odd) - different)
    total = sum(kinds.values(), Counts())
    return make_group("ddp", step, "undecided", replicas, total, tensors, kinds=kinds, **fields)


def found(case: Group, *earlier: Group) -> dict[str, Finding]:
    """Diagnose, and return the findings by code."""
    return {finding.code: finding for finding in diagnose.diagnose(case, (*earlier, case) if earlier else ())}


MEAN, VAR = diff("bn.running_mean", "bn_mean"), diff("bn.running_var", "bn_var")
COUNT = diff("bn.num_batches_tracked", "bn_count", max_abs=3)
WEIGHT = diff("fc.weight", "parameter")
STEP = diff("optimizer.fc.weight.step", "optimizer_step")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.CODE)
def test_every_rule_is_whole(rule: Any) -> None:
    """A rule has code, slug, severity, cause, fix, and a docstring with the sections that `explain` prints."""
    assert re.fullmatch(r"SYN\d{3}", rule.CODE)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.SLUG)
    assert rule.SEVERITY in get_args(Severity)
    for sentence in (rule.CAUSE, rule.FIX):
        assert (sentence if isinstance(sentence, str) else str(sentence())).endswith(".")
    assert rule.__file__ is not None
    assert Path(rule.__file__).stem == f"{rule.CODE.lower()}_{rule.SLUG.replace('-', '_')}"
    sections = re.findall(r"^(Signature|Cause|Fix|Incidents)\b", rule.__doc__, flags=re.MULTILINE)
    assert sections == ["Signature", "Cause", "Fix", "Incidents"]


def test_every_rule_is_listed_in_the_order_of_precedence() -> None:
    """RULES holds every module of the folder once, in DESIGN's order."""
    codes = [rule.CODE[3:] for rule in RULES]
    assert {f"syn{code}" for code in codes} == {path.name[:6] for path in HOME.glob("syn*.py")}
    assert len(set(codes)) == len(codes)
    covering = [code for code in codes if code not in ("103", "104", "105")]
    assert covering == PRECEDENCE, "a new rule has its place in RULES and in PRECEDENCE above"


def test_nothing_differs() -> None:
    """Without a difference there is no finding."""
    assert found(group()) == {}


def test_101() -> None:
    """A tensor that a rank lacks is SYN101 on the minority; a tensor of another shape is not SYN101."""
    lacking = TensorDiff("a", "parameter", "float32", (4,), "not_compared", reason="missing", clusters=((0, 2),))
    fitted = found(group(lacking, ranks=3))
    assert set(fitted) == {"SYN101"}
    assert (fitted["SYN101"].ranks, fitted["SYN101"].tensors) == ((1,), ("a",))
    text = syn101_missing_tensors.Text
    assert fitted["SYN101"].facts == (text.MISSING(ranks=(1,), missing=text.TENSORS(tensors=1), names=("a",)),)
    assert "SYN101" not in found(group(diff("a", "parameter", status="not_compared", reason="shape")))


def test_101_of_different_tensors() -> None:
    """If ranks lack different tensors, the evidence does not claim that each rank lacks all of them."""
    lacking = [
        TensorDiff(name, "parameter", "float32", (4,), "not_compared", reason="missing", clusters=((rank,),))
        for name, rank in (("a", 0), ("b", 1))
    ]
    scheduler = ValueDiff("scheduler.last_epoch", {0: 1, 1: None}, counts=True, kind="setting", lost=(1,))
    (fact,) = found(group(*lacking, values=(scheduler,)))["SYN101"].facts
    assert fact.code is syn101_missing_tensors.Text.PARTLY_MISSING
    assert fact.parameters["ranks"] == (0, 1)
    assert fact.parameters["missing"] == syn101_missing_tensors.Text.TENSORS_AND_VALUES(tensors=2, values=1)
    assert fact.parameters["names"] == ("a", "b", "scheduler.last_epoch")


def test_101_names_the_rank_with_an_additional_tensor() -> None:
    """If one rank of three has a tensor that the other ranks lack, this rank is the suspect."""
    alone = TensorDiff("a", "parameter", "float32", (4,), "not_compared", reason="missing", clusters=((1,),))
    assert found(group(alone, ranks=3))["SYN101"].ranks == (1,)


@pytest.mark.parametrize("reason", ["shape", "dtype"])
def test_102(reason: str) -> None:
    """Another shape or dtype is SYN102 on the minority; a refused tensor is not a difference."""
    detail = Detail.UNEQUAL(sets="x on ranks 0, 1 and y on rank 2")
    unlike = diff("a", "parameter", ((0, 1), (2,)), status="not_compared", reason=reason, detail=detail)
    fitted = found(group(unlike, ranks=3))
    assert set(fitted) == {"SYN102"}
    assert fitted["SYN102"].ranks == (2,)
    text = syn102_shape_or_dtype_mismatch.Text
    first = text.SHAPES if reason == "shape" else text.DTYPES
    assert fitted["SYN102"].facts == (first(tensors=1), text.TENSOR(name="a", detail=detail))
    others = [diff(name, "parameter", status="not_compared", reason="shape", detail=detail) for name in "bc"]
    facts = found(group(unlike, *others, ranks=3))["SYN102"].facts
    assert facts[0].parameters == {"tensors": 3}
    assert facts[-1] == text.MORE(count=1)
    assert found(group(diff("a", "parameter", status="not_compared", reason="refused"))) == {}


def test_103() -> None:
    """A removed prefix is reported and never fails."""
    fitted = found(group(normalized={1: 12}))
    assert set(fitted) == {"SYN103"}
    assert (fitted["SYN103"].ranks, fitted["SYN103"].severity, fitted["SYN103"].fails) == ((1,), "info", False)
    assert fitted["SYN103"].facts == (syn103_prefix_normalized.Text.PREFIX(ranks=(1,), names=12),)
    assert found(group(normalized={})) == {}


def test_104() -> None:
    """Sharded tensors are reported by layout and never fail."""
    shards = (
        Shards("DTensor", "copied to 2, divided in 2 (dimension 0)", 23, 22, ((0, 2), (1, 3))),
        Shards("optimizer", "of which each rank has its own", 1, 0),
        Shards("model parallel", "parts along tp", 2, 0),
    )
    fitted = found(group(ranks=4, shards=shards))
    assert set(fitted) == {"SYN104"}
    assert (fitted["SYN104"].fails, fitted["SYN104"].ranks) == (False, (0, 1, 2, 3))
    text = syn104_sharded_by_design.Text
    assert fitted["SYN104"].facts == (
        text.PARTLY_COMPARED(
            tensors=text.DTENSORS(count=23), layout=shards[0].layout, groups=((0, 2), (1, 3)), compared=22, alone=1
        ),
        text.NOT_COMPARED(tensors=text.OPTIMIZER_TENSORS(count=1), layout=shards[1].layout),
        text.NOT_COMPARED(tensors=text.PLAIN_TENSORS(count=2), layout=shards[2].layout),
    )
    many = tuple(Shards("DTensor", f"layout {i}", 2, 0) for i in range(7))
    assert found(group(shards=many))["SYN104"].facts[-1] == text.OTHER_LAYOUTS(tensors=6, layouts=3)
    assert found(group(shards=())) == {}


def test_105() -> None:
    """A broken tie is reported with its names on the smaller set of ranks, and never fails."""
    fitted = found(group(ranks=3, ties=(Tie(("embed", "head"), (1,)),)))
    assert set(fitted) == {"SYN105"}
    assert (fitted["SYN105"].ranks, fitted["SYN105"].fails) == ((1,), False)
    text = syn105_tie_broken.Text
    assert fitted["SYN105"].facts == (text.TIED_ON_SOME(names=("embed", "head"), tied=(1,), separate=(0, 2)),)
    assert found(group(ties=(Tie(("embed", "head"), (1,)),)))["SYN105"].ranks == (0, 1)
    assert found(group(ties=())) == {}


@pytest.mark.parametrize("name", ["step", "epoch", "global_step"])
def test_106(name: str) -> None:
    """A step or epoch that differs is SYN106 on the odd rank and covers everything; other values are not SYN106."""
    value = ValueDiff(name, {0: 7, 1: 5, 2: 7}, counts=True, kind="progress")
    fitted = found(group(WEIGHT, MEAN, ranks=3, values=(value,)))
    assert set(fitted) == {"SYN106"}
    assert fitted["SYN106"].ranks == (1,)
    text = syn106_different_progress.Text
    assert fitted["SYN106"].facts == (text.PROGRESS(name=name, values={0: 7, 1: 5, 2: 7}),)
    assert set(fitted["SYN106"].tensors) == {"fc.weight", "bn.running_mean"}
    other = ValueDiff("loss", {0: 7, 1: 5, 2: 7}, counts=False)
    assert "SYN106" not in found(group(WEIGHT, ranks=3, values=(other,)))


def test_106_by_the_optimizers_steps() -> None:
    """Optimizer steps that differ are SYN106 only if the files do not record equal steps."""
    fitted = found(group(STEP, WEIGHT))
    assert set(fitted) == {"SYN106"}
    assert fitted["SYN106"].facts == (syn106_different_progress.Text.UNKNOWN_STEP_COUNTERS(counters=1),)
    assert "SYN106" not in found(group(STEP, WEIGHT, stores_progress=True))


def test_201() -> None:
    """Running statistics that differ alone are SYN201; beside parameters or optimizer state they are not."""
    fitted = found(group(MEAN, VAR))
    assert set(fitted) == {"SYN201"}
    assert fitted["SYN201"].severity == "warning"
    first, *others = fitted["SYN201"].facts
    assert first.code is syn201_bn_local_stats.Text.STATISTICS
    assert (first.parameters["count"], first.parameters["total"]) == (2, 8)
    assert {Statistics.PARAMETERS_AGREE(count=10), Statistics.COUNTS_AGREE()} <= set(others)
    assert fitted["SYN201"].ranks == (0, 1)
    assert "SYN201" not in found(group(MEAN, VAR, WEIGHT))
    assert "SYN201" not in found(group(MEAN, diff("optimizer.a.exp_avg", "optimizer")))
    assert "SYN201" not in found(group(WEIGHT))


def test_201_if_parameters_were_not_compared() -> None:
    """Shards are not differences: statistics that differ alone among the compared tensors are SYN201."""
    shard = TensorDiff("fc.weight", "parameter", "float32", (4,), "not_compared", reason="sharded")
    assert set(found(group(MEAN, shard))) == {"SYN201"}


def test_variances_alone_are_no_drift() -> None:
    """Variances that differ beside equal means are SYN204. If means were not compared, they are SYN201."""
    for metadata in (None, Metadata(buffers_synced=False)):
        assert set(found(group(VAR, metadata=metadata))) == {"SYN204"}
    left_out = group(VAR)
    del left_out.kinds["bn_mean"]
    assert set(found(left_out)) == {"SYN201"}


def test_202_by_growth() -> None:
    """Drift that grows 1.5 times over the steps is SYN202; drift that grows less is SYN201."""
    earlier = group(diff("bn.running_mean", "bn_mean", max_abs=0.1), step=1)
    assert set(found(group(diff("bn.running_mean", "bn_mean", max_abs=0.16)), earlier)) == {"SYN202"}
    assert set(found(group(diff("bn.running_mean", "bn_mean", max_abs=0.14)), earlier)) == {"SYN201"}


def test_202_by_metadata() -> None:
    """Metadata without buffer synchronization leads to SYN202, and metadata with it to SYN201."""
    assert set(found(group(MEAN, metadata=Metadata(buffers_synced=False)))) == {"SYN202"}
    earlier = group(diff("bn.running_mean", "bn_mean", max_abs=0.01), step=1)
    assert set(found(group(MEAN, metadata=Metadata(buffers_synced=True)), earlier)) == {"SYN201"}


def test_203() -> None:
    """Counts that differ are SYN203 on the minority and cover its statistics."""
    odd = diff("bn.num_batches_tracked", "bn_count", ((0, 1, 3), (2,)), max_abs=3)
    fitted = found(group(odd, diff("bn.running_mean", "bn_mean", ((0,), (1,), (2,), (3,))), ranks=4))
    assert set(fitted) == {"SYN203", "SYN201"}  # the statistics of ranks 0, 1, 3 differ among themselves
    assert (fitted["SYN203"].ranks, fitted["SYN201"].ranks) == ((2,), (0, 1, 3))
    text = syn203_bn_count_mismatch.Text
    assert fitted["SYN203"].facts[0] == text.SOME_RANKS(ranks=(2,), size=text.BY_UP_TO(batches=3), layers=1)
    # Either of two ranks may be wrong.
    assert found(group(COUNT))["SYN203"].facts[0] == text.ALL_RANKS(size=text.BY_UP_TO(batches=3), layers=1)
    assert "SYN203" not in found(group(MEAN))


def test_299() -> None:
    """What no rule explains is SYN299, tensors and values, and never silence."""
    note = ValueDiff("temperature", {0: 0.1, 1: 0.2}, counts=True)
    fitted = found(group(WEIGHT, MEAN, values=(note,)))
    assert set(fitted) == {"SYN299"}
    assert set(fitted["SYN299"].tensors) == {"fc.weight", "bn.running_mean"}
    assert fitted["SYN299"].values == ("temperature",)
    assert "SYN299" not in found(group(MEAN))


@pytest.mark.parametrize("seed", range(20))
def test_every_difference_is_in_exactly_one_finding(seed: int) -> None:
    """Whatever differs, each tensor and value that counts is covered once."""
    import random

    rng = random.Random(seed)
    pool = [MEAN, VAR, COUNT, WEIGHT, STEP, diff("b", "parameter", status="not_compared", reason="dtype")]
    values = (
        ValueDiff("epoch", {0: 1, 1: 2}, counts=True, kind="progress"),
        ValueDiff("optimizer.param_groups.0.lr", {0: 1, 1: 2}, counts=True, kind="setting"),
        ValueDiff("note", {0: 1, 1: 2}, counts=False),
    )
    case = group(*(d for d in pool if rng.random() < 0.6), values=tuple(v for v in values if rng.random() < 0.4))
    findings = found(case).values()
    assert sorted(n for f in findings for n in f.tensors) == sorted(d.name for d in case.tensors)
    assert sorted(n for f in findings for n in f.values) == sorted(v.name for v in case.values if v.counts)


def test_allowed_findings_do_not_fail() -> None:
    """An allowed finding is reported and does not fail the run."""
    (finding,) = diagnose.diagnose(group(MEAN), allow=frozenset({"SYN201"}))
    assert (finding.allowed, finding.fails) == (True, False)
    (finding,) = diagnose.diagnose(group(WEIGHT), allow=frozenset({"SYN201"}))
    assert finding.fails
