"""`syncheck show` and `syncheck explain`."""

from __future__ import annotations

import json
import subprocess
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import network, save_pth, save_safetensors
from support.listings import find_texts, index_by, list_codes, list_starts, measure_width

from syncheck.cli.parser import build_parser
from syncheck.diagnose.rules import list_rules
from syncheck.live.witnesses.rules import WITNESS_RULES
from syncheck.parity.causes import PARITY_RULES
from syncheck.readers import contents
from syncheck.report import terminal, text
from syncheck.report.explanation import find_addresses

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

    Run = Callable[..., Done]


def test_statistics_equal_numpy(cli: Run, tmp_path: Path) -> None:
    """Minimum, maximum, mean and standard deviation over finite elements equal numpy's float64 results."""
    values = (np.random.default_rng(0).standard_normal(700_000) * 3 + 1e4).astype(np.float32)
    values[5], values[650_000] = np.nan, np.inf
    save_safetensors(tmp_path / "a.safetensors", {"w": values, "i": np.arange(5), "e": np.zeros((0, 2), np.float32)})
    done = cli("show", "a.safetensors", "--format", "json")
    rows = index_by(json.loads(done.out)["tensors"], "name")
    finite = values[np.isfinite(values)].astype(np.float64)
    assert rows["w"]["nonfinite"] == 2
    assert rows["w"]["bytes"] == values.nbytes
    for name, expected in (
        ("min", finite.min()),
        ("max", finite.max()),
        ("mean", finite.mean()),
        ("std", finite.std()),
    ):
        assert rows["w"][name] == pytest.approx(expected, rel=1e-9)
    assert (rows["i"]["dtype"], rows["i"]["max"]) == ("int64", 4)
    assert (rows["e"]["shape"], rows["e"]["mean"]) == ([0, 2], None)


def test_listing(cli: Run, tmp_path: Path) -> None:
    """The text lists tensors with kind, dtype, shape and bytes, then values, and notes that kinds are guessed."""
    save_pth(tmp_path / "a.pth", {"model": network(), "epoch": 7})
    done = cli("show", "a.pth")
    assert done.code == 0
    row = next(line.split() for line in done.lines if line.startswith("layer0.bn.running_mean"))
    assert row[1:5] == ["bn_mean", "float32", "4", "16"]
    assert "values: epoch = 7" in done.out
    assert "distinguished by name" in done.out


def test_listing_fits_a_terminal(cli: Run, tmp_path: Path) -> None:
    """No line is wider than 80 columns, even with optimizer names, and NaN adds a column for nonfinite elements."""
    path = next((Path(__file__).parents[2] / "fixtures/desync/step_skipped").rglob("*.pth"))
    listing = contents.describe(str(path)) | {"path": "a.pth"}
    drawn = terminal.render(text.list_contents(listing), 80, color=False)
    assert measure_width(drawn.splitlines()) <= 80
    assert "\noptimizer.fc.weight.exp_avg  optimizer\n" in drawn
    assert ", all values finite\n" in drawn
    assert " nonfinite" not in drawn
    model = network()
    model["fc.bias"][0] = np.nan
    save_pth(tmp_path / "b.pth", model)
    outlier = cli("show", "b.pth")
    assert "finite\n" not in outlier.out.partition("\n")[0]
    assert find_texts(outlier.lines, start="fc.bias")[0].split()[-1] == "1"


