"""Test items of `--syncheck`: ids, texts, and compatibility with options of pytest and with other plugins."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_pth
from support.listings import find_texts, measure_width
from support.sessions import find_failure, session, sessions

from syncheck import metadata
from syncheck.messages import Note
from syncheck.text import TYPED_IN_PYTEST, options_as_typed

if TYPE_CHECKING:
    from pathlib import Path

BN = ("running_mean", "running_var")
with options_as_typed(TYPED_IN_PYTEST):
    KINDS_GUESSED = str(Note.KINDS_GUESSED())
EVIL = "[red]\x1b[31m\n::x\x00\u202e]]>"


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """Two checkpoints with different running statistics, and two equal checkpoints of another run."""
    for rank in range(2):
        save(tmp_path / "ckpts" / f"ddp_rank{rank}.pth", changed(network(), *BN) if rank else network())
        save(tmp_path / "ckpts" / f"ddp-syncbn_rank{rank}.pth", network())
    return tmp_path


def test_failures_have_no_traceback(drifted: Path) -> None:
    """A failing item prints finding, cause, fix, its worst tensors and its counts, and no code of the plugin."""
    wide, uncached, short, native = sessions(
        (drifted, ["--syncheck", "ckpts"]),
        (drifted, ["--syncheck", "ckpts", "-p", "no:cacheprovider"]),
        (drifted, ["--syncheck", "ckpts", "--tb=line"]),
        (drifted, ["--syncheck", "ckpts", "--tb=native"]),
    )
    text = find_failure(wide.out, "syncheck ckpts::ddp::bn-stats")
    for part in (
        "SYN201 bn-local-stats (warning, likely) on ranks 0-1",
        ": 4 of 4 differ",
        "  why   ",
        "  fix   ",
    ):
        assert part in text
    assert "--syncheck-allow SYN201" in text
    assert " --allow" not in text
    assert "bn_count        2          2      0      0          0             0" in text
    assert text.count("running_var") == 3  # two rows, and the evidence
    assert "fc.weight" not in text
    assert "rank 1: ckpts/ddp_rank1.pth (torch-zip, " in text
    summary = find_texts(wide.lines, start="FAILED ")[0]
    assert summary.startswith("FAILED ckpts::ddp::bn-stats - SYN201 bn-local-stats (warning, likely) on ranks 0-1: ")
    assert uncached.code == short.code == native.code == 1
    for ended in (wide, uncached, short, native):
        assert "Traceback" not in ended.out
        assert ".py" not in ended.out.partition("FAILURES")[2]
    assert f"{drifted}/ckpts:0: SYN201 bn-local-stats" in short.out


def test_texts_are_bounded(tmp_path: Path) -> None:
    """A failure lists the worst tensors, with the ends of very long names, and the option that lists all."""
    for rank in range(2):
        state = {f"{'deep.' * 60}{i}.weight": np.full(3, rank, np.float32) for i in range(30)}
        save(tmp_path / f"ddp_rank{rank}.pth", state)
    text = find_failure(session(tmp_path, "--syncheck", "*.pth").out, "syncheck .::ddp::parameters")
    assert text.count(".weight  parameter ") == 10
    assert "... and 20 more; --syncheck-output FILE.html lists all" in text
    assert measure_width(text.splitlines()) < 1000


def test_one_group_per_run_and_step(tmp_path: Path) -> None:
    """Each step of a run is a group, and ids contain the step only if there are several."""
    for step in (2, 10):
        for rank in range(2):
            block = metadata(run="ddp", rank=rank, world_size=2, step=step, run_id="a")
            tree = {"model": network(), "syncheck": block}
            save_pth(tmp_path / "history" / "ddp" / f"step_{step}" / f"rank_{rank}.pth", tree)
    both, first = sessions(
        (tmp_path, ["--collect-only", "-q", "--syncheck", "history"]),
        (tmp_path, ["--collect-only", "-q", "--syncheck", "history/ddp/step_2"]),
    )
    items = ("parameters", "bn-stats", "values")
    ids = [f"history/ddp::ddp-step-{step}::{item}" for step, item in product((2, 10), items)]
    assert both.lines[:6] == ids
    assert "6 tests collected" in both.out
    assert first.lines[:3] == [f"history/ddp::ddp::{item}" for item in items]


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [
        "plain",
        "a::b[c] d",
        "\udcff\x1b[31m",
    ],
    ids=["plain", "brackets", "bytes"],
)
def test_hostile_names_leave_ids_and_junit_valid(tmp_path: Path, folder: str) -> None:
    """Ids and XML are valid with control characters, brackets and `::` in names of runs, files and tensors."""
    target = tmp_path / folder
    for rank in range(2):
        for run_id in ("one", "two"):
            block = metadata(run=EVIL, rank=rank, world_size=2, step=1, run_id=run_id)
            tree = {
                "model": {EVIL: np.full(3, rank, np.float32), "\udc80": np.ones(1)},
                "syncheck": block,
                "step": EVIL,
            }
            save_pth(target / run_id / f"r{rank}.pth", tree)
    (target / f"{EVIL[:8]}.pth").write_bytes(b"")
    base = ["--syncheck", ".", "-p", "no:cacheprovider"]
    first, spread, listing = sessions(
        (tmp_path, [*base, "-rA", "--junitxml", "one.xml"]),
        (tmp_path, [*base, "-v", "-n", "2", "--junitxml", "spread.xml"]),
        (tmp_path, [*base, "--collect-only", "-q"]),
    )
    ids = find_texts(listing.lines, "::")
    assert len(set(ids)) == len(ids) == 5
    assert all(nodeid.isprintable() and nodeid.count("::") == 2 and "[" not in nodeid for nodeid in ids), ids
    assert set(spread.outcomes()) == set(ids), spread.out
    assert first.code == spread.code == 1
    for ended in (first, spread, listing):
        assert "\x1b[31m" not in ended.out
        assert "\x00" not in ended.out
        assert "\u202e" not in ended.out
    for name in ("one.xml", "spread.xml"):
        assert len(ET.parse(tmp_path / name).getroot().findall(".//testcase")) == 5


@pytest.mark.slow
def test_equal_names_after_escaping_are_numbered(tmp_path: Path) -> None:
    """Runs with equal names after escaping have different ids, the same on every worker."""
    for name in ("a::b", "a:b", "a[b", "a(b"):
        for rank in range(2):
            block = metadata(run=name, rank=rank, world_size=2, run_id="one")
            tree = {"w": np.full(2, rank if name == "a:b" else 0, np.float32), "syncheck": block}
            save_pth(tmp_path / f"{'abcd'[len(list(tmp_path.glob('*.pth'))) // 2]}_rank{rank}.pth", tree)
    first, spread = sessions(
        (tmp_path, ["-v", "--syncheck", "*.pth"]), (tmp_path, ["-v", "--syncheck", "*.pth", "-n", "2"])
    )
    ids = {f".::{name}::parameters" for name in ("a:b", "a:b~2", "a(b", "a(b~2")}
    assert set(first.outcomes()) == ids, first.out
    assert first.outcomes() == spread.outcomes(), spread.out
    assert sorted(first.outcomes().values()) == ["FAILED", "PASSED", "PASSED", "PASSED"]


@pytest.mark.slow
def test_junit_has_the_numbers(drifted: Path) -> None:
    """Verdict, findings, counts and the worst tensor are properties of each test case, with -n too."""
    sessions(
        (drifted, ["--syncheck", "ckpts", "--junitxml", "one.xml"]),
        (drifted, ["--syncheck", "ckpts", "--junitxml", "spread.xml", "-n", "2"]),
    )
    for name in ("one.xml", "spread.xml"):
        cases = {
            (case.get("classname"), case.get("name")): case
            for case in ET.parse(drifted / name).getroot().findall(".//testcase")
        }
        assert set(cases) == {
            (f"ckpts.{run}", item) for run, item in product(("ddp", "ddp-syncbn"), ("parameters", "bn-stats"))
        }
        failed, passed = cases["ckpts.ddp", "bn-stats"], cases["ckpts.ddp-syncbn", "bn-stats"]
        properties = {each.get("name"): each.get("value") for each in failed.findall(".//property")}
        assert properties.pop("syncheck_notes") == str(KINDS_GUESSED)
        assert properties.pop("syncheck_worst") in {
            f"layer{i}.bn.{source_value}" for i, source_value in product(range(2), BN)
        }
        assert properties == {
            "syncheck_verdict": "out_of_sync",
            "syncheck_replicas": "2",
            "syncheck_findings": "SYN201",
            "syncheck_tensors": "6",
            "syncheck_identical": "2",
            "syncheck_equal": "0",
            "syncheck_close": "0",
            "syncheck_different": "4",
            "syncheck_not_compared": "0",
            "syncheck_max_abs": "1",
        }
        (element,) = failed.findall("failure")
        assert str(element.get("message")).startswith("SYN201 bn-local-stats (warning, likely) on ranks 0-1: ")
        assert "fix   " in str(element.text)
        assert passed.find("failure") is None


@pytest.mark.slow
def test_selecting_and_stopping(drifted: Path) -> None:
    """-k, -m, --deselect, -x, --lf, --ff and --collect-only work as for other tests."""
    base = ["-v", "--syncheck", "ckpts"]
    first, last_failed, stopped, chosen, deselected, marked, spread, scoped = sessions(
        (drifted, base),
        (drifted, [*base, "--lf"]),
        (drifted, [*base, "-x", "--ff"]),
        (drifted, [*base, "-k", "syncbn and not parameters"]),
        (drifted, [*base, "--deselect", "ckpts::ddp::bn-stats"]),
        (drifted, [*base, "-m", "not slow", "-p", "no:terminalprogress"]),
        (drifted, [*base, "-n", "2"]),
        (drifted, [*base, "-n", "2", "--dist", "loadscope"]),
    )
    failed = {"ckpts::ddp::bn-stats": "FAILED"}
    passed = {"ckpts::ddp::parameters": "PASSED"} | {
        f"ckpts::ddp-syncbn::{item}": "PASSED" for item in ("parameters", "bn-stats")
    }
    assert (first.code, first.outcomes()) == (1, failed | passed), first.out
    assert (last_failed.code, last_failed.outcomes()) == (1, failed), last_failed.out
    assert (stopped.code, stopped.outcomes()) == (1, failed), stopped.out
    assert (chosen.code, chosen.outcomes()) == (0, {"ckpts::ddp-syncbn::bn-stats": "PASSED"}), chosen.out
    assert (deselected.code, deselected.outcomes()) == (0, passed), deselected.out
    assert (marked.code, marked.outcomes()) == (1, failed | passed), marked.out
    for run in (spread, scoped):
        assert (run.code, run.outcomes()) == (1, failed | passed), run.out
        assert "bn-stats 4/6 differ (SYN201)" in run.out


@pytest.mark.slow
def test_other_plugins_and_the_conftest_of_a_project(drifted: Path) -> None:
    """Coverage, time limits, and a conftest that treats every item as a function work."""
    (drifted / "conftest.py").write_text(
        "import pytest\n\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    for item in items:\n"
        "        assert item.path.exists() and str(item.fspath) and item.location and item.name\n"
        "        assert item.get_closest_marker('slow') is None and 'gpu' not in item.keywords\n"
        "        item.add_marker(pytest.mark.seen)\n\n"
        "@pytest.fixture(autouse=True)\n"
        "def every_test():\n"
        "    yield\n\n"
        "@pytest.hookimpl(wrapper=True)\n"
        "def pytest_runtest_makereport(item, call):\n"
        "    report = yield\n"
        "    item.rep_call = report\n"
        "    return report\n\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'seen: by the conftest')\n"
    )
    (drifted / "test_suite.py").write_text("def test_own():\n    pass\n")
    base = ["--syncheck", "ckpts/ddp-syncbn*.pth", "test_suite.py", "--strict-markers", "-W", "error"]
    for ended in sessions(
        (drifted, [*base, "--timeout", "30", "--cov", "test_suite"]),
        (drifted, [*base, "--timeout", "30", "--timeout-method", "thread", "-n", "2", "--dist", "loadfile"]),
        (drifted, [*base, "--maxfail=1", "--durations=3", "--setup-show"]),
        (drifted, [*base, "-q", "--no-header", "--no-summary"]),
    ):
        assert ended.code == 0, ended.out
        assert "3 passed" in ended.out


def test_missing_ranks_and_other_files_are_reported(tmp_path: Path) -> None:
    """A missing rank and files other than checkpoints are reported, and are not failures."""
    for rank in range(2):
        block = metadata(run="ddp", rank=rank, world_size=3, run_id="a")
        save_pth(tmp_path / "ckpts" / f"ddp_rank{rank}.pth", {"model": network(), "syncheck": block})
    (tmp_path / "ckpts" / "log.txt").write_text("a log")
    ended = session(tmp_path, "--syncheck", "ckpts")
    assert ended.code == 0
    assert f"note: {Note.RANKS_ABSENT(ranks=(2,), world_size=3)}" in ended.out
    assert "syncheck: 2 checkpoints, 1 group, 1 other files skipped" in ended.out


@pytest.mark.slow
def test_the_summary_is_bounded(tmp_path: Path) -> None:
    """The summary of many groups lists the worst first and counts the others, with and without -n."""
    for i in range(30):
        for rank in range(2):
            state = {"w": np.full(2, rank if i == 29 else 0, np.float32)}
            save(tmp_path / f"run{chr(97 + i % 26)}{chr(97 + i // 26)}_rank{rank}.pth", state)
    (tmp_path / "lone.pth").write_bytes((tmp_path / "runaa_rank0.pth").read_bytes())
    for ended in sessions((tmp_path, ["--syncheck", ".", "-rf"]), (tmp_path, ["--syncheck", ".", "-rf", "-n", "1"])):
        section = re.split(r"^=+ syncheck =+$", ended.out, flags=re.MULTILINE)[1].split("\n===")[0]
        lines = section.strip().splitlines()
        assert lines[0] == "OUT OF SYNC  .::rundb: parameters 1/1 differ (SYN299)", section
        assert len(lines) == 22
        assert lines[1].startswith("COULD NOT TELL  .::lone: ")
        assert lines[20] == "... and 11 more groups: 11 in sync"
        assert lines[21] == f"note on 30 of 31 groups: {KINDS_GUESSED}"
        assert "no replica to compare with: " in ended.out
