"""The exit code of pytest with `--syncheck` agrees with `syncheck.compare`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_pth
from support.dtensors import save_ranks
from support.groups import make_finding, make_group
from support.listings import find_texts, list_fields
from support.sessions import session, sessions
from support.states import omit

import syncheck
from syncheck import api
from syncheck.messages import Refusal
from syncheck.pytest_plugin.checkpoints.judge import judge_planned
from syncheck.pytest_plugin.checkpoints.plan import Planned
from syncheck.records import Counts, Reason, TensorDiff
from syncheck.report.items import findings_of_item
from syncheck.text import to_flag

if TYPE_CHECKING:
    from collections.abc import Callable

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = {"state": {0: {"step": np.array(3.0, np.float32), "exp_avg": np.ones(3, np.float32)}}}


def ranks(*trees: Any, name: str = "run_rank{}.pth") -> Callable[[Path], None]:
    """Return a function that writes one checkpoint per rank."""

    def write(folder: Path) -> None:
        for rank, tree in enumerate(trees):
            save_pth(folder / name.format(rank), tree)

    return write


def several(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that calls all of these functions."""
    return lambda folder: [writer(folder) for writer in writers] and None


def empty(folder: Path) -> None:
    """Write an unreadable checkpoint."""
    (folder / "broken.pth").write_bytes(b"")


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a state dict without a tensor."""
    return omit(state, name)


SAME = ranks(network(), network())
BIAS = ranks(network(), changed(network(), "fc.bias"), name="bias_rank{}.pth")
DRIFT = ranks(network(), changed(network(), "running_var"), name="drift_rank{}.pth")
RNG = ranks(*({"rng_state": np.full(4, rank, np.int64)} for rank in range(2)))
LONE = ranks(network(3), name="lone{}.pth")
# Functions that write checkpoints, and options of the comparison.
CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "equal": (SAME, {}),
    "parameters": (BIAS, {}),
    "statistics": (DRIFT, {}),
    "statistics allowed": (DRIFT, {"allow": ("SYN201",)}),
    "another allowed": (DRIFT, {"allow": ("SYN299",)}),
    "one of two runs": (several(SAME, BIAS), {}),
    "three ranks": (ranks(network(), network(), changed(network(), "fc.bias")), {}),
    "within a tolerance": (ranks(network(), changed(network(), "fc.bias", by=1e-7)), {"rtol": 1e-3, "atol": 1e-3}),
    "outside a tolerance": (BIAS, {"rtol": 1e-3, "atol": 1e-3}),
    "missing": (ranks(network(), without(network(), "fc.bias")), {}),
    "shape": (ranks(network(), network() | {"fc.bias": np.ones(3, np.float32)}), {}),
    "dtype": (ranks(network(), network() | {"fc.bias": np.ones(10, np.float64)}), {}),
    "not a number on one": (ranks(network(), network() | {"fc.bias": np.full(10, np.nan, np.float32)}), {}),
    "a prefix": (ranks(network(), {f"module.{name}": of for name, of in network().items()}), {}),
    "one file": (LONE, {}),
    "one file beside two": (several(SAME, LONE), {}),
    "one file beside two that differ": (several(BIAS, LONE), {}),
    "unreadable": (empty, {}),
    "unreadable beside two": (several(SAME, empty), {}),
    "unreadable beside two that differ": (several(BIAS, empty), {}),
    "unreadable beside one": (several(LONE, empty), {}),
    "no tensor": (ranks({}, {}), {}),
    "values alone": (ranks({"step": 1}, {"step": 1}), {}),
    "values alone that differ": (ranks({"step": 1}, {"step": 2}), {}),
    "step": (ranks({"model": network(), "step": 1}, {"model": network(), "step": 2}), {}),
    "step, parameters only": (
        ranks({"model": network(), "step": 1}, {"model": network(), "step": 2}),
        {"only": ("params",)},
    ),
    "a note": (ranks({"model": network(), "note": "a"}, {"model": network(), "note": "b"}), {}),
    "a scaler's state": (ranks(*({"model": network(), "scaler": {"scale": 2.0**rank}} for rank in range(2))), {}),
    "an optimizer": (ranks(*({"model": network(), "optimizer": STEP} for _ in range(2))), {}),
    "an optimizer alone": (ranks(*({"optimizer": STEP} for _ in range(2))), {}),
    "an optimizer's steps alone": (
        ranks(*({"optimizer": {"state": {0: {"step": np.array(3.0, np.float32)}}}} for _ in range(2))),
        {},
    ),
    "an averaged copy": (ranks(*({"model": network(), "ema": {"w": np.full(2, r, np.float32)}} for r in range(2))), {}),
    "random states": (RNG, {}),
    "rng on request": (RNG, {"only": ("rng",)}),
    "nothing matches": (SAME, {"include": ("nothing",)}),
    "all left out": (BIAS, {"exclude": ("*",)}),
    "the difference left out": (BIAS, {"exclude": ("fc.*",)}),
    "nothing matches in one of two": (
        several(SAME, ranks({"w": np.ones(2, np.float32)}, {"w": np.zeros(2, np.float32)}, name="w_rank{}.pth")),
        {"include": ("fc.*",)},
    ),
    "buffers of what has none": (ranks(*({"w": np.ones(2, np.float32)} for _ in range(2))), {"only": ("buffers",)}),
    "grouped into one": (several(SAME, BIAS), {"group_by": "(rank)"}),
    "grouped into many": (SAME, {"group_by": "(rank.)"}),
    "steps": (several(*(ranks(network(), network(), name=f"step_{n}/rank_{{}}.pth") for n in (1, 2))), {}),
}  # fmt: skip


def arguments(options: dict[str, Any]) -> list[str]:
    """Convert options of the library into options of the plugin."""
    settings = []
    for name, value in options.items():
        settings += [
            f"{to_flag(name, '--syncheck-')}={each}" for each in (value if isinstance(value, tuple) else (value,))
        ]
    return settings


@pytest.mark.slow
def test_pytest_agrees_on_constructed_cases(tmp_path: Path) -> None:
    """For cases of every kind, pytest exits with 0 if and only if the library returns in sync."""
    jobs, expected = [], []
    for number, (write, options) in enumerate(CASES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder)
        jobs.append((folder, ["--syncheck", ".", "-v", "-p", "no:cacheprovider", *arguments(options)]))
        expected.append(syncheck.compare(folder, options=syncheck.Options(**options)).exit_code)
    assert set(expected) == {0, 1, 2}
    for name, code, ended in zip(CASES, expected, sessions(*jobs), strict=True):
        assert (name, ended.code) == (name, int(code != 0)), ended.out
        assert ended.outcomes(), ended.out


@pytest.mark.parametrize("name", CASES)
def test_items_are_planned_from_names(tmp_path: Path, name: str) -> None:
    """The kinds planned from names are the kinds counted by the comparison."""
    write, settings = CASES[name]
    write(tmp_path)
    options = syncheck.Options(**settings)
    findings = api.find(tmp_path, options=options)
    for replicas, group in zip(findings.groups, api.judge(findings, options).groups, strict=True):
        kinds = set(api.kinds_in(replicas, options))
        if group.verdict != "alone":
            assert kinds - {"value"} == set(group.kinds) - (set() if "rng" in options.only else {"rng"})
        if any(list_fields(group.values, "counts")):
            assert "value" in kinds


@pytest.mark.slow
def test_pytest_agrees_on_real_runs(tmp_path: Path) -> None:
    """pytest and the library agree on the fixtures and their subfolders."""
    folders = [FIXTURES, *(folder for part in ("desync", "in_sync") for folder in sorted((FIXTURES / part).iterdir()))]
    ended = sessions(*((tmp_path, ["--syncheck", folder, "-p", "no:cacheprovider"]) for folder in folders))
    for folder, run in zip(folders, ended, strict=True):
        assert run.code == syncheck.compare(folder).exit_code, run.out


@pytest.mark.slow
def test_pytest_agrees_on_random_cases(tmp_path: Path) -> None:
    """For random faults and options, pytest exits with 0 if and only if the library returns in sync."""
    jobs, expected = [], []
    for seed in range(40):
        folder = tmp_path / str(seed)
        options = random_case(random.Random(seed), folder)
        jobs.append((folder, ["--syncheck", ".", "-p", "no:cacheprovider", *arguments(options)]))
        expected.append(syncheck.compare(folder, options=syncheck.Options(**options)).exit_code)
    assert set(expected) == {0, 1, 2}
    for seed, (code, ended) in enumerate(zip(expected, sessions(*jobs), strict=True)):
        assert (seed, ended.code) == (seed, int(code != 0)), ended.out


def random_case(chance: random.Random, folder: Path) -> dict[str, Any]:
    """Write random runs with random faults, and return random options."""
    for run in range(chance.randint(1, 3)):
        faulty = chance.random() < 0.4
        for rank in range(chance.choice((1, 2, 2, 3))):
            model = network(layers=1)
            if faulty and chance.random() < 0.6:
                ending = chance.choice(("running_mean", "fc.bias", "bn.weight", "num_batches_tracked"))
                model = changed(model, ending)
            if faulty and chance.random() < 0.1:
                del model["fc.weight"]
            tree: dict[str, Any] = {"model": model, "step": 5 + (faulty and chance.random() < 0.2)}
            path = save_pth(folder / f"{'abc'[run]}_rank{rank}.pth", tree)
            if chance.random() < 0.05:
                path.write_bytes(path.read_bytes()[:99])
    options: dict[str, Any] = {}
    if chance.random() < 0.4:
        options["allow"] = tuple(chance.sample(("SYN201", "SYN203", "SYN106", "SYN299", "SYN101"), 2))
    if chance.random() < 0.2:
        options["only"] = (chance.choice(("params", "buffers", "optimizer")),)
    if chance.random() < 0.2:
        options["exclude"] = (chance.choice(("fc.*", "layer0.bn.*", "*")),)
    if chance.random() < 0.2:
        options |= {"rtol": 1.0, "atol": 9.0}
    return options


@pytest.mark.parametrize("spread", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_file_damaged_during_the_run_fails(tmp_path: Path, spread: tuple[str, ...]) -> None:
    """A file truncated, removed or replaced after it was opened fails every item of its group and no other."""
    for run in ("cut", "gone", "other", "folder", "whole"):
        for rank in range(2):
            save(tmp_path / f"{run}_rank{rank}.pth", network())
    (tmp_path / "conftest.py").write_text(
        "import contextlib, os\n\n"
        "def pytest_runtest_logstart():\n"
        "    with contextlib.suppress(OSError):\n"
        "        os.truncate('cut_rank1.pth', 100)\n"
        "        os.rename('gone_rank0.pth', 'gone')\n"
        "        for rank in range(2):\n"
        "            os.replace(f'new{rank}', f'other_rank{rank}.pth')\n"
        "        os.unlink('folder_rank1.pth')\n"
        "        os.mkdir('folder_rank1.pth')\n"
    )
    for rank in range(2):  # equal at the offsets of the earlier tensors
        save(tmp_path / "new.pth", network() | {"more": np.full(9, rank, np.float32)}).rename(tmp_path / f"new{rank}")
    (ended,) = sessions((tmp_path, ["-v", "--syncheck", "*.pth", "--syncheck-output", "a.json", *spread]))
    assert ended.code == 1
    for run in ("cut", "gone", "other", "folder", "whole"):
        word = "PASSED" if run == "whole" else "FAILED"
        assert {ended.outcomes()[f".::{run}::{item}"] for item in ("parameters", "bn-stats")} == {word}, ended.out
    for file in ("cut_rank1.pth", "gone_rank0.pth", "other_rank0.pth", "folder_rank1.pth"):
        assert f"could not tell: unreadable since the run began: {file}: " in ended.out
    assert "Traceback" not in ended.out


def test_every_failing_finding_fails_an_item() -> None:
    """A finding on two kinds fails both items; a finding without tensors fails all items of its group."""
    diffs = (
        TensorDiff("w", "parameter", "float32", (2,), "different"),
        TensorDiff("m", "bn_mean", "float32", (2,), "different"),
    )

    def items_of(tensors: tuple[str, ...], values: tuple[str, ...] = ()) -> set[str]:
        finding = make_finding("SYN299", "unexplained-difference", "error", (0, 1), tensors, "", "", "", values)
        group = make_group("a", None, "out_of_sync", (), Counts(), diffs, findings=(finding,))
        siblings = ("parameters", "bn-stats", "optimizer", "values")
        return {item for item in siblings if findings_of_item(group, item, siblings) == [finding]}

    assert items_of(("w",)) == {"parameters"}
    assert items_of(("w", "m")) == {"parameters", "bn-stats"}
    assert items_of(("w",), ("step",)) == {"parameters", "values"}
    assert items_of(()) == items_of(("not listed",)) == {"parameters", "bn-stats", "optimizer", "values"}


@pytest.mark.parametrize("decided", [True, False])
def test_an_item_without_a_comparison_does_not_pass(tmp_path: Path, decided: bool) -> None:
    """An item without a comparison is skipped with the reason, and fails if its group is undecided."""
    refused = TensorDiff(
        "s", "optimizer", "float32", (2,), "not_compared", reason=Reason.REFUSED, detail=Refusal.SPARSE()
    )
    kinds = {"parameter": Counts(2, identical=2), "optimizer": Counts(1, not_compared=1)}
    group = make_group("a", None, "in_sync" if decided else "undecided", (), Counts(), (refused,), kinds=kinds)

    class Judge:
        def group(self, number: int) -> Any:
            return group, []

    siblings = ("parameters", "optimizer")
    judge: Any = Judge()
    ended = {item: judge_planned(Planned(tmp_path, "x", "a", item, siblings, 0), judge) for item in siblings}
    assert ended["parameters"].status == ("passed" if decided else "failed")
    assert ended["optimizer"].status == ("skipped" if decided else "failed")
    assert "no tensor was compared (1 refused: a sparse tensor)" in ended["optimizer"].body
    assert ("syncheck_verdict", "undecided") in ended["optimizer"].properties


def test_shards_do_not_change_the_verdict(tmp_path: Path) -> None:
    """A kind stored as shards is skipped beside a kind in sync, and the summary agrees with `compare`."""
    parts = {rank: np.full((2, 3), rank, np.float32) for rank in range(2)}
    folder = tmp_path / "both"
    statistics = {name: array for name, array in network(layers=1).items() if "running" in name or "num_" in name}
    buffers = {name: dict.fromkeys(range(2), array) for name, array in statistics.items()}
    save_ranks(folder, parts, ["S(0)"], (2,), **buffers)
    save_ranks(tmp_path / "alone", parts, ["S(0)"], (2,))
    both, alone = sessions((folder, ["--syncheck", "."]), (tmp_path / "alone", ["--syncheck", "."]))
    assert (both.code, syncheck.compare(folder).exit_code) == (0, 0)
    (line,) = find_texts(both.lines, "parameters 1/1 not compared")
    assert line.startswith("IN SYNC")
    assert (alone.code, syncheck.compare(tmp_path / "alone").exit_code) == (1, 2)
    (line,) = find_texts(alone.lines, "parameters 1/1 not compared")
    assert line.startswith("COULD NOT TELL")


def test_unjudged_tensors_are_counted(tmp_path: Path) -> None:
    """Summary and JUnit contain RNG states, excluded tensors, and values that may differ."""
    for rank in range(2):
        state = np.full(4, rank, np.int64)
        tree = {"model": network(), "rng_state": state, "temperature": 0.5 + rank, "step": 5}
        save_pth(tmp_path / f"ddp_rank{rank}.pth", tree)
    ended = session(tmp_path, "--syncheck", "*.pth", "--syncheck-exclude", "fc.*", "--junitxml=j.xml", "-n", "1")
    assert ended.code == 0, ended.out
    (line,) = find_texts(ended.lines, start="IN SYNC")
    assert line.endswith("; rng 1/1 not compared; 2 tensors excluded by options")
    assert "    values that differ: temperature: 0.5 on rank 0, 1.5 on rank 1" in ended.lines
    junit = (tmp_path / "j.xml").read_text()
    assert 'name="syncheck_not_judged" value="rng 1/1 not compared; 2 tensors excluded' in junit
    assert 'name="syncheck_values_that_differ" value="temperature: 0.5 on rank 0' in junit
