"""The project has no address until a step of a release sets one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.listings import find_texts

from tools.set_address import set_address

ROOT = Path(__file__).resolve().parents[2]
CHANGED = ["syncheck/report/words.py", "docs/site.py", "pyproject.toml", "docs/ci.md"]
SITE, REPOSITORY = "https://example.org/docs/", "https://example.org/octo/syncheck"
SHOW_FINDING = """\
import syncheck
from syncheck.report import html, plain, text
report = syncheck.compare("desync/bn_local_stats")
print(plain.render(text.draw_comparison(report, 1)))
print(html.render(report, "0"))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the package and of the files with an address."""
    shutil.copytree(ROOT / "syncheck", tmp_path / "syncheck", ignore=shutil.ignore_patterns("__pycache__"))
    for name in CHANGED[1:]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def show_finding(clone: Path) -> str:
    """Return the report of a clone about SYN201, as text and as a page."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW_FINDING],
        cwd=ROOT / "fixtures",
        env={"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_no_document_has_an_address_of_the_project() -> None:
    """No document, program or picture has a placeholder of an address, besides the instructions of the release step."""
    command = ["git", "grep", "-lE", r"syncheck\.invalid|\bOWNER/syncheck", "--", ":!tests/docs/test_addresses.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert set(listed.split()) <= {"tools/set_address.py", "CHANGELOG.md"}


@pytest.mark.slow
def test_a_report_prints_no_address(clone: Path) -> None:
    """Without an address, a finding refers to `syncheck explain` only."""
    printed = show_finding(clone)
    assert "  more  syncheck explain SYN201\n" in printed
    assert not find_texts(printed.splitlines(), "/findings/syn201")


@pytest.mark.slow
def test_a_release_sets_all_addresses(clone: Path) -> None:
    """After the step, reports, jobs, site and package have the given addresses, and a second step is refused."""
    assert set_address(SITE, REPOSITORY, clone) == CHANGED
    printed = show_finding(clone)
    address = "https://example.org/docs/latest/reference/findings/syn201/"
    assert f"  more  syncheck explain SYN201, or {address}\n" in printed
    assert f'<a href="{address}">' in printed
    jobs = (clone / "docs/ci.md").read_text(encoding="utf-8")
    assert "uses: octo/syncheck@v" in jobs
    assert f"git+{REPOSITORY}@v" in jobs
    assert not re.search("<(repository|owner)>", jobs)
    assert f'REPOSITORY = "{REPOSITORY}"' in (clone / "docs/site.py").read_text(encoding="utf-8")
    project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["urls"]["Repository"], "live" in project["optional-dependencies"]) == (REPOSITORY, True)
    with pytest.raises(SystemExit, match="start from a fresh clone"):
        set_address(SITE, REPOSITORY, clone)
