"""The documentation site: all pages are written, links are rewritten, and each finding has a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.browser import window
from support.listings import list_fields

from syncheck.diagnose.rules import list_rules
from syncheck.parity.causes import PARITY_RULES

ROOT = Path(__file__).resolve().parents[2]


def build(clone: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a clone."""
    command = [sys.executable, str(clone / "docs" / "site.py"), str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_pages(tmp_path: Path) -> None:
    """Each finding has a page with its printed text, and each page of the navigation exists."""
    done = build(ROOT, tmp_path, "--pages")
    assert (done.returncode, done.stderr) == (0, "")
    pages = tmp_path / "pages"
    for rule in (*list_rules(), *PARITY_RULES):
        text = (pages / "reference" / "findings" / f"{rule.code.lower()}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {rule.code} {rule.slug}")
    printed = (pages / "reference" / "findings" / "syn201.md").read_text(encoding="utf-8")
    assert re.search(r"^    fix   ", printed, re.MULTILINE)
    navigation = (tmp_path / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listing = dict(re.findall(r"^ +- \"(.*)\": ([\w/-]+\.md)$", navigation, re.MULTILINE))
    assert set(listing.values()) == {str(page.relative_to(pages)) for page in pages.rglob("*.md")}
    assert listing["SYN201 bn-local-stats"] == "reference/findings/syn201.md"
    assert len(re.findall(r"^  - ", navigation, re.MULTILINE)) <= 7


def test_headings_are_in_order(tmp_path: Path) -> None:
    """Each page has one title, and no heading is more than one level below the heading before it."""
    assert build(ROOT, tmp_path, "--pages").returncode == 0
    out_of_order = []
    for page in (tmp_path / "pages").rglob("*.md"):
        tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
        levels = [int(token.tag[1]) for token in tokens if token.type == "heading_open"]
        if levels[:1] != [1] or levels.count(1) > 1 or any(after > before + 1 for before, after in pairwise(levels)):
            out_of_order.append(page.name)
    assert out_of_order == []


@pytest.mark.slow
def test_a_dead_link_stops_the_build(tmp_path: Path) -> None:
    """A link to a file that does not exist is reported with its page."""
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns(".git", "__pycache__", "*.pth")
    for name in ("docs", "syncheck", "benchmarks", "fixtures", "train", "tests"):
        shutil.copytree(ROOT / name, clone / name, ignore=ignored if name != "fixtures" else None)
    for name in (
        "README.md",
        "README.zh-CN.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "action.yml",
    ):
        shutil.copy(ROOT / name, clone / name)
    page = clone / "docs" / "scale.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n[gone](no-such-page.md)\n", encoding="utf-8")
    done = build(clone, tmp_path / "out", "--pages")
    assert done.returncode == 1
    assert "scale.md" in done.stderr
    assert "no-such-page.md" in done.stderr


@pytest.mark.slow
def test_strict_build(tmp_path: Path) -> None:
    """The generator finds no dead link or anchor."""
    pytest.importorskip("zensical")
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference" / "findings" / "syn304" / "index.html").exists()
    pages = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")}
    assert [
        path for path, text in pages.items() if "```" in re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL)
    ] == []
    script = next(text for path, text in pages.items() if path.parent.name == "13-script")
    assert '<span class="filename">reduce_mean.py</span>' in script
    # The header of each page leads to both languages.
    menus = {
        path: set(re.findall(r'href="([^"]*)" hreflang="(\w+)" class="md-select__link"', text))
        for path, text in pages.items()
    }
    targets = {"en": tmp_path / "site", "zh": tmp_path / "site" / "zh-CN"}
    for path, menu in menus.items():
        # The page of missing addresses has links from the root.
        if path.name != "404.html":
            assert {code: (path.parent / link).resolve() for link, code in menu} == targets, path
    loaded = re.findall(r"<(?:link|script|img)[^>]* (?:src|href)=\"?(https?://[^\" >]+)", "".join(pages.values()))
    assert loaded == []


# Whether the page is wider than the window, and the blocks of code and tables that continue without a sign.
CUT = """() => [
    document.documentElement.scrollWidth > innerWidth,
    ...[...document.querySelectorAll(".md-content pre > code, .md-content table")]
        .filter((each) => each.scrollWidth > each.clientWidth + 1)
        .filter((each) => {
            const style = getComputedStyle(each);
            return style.overflowX !== "auto" || !style.backgroundAttachment.includes("local");
        })
        .map((each) => each.textContent.slice(0, 60)),
]"""


@pytest.mark.slow
def test_nothing_is_cut_in_a_narrow_window(tmp_path: Path) -> None:
    """At 690 pixels, no page is wider than the window, and wide code and tables scroll with a shadow at their edge."""
    pytest.importorskip("zensical")
    assert build(ROOT, tmp_path).returncode == 0
    pages = sorted((tmp_path / "site").rglob("index.html"), key=measure_longest_line)
    # The pages of findings have one form; those with the longest lines stand for the others.
    of_findings = [path for path in pages if path.parent.parent.name == "findings"]
    cut = {}
    with window(690) as page:
        for path in sorted(set(pages) - set(of_findings[:-10])):
            page.goto(path.as_uri())
            is_wide, *blocks = page.evaluate(CUT)
            if is_wide or blocks:
                cut[path.parent.name] = blocks
    assert cut == {}


def measure_longest_line(path: Path) -> int:
    """Return the length of the longest line of the code blocks of a page."""
    blocks = re.findall(r"<pre>.*?</pre>", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = re.sub(r"<[^>]*>", "", "\n".join(blocks)).splitlines()
    return max(map(len, lines), default=0)


@pytest.mark.slow
def test_released_versions(tmp_path: Path) -> None:
    """Each X.Y with a tag has a folder, from its newest tag; `latest` is the newest, and the start page leads to it."""
    pytest.importorskip("zensical")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    for tag in ("v0.2.0", "v0.2.1", "experiment"):
        subprocess.run(["git", "tag", tag], cwd=clone, check=True)
    done = build(clone, tmp_path / "out", "--versions")
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "out" / "site"
    rows = json.loads((site / "versions.json").read_text(encoding="utf-8"))
    assert list_fields(rows, "version", "aliases") == [("0.2", ["latest"]), ("dev", [])]
    for name in ("0.2", "dev", "latest"):
        assert (site / name / "reference" / "findings" / "syn304" / "index.html").exists()
    assert "url=latest/" in (site / "index.html").read_text(encoding="utf-8")
    listing = subprocess.run(["git", "worktree", "list"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert listing.count("\n") == 1
