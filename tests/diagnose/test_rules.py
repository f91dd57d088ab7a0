"""All rules are complete and ordered, and the rules on structure, progress and BatchNorm match their faults."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
from support.cases import diagnose_case, diff, group
from support.listings import find_all, join_fields, list_fields, list_names, map_fields

from syncheck.diagnose import rules, syn101_missing_tensors, syn103_prefix_normalized, syn201_bn_local_stats
from syncheck.diagnose.bn import Statistics
from syncheck.diagnose.conversion_rules import CONVERSION_RULES
from syncheck.diagnose.rules import REPLICA_RULES, list_diff_rules, list_rules, name_rules
from syncheck.diagnose.syn102_shape_or_dtype_mismatch import Text as Mismatch
from syncheck.diagnose.syn104_sharded_by_design import Text as Sharded
from syncheck.diagnose.syn105_tie_broken import Text as Tied
from syncheck.diagnose.syn106_different_progress import Text as Progress
from syncheck.diagnose.syn203_bn_count_mismatch import Text as Batches
from syncheck.diagnose.syn405_equal_shards import Text as Equal
from syncheck.findings import EqualShards
from syncheck.messages import Detail
from syncheck.parity.causes import PARITY_RULES
from syncheck.records import Group, Severity, Shards, TensorDiff, Tie, ValueDiff
from syncheck.snapshots import Metadata

HOME = Path(rules.__file__).parent
# The order of precedence, without the rules that cover no difference.
PRECEDENCE = """108 206 225 101 102 223 222 220 221 217 106 215 214 216 107 224 226 231 230 240 205 203 204 202 201 219
218 212 213 210 211 241 299 310 301 302 303 304 305 306 307 308 309 318 312 313 314 315 316 317 311 399""".split()
PRECEDENCE_FOR_MODELS = """223 310 301 302 303 304 305 306 307 308 309 318 312 313 314 315 316 317 311 101 102 220 106
214 107 213 399 103""".split()
MEAN, VAR = diff("bn.running_mean", "bn_mean"), diff("bn.running_var", "bn_var")
COUNT = diff("bn.num_batches_tracked", "bn_count", max_abs=3)
WEIGHT = diff("fc.weight", "parameter")
MOMENT = diff("optimizer.fc.weight.exp_avg", "optimizer")
STEP = diff("optimizer.fc.weight.step", "optimizer_step")
EPOCH = ValueDiff("epoch", {0: 1, 1: 2}, counts=True, kind="progress")
RATE = ValueDiff("optimizer.param_groups.0.lr", {0: 1, 1: 2}, counts=True, kind="setting")


@pytest.mark.parametrize("rule", (*list_rules(), *PARITY_RULES), ids=attrgetter("code"))
def test_every_rule_is_complete(rule: Any) -> None:
    """Each rule has a code, slug, severity, cause and fix, and a docstring with the sections printed by `explain`."""
    assert re.fullmatch(r"SYN\d{3}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.slug)
    assert rule.severity in get_args(Severity)
    assert all(rule.sentences[name].value.endswith(".") for name in ("CAUSE", "FIX"))
    parts = re.split(r"^(Signature|Cause|Fix|Incidents)\b", rule.explanation, flags=re.MULTILINE)
    assert parts[1::2] == ["Signature", "Cause", "Fix", "Incidents"]
    assert all(len(text.split()) > 1 for text in parts[2::2])


def test_rules_are_listed_in_the_order_of_precedence() -> None:
    """The rules are every module of the folder and every relation of two models once, in the order of precedence."""
    assert sorted(list_fields(REPLICA_RULES, "name")) == sorted(list_fields(HOME.glob("syn*.py"), "stem"))
    assert name_rules() == {rule.code: rule.slug for rule in list_rules()}
    codes = [rule.code[3:] for rule in list_rules()]
    assert len(set(codes)) == len(codes)
    covering = [code for code in codes if code not in ("103", "104", "105", "405")]
    assert covering == PRECEDENCE, "a new rule has its place in REPLICA_RULES and in PRECEDENCE above"
    assert [rule.code[3:] for rule in list_diff_rules()] == PRECEDENCE_FOR_MODELS


def test_every_relation_has_one_rule() -> None:
    """A rule of the table covers one relation, and no two rules cover the same relation."""
    relations = [rule.relation for rule in CONVERSION_RULES if rule.relation is not None]
    assert len(set(relations)) == len(relations)
    for rule in CONVERSION_RULES:
        assert (rule.match is None) == (rule.relation is not None) == (rule.state is not None), rule.code


def make_missing(name: str, *ranks: int, reason: Any = "missing") -> TensorDiff:
    """Return a parameter that exists only on the given ranks."""
    return diff(name, "parameter", (ranks,), status="not_compared", reason=reason, minority=())


def test_no_finding_without_a_difference() -> None:
    """A group without a difference has no finding, even if the reader refused a tensor on some ranks."""
    assert diagnose_case(group()) == diagnose_case(group(make_missing("a", 0, reason="refused"))) == {}


@pytest.mark.parametrize(("holders", "suspect"), [((0, 2), 1), ((1,), 1)])
def test_101(holders: tuple[int, ...], suspect: int) -> None:
    """A tensor that some ranks lack is SYN101 on the smaller set of ranks."""
    fitted = diagnose_case(group(make_missing("a", *holders), ranks=3))
    assert set(fitted) == {"SYN101"}
    assert (fitted["SYN101"].ranks, fitted["SYN101"].tensors) == ((suspect,), ("a",))
    text = syn101_missing_tensors.Text
    lost = tuple(sorted({0, 1, 2} - set(holders)))
    assert fitted["SYN101"].facts == (text.MISSING(ranks=lost, missing=text.TENSORS(tensors=1), names=("a",)),)


def test_101_of_different_tensors() -> None:
    """If different ranks lack different tensors, the evidence names the tensors of each set of ranks."""
    scheduler = ValueDiff("scheduler.last_epoch", {0: 1, 1: None}, counts=True, kind="setting", lost=(1,))
    text = syn101_missing_tensors.Text
    facts = diagnose_case(group(make_missing("a", 0), make_missing("b", 1), values=(scheduler,)))["SYN101"].facts
    count = text.TENSORS_AND_VALUES(tensors=1, values=1)
    assert facts == (
        text.MISSING(ranks=(1,), missing=count, names=("a", "scheduler.last_epoch")),
        text.ALSO_MISSING(ranks=(0,), missing=text.TENSORS(tensors=1), names=("b",)),
    )
    names = [chr(ord("a") + rank) for rank in range(5)]
    many = [make_missing(name, rank) for rank, name in enumerate(names)]
    (fact,) = diagnose_case(group(*many, ranks=5))["SYN101"].facts
    count = text.TENSORS(tensors=5)
    assert fact == text.PARTLY_MISSING(ranks=(0, 1, 2, 3, 4), missing=count, names=tuple(names))


@pytest.mark.parametrize(("reason", "first"), [("shape", Mismatch.SHAPES), ("dtype", Mismatch.DTYPES)])
def test_102(reason: str, first: Any) -> None:
    """A different shape or dtype is SYN102 on the minority, without SYN101."""
    detail = Detail.UNEQUAL(sets="x on ranks 0, 1 and y on rank 2")
    fields: dict[str, Any] = {"status": "not_compared", "reason": reason, "detail": detail}
    mismatched = [diff(name, "parameter", ((0, 1), (2,)), **fields) for name in "abc"]
    fitted = diagnose_case(group(mismatched[0], ranks=3))
    assert set(fitted) == {"SYN102"}
    assert fitted["SYN102"].ranks == (2,)
    assert fitted["SYN102"].facts == (first(tensors=1), Mismatch.TENSOR(name="a", detail=detail))
    facts = diagnose_case(group(*mismatched, ranks=3))["SYN102"].facts
    assert (facts[0], facts[-1]) == (first(tensors=3), Mismatch.MORE(count=1))


SHARDS = (
    Shards("DTensor", "copied to 2, divided in 2 (dimension 0)", 23, 22, ((0, 2), (1, 3))),
    Shards("optimizer", "of which each rank has its own", 1, 0),
    Shards("model parallel", "parts along tp", 2, 0),
)
TIE = Tie(("embed", "head"), (1,))
EQUAL = EqualShards("a", 4, 2, ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("fields", "code", "ranks", "facts"),
    [
        ({"normalized": {1: 12}}, "SYN103", (1,), [syn103_prefix_normalized.Text.PREFIX(ranks=(1,), names=12)]),
        (
            {"shards": SHARDS},
            "SYN104",
            (0, 1, 2, 3),
            [
                Sharded.PARTLY_COMPARED(
                    tensors=Sharded.DTENSORS(count=23), layout=SHARDS[0].layout, groups=((0, 2), (1, 3)), compared=22,
                    alone=1,
                ),
                Sharded.NOT_COMPARED(tensors=Sharded.OPTIMIZER_TENSORS(count=1), layout=SHARDS[1].layout),
                Sharded.NOT_PLACED(tensors=Sharded.PLAIN_TENSORS(count=2), layout=SHARDS[2].layout),
            ],
        ),
        (
            {"equal_shards": (EQUAL, replace(EQUAL, name="b"), EqualShards("c", 2, 2, ((1, 3),)))},
            "SYN405",
            (0, 1, 2, 3),
            [
                Equal.EQUAL(count=2, shards=4, equal=2, sets=EQUAL.clusters, names=("a", "b")),
                Equal.EQUAL(count=1, shards=2, equal=2, sets=((1, 3),), names=("c",)),
            ],
        ),
        ({"ties": (TIE,)}, "SYN105", (1,), [Tied.TIED_ON_SOME(names=TIE.names, tied=(1,), separate=(0, 2, 3))]),
    ],
)  # fmt: skip
def test_findings_that_never_fail(fields: dict[str, Any], code: str, ranks: tuple[int, ...], facts: list[Any]) -> None:
    """Removed prefixes, shards and broken ties are reported with severity info and never fail the comparison."""
    fitted = diagnose_case(group(ranks=4, **fields))
    assert set(fitted) == {code}
    assert (fitted[code].ranks, fitted[code].fails) == (ranks, False)
    assert list(fitted[code].facts) == facts
    assert fitted[code].severity == "info"


def test_104_and_105_on_few_ranks_and_many_layouts() -> None:
    """SYN104 lists only the first layouts, and SYN105 suspects both ranks if one of two ranks broke a tie."""
    many = tuple(Shards("DTensor", f"layout {i}", 2, 0) for i in range(7))
    assert diagnose_case(group(shards=many))["SYN104"].facts[-1] == Sharded.OTHER_LAYOUTS(tensors=6, layouts=3)
    assert diagnose_case(group(ties=(TIE,)))["SYN105"].ranks == (0, 1)


@pytest.mark.parametrize("name", ["step", "epoch", "global_step"])
def test_106(name: str) -> None:
    """A different step or epoch is SYN106 on the odd rank and covers all differences; other values are not SYN106."""
    values = {0: 7, 1: 5, 2: 7}
    fitted = diagnose_case(
        group(WEIGHT, MEAN, ranks=3, values=(ValueDiff(name, values, counts=True, kind="progress"),))
    )
    assert set(fitted) == {"SYN106"}
    assert (fitted["SYN106"].ranks, set(fitted["SYN106"].tensors)) == ((1,), {WEIGHT.name, MEAN.name})
    # A rank that skips steps without counting them is at the same epoch.
    doubts = () if name == "epoch" else (Progress.MAY_BE_SKIPPED(),)
    assert fitted["SYN106"].facts == (Progress.PROGRESS(name=name, values=values), *doubts)
    assert "SYN106" not in diagnose_case(group(WEIGHT, ranks=3, values=(ValueDiff("loss", values, counts=False),)))


def test_106_by_optimizer_steps() -> None:
    """Different optimizer steps are SYN106 only if the files do not record equal steps."""
    fitted = diagnose_case(group(STEP, WEIGHT))
    assert set(fitted) == {"SYN106"}
    assert fitted["SYN106"].facts == (Progress.UNKNOWN_STEP_COUNTERS(counters=1),)
    assert "SYN106" not in diagnose_case(group(STEP, WEIGHT, stores_progress=True))


def test_201() -> None:
    """Differences in running statistics alone are SYN201, a warning on all ranks."""
    fitted = diagnose_case(group(MEAN, VAR))
    assert set(fitted) == {"SYN201"}
    assert (fitted["SYN201"].severity, fitted["SYN201"].ranks) == ("warning", (0, 1))
    first = fitted["SYN201"].facts[0]
    assert first.code is syn201_bn_local_stats.Text.STATISTICS
    assert (first.parameters["count"], first.parameters["total"]) == (2, 8)
    assert {Statistics.PARAMETERS_AGREE(count=10), Statistics.COUNTS_AGREE()} <= set(fitted["SYN201"].facts)


def mean(size: float, step: int = 10, **fields: Any) -> Group:
    """Return a group whose running means differ by `size`."""
    return group(diff("bn.running_mean", "bn_mean", max_abs=size), step=step, **fields)


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        # Uncompared tensors are not differences.
        ([group(MEAN, diff("fc.weight", "parameter", status="not_compared", reason="sharded"))], "SYN201"),
        ([group(VAR)], "SYN204"),
        ([group(VAR, metadata=Metadata(buffers_synced=False))], "SYN204"),
        # Drift that grows 1.5 times over the steps, or follows from the metadata.
        ([mean(0.16), mean(0.1, 1)], "SYN202"),
        ([mean(0.14), mean(0.1, 1)], "SYN201"),
        ([group(MEAN, metadata=Metadata(buffers_synced=False))], "SYN202"),
        ([mean(0.5, metadata=Metadata(buffers_synced=True)), mean(0.01, 1)], "SYN201"),
    ],
)
def test_code_of_running_statistics(cases: list[Group], code: str) -> None:
    """Drift alone is SYN201; SYN202 requires growth or metadata, and SYN204 requires equal means."""
    assert set(diagnose_case(*cases)) == {code}


def test_not_204_without_compared_means() -> None:
    """If means were not compared, different variances are SYN201."""
    case = group(VAR)
    del case.kinds["bn_mean"]
    assert set(diagnose_case(case)) == {"SYN201"}


@pytest.mark.parametrize("others", [[MEAN, VAR, WEIGHT], [MEAN, MOMENT], [WEIGHT]])
def test_not_201_beside_trained_tensors(others: list[TensorDiff]) -> None:
    """Different running statistics beside different parameters or optimizer state are not SYN201."""
    assert "SYN201" not in diagnose_case(group(*others))


def test_203() -> None:
    """Different batch counts are SYN203 on the minority and cover the minority's statistics."""
    outlier = diff(COUNT.name, "bn_count", ((0, 1, 3), (2,)), max_abs=3)
    fitted = diagnose_case(group(outlier, diff(MEAN.name, "bn_mean", ((0,), (1,), (2,), (3,))), ranks=4))
    # The statistics of ranks 0, 1 and 3 differ among themselves.
    assert map_fields(fitted, "ranks") == {"SYN203": (2,), "SYN201": (0, 1, 3)}
    size = Batches.BY_UP_TO(batches=3)
    assert fitted["SYN203"].facts[0] == Batches.SOME_RANKS(ranks=(2,), size=size, layers=1)
    assert diagnose_case(group(COUNT))["SYN203"].facts[0] == Batches.ALL_RANKS(size=size, layers=1)
    assert "SYN203" not in diagnose_case(group(MEAN))


