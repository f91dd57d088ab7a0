"""The tolerance of each tensor, and the table of `close`, which equals torch's."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, compare_ranks, network, save, save_safetensors
from support.listings import find_all, index_by, join_fields, list_codes, list_fields, map_fields

import syncheck
from syncheck import api
from syncheck.errors import OptionError
from syncheck.messages import Note
from syncheck.records import DECADES
from syncheck.tensors import kinds
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.tolerance import CLOSE, Tolerance, tolerances
from syncheck.testing import compare

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report, TensorDiff


def diffs(report: Report) -> dict[str, TensorDiff]:
    """Return the tensors of the only group by name, without identical tensors."""
    (group,) = report.groups
    return index_by(group.tensors, "name")


def test_the_table_equals_torch() -> None:
    """The table equals the installed torch's; dtypes without a row require equality in torch too."""
    torch = pytest.importorskip("torch")
    from torch.testing import _comparison

    for name, row in CLOSE.items():
        assert _comparison.default_tolerances(getattr(torch, name)) == row, name
    for name in DTYPES.keys() - CLOSE.keys():
        if hasattr(torch, name):
            assert _comparison.default_tolerances(getattr(torch, name)) == (0.0, 0.0), name


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [("float16", 1e-3, 4e-3), ("float32", 1.2e-6, 3e-5), ("float64", 1.5e-7, 3e-7), ("complex64", 1.2e-6, 3e-5)],
)
def test_close_depends_on_the_dtype(tmp_path: Path, dtype: str, near: float, far: float) -> None:
    """`close` applies torch's tolerance for the dtype, and the report contains its numbers."""
    first = np.ones(4, dtype)
    for gap, status in ((near, "close"), (far, "different")):
        for i, array in enumerate((first, (first + np.asarray(gap, dtype)).astype(dtype))):
            save_safetensors(tmp_path / f"rank{i}.safetensors", {"w": array})
        diff = diffs(syncheck.compare(tmp_path, options=syncheck.Options(close=True)))["w"]
        assert diff.status == status
        rtol, atol = CLOSE[dtype]
        assert diff.tolerance == (f"rtol={rtol:g} atol={atol:g} (close)" if status == "close" else None)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int64", "uint8", "bool"])
def test_close_requires_equality_without_a_row(dtype: str) -> None:
    """float8 and integers have no row in torch's table and must be equal, as in torch."""
    assert tolerances(close=True).of("w", "parameter", dtype).exact


def test_close_is_symmetric_unlike_torch(tmp_path: Path) -> None:
    """The difference is compared with the larger magnitude, so swapping two files never changes the verdict."""
    torch = pytest.importorskip("torch")
    # Just beyond rtol times the smaller number, and within rtol times the larger number.
    a = 1000.0
    b = a + 1e-5 + 1.3e-6 * a * (1 + 6e-7)
    a64, b64 = torch.tensor([a, b], dtype=torch.float64).reshape(2, 1)
    passes = [torch.isclose(x, y, rtol=1.3e-6, atol=1e-5).item() for x, y in ((a64, b64), (b64, a64))]
    assert passes == [True, False]
    options = {"rtol": 1.3e-6, "atol": 1e-5}
    for first, second in ((a, b), (b, a)):
        states = [{"w": np.array([value], np.float64)} for value in (first, second)]
        assert compare_ranks(tmp_path, *states, **options).verdict == "in_sync"


TWO_NOT_CLOSE = [
    ("float32", (1, 1, 0, 2), {"rtol": 0.0, "atol": 1.0}),
    ("float16", (1, 1, 0, 2), {"rtol": 0.0, "atol": 1.0}),
    ("float64", (8, 8, 7, 9), {"rtol": 1 / 8, "atol": 0.0}),
    ("float64", (1, 1, 1 - 2**-53, 1 + 2**-52), {"ulp": 1}),
    ("complex64", (1j, 1j, 0, 2j), {"rtol": 0.0, "atol": 1.0}),
    ("float64", (-1.7e308, 1.7e308, 0), {"rtol": 1.0, "atol": 0.0}),
]


@pytest.mark.parametrize(("dtype", "values", "tolerance"), TWO_NOT_CLOSE)
@pytest.mark.parametrize("reference", [None, 0])
@pytest.mark.parametrize("where", ["files", "memory"])
def test_every_pair_must_be_close(
    tmp_path: Path, where: str, reference: int | None, dtype: str, values: Any, tolerance: dict[str, Any]
) -> None:
    """A tensor differs if two replicas are not close, even if all are close to the majority or to the reference."""
    states = [{"w": np.array([0, value], dtype), "v": np.ones(2, np.float32)} for value in values]
    if where == "files":
        for i, state in enumerate(states):
            save_safetensors(tmp_path / f"rank{i}.safetensors", state)
        report = syncheck.compare(tmp_path, options=syncheck.Options(**tolerance, reference=reference), histograms=True)
    else:
        report = compare(*states, **tolerance, reference=reference)
    assert (report.exit_code, diffs(report)["w"].status) == (1, "different")


