"""`python -m fuzz diff` judges exit codes by an oracle that knows the mutation, and reports every wrong answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts, list_codes, list_fields

pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

from fuzz import damages, diff
from fuzz.expected_codes import list_right_codes
from fuzz.model_mutations import MUTATIONS, Effect
from fuzz.pairs import KINDS, Options, Pair
from syncheck import cli

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SEED, PAIRS = 3, 60


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer in this process, which tests inject faults into, without a limit of its memory."""
    monkeypatch.setattr(damages.Worker, "send", lambda self, *given: setattr(self, "result", self.function(*given)))
    monkeypatch.setattr(damages.Worker, "receive", lambda self, _: self.result)
    monkeypatch.setattr(diff, "_limit_memory", lambda: None)


@pytest.mark.slow
def test_a_few_pairs(tmp_path: Path) -> None:
    """No pair is wrongly in sync, and syncheck neither crashes nor hangs; most kinds of mutations occur."""
    trials = diff.run_pairs(SEED, range(PAIRS), tmp_path)
    assert [trial.group for trial in trials if trial.fault in ("wrong 0", "crash", "hang")] == []
    assert set(list_codes(trials)) == {0, 1, 2}
    assert len(set(list_fields(trials, "kind"))) > len(KINDS) / 2


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("fault", ["always in sync", "crash", "never in sync"])
def test_injected_faults_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A diff that answers 0 always, crashes or finds differences everywhere is reported with its files."""
    codes = {"always in sync": 0, "crash": 3, "never in sync": 1}
    monkeypatch.setattr(cli, "main", lambda _: codes[fault])
    trials = diff.run_pairs(SEED, range(12), tmp_path)
    columns = {"always in sync": "wrong 0", "crash": "crash", "never in sync": "wrong 1/2"}
    wrong = [trial for trial in trials if trial.fault]
    assert set(list_fields(wrong, "fault")) == {columns[fault]}
    for trial in wrong:
        folder = tmp_path / f"{SEED}_{trial.number}"
        text = (folder / "finding.txt").read_text()
        assert f"python -m fuzz diff --seed {SEED} --only {trial.number}" in text
        record = json.loads((folder / "pair.json").read_text())
        # The record and the files are enough to repeat the command elsewhere.
        assert record["kind"] == trial.kind
        assert len(list(folder.iterdir())) >= 4
    table = diff.summarize(trials, KINDS)
    row = find_texts(table.splitlines(), start="all ")[0]
    assert str(len(wrong)) in row.split()


@pytest.mark.usefixtures("_one_process")
def test_a_dead_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs or dies is a finding of its mutation."""
    for died, fault in (("hang", "hang"), ("exit -9", "crash")):
        monkeypatch.setattr(damages.Worker, "receive", lambda *_, died=died: {"died": died})
        (trial,) = diff.run_pairs(SEED, [0], tmp_path)
        assert trial.fault == fault
        assert trial.kind in KINDS


@pytest.mark.usefixtures("_one_process")
def test_exit_code_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The program exits with 1 after a wrong 0, and repeats one pair with equal files."""
    arguments = ["--seed", str(SEED), "--jobs", "1", "--findings"]
    monkeypatch.setattr(cli, "main", lambda _: 0)
    assert diff.main([*arguments, str(tmp_path / "all"), "--pairs", "8"]) == 1
    number = next((tmp_path / "all").iterdir()).name.partition("_")[2]
    assert diff.main([*arguments, str(tmp_path / "one"), "--only", number]) == 1
    for path in (tmp_path / "one" / f"{SEED}_{number}").iterdir():
        if path.suffix == ".safetensors":
            assert path.read_bytes() == (tmp_path / "all" / f"{SEED}_{number}" / path.name).read_bytes()
    assert f"seed {SEED}" in capsys.readouterr().out


ACCEPT = frozenset({"--accept-inferred"})
CAST = Effect(cast="bfloat16")


@pytest.mark.parametrize(
    ("pair", "right"),
    [
        (Pair("none", change="nothing"), {0}),
        (Pair("one scaled"), {1}),
        (Pair("NaN", "wrapper"), {1}),
        (Pair("none", "renamed", change="nothing"), {2}),
        (Pair("none", "renamed", change="nothing", options=Options(ACCEPT)), {0}),
        (Pair("none", "renamed", change="nothing", options=Options(ACCEPT), is_ambiguous=True), {0, 2}),
        (Pair("none", "renamed", change="nothing", options=Options(map="right")), {0}),
        (Pair("none", "renamed", change="nothing", options=Options(map="wrong")), {1, 2}),
        (Pair("rows cut", "renamed"), {1, 2}),
        (Pair("rows cut", "renamed", options=Options(ACCEPT)), {1, 2}),
        (Pair("rows cut", "renamed", options=Options(map="right")), {1}),
        (Pair("parts exchanged", "renamed", effect=Effect(is_consistent=True), options=Options(ACCEPT)), {0, 1, 2}),
        (Pair("cast", effect=CAST, change="cast"), {1}),
        (Pair("cast", effect=CAST, change="cast", options=Options(cast="bfloat16")), {0}),
        (Pair("bit flipped", options=Options(cast="bfloat16")), {1}),
        (Pair("optimizer state added", change="optimizer"), {1}),
        (Pair("optimizer state added", change="optimizer", options=Options(frozenset({"--only-params"}))), {0}),
        (Pair("tensor dropped", options=Options(frozenset({"--subset"}))), {1, 2}),
        (Pair("bit flipped", options=Options(allow="SYN304")), {1}),
        (Pair("bit flipped", options=Options(allow="SYN220")), {0, 1, 2}),
        (Pair("none", "one name", change="nothing"), {1, 2}),
        (Pair("none", "second prefix", change="nothing"), {1, 2}),
        (Pair("shard missing"), {2}),
    ],
)
def test_right_codes(pair: Pair, right: set[int]) -> None:
    """The oracle knows which exit codes are right for a mutation, its names and options."""
    assert list_right_codes(pair) == right
    if pair.change not in ("nothing", "cast", "optimizer") and not pair.options.allow:
        assert 0 not in list_right_codes(replace(pair, effect=Effect(), relation="one name"))


def test_the_oracle_is_independent() -> None:
    """Neither the oracle nor the makers of pairs import syncheck."""
    import inspect

    from fuzz import adapter_pairs, expected_codes, layouts, model_mutations, pairs, toy_maps, toy_models

    modules: Sequence[Any] = (adapter_pairs, expected_codes, layouts, model_mutations, pairs, toy_maps, toy_models)
    assert [module for module in modules if "import syncheck" in inspect.getsource(module)] == []
    assert [module for module in modules if "from syncheck" in inspect.getsource(module)] == []
    assert set(MUTATIONS) < set(KINDS)
