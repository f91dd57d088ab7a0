"""Sentences, tables and names shared by several formats."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import Done, network, save, save_pth
from support.dtensors import save_ranks
from support.hostile_report import HOSTILE, hostile
from support.listings import list_names

import syncheck
from syncheck.api import Options
from syncheck.diagnose import syn108_different_runs
from syncheck.messages import Grouping, Hint, Note, Undecided
from syncheck.records import Counts, Fixed, Group, Place, Replica, TensorDiff
from syncheck.report import formats, plain, tables, text, words
from syncheck.report.tables import sort_worst_first
from syncheck.report.undecided import undecided_reason
from syncheck.text import Side

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.layout.replica_groups import Sets


@pytest.mark.parametrize(
    "groups, clusters, shown",
    [
        ((), ((0, 2, 3), (1,)), "0,2-3 | 1"),
        (((0, 1, 2, 3),), ((0, 2, 3), (1,)), "0,2-3 | 1"),
        (((0, 2), (1, 3)), ((0,), (2,), (1,), (3,)), "0 | 2; 1 | 3"),
        (((0, 2), (1, 3)), ((1,), (3,)), "1 | 3"),
        (((0, 2, 4), (1, 3, 5)), ((0, 4), (2,), (1, 3), (5,)), "0,4 | 2; 1,3 | 5"),
        ((tuple(range(6)),), tuple((rank,) for rank in range(6)), "0 | 1 | 2 | 3 | 2 more"),
        (
            tuple((rank, rank + 6) for rank in range(6)),
            ((0,), (6,), (1,), (7,), (2,), (8,), (3,), (9,), (4,), (10,), (5,), (11,)),
            "0 | 6; 1 | 7; 2 | 8; 3 | 9; 2 more",
        ),
    ],
)
def test_clusters_of_ranks(groups: Sets, clusters: Sets, shown: str) -> None:
    """Bars separate sets of ranks with equal bytes; semicolons separate replica groups."""
    diff = TensorDiff("w", "parameter", "float32", (2,), "different", replica_groups=groups, clusters=clusters)
    assert tables.clusters_text(diff) == shown


@pytest.mark.parametrize(
    "file_format, expected",
    [("torch-zip", "A m on rank 1 (rank 1), B b.pth"), ("memory", "A m on rank 1, B b.pth")],
)
def test_rank_of_the_largest_difference(file_format: str, expected: str) -> None:
    """The rank of a file is printed whatever its name is; the path of a model in memory states the rank."""
    replicas = tuple(
        Replica("m", side, file_format, 1, 8, label=side.name, files=2 if side is Side.A else 1) for side in Side
    )
    places = {Side.A: Place("m on rank 1", 1), Side.B: Place("b.pth")}
    diff = TensorDiff("w", "parameter", "float32", (2,), "different", places=places)
    group = Group("m", "m", None, replicas, Counts(1, different=1), (diff,))
    assert tables.place_lines([diff], group) == [f"largest difference of w: {expected}"]


def test_reason_if_all_tensors_are_shards(tmp_path: Path) -> None:
    """If every rank holds its own shards, the reason of the verdict is shards and not options."""
    parts = {rank: np.full((4, 3), rank, np.float32) for rank in range(2)}
    save_ranks(tmp_path, parts, ["S(0)"], (2,))
    report = syncheck.compare(tmp_path)
    assert undecided_reason(report).code is Undecided.ONLY_SHARDS
    for rank in range(2):
        save_pth(tmp_path / "other" / f"rank{rank}.pth", {"w": parts[rank]})
    excluded = syncheck.compare(tmp_path / "other", options=Options(exclude=("*",)))
    assert undecided_reason(excluded) == Undecided.ALL_EXCLUDED(count=1)


def test_two_models_of_different_runs_are_for_diff(tmp_path: Path) -> None:
    """Files of two runs, alone or in one group with whole and divided tensors, have the command for two models."""
    tensor = np.arange(24, dtype=np.float32).reshape(8, 3)
    block, other_block = (syncheck.metadata(run=run, run_id=run, rank=0, world_size=2) for run in ("fsdp", "ddp"))
    (part,) = save_ranks(tmp_path, {0: tensor[:4]}, ["S(0)"], (2,), syncheck={0: block})
    whole = save_pth(tmp_path / "ddp_rank0.pth", {"w": tensor, "syncheck": other_block})
    alone = syncheck.compare([str(part), str(whole)])
    assert undecided_reason(alone).code is Undecided.NO_REPLICAS
    together = syncheck.compare([str(part), str(whole)], options=Options(group_by=""))
    assert undecided_reason(together).code is Undecided.OF_OTHER_RUNS
    # One file more has a replica.
    save_pth(tmp_path / "x" / "rank0.pth", {"w": tensor})
    save_pth(tmp_path / "x" / "rank1.pth", {"w": tensor})
    some = syncheck.compare([str(part), str(tmp_path / "x")])
    assert undecided_reason(some).code is Undecided.SOME_ALONE
    reasons = [undecided_reason(report) for report in (alone, together, some)]
    advice = [*reasons, syn108_different_runs.Text.FIX(), Hint.GROUP_FILES()]
    for sentence in advice:
        assert "syncheck diff A B" in str(sentence)


def test_an_empty_match_has_a_name(tmp_path: Path) -> None:
    """Without a text of the expression, the group of all files and the rest beside other groups have names."""
    paths = []
    for name in ("a1", "a2", "b1", "b2"):
        paths.append(str(save(tmp_path / f"{name}.pth", network())))
    (group,) = syncheck.compare(paths, options=Options(group_by="")).groups
    assert words.group_title(group) == "all files, 4 replicas"
    groups = syncheck.compare(paths, options=Options(group_by="/(a)?[^/]*$")).groups
    assert [group.name for group in groups] == ["a", "other files"]


def diff(name: str, kind: str = "parameter", **changes: object) -> TensorDiff:
    """Return a tensor that differs."""
    fields = {"status": "different", "max_abs": 0.1, "nonfinite": {0: 0, 1: 0}} | changes
    return TensorDiff(name, kind, "float32", (4,), **fields)


def test_order_of_tensors() -> None:
    """NaN on one rank, then parameters by difference, running statistics, counters, and tensors not compared."""
    nan = diff("nan", max_abs=None, nonfinite={0: 0, 1: 1})
    infinite = diff("both", max_abs=0.2, nonfinite={0: 3, 1: 3})
    flipped = diff("flipped", "optimizer", max_abs=1e-9)
    mean = diff("mean", "bn_mean", max_abs=0.5)
    counter = diff("counter", "bn_count", max_abs=1.0)
    shard = diff("shard", status="not_compared", reason="sharded", max_abs=None)
    output = list_names(sort_worst_first([counter, mean, shard, flipped, infinite, nan]))
    assert output == ["nan", "both", "flipped", "mean", "counter", "shard"]


def test_report_prints_each_note_once(cli: Callable[..., Done], tmp_path: Path) -> None:
    """A note common to several runs is printed once; the grouping of files is not printed."""
    for run in ("one", "two"):
        for rank in range(2):
            save(tmp_path / f"ckpts/{run}_rank{rank}.pth", network())
    done = cli("report", "ckpts", "--quick")
    assert done.code == 0
    assert done.out.count(str(Note.QUICK()).partition(",")[0]) == 1
    assert str(Grouping.RANKS_IN_NAMES()) not in done.out


def test_names_of_the_baseline_are_escaped() -> None:
    """A resolved finding adds one line of bounded length, and one notice on GitHub, for every hostile name."""
    group = hostile("calm").groups[0]
    report = replace(hostile("calm"), groups=(group,))
    for name in HOSTILE:
        fixed = replace(report, groups=(replace(group, label=name, fixed=(Fixed(name, (name,) * 9),)),))
        (line,) = words.fixed_lines(fixed.groups)
        assert len(line) < 1500
        assert line.isprintable()
        for parts in (text.draw_comparison, text.draw_overview):
            assert line in plain.render(parts(fixed, 0)).splitlines() or "#" in name, name
        before = formats.render_format("github", report).splitlines()
        after = formats.render_format("github", fixed).splitlines()
        assert len(after) == len(before) + 1
        added = next(line for line in after if line not in before)
        assert added.startswith("::notice ")
        assert next(ET.fromstring(formats.render_format("junit", fixed)).iter("property")) is not None
        assert len(formats.render_format("markdown", fixed)) < 60_000


@pytest.mark.slow
def test_names_of_the_baseline_are_escaped_in_html() -> None:
    """The page contains one line per resolved finding, and no script from a name."""
    report = hostile("calm")
    fixed = tuple(Fixed("SYN201", (name,)) for name in HOSTILE)
    page = formats.render_format("html", replace(report, groups=(replace(report.groups[0], fixed=fixed),)))
    assert page.count(">fixed: ") == len(HOSTILE)
    report = replace(report, groups=report.groups[:1])
    assert len(re.findall("<script", page)) == len(re.findall("<script", formats.render_format("html", report)))


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("change", ["nothing", "noise", "scale"])
def test_nan_in_one_model_comes_first(tmp_path: Path, side: str, change: str) -> None:
    """Before all findings, a report of two models names the tensor with NaN, the numbers, and one of the elements."""
    rng = np.random.default_rng(0)
    model = {f"{name}.weight": rng.standard_normal((16, 8), np.float32) for name in ("first", "second")}
    changes = {"nothing": lambda w: w.copy(), "noise": lambda w: w + 1e-3 * w**2, "scale": lambda w: 2 * w}
    broken = {name: changes[change](weight) for name, weight in model.items()}
    broken["second.weight"][3:5] = np.nan
    paths = [save_pth(tmp_path / f"{name}.pth", tree) for name, tree in (("model", model), ("broken", broken))]
    report = syncheck.diff(*(paths if side == "B" else paths[::-1]))
    (line,) = words.one_sided_lines(report)
    assert [word in line for word in ("second.weight", "16 in " + side, "of 128", "[3, 0]")] == [True] * 4
    summary = plain.render(text.draw_comparison(report, 5)).partition("\nOUT OF SYNC")[2]
    assert summary.index(line[:40]) < summary.index("SYN")
    for name in ("github", "markdown", "html"):
        assert "more NaN or infinite elements in one model" in formats.render_format(name, report)


def test_nan_in_both_models_is_no_difference(tmp_path: Path) -> None:
    """Equal NaN in both models are no news about one of them."""
    model = {"w": np.full((16, 8), np.nan, np.float32), "b": np.ones(3, np.float32)}
    paths = [save_pth(tmp_path / f"{i}.pth", model | {"b": np.full(3, i, np.float32)}) for i in (0, 1)]
    assert words.one_sided_lines(syncheck.diff(*paths)) == []