def test_show_bad_file(cli: Run, tmp_path: Path) -> None:
    """A bad file exits with 2 and prints one line, in either format."""
    (tmp_path / "a.pth").write_text("text")
    for arguments in (["a.pth"], ["a.pth", "--format", "json"], ["no.pth"], ["."]):
        done = cli("show", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("rule", list_rules(), ids=attrgetter("code"))
def test_explain_prints_the_docstring(cli: Run, rule: object) -> None:
    """`explain` prints the complete docstring of a finding, selected by code, slug or number."""
    code, slug, text = rule.code, rule.slug, rule.explanation  # type: ignore[attr-defined]
    done = cli("explain", code)
    assert done.code == 0
    assert done.lines[0].startswith(f"{code} {slug} (")
    assert " ".join(text.split()) in " ".join(done.out.split())
    if code == "SYN201":
        assert cli("explain", slug).out == cli("explain", "201").out == done.out


@pytest.mark.parametrize("spelling", ["syn201", "SYN-201", "syn-201", "Syn_201", "SYN 201", "BN_LOCAL_STATS"])
def test_spellings_of_a_code(cli: Run, spelling: str) -> None:
    """A code in lower case, or with a separator, is the code."""
    done = cli("explain", spelling)
    assert (done.code, done.out) == (0, cli("explain", "SYN201").out)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("SYN-20", "SYN201"),
        ("syn2O1", "SYN201"),
        ("SYN2O4", "SYN204"),
        ("SYN2011", "SYN201"),
        ("bn-local-stat", "bn-local"),
    ],
)
def test_unknown_codes(cli: Run, typed: str, meant: str) -> None:
    """An unknown code is one line with a similar code, and the command that lists all codes."""
    done = cli("explain", typed)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert done.err.startswith(f"syncheck: error: {typed}: ")
    assert meant in done.err
    assert "syncheck explain" in done.err


@pytest.mark.parametrize("typed", ["SYN999", "syn-999", "SYN2O9", "000"])
def test_unknown_numbers_have_no_similar_code(cli: Run, typed: str) -> None:
    """Codes with other digits are other findings."""
    done = cli("explain", typed)
    assert (done.code, done.err.count("\n"), done.err.count("SYN")) == (2, 1, typed.count("SYN"))


def test_explain_lists_all(cli: Run) -> None:
    """Without a code, `explain` lists every finding; an unknown code exits with 2 and one line."""
    done = cli("explain")
    assert done.code == 0
    assert list_starts(done.lines[1:]) == sorted(
        [*list_codes(list_rules()), *list_codes(WITNESS_RULES), *list_codes(PARITY_RULES)]
    )
    done = cli("explain", "SYN000")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no such finding" in done.err


def test_explain_renders_lists_and_links(cli: Run) -> None:
    """Each item of a list has its own line, and each incident its address."""
    lines = cli("explain", "SYN211").lines
    assert "  - No two of three or more ranks agree." in lines
    assert "  - https://github.com/jingyaogong/minimind/issues/854" in lines
    assert find_addresses("NVIDIA/Megatron-LM#663, #950; arXiv 2401.12345") == [
        "https://github.com/NVIDIA/Megatron-LM/issues/663",
        "https://github.com/NVIDIA/Megatron-LM/issues/950",
        "https://arxiv.org/abs/2401.12345",
    ]


def test_show_lists_the_first_tensors(cli: Run, tmp_path: Path) -> None:
    """`-n` limits the list, counts the other tensors, and must be at least 0."""
    save_pth(tmp_path / "a.pth", network())
    full = cli("show", "a.pth")
    limited = cli("show", "a.pth", "-n", "2")
    assert limited.lines[-1] == f"... and {len(network()) - 2} more; -n 0 shows all"
    assert len(limited.lines) == len(full.lines) - len(network()) + 3
    assert cli("show", "--shards", "a.pth", "-n", "2").lines[-1] == limited.lines[-1]
    assert cli("show", "a.pth", "-n", "-1").err == "syncheck: error: --limit -1: must be at least 0\n"


def test_shell_completion(tmp_path: Path) -> None:
    """The script of README completes commands, options, choices, and paths after commands and options that take one."""
    shtab = pytest.importorskip("shtab")
    script = tmp_path / "completion"
    script.write_text(shtab.complete(build_parser(), "bash"))
    (tmp_path / "a.pth").touch()
    typed = {
        "co": "compare",
        "compare --only-p": "--only-params",
        "compare --format j": "json junit",
        "compare a.p": "a.pth",
        "compare x --reference a.p": "a.pth",
        "watch --on-desync ra": "raise",
    }
    for words, completed in typed.items():
        shell = f"source {script}; COMP_WORDS=(syncheck {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        shell += "_shtab_syncheck; echo ${COMPREPLY[*]}"
        done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == completed, words
