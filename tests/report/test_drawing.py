"""Reports as plain text, on a terminal, as HTML and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.groups import make_finding, make_group
from support.groups import text as message_of
from support.listings import find_first, find_texts, list_absent, list_names, list_starts, measure_width
from support.real_runs import FIXTURES, REAL, compare_real_runs

import syncheck
from syncheck.messages import Detail
from syncheck.readers import contents
from syncheck.records import Counts, Reason, Replica, Report, TensorDiff
from syncheck.report import html, json_document, parts, plain, terminal, text

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "a\x1b[31m<script>alert(1)</script>[bold]&\n$x$" + "n" * 150


@pytest.fixture(scope="module")
def report() -> Report:
    """Return the report of runs with and without drift."""
    return compare_real_runs()


@pytest.fixture(scope="module")
def hostile() -> Report:
    """Return a report with hostile names in all texts from files."""
    diff = TensorDiff(
        HOSTILE, "bn_mean", "float32", (2,), "different", replica_groups=((0, 1),), clusters=((0,), (1,)), mismatched=2,
        numel=2, max_abs=1.5, max_rel=None, max_ulp=None, index=(1,), nonfinite={0: 1, 1: 0}, extent="all",
    )  # fmt: skip
    finding = make_finding("SYN201", "bn-local-stats", "warning", (0, 1), (HOSTILE,), HOSTILE, "why", "fix")
    counts = Counts(tensors=1, different=1)
    replicas = (Replica(HOSTILE, 0, "torch-zip", 1, 8), Replica("b", 1, "torch-zip", 1, 8))
    group = make_group(
        HOSTILE, 3, "out_of_sync", replicas, counts, (diff,), findings=(finding,), kinds={"bn_mean": counts},
        notes=(message_of(HOSTILE),),
    )  # fmt: skip
    return Report("out_of_sync", (group,), drift=())


def test_plain_text_keeps_names_on_one_line(hostile: Report) -> None:
    """Without a terminal a name of 200 characters is on one line, escaped, without boxes."""
    drawn = plain.render(text.draw_comparison(hostile, 0))
    escaped = "a\\x1b[31m<script>alert(1)</script>[bold]&\\n$x$" + "n" * 150
    assert f"  {escaped}  bn_mean  0 | 1" in drawn
    assert "\x1b" not in drawn
    assert "─" not in drawn


@pytest.mark.parametrize("width", [80, 200])
def test_terminal_text_fits_and_nothing_is_cut(report: Report, width: int) -> None:
    """On terminals of 80 and 200 columns no line is too long, and all names of tensors are complete."""
    drawn = terminal.render(text.draw_comparison(report, 0), width, color=False)
    assert measure_width(drawn.splitlines()) <= width
    assert "…" not in drawn
    names = set(list_names(report.tensors))
    first_column = "".join(line.split()[0] for line in drawn.splitlines() if line.split())
    assert not list_absent(first_column, names)


def test_terminal_ignores_markup_from_files(hostile: Report) -> None:
    """Names with markup of rich and escape sequences are printed as text."""
    drawn = terminal.render(text.draw_comparison(hostile, 0), None, color=True)
    assert "[bold]" in drawn
    assert "\x1b[31m<script>" not in drawn


def test_plain_and_terminal_text_are_equal(report: Report) -> None:
    """Plain and terminal output have the same words and curves in the same order."""
    parts = text.draw_overview(report, 3)
    wide = re.sub("\\|\\S+\\|", "|curve|", terminal.render(parts, 400, color=False))
    simple = re.sub("\\|\\S+\\|", "|curve|", plain.render(parts))
    assert "drift  step 2: 0" in simple
    assert re.sub(r"[─\s]+", " ", wide).strip() == re.sub(r"\s+", " ", simple).strip()


def test_verdicts_are_not_wrapped(report: Report) -> None:
    """In the table of runs on a narrow terminal verdicts are not wrapped."""
    group = report.groups[0]
    crowded = {name: replace(count, not_compared=23) for name, count in group.kinds.items()}
    groups = tuple(replace(group, run=f"a-long-name-{i}", name=f"a-long-name-{i} step 6", kinds=crowded) for i in "12")
    for width in (70, 76, 80):
        drawn = terminal.render(text.draw_overview(Report("out_of_sync", groups), 1), width, color=False)
        table = drawn.split("\n\n")[0]
        assert table.count("OUT OF SYNC") == 2, drawn


def test_shards_are_listed_without_a_limit_only(report: Report) -> None:
    """With a limit shards are counted, because SYN104 summarizes them; without a limit they are listed."""
    bn = find_first(report.tensors, kind="bn_mean")
    shard = TensorDiff(
        "a.shard", "parameter", "float32", (2,), "not_compared", Reason.SHARDED, Detail.SHARDED(layout="no copy")
    )
    group = replace(report.groups[0], tensors=(bn, *[replace(shard, name=f"shard.{i}") for i in range(7)]))
    selected = plain.render(text.draw_comparison(Report("out_of_sync", (group,)), 3))
    assert ("shard.0" in selected, "... and 7 sharded; " in selected) == (False, True)
    everything = plain.render(text.draw_comparison(Report("out_of_sync", (group,)), 0))
    assert (everything.count("no copy"), "7 sharded; " in everything) == (7, False)


def test_columns_without_numbers_are_dropped(report: Report) -> None:
    """Tensors compared by digest have no columns of differences."""
    group = next(group for group in report.groups if group.tensors)
    by_digest = [replace(d, max_abs=None, mismatched=None, reason="digest", detail="mean 1 | 2") for d in group.tensors]
    drawn = plain.render(text.draw_comparison(Report("out_of_sync", (replace(group, tensors=tuple(by_digest)),)), 0))
    assert ("by digest: mean 1 | 2" in drawn, "max abs" in drawn) == (True, False)
    assert "max abs" in plain.render(text.draw_comparison(Report("out_of_sync", (group,)), 0))


def test_page_escapes_names(hostile: Report) -> None:
    """A name with a script element becomes text."""
    drawn = html.render(hostile, "0")
    assert drawn.count("<script") == drawn.count("</script>") == 3
    assert "&lt;script&gt;alert(1)" in drawn


def test_document_is_strict_json(hostile: Report) -> None:
    """The JSON document contains no NaN or infinity, and names are unescaped."""
    document = json.loads(json_document.render(hostile, "0"), parse_constant=lambda text: pytest.fail(text))
    assert document["groups"][0]["tensors"][0]["name"] == HOSTILE
    assert document["groups"][0]["tensors"][0]["nonfinite"] == {"0": 1, "1": 0}


@pytest.mark.parametrize("width", [80, 200])
def test_long_names_of_runs_have_their_own_line(report: Report, width: int) -> None:
    """A name of a run longer than two lines of its column is printed once, on a line above its rows."""
    group = report.groups[0]
    name = "ddp-fault-optimizer-on-one-rank"
    runs = [replace(group, run=f"{name}-{i}", name=f"{name}-{i} step {i}", step=i) for i in (1, 2)]
    drawn = terminal.render(text.draw_overview(Report("out_of_sync", tuple(runs)), 1), width, color=False)
    table = drawn.split("\n\n")[0].splitlines()
    assert measure_width(table) <= width
    starts = find_texts(table, start=name)
    assert list_starts(starts, "  ") == list_names(runs)
    assert "\uf8ff" not in drawn
    assert table[0].split()[0] == "run"


@pytest.mark.parametrize("color", [False, True])
def test_numbers_and_kinds_are_not_wrapped(report: Report, color: bool) -> None:
    """On 80 columns four different ranks, a large number of ULP and a long name are not wrapped."""
    bn = find_first(report.tensors, kind="bn_mean")
    name = "optimizer.layer4.1.conv2.weight.momentum_buffer"
    outlier = replace(
        bn, name=name, kind="optimizer_step", clusters=((0,), (1,), (2,), (3,)), mismatched=1000, numel=1000,
        max_abs=1.49, max_rel=1.9774, max_ulp=2120711899,
    )  # fmt: skip
    group = replace(report.groups[0], tensors=(outlier, replace(outlier, name="fc.weight")))
    drawn = terminal.render(text.draw_comparison(Report("out_of_sync", (group,)), 5, verbose=True), 80, color=color)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert measure_width(bare.splitlines()) <= 80
    assert f"\n  {name}" in bare
    assert re.search(r"optimizer_step +0 \| 1 \| 2 \| 3 +1000 of 1000 +1.49 +197.74% +2120711899", bare)


def test_names_are_wrapped_after_a_dot(report: Report) -> None:
    """A name on two lines is wrapped after a dot, or anywhere without a dot."""
    bn = find_first(report.tensors, kind="bn_mean")
    renamed = [replace(bn, name=name) for name in ("layer10.0.shortcut.1.running_mean", "n" * 33)]
    group = replace(report.groups[0], tensors=tuple(renamed))
    drawn = terminal.render(text.draw_comparison(Report("out_of_sync", (group,)), 5, verbose=True), 80, color=False)
    assert re.search(r"\n  layer10.0.shortcut.1.  +bn_mean .*\n  running_mean *\n", drawn)
    assert re.search(r"\n  n{20,32}  +bn_mean .*\n  n+ *\n", drawn)


def test_the_name_of_a_run_is_printed_once() -> None:
    """In the table of drift a long name is printed once above its steps."""
    grid = parts.Grid(("run", "step", "largest drift of a running statistic", "tensor"), right=("step",))
    name = "ddp-" + "long-" * 10 + "name"
    for step in (10, 20, 30):
        grid.add(name, str(step), "0.1969", "layer3.0.bn1.running_var")
    grid.add("short", "10", "0.1969", "layer3.0.bn1.running_var")
    drawn = terminal.render([grid], 58, color=False)
    assert measure_width(drawn.splitlines()) <= 58
    assert (drawn.count(name), drawn.count("0.1969"), drawn.count("short")) == (1, 4, 1)


def test_the_table_of_steps_contains_the_findings(report: Report) -> None:
    """The table of steps contains the codes of the findings, or a dash."""
    table = html.render(report, "0").partition('id="steps"')[2].partition("</table>")[0]
    cells = re.findall(r'SYNC</td><td class="">([^<]+)</td>', table)
    assert sorted(cells) == ["-", "-", "SYN201", "SYN202", "SYN202", "SYN202"]


def test_no_table_of_drift_without_running_statistics() -> None:
    """A run of several steps without BatchNorm has no table of drift."""
    without_statistics = syncheck.compare(FIXTURES / "desync/init_not_broadcast_over_steps")
    assert "running statistic" not in plain.render(text.draw_overview(without_statistics, 3))
    assert "running statistic" in plain.render(text.draw_overview(syncheck.compare(REAL[1]), 3))


def test_long_names_do_not_widen_tables(tmp_path: Path) -> None:
    """A name of thousands of characters is cut in the middle in every line of a text, and whole in the document."""
    stem = "m." + "x" * 3000
    names = [f"{stem}.weight", f"{stem}.bias", "head.weight"]
    paths = []
    for rank in range(2):
        tensors = {name: np.full((4, 4), rank + 1.0, np.float32) for name in names}
        paths.append(save_pth(tmp_path / f"rank{rank}.pth", {"model": tensors}))
    for report in (syncheck.compare(*paths), syncheck.diff(*paths)):
        drawn = plain.render(text.draw_comparison(report, 0))
        assert max(map(len, drawn.splitlines())) < 2000
        assert stem not in drawn
        assert "head.weight" in drawn
        document = json.loads(json_document.render(report, "0"))
        assert sorted(row["name"] for row in document["groups"][0]["tensors"]) == sorted(names)
    shown = plain.render(text.list_contents(contents.describe(str(paths[0]))))
    assert max(map(len, shown.splitlines())) < 300
