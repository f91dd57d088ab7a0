"""Reports and errors of `syncheck diff`: A and B instead of ranks, the index and the file of the worst element."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from support.checkpoints import network, save_pth
from support.dtensors import save_ranks
from support.listings import list_codes, list_fields

import syncheck
from syncheck.cli import main
from syncheck.messages import Note
from syncheck.report import failure
from syncheck.text import Side

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = json.loads((Path(syncheck.__file__).parent / "report" / "schema.json").read_text())
W = np.arange(24, dtype=np.float32).reshape(8, 3)
FULL = {"w": W, "norm.weight": np.ones(5, np.float32)}


def write(folder: Path, whole: Any = W) -> tuple[str, str]:
    """Write a model in shards of two ranks, and in one file; return both paths."""
    (folder / "ranks").mkdir()
    norm = dict.fromkeys(range(2), FULL["norm.weight"])
    save_ranks(folder / "ranks", {0: whole[:4], 1: whole[4:]}, ["S(0)"], [2], **{"norm.weight": norm})
    return str(folder / "ranks"), str(save_pth(folder / "full.pth", FULL))


def edited() -> Any:
    """Return W with two changed elements in the shard of rank 1; the larger change is at [6, 2]."""
    complete = W.copy()
    complete[5, 0] += 1
    complete[6, 2] += 9
    return complete


def diff_files(folder: Path, a: Any, b: Any, **options: Any) -> syncheck.Report:
    """Compare two state dicts in files."""
    paths = [save_pth(folder / name, tree) for name, tree in (("a.pth", a), ("b.pth", b))]
    return syncheck.diff(*paths, options=syncheck.DiffOptions(**options))


@pytest.mark.parametrize("format_name", ["text", "markdown", "github", "junit", "html", "assertion"])
def test_reports_show_the_worst_element(tmp_path: Path, capsys: pytest.CaptureFixture[str], format_name: str) -> None:
    """Every format shows the rank and file with the largest difference, and describes no model as a rank."""
    a, b = write(tmp_path, edited())
    if format_name == "assertion":
        text = failure.message(syncheck.diff(a, b))
    elif format_name == "html":
        assert main(["diff", a, b, "-q", "-o", str(tmp_path / "r.html")]) == 1
        text = re.sub(
            r"<script.*?</script>|<style>.*?</style>|<wbr>", "", (tmp_path / "r.html").read_text(), flags=re.DOTALL
        )
    else:
        assert main(["diff", a, b, "--format", format_name]) == 1
        text = capsys.readouterr().out
    words = text.replace("%2C", ",").replace("`", "")
    assert f"A {a}/m_rank1.pth (rank 1), B {b}" in words
    assert "[6, 2]" in words or format_name == "github"  # the evidence has the element
    assert "SYN399" in words
    assert not re.search(r"replica|\branks\b|rank 0\b|on A|on B", words.replace("/ranks", "").replace("ranks and", ""))


def test_json_names_the_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document has the command, the labels, the number of files, and the place of the element in A and in B."""
    a, b = write(tmp_path, edited())
    assert main(["diff", a, b, "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    (group,) = document["groups"]
    assert document["command"] == "diff"
    assert list_fields(group["replicas"], "label", "path", "files") == [("A", a, 2), ("B", b, 1)]
    (tensor,) = group["tensors"]
    assert (tensor["name"], tensor["index"]) == ("w", [6, 2])
    plain = {"tensor": "", "index": None}
    assert tensor["places"] == {
        "0": {"path": f"{a}/m_rank1.pth", "rank": 1, **plain},
        "1": {"path": b, "rank": None, **plain},
    }
    assert list_fields(group["findings"], "ranks") == [[]]


def lose(state: dict[str, Any]) -> None:
    """B lacks a tensor."""
    del state["fc.bias"]


def reshape(state: dict[str, Any]) -> None:
    """A tensor of B has another shape, another tensor another dtype."""
    state["fc.bias"] = state["fc.bias"][:-1] + 1
    state["fc.weight"] = state["fc.weight"].astype(np.float64) + np.arange(state["fc.weight"].shape[1])


def flip(state: dict[str, Any]) -> None:
    """One bit of B differs."""
    state["fc.weight"].view(np.int32)[2, 1] ^= 1 << 20


def break_element(state: dict[str, Any]) -> None:
    """One element of B is NaN."""
    state["fc.weight"][2, 1] = np.nan


def wrap(state: dict[str, Any]) -> None:
    """The names of B have a prefix."""
    for name in list(state):
        state[f"module.{name}"] = state.pop(name)


@pytest.mark.parametrize(
    ("fault", "code"),
    [(lose, "SYN101"), (reshape, "SYN102"), (flip, "SYN220"), (break_element, "SYN220"), (wrap, "SYN103")],
)
def test_findings_name_models(tmp_path: Path, fault: Callable[[dict[str, Any]], None], code: str) -> None:
    """Evidence, cause and fix of each finding are about A and B, also if the fault is in A."""
    faulty = network()
    fault(faulty)
    for a, b in ((network(), faulty), (faulty, network())):
        report = diff_files(tmp_path, a, b)
        (finding,) = report.groups[0].findings
        assert finding.code == code
        assert report.verdict == ("in_sync" if code == "SYN103" else "out_of_sync")
        assert not re.search(r"\branks?\b", f"{finding.evidence} {finding.cause} {finding.fix}", re.IGNORECASE)
        outlier = Side.B if b is faulty else Side.A
        if "ranks" in (parameters := finding.facts[0].parameters):
            assert parameters["ranks"] == (outlier,)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    """A shard that changed on the disk is found by its checksum, and the finding names the file of this rank."""
    a, b = write(tmp_path)
    path = Path(a, "m_rank1.pth")
    content = path.read_bytes()
    position = content.index(W[4:].tobytes()) + 4
    path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    (finding,) = syncheck.diff(a, b).groups[0].findings
    assert finding.code == "SYN223"
    assert finding.facts[0].parameters["paths"] == (str(path),)


def test_values_are_shown_by_side(tmp_path: Path) -> None:
    """A learning rate that differs is out of sync; the evidence has both values."""
    rates = [{**FULL, "optimizer": {"state": {}, "param_groups": [{"lr": lr, "params": []}]}} for lr in (0.1, 0.2)]
    report = diff_files(tmp_path, *rates)
    (finding,) = report.groups[0].findings
    (fact,) = finding.facts
    assert (report.verdict, fact.parameters["values"]) == ("out_of_sync", {Side.A: 0.1, Side.B: 0.2})


def test_copies_from_larger_runs(tmp_path: Path) -> None:
    """Each side may be the file of one rank of a run: files of other ranks are not missed."""
    block = {"schema": 1, "run": "ddp", "run_id": "x", "step": 1, "world_size": 4}
    report = diff_files(
        tmp_path, {**FULL, "syncheck": {**block, "rank": 0}}, {**FULL, "syncheck": {**block, "rank": 3}}
    )
    assert report.verdict == "in_sync"
    assert Note.RANKS_ABSENT not in list_codes(report.groups[0].notes)


def test_subset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--subset accepts optimizer state that B lacks, in a note instead of the table, and none that A lacks."""
    state = {"state": {0: {"exp_avg": W}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    trained = {"model": FULL, "optimizer": state}
    assert diff_files(tmp_path, trained, FULL).verdict == "out_of_sync"
    report = diff_files(tmp_path, trained, FULL, subset=True)
    assert (report.verdict, report.counts.not_compared) == ("in_sync", 1)
    assert [note.parameters["names"] for note in report.groups[0].notes if note.code is Note.SUBSET] == [
        ("optimizer.w.exp_avg",)
    ]
    assert main(["diff", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), "--subset"]) == 0
    assert "missing" not in capsys.readouterr().out
    assert diff_files(tmp_path, FULL, trained, subset=True).verdict == "out_of_sync"


@pytest.mark.parametrize(
    "name",
    ["norm.weight", "norm.running_mean", "rotary.inv_freq", "optimizer.0.weight", "optimizer.net.gamma", "ema.weight",
     "scaler.weight", "rng.weight"],
)  # fmt: skip
def test_subset_never_accepts_tensors_of_the_model(tmp_path: Path, name: str) -> None:
    """B may lack no parameter, buffer or part of an adapter, even if its name is that of another kind."""
    report = diff_files(tmp_path, {"w": W, name: W}, {"w": W}, subset=True)
    assert report.verdict == "out_of_sync"
    assert list_codes(report.groups[0].findings) == ["SYN101"]


def test_excluded_tensors_are_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that exclude all tensors give no verdict; models without a common name are an error."""
    _, b = write(tmp_path)
    assert main(["diff", b, b, "--exclude", "*"]) == 2
    assert "exclude 2 tensors" in capsys.readouterr().out
    second = save_pth(tmp_path / "other.pth", {"x": W + 1})
    assert main(["diff", b, str(second)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_a_baseline_accepts_a_difference(tmp_path: Path) -> None:
    """A known difference passes; a difference of another tensor fails."""
    a, b = write(tmp_path, edited())
    known_values = ["--baseline", str(tmp_path / "known.json")]
    assert main(["diff", a, b, "-q", *known_values]) == 2
    assert main(["diff", a, b, "-q", *known_values, "--update-baseline"]) == 0
    assert main(["diff", a, b, "-q", *known_values]) == 0
    save_pth(Path(b), {**FULL, "norm.weight": np.zeros(5, np.float32)})
    assert main(["diff", a, b, "-q", *known_values]) == 1


@pytest.mark.parametrize("wrong", ["no.pth", "no*.pth", "ranks/m_rank0.pth", "text.txt", ".", "full.pth,text.txt"])
def test_errors_name_the_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """A path that is not one whole model is one line that begins with the side, and exit code 2."""
    write(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for label, sides in (("A", (wrong, "full.pth")), ("B", ("full.pth", wrong))):
        assert main(["diff", *sides]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"syncheck: error: {label}: ")
        assert err.count("\n") == 1