def test_299() -> None:
    """Tensors and values without a matching rule are SYN299."""
    note = ValueDiff("temperature", {0: 0.1, 1: 0.2}, counts=True)
    fitted = diagnose_case(group(WEIGHT, MEAN, values=(note,)))
    assert set(fitted) == {"SYN299"}
    assert set(fitted["SYN299"].tensors) == {WEIGHT.name, MEAN.name}
    assert fitted["SYN299"].values == (note.name,)


@pytest.mark.parametrize("seed", range(20))
def test_every_difference_is_in_exactly_one_finding(seed: int) -> None:
    """Findings cover each tensor and each relevant value of a random group exactly once."""
    rng = random.Random(seed)
    pool = [MEAN, VAR, COUNT, WEIGHT, STEP, diff("b", "parameter", status="not_compared", reason="dtype")]
    values = (EPOCH, RATE, ValueDiff("note", {0: 1, 1: 2}, counts=False))
    case = group(*(d for d in pool if rng.random() < 0.6), values=tuple(v for v in values if rng.random() < 0.4))
    findings = diagnose_case(case).values()
    assert sorted(join_fields(findings, "tensors")) == sorted(list_names(case.tensors))
    assert sorted(join_fields(findings, "values")) == sorted(list_names(find_all(case.values, counts=True)))


def test_allowed_findings_do_not_fail() -> None:
    """An allowed finding is reported and does not fail the run."""
    for tensor, allowed in ((MEAN, True), (WEIGHT, False)):
        (finding,) = rules.diagnose(group(tensor), allow=frozenset({"SYN201"}))
        assert (finding.allowed, finding.fails) == (allowed, not allowed)
