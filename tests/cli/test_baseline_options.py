"""`--baseline FILE` and `--update-baseline` of `compare` and `report`."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
from support.checkpoints import changed, network, save
from support.listings import find_all, list_names

import syncheck as library

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

    Run = Callable[..., Done]

SCHEMA = json.loads((Path(library.__file__).parent / "report" / "schema.json").read_text())
FILES = ("run_*.pth", "--baseline", "known.json")


@pytest.fixture
def differing(tmp_path: Path) -> Callable[..., None]:
    """Write two ranks; on the second rank, each tensor whose name ends with a given suffix differs."""

    def write(*suffixes: str) -> None:
        for rank in range(2):
            save(tmp_path / f"run_rank{rank}.pth", changed(network(), *(suffixes if rank else ())))

    return write


@pytest.mark.parametrize("command", ["compare", "report"])
def test_known_findings_pass_and_new_findings_fail(cli: Run, differing: Callable[..., None], command: str) -> None:
    """Known findings pass, new tensors fail, and fixed findings are reported until an update removes them."""
    differing("running_mean")
    assert cli(command, *FILES).code == 2
    created = cli(command, *FILES, "--update-baseline")
    assert (created.code, created.err) == (0, "syncheck: known.json: 2 names in 1 run accepted: 2 added, 0 removed\n")
    known_findings = cli(command, *FILES)
    assert (known_findings.code, known_findings.err) == (0, "")
    assert "SYN201 bn-local-stats (warning, consistent, accepted by the baseline) on ranks 0-1" in known_findings.out
    assert known_findings.verdict == "IN SYNC, ignoring baseline findings (SYN201)"
    differing("running_mean", "layer0.bn.running_var")
    new = cli(command, *FILES)
    assert (new.code, new.verdict) == (1, "OUT OF SYNC")
    assert "not in the baseline: layer0.bn.running_var" in re.sub(r"\s+", " ", new.out)
    differing("layer0.bn.running_mean")
    fixed = cli(command, *FILES)
    assert fixed.code == 0
    assert "fixed: run no longer has SYN201 on layer1.bn.running_mean; " in fixed.out
    assert "--update-baseline" in fixed.out
    assert cli(command, *FILES, "--update-baseline").err.endswith("1 name in 1 run accepted: 0 added, 1 removed\n")
    assert "fixed" not in cli(command, *FILES).out


def test_every_format_reports_the_baseline(cli: Run, differing: Callable[..., None]) -> None:
    """JSON, JUnit, GitHub and Markdown output marks accepted, new and fixed findings."""
    differing("running_mean")
    cli("compare", *FILES, "--update-baseline")
    differing("layer0.bn.running_mean", "fc.weight")
    outputs = ("-o", "r.md", "-o", "r.xml", "-o", "r.json", "--format", "github")
    done = cli("compare", *FILES, *outputs)
    assert done.code == 1
    assert re.search(r"^::notice title=syncheck%3A baseline findings fixed::fixed: run no", done.out, re.M)
    assert "::error " in done.out
    text = Path("r.md").read_text()
    assert "not in the baseline" in text
    assert "fixed: `run` no longer has" in text
    document = json.loads(Path("r.json").read_text())
    jsonschema.validate(document, SCHEMA)
    (group,) = document["groups"]
    assert group["fixed"] == [{"code": "SYN201", "names": ["layer0.bn.running_mean", "layer1.bn.running_mean"]}]
    (finding,) = group["findings"]
    assert (finding["accepted"], finding["new"]) == (False, ["fc.weight", "layer0.bn.running_mean"])
    properties = ET.parse("r.xml").iterfind("testsuite/properties/property")
    assert (
        next(item for item in properties if item.get("name") == "syncheck_fixed")
        .get("value", "")
        .startswith("fixed: run no longer has")
    )
    cli("compare", *FILES, "--update-baseline")
    done = cli("compare", *FILES, *outputs)
    assert (done.code, ET.parse("r.xml").getroot().get("failures")) == (0, "0")
    assert "::error " not in done.out
    assert "accepted by the baseline) on" in done.out
    (finding,) = json.loads(Path("r.json").read_text())["groups"][0]["findings"]
    assert (finding["accepted"], finding["new"]) == (True, [])


def test_an_incomplete_comparison_is_not_accepted(cli: Run, differing: Callable[..., None], tmp_path: Path) -> None:
    """If a file is unreadable or nothing is compared, an update exits with 2 and leaves the baseline unchanged."""
    differing("running_mean")
    (tmp_path / "run_rank2.pth").write_bytes(b"junk")
    for _ in range(2):
        done = cli("compare", *FILES, "--update-baseline", "--exit-zero")
        assert done.code == 2
        assert "known.json: the baseline is not updated: run_rank2.pth could not be read" in done.err
        assert "SYN201" in done.out
        assert not (tmp_path / "known.json").exists()
    assert cli("compare", "run_rank0.pth", *FILES[1:], "--update-baseline").code == 2
    assert not (tmp_path / "known.json").exists()
    (tmp_path / "run_rank2.pth").unlink()
    cli("compare", *FILES, "--update-baseline")
    before = (tmp_path / "known.json").read_bytes()
    (tmp_path / "run_rank1.pth").write_bytes(b"junk")
    assert cli("compare", *FILES, "--update-baseline").code == 2
    assert (tmp_path / "known.json").read_bytes() == before
    # A baseline does not make an unreadable file pass.
    assert cli("compare", *FILES).code == 2


@pytest.mark.parametrize("update", [(), ("--update-baseline",)])
def test_invalid_baselines_are_refused(
    cli: Run, differing: Callable[..., None], tmp_path: Path, update: tuple[str, ...]
) -> None:
    """An outdated baseline, invalid JSON and a checkpoint are refused with exit code 2 and stay unchanged."""
    differing()
    (tmp_path / "old.json").write_text('{"syncheck_baseline": 0, "accepted": {}}')
    (tmp_path / "junk.json").write_text("{")
    for name in ("old.json", "junk.json", "run_rank0.pth"):
        before = (tmp_path / name).read_bytes()
        done = cli("compare", "run_*.pth", "--baseline", name, *update)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"syncheck: error: {name}: ")
        assert (tmp_path / name).read_bytes() == before


def test_an_update_requires_a_writable_file(cli: Run, differing: Callable[..., None], tmp_path: Path) -> None:
    """Without a writable --baseline, an update fails before anything is compared; a link is followed."""
    differing()
    done = cli("compare", "run_*.pth", "--update-baseline")
    assert (done.code, done.out) == (2, "")
    assert "--update-baseline: requires --baseline FILE" in done.err
    done = cli("compare", "run_*.pth", "--update-baseline", "--baseline", "no/known.json")
    assert (done.code, done.out) == (2, "")
    assert "baseline no/known.json: cannot be written: the folder no does not exist; create it first" in done.err
    os.symlink("there.json", tmp_path / "known.json")
    assert cli("compare", *FILES, "--update-baseline", "-q").err == ""
    assert (tmp_path / "there.json").exists()
    assert (tmp_path / "known.json").is_symlink()


def test_the_baseline_of_the_project(cli: Run, differing: Callable[..., None], tmp_path: Path) -> None:
    """The baseline in pyproject.toml is relative to that file; a typed --baseline takes precedence."""
    differing("running_mean")
    (tmp_path / "pyproject.toml").write_text("[tool.syncheck]\nbaseline = 'known.json'\n")
    (tmp_path / "below").mkdir()
    os.chdir(tmp_path / "below")
    files = str(tmp_path / "run_*.pth")
    assert cli("compare", files, "--update-baseline", "-q").code == 0
    assert sorted(list_names(find_all(tmp_path.iterdir(), suffix=".json"))) == ["known.json"]
    done = cli("compare", files)
    assert (done.code, done.err) == (0, f"syncheck: options from {tmp_path}/pyproject.toml: baseline\n")
    assert cli("compare", files, "--no-config").code == 1
    empty = tmp_path / "empty.json"
    empty.write_text('{"syncheck_baseline": 1, "accepted": {}}')
    assert cli("compare", files, "--baseline", str(empty)).code == 1
    (tmp_path / "known.json").unlink()
    assert cli("compare", files).code == 2
