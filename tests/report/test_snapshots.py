"""The wording of each surface, compared with committed snapshots of two fixtures.

Other tests assert on codes and data. After a change of wording, rewrite the snapshots and review the difference:

    SYNCHECK_SNAPSHOTS=write pytest tests/report/test_snapshots.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import find_texts
from support.states import omit_prefixes

import syncheck
from syncheck.report import github, html, junit, markdown, plain, text

if TYPE_CHECKING:
    from syncheck.records import Report

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SNAPSHOTS = Path(__file__).resolve().parent / "snapshots"
# Several steps of a run with growing drift beside a run in sync, and one file without a replica.
PATHS = {
    "drift": ("desync/bn_no_broadcast", "in_sync/ddp_no_bn"),
    "alone": (next((FIXTURES / "in_sync/ddp_no_bn").rglob("*0.pth")).relative_to(FIXTURES).as_posix(),),
}


class VisibleText(HTMLParser):
    """Collects the visible text of a page, one line per element, without charts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("svg", "style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("svg", "style", "script")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(data.strip())


def check(name: str, actual: str) -> None:
    """Compare a text with its snapshot, or write the snapshot."""
    path = SNAPSHOTS / name
    actual = "".join(f"{line.rstrip()}\n" for line in actual.splitlines())
    if os.environ.get("SYNCHECK_SNAPSHOTS") == "write":
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text(actual, encoding="utf-8")
    assert actual == path.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=PATHS)
def case(request: pytest.FixtureRequest) -> tuple[str, Report]:
    """Return the name and the report of a fixture, with paths relative to the fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FIXTURES)
        return request.param, syncheck.compare(*PATHS[request.param])


def test_text(case: tuple[str, Report]) -> None:
    """`syncheck compare` and `syncheck report` print the texts of the snapshots."""
    name, report = case
    check(f"{name}.compare.txt", plain.render(text.draw_comparison(report, 5)))
    check(f"{name}.report.txt", plain.render(text.draw_overview(report, 5)))


def test_markdown(case: tuple[str, Report]) -> None:
    """`--format markdown` prints the text of the snapshot."""
    name, report = case
    check(f"{name}.md", markdown.render(report))


def test_github(case: tuple[str, Report]) -> None:
    """`--format github` prints the text of the snapshot."""
    name, report = case
    check(f"{name}.github.txt", github.render(report))


def test_junit(case: tuple[str, Report]) -> None:
    """`--format junit` prints the text of the snapshot."""
    name, report = case
    check(f"{name}.junit.xml", junit.render(report))


def test_html(case: tuple[str, Report]) -> None:
    """The visible text of an HTML page, without charts, equals the snapshot."""
    name, report = case
    check(f"{name}.html.txt", "\n".join(VisibleText(html.render(report, "VERSION")).lines))


@pytest.mark.parametrize("name", PATHS)
def test_pytest_summary(name: str) -> None:
    """A pytest run on checkpoints prints the header, failures and summary of the snapshot."""
    arguments = [f"--syncheck={path}" for path in PATHS[name]]
    command = [sys.executable, "-m", "pytest", "--rootdir", ".", "-p", "no:cacheprovider", "-c", os.devnull, *arguments]
    inherited = omit_prefixes(os.environ, ("PYTEST_", "COV_"))
    environment = {"COLUMNS": "100", "PY_COLORS": "0", "CI": ""}
    done = subprocess.run(
        command, cwd=FIXTURES, env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    header = find_texts(done.stdout.splitlines(), start="syncheck: ")
    _, title, remainder = done.stdout.partition("\n" + " FAILURES ".center(100, "=") + "\n")
    sections, _, _ = remainder.partition("=" * 20 + " short test summary info ")
    check(f"{name}.pytest.txt", "\n".join([*header, title.strip(), sections.rstrip("=")]))
