"""Every rule fires on its planted fault and stays silent on a near miss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from groups import make_group

from syncheck import diagnose
from syncheck.diagnose import RULES
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
    """A tensor that a rank lacks is SYN101 and names the fewer; one of another shape is not."""
    lacking = TensorDiff("a", "parameter", "float32", (4,), "not_compared", reason="missing", clusters=((0, 2),))
    fitted = found(group(lacking, ranks=3))
    assert set(fitted) == {"SYN101"}
    assert (fitted["SYN101"].ranks, fitted["SYN101"].tensors) == ((1,), ("a",))
    assert "SYN101" not in found(group(diff("a", "parameter", status="not_compared", reason="shape")))


def test_101_names_the_one_that_has_it() -> None:
    """Where one of three has a tensor that the others lack, that one is the suspect."""
    alone = TensorDiff("a", "parameter", "float32", (4,), "not_compared", reason="missing", clusters=((1,),))
    assert found(group(alone, ranks=3))["SYN101"].ranks == (1,)


@pytest.mark.parametrize("reason", ["shape", "dtype"])
def test_102(reason: str) -> None:
    """Another shape or dtype is SYN102 on the minority; a tensor that was refused is no difference."""
    unlike = diff("a", "parameter", ((0, 1), (2,)), status="not_compared", reason=reason)
    fitted = found(group(unlike, ranks=3))
    assert set(fitted) == {"SYN102"}
    assert fitted["SYN102"].ranks == (2,)
    assert found(group(diff("a", "parameter", status="not_compared", reason="refused"))) == {}


def test_103() -> None:
    """A prefix that was taken off is told and never fails; without one nothing is."""
    fitted = found(group(normalized={1: 12}))
    assert set(fitted) == {"SYN103"}
    assert (fitted["SYN103"].ranks, fitted["SYN103"].severity, fitted["SYN103"].fails) == ((1,), "info", False)
    assert found(group(normalized={})) == {}


def test_104() -> None:
    """Tensors in parts are told with their layouts and numbers and never fail; a group without any is not told so."""
    shards = (
        Shards("DTensor", "copied to 2, divided in 2 (dimension 0)", 23, 22, ((0, 2), (1, 3))),
        Shards("optimizer", "of which each rank has its own", 1, 0),
        Shards("model parallel", "parts along tp", 2, 0),
    )
    fitted = found(group(ranks=4, shards=shards))
    assert set(fitted) == {"SYN104"}
    assert (fitted["SYN104"].fails, fitted["SYN104"].ranks) == (False, (0, 1, 2, 3))
    assert fitted["SYN104"].evidence == (
        "23 DTensors, copied to 2, divided in 2 (dimension 0): compared within ranks 0, 2 and ranks 1, 3, and 1 of "
        "them with no other rank's; 1 tensor of the optimizer, of which each rank has its own: not compared, no two "
        "ranks hold the same part; 2 plain tensors, parts along tp: not compared, no two ranks hold the same part"
    )
    many = tuple(Shards("DTensor", f"layout {i}", 2, 0) for i in range(7))
    assert found(group(shards=many))["SYN104"].evidence.endswith("; 6 tensors in 3 other layouts")
    assert found(group(shards=())) == {}


def test_105() -> None:
    """A broken tie is told with its names, on the fewer ranks, and never fails; without one nothing is told."""
    fitted = found(group(ranks=3, ties=(Tie(("embed", "head"), (1,)),)))
    assert set(fitted) == {"SYN105"}
    assert (fitted["SYN105"].ranks, fitted["SYN105"].fails) == ((1,), False)
    assert fitted["SYN105"].evidence == "embed and head share memory on rank 1 only"
    assert found(group(ties=(Tie(("embed", "head"), (1,)),)))["SYN105"].ranks == (0, 1)
    assert found(group(ties=())) == {}


@pytest.mark.parametrize("name", ["step", "epoch", "global_step"])
def test_106(name: str) -> None:
    """A differing step or epoch is SYN106, names the odd rank, and covers all else; other values do not make one."""
    value = ValueDiff(name, {0: 7, 1: 5, 2: 7}, counts=True, kind="progress")
    fitted = found(group(WEIGHT, MEAN, ranks=3, values=(value,)))
    assert set(fitted) == {"SYN106"}
    assert fitted["SYN106"].ranks == (1,)
    assert set(fitted["SYN106"].tensors) == {"fc.weight", "bn.running_mean"}
    other = ValueDiff("loss", {0: 7, 1: 5, 2: 7}, counts=False)
    assert "SYN106" not in found(group(WEIGHT, ranks=3, values=(other,)))


def test_106_by_the_optimizers_steps() -> None:
    """Optimizer steps that differ are SYN106 only where the files do not say themselves that their steps agree."""
    assert set(found(group(STEP, WEIGHT))) == {"SYN106"}
    assert "SYN106" not in found(group(STEP, WEIGHT, stores_progress=True))


def test_201() -> None:
    """Running statistics that differ alone are SYN201; with a parameter or the optimizer it is another matter."""
    fitted = found(group(MEAN, VAR))
    assert set(fitted) == {"SYN201"}
    assert fitted["SYN201"].severity == "warning"
    assert fitted["SYN201"].ranks == (0, 1)
    assert "SYN201" not in found(group(MEAN, VAR, WEIGHT))
    assert "SYN201" not in found(group(MEAN, diff("optimizer.a.exp_avg", "optimizer")))
    assert "SYN201" not in found(group(WEIGHT))


def test_201_where_parameters_were_not_compared() -> None:
    """Shards are not differences: statistics that differ alone among what is comparable are SYN201."""
    shard = TensorDiff("fc.weight", "parameter", "float32", (4,), "not_compared", reason="sharded")
    assert set(found(group(MEAN, shard))) == {"SYN201"}


def test_variances_alone_are_no_drift() -> None:
    """Means that were compared and agree rule SYN201 and SYN202 out: SYN204. Means that were left out do not."""
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
    """Metadata that says buffers are not synchronized makes SYN202, one that says they are keeps SYN201."""
    assert set(found(group(MEAN, metadata=Metadata(buffers_synced=False)))) == {"SYN202"}
    earlier = group(diff("bn.running_mean", "bn_mean", max_abs=0.01), step=1)
    assert set(found(group(MEAN, metadata=Metadata(buffers_synced=True)), earlier)) == {"SYN201"}


def test_203() -> None:
    """Counts that differ are SYN203, name the minority, and cover its statistics; equal counts are not."""
    odd = diff("bn.num_batches_tracked", "bn_count", ((0, 1, 3), (2,)), max_abs=3)
    fitted = found(group(odd, diff("bn.running_mean", "bn_mean", ((0,), (1,), (2,), (3,))), ranks=4))
    assert set(fitted) == {"SYN203", "SYN201"}  # the statistics of ranks 0, 1, 3 differ among themselves
    assert (fitted["SYN203"].ranks, fitted["SYN201"].ranks) == ((2,), (0, 1, 3))
    assert "by up to 3 batches, suspect rank 2" in fitted["SYN203"].evidence
    assert "suspect" not in found(group(COUNT))["SYN203"].evidence  # of two ranks either
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
    """A code that is allowed is still told, and does not fail the run; others do."""
    (finding,) = diagnose.diagnose(group(MEAN), allow=frozenset({"SYN201"}))
    assert (finding.allowed, finding.fails) == (True, False)
    (finding,) = diagnose.diagnose(group(WEIGHT), allow=frozenset({"SYN201"}))
    assert finding.fails