def test_a_histogram_with_a_tolerance_counts_the_tested_differences(tmp_path: Path) -> None:
    """With a tolerance, the histogram counts the largest difference of any two replicas, as in the report."""
    for i, value in enumerate((6, 6, 0, 12)):
        save_safetensors(tmp_path / f"rank{i}.safetensors", {"w": np.array([value, 5], np.float32)})
    for options, gap, decade in ((syncheck.Options(rtol=0, atol=6), 12, 1), (syncheck.Options(), 6, 0)):
        diff = diffs(syncheck.compare(tmp_path, options=options, histograms=True))["w"]
        assert (diff.status, diff.max_abs) == ("different", gap)
        assert diff.histogram is not None
        assert diff.histogram.counts[DECADES.index(decade) + 1] == 1
        assert diff.histogram.equal == 1


TOLERANCES = ({"rtol": 0.0, "atol": 1.0}, {"rtol": 0.25, "atol": 0.5}, {"ulp": 2}, {"rtol": 1.0, "atol": 0.0}, {})


def test_verdicts_do_not_depend_on_order_or_reference() -> None:
    """Order and reference do not affect the verdict, and replicas in sync stay in sync if any replica is removed."""
    from hypothesis import strategies as st
    from support.strategies import for_all

    near_one = [float(np.float32(1) + np.float32(i) * np.float32(2**-23)) for i in range(-3, 4)]
    number = st.sampled_from([0.0, -0.0, 1.0, 2.0, 0.5, 1.5, -1.0, 1e30, np.nan, np.inf, -np.inf, *near_one])
    replicas = st.lists(st.tuples(number, number), min_size=3, max_size=5)

    def verdict(rows: Any, **tolerance: Any) -> int:
        return compare(*({"w": np.array(row, np.float32)} for row in rows), **tolerance).exit_code

    def check(case: Any) -> None:
        rows, order, tolerance, reference = case
        complete = verdict(rows, **tolerance)
        assert verdict([rows[i] for i in order], **tolerance) == complete
        assert verdict(rows, **tolerance, reference=reference) == complete
        if complete == 0:
            assert all(verdict(rows[:i] + rows[i + 1 :], **tolerance) == 0 for i in range(len(rows)))

    drawn = replicas.flatmap(
        lambda rows: st.tuples(
            st.just(rows),
            st.permutations(range(len(rows))),
            st.sampled_from(TOLERANCES),
            st.integers(0, len(rows) - 1),
        )
    )
    for_all(drawn, check, examples=50)


def test_names_precede_kinds(tmp_path: Path) -> None:
    """Names precede kinds, the first matching glob applies, and other tensors have the general tolerance."""
    second = changed(network(), "running_mean", "running_var", "fc.weight", "fc.bias", by=1e-3)
    table = {
        "layer1.*": "bitwise",
        "layer1.bn.running_mean": {"rtol": 0, "atol": 1},  # no effect: the glob above matches first
        "fc.w*": {"rtol": 0, "atol": 0.5},
        "bn_mean": {"rtol": 0, "atol": 0.01},
        "bn_var": "close",
    }
    result = diffs(compare_ranks(tmp_path, network(), second, rtol=0.0, atol=0.1, tolerance=table))
    statuses = map_fields(result, "status", "tolerance")
    assert statuses == {
        "layer0.bn.running_mean": ("close", "rtol=0 atol=0.01 (tolerance of bn_mean)"),
        "layer0.bn.running_var": ("different", None),
        "layer1.bn.running_mean": ("different", None),
        "layer1.bn.running_var": ("different", None),
        "fc.weight": ("close", "rtol=0 atol=0.5 (tolerance of fc.w*)"),
        "fc.bias": ("close", "rtol=0 atol=0.1"),
    }


