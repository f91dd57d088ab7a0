"""Addresses of the project: one placeholder, which a release step replaces."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.listings import find_texts

from syncheck.report.words import SITE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the files that contain the placeholder, as a git repository."""
    for name in ("pyproject.toml", "docs/ci.md", "docs/site.py", "syncheck/report/words.py", "tools/set_address.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for command in (["git", "init", "-q"], ["git", "add", "."]):
        subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


def test_the_addresses_of_the_package_are_those_of_the_site() -> None:
    """The project's URLs begin with the addresses that the reports and the site use."""
    specification = importlib.util.spec_from_file_location("site_program", ROOT / "docs" / "site.py")
    assert specification is not None
    assert 'REPOSITORY = "https://syncheck.invalid/syncheck"' in (ROOT / "docs/site.py").read_text(encoding="utf-8")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls["Documentation"] == SITE.removesuffix("/latest")
    assert all(url.startswith("https://syncheck.invalid/") for url in urls.values())


def test_no_other_placeholder() -> None:
    """The documents have no placeholder for an owner."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml"):
        assert not re.search(r"\bOWNER\b", path.read_text(encoding="utf-8")) or path.name == "CONTRIBUTING.md", path


def test_a_release_replaces_all_placeholders(clone: Path) -> None:
    """After the step, no placeholder is left, and jobs, package and reports have the given addresses."""
    command = [sys.executable, "tools/set_address.py", "https://example.org/docs/", "https://github.com/octo/syncheck"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"pyproject.toml", "docs/ci.md", "docs/site.py", "syncheck/report/words.py"}
    texts = {name: (clone / name).read_text(encoding="utf-8") for name in done.stdout.split()}
    assert not find_texts(texts.values(), "syncheck.invalid")
    assert 'SITE = "https://example.org/docs/latest"' in texts["syncheck/report/words.py"]
    assert "uses: octo/syncheck@v" in texts["docs/ci.md"]
    assert "git+https://github.com/octo/syncheck@v" in texts["docs/ci.md"]
    assert tomllib.loads(texts["pyproject.toml"])["project"]["urls"]["Repository"] == "https://github.com/octo/syncheck"
