"""Every link between the documents leads to an existing file and heading."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
PAGES += sorted([ROOT / "fuzz" / "README.md", ROOT / "tests" / "examples" / "README.md"])
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


def prose(text: str) -> str:
    """Return a page without code blocks, which may contain brackets and number signs."""
    text = _FENCE.sub("", text)
    return "\n".join(line for line in text.split("\n") if not line.startswith("    "))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page as on GitHub: repeated headings get -1, -2 and so on."""
    result: dict[str, int] = {}
    created = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", path.read_text(encoding="utf-8")))
    for heading in re.findall(r"^#{1,6} +(.*?)#*$", prose(path.read_text(encoding="utf-8")), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        result[slug] = result.get(slug, -1) + 1
        created.add(f"{slug}-{result[slug]}" if result[slug] else slug)
    return frozenset(created)


def leads(page: Path, target: str) -> bool:
    """Return whether a link leads to a file of the clone, and to a heading if it has an anchor."""
    name, _, anchor = unquote(target).partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists() or ROOT not in [file, *file.parents]:
        return False
    return not anchor or (file.suffix == ".md" and anchor in anchors(file))


def broken(page: Path) -> list[str]:
    """Return the broken links of a page. Links to websites are not checked."""
    targets = _LINK.findall(_CODE.sub("", prose(page.read_text(encoding="utf-8"))))
    return [target for target in targets if not re.match(r"[a-z]+:", target) and not leads(page, target)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_work(path: Path) -> None:
    """Linked files and headings exist."""
    assert broken(path) == []


def test_every_document_is_in_the_index() -> None:
    """docs/README.md links to every page except those of the guide and of findings, which have indexes of their own."""
    docs = ROOT / "docs"
    index = {(docs / t.partition("#")[0]).resolve() for t in _LINK.findall((docs / "README.md").read_text())}
    pages = {p for p in docs.rglob("*.md") if p.parent.name not in ("guide", "findings")} | {docs / "guide/README.md"}
    assert sorted(pages - index - {docs / "README.md"}) == []
    for folder, own_values in (("guide", "guide/README.md"), ("reference/findings", "reference/findings.md")):
        links = {
            (docs / own_values).parent / link for link in _LINK.findall((docs / own_values).read_text(encoding="utf-8"))
        }
        assert sorted(p for p in (docs / folder).glob("*.md") if p not in links and p != docs / own_values) == []
    assert "docs/README.md" in _LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing files, missing headings and files outside the clone are broken links; code and websites are not."""
    monkeypatch.setattr("test_doc_links.ROOT", tmp_path)
    text = "# A `b_c`, d\n## Same\n## Same\n[x](#a-b_c-d) [x](#same-1) [x](https://a.b/c#d) `[x](no.md)`\n"
    text += "```\n# no heading\n[x](no.md)\n```\n\n    [x](no.md)\n\n"
    text += "[x](no.md) [x](#no-heading) [x](#same-2) [x](../b.md)\n"
    page = tmp_path / "a.md"
    page.write_text(text)
    (tmp_path.parent / "b.md").write_text("")
    assert broken(page) == ["no.md", "#no-heading", "#same-2", "../b.md"]