def test_the_order_of_globs_decides() -> None:
    """The first matching glob of the table applies, even if another is longer."""
    table: dict[str, Any] = {"*.weight": {"ulp": 1}, "fc.weight": {"ulp": 2}}
    assert tolerances(table=table).of("fc.weight", "parameter", "float32").ulp == 1
    turned = dict(reversed(table.items()))
    assert tolerances(table=turned).of("fc.weight", "parameter", "float32").ulp == 2


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_is_a_valid_key(kind: str) -> None:
    """Each kind of tensors is a valid key and applies to this kind only."""
    result = tolerances(table={kind: {"ulp": 3}}, kinds=kinds.KINDS)
    assert result.of("some.name", kind, "float32") == Tolerance(ulp=3, rule=f"tolerance of {kind}")
    assert all(result.of("some.name", second, "float32").exact for second in kinds.KINDS if second != kind)


COUNTED = {
    "optimizer.w.step": ("optimizer_step", "optimizer.*.step"),
    "optimizer.w.num_updates": ("optimizer", "*num_updates"),
    "bn.num_batches_tracked": ("bn_count", "*.num_batches_tracked"),
    "obs.count": ("buffer", "obs.count"),
    "ema.n_averaged": ("ema", "*.n_averaged"),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(
    "options", [{"rtol": 1e-5, "atol": 1.0}, {"ulp": 1000}, {"close": True}, {"tolerance": {"*": {"ulp": 1000}}}]
)
def test_counters_are_exact(name: str, options: dict[str, Any]) -> None:
    """A counter stored as a float is exact under every tolerance, unless a glob names the counter."""
    kind, glob = COUNTED[name]
    assert tolerances(**_table(options)).of(name, kind, "float32").exact
    named = {"tolerance": {"*.w": "close", glob: {"rtol": 0, "atol": 1}}}
    assert tolerances(**_table(named)).of(name, kind, "float32").atol == 1


def _table(options: dict[str, Any]) -> dict[str, Any]:
    return {{"tolerance": "table"}.get(key, key): value for key, value in options.items()} | {"kinds": kinds.KINDS}


def test_counters_of_files_are_exact(tmp_path: Path) -> None:
    """Optimizers with different step counters are out of sync, unless the tolerance names the kind or the counter."""
    torch = pytest.importorskip("torch")
    for rank in range(2):
        moment, step = torch.full((3,), 1.0 + rank * 1e-6), torch.tensor(100_000.0 + rank)
        optimizer = {"state": {0: {"step": step, "exp_avg": moment}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": {"w": torch.ones(3)}, "optimizer": optimizer}, tmp_path / f"rank{rank}.pth")
    for table, code in (
        ({}, 1),
        ({"optimizer": {"rtol": 1e-5, "atol": 1}, "optimizer.*": {"rtol": 1e-5, "atol": 1}}, 1),
        ({"optimizer_step": {"rtol": 0, "atol": 1}}, 0),
        ({"optimizer.*.step": {"rtol": 0, "atol": 1}}, 0),
    ):
        options = syncheck.Options(rtol=1e-5, atol=1e-8, tolerance=table)
        assert syncheck.compare(tmp_path, options=options).exit_code == code, table


def test_integers_are_exact_under_every_tolerance(tmp_path: Path) -> None:
    """Tolerances apply to floating-point numbers; integers and bools must be equal, even if named."""
    for dtype, a, b in (("int64", 1000, 1001), ("uint8", 3, 4), ("bool", 0, 1)):
        for rank, value in enumerate((a, b)):
            save_safetensors(tmp_path / f"rank{rank}.safetensors", {"w": np.array([value], dtype)})
        for options in ({"rtol": 1.0, "atol": 9.0}, {"ulp": 99}, {"tolerance": {"w": {"rtol": 1, "atol": 9}}}):
            assert syncheck.compare(tmp_path, options=syncheck.Options(**options)).exit_code == 1, (dtype, options)


def test_unused_keys_are_noted(tmp_path: Path) -> None:
    """A key that matches neither a tensor nor a kind is noted, with the list of kinds, because it may be misspelled."""
    report = compare_ranks(
        tmp_path, network(), network(), tolerance={"bn_means": "close", "fc.*": "close", "ema": "close"}
    )
    (note,) = find_all(report.groups[0].notes, code=Note.UNUSED_TOLERANCES)
    assert note.parameters["names"] == ("bn_means",)
    assert note.parameters["kinds"][:2] == ("parameter", "buffer")
    codes = set(list_codes(compare_ranks(tmp_path, network(), network()).groups[0].notes))
    assert Note.UNUSED_TOLERANCES not in codes


def test_globs_used_in_another_group_are_not_noted(tmp_path: Path) -> None:
    """A glob that matches in one run is not noted for runs without a match, even if the runs are judged separately."""
    for rank in range(2):
        save(tmp_path / f"a_rank{rank}.pth", network())
        save(tmp_path / f"b_rank{rank}.pth", {"head.weight": np.ones(2, np.float32)})
    options = syncheck.Options(tolerance={"head.*": "close"})
    findings = api.find(tmp_path, options=options)
    for part in (
        findings,
        replace(findings, groups=findings.groups[:1]),
        replace(findings, groups=findings.groups[1:]),
    ):
        notes = join_fields(api.judge(part, options).groups, "notes")
        assert Note.UNUSED_TOLERANCES not in list_codes(notes)


def test_tolerances_in_memory() -> None:
    """The table applies to objects in memory as to files, with notes about unused globs."""
    items = [{"w": np.array([value], np.float32), "v": np.ones(1, np.float32)} for value in (1.0, 1.5)]
    (group,) = compare(*items, tolerance={"w": {"rtol": 0, "atol": 0.5}, "x.*": "close"}).groups
    assert list_fields(group.tensors, "tolerance") == ["rtol=0 atol=0.5 (tolerance of w)"]
    assert group.notes[-1].code is Note.UNUSED_TOLERANCES
    assert group.notes[-1].parameters["names"] == ("x.*",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"close": True, "rtol": 0.1, "atol": 0.1},
            "cannot be combined",
        ),
        ({"close": True, "ulp": 0}, "cannot be combined"),
        ({"close": 1}, "close=1: must be"),
        ({"atol": 0.1}, "rtol and atol belong together"),
        ({"rtol": 0.1, "atol": -1.0}, "must be 0 <= rtol <= 1 and a finite atol >= 0"),
        ({"ulp": -1}, "ulp=-1: must be at least 0"),
        ({"tolerance": "close"}, "tolerance='close': must be a table"),
        ({"tolerance": {3: "close"}}, "tolerance={3: 'close'}: must be a table"),
        ({"tolerance": {"fc.*": "near"}}, 'tolerance["fc.*"]=\'near\': must be "close", "bitwise", or rtol and atol'),
        ({"tolerance": {"fc.*": {}}}, 'tolerance["fc.*"]={}: must be'),
        ({"tolerance": {"fc.*": {"ulps": 1}}}, "tolerance[\"fc.*\"]={'ulps': 1}: must be"),
        ({"tolerance": {"fc.*": {"ulp": 1.5}}}, "tolerance[\"fc.*\"]={'ulp': 1.5}: must be"),
        ({"tolerance": {"fc.*": {"ulp": True}}}, "tolerance[\"fc.*\"]={'ulp': True}: must be"),
        ({"tolerance": {"fc.*": {"ulp": -1}}}, "ulp=-1: must be at least 0"),
        ({"tolerance": {"fc.*": {"rtol": 1e-3}}}, "rtol and atol belong together"),
        ({"tolerance": {"fc.*": {"rtol": 2, "atol": 0}}}, "must be 0 <= rtol <= 1"),
        ({"tolerance": {"fc.*": {"rtol": 0, "atol": 10**400}}}, "a finite atol"),
        (
            {"tolerance": {"layer4": {"conv": {"ulp": 1}}}},
            'a name with dots needs quotes, as in "layer4.*"',
        ),
    ],
)
def test_invalid_tolerances(options: dict[str, Any], text: str) -> None:
    """A contradiction or invalid entry raises a one-line error with the entry and the valid values."""
    with pytest.raises(OptionError) as caught:
        syncheck.Options(**options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_starts_with_its_options() -> None:
    """An error names the fields of its options, and can be sent between processes."""
    for options, start in (
        ({"group_by": "("}, "group_by='('"),
        ({"jobs": 0}, "jobs=0"),
        ({"rtol": 0.5}, "rtol and atol"),
        ({"tolerance": {"a.*": 1}}, 'tolerance["a.*"]=1'),
    ):
        with pytest.raises(OptionError) as caught:
            syncheck.Options(**options)  # type: ignore[arg-type]
        error = caught.value
        assert str(error).startswith(start)
        messages = pickle.loads(pickle.dumps(error))
        assert (type(messages), str(messages)) == (OptionError, str(error))


def test_a_tolerance_in_a_call_replaces_the_options() -> None:
    """A tolerance in a call replaces all tolerances of the options."""
    from syncheck.options import replace_fields

    options = syncheck.Options(rtol=0.1, atol=0.1, tolerance={"fc.*": "close"}, allow=("SYN201",))
    assert replace_fields(options, ulp=2) == syncheck.Options(ulp=2, allow=("SYN201",))
    assert replace_fields(options, close=False) == syncheck.Options(allow=("SYN201",))
    assert replace_fields(options, allow=(), close=None) == syncheck.Options(
        rtol=0.1, atol=0.1, tolerance={"fc.*": "close"}
    )
