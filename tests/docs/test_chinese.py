"""The Chinese pages have the code, headings, numbers and links of the English pages."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# English pages and their translations.
PAGES = {
    "README.md": "README.zh-CN.md",
    "docs/guide/01-ideas.md": "docs/zh-CN/01-ideas.md",
    "docs/guide/03-ddp.md": "docs/zh-CN/03-ddp.md",
    "docs/guide/04-accumulation.md": "docs/zh-CN/04-accumulation.md",
    "docs/guide/06-batchnorm.md": "docs/zh-CN/06-batchnorm.md",
    "docs/guide/09-launching.md": "docs/zh-CN/09-launching.md",
    "docs/guide/11-finding-a-desync.md": "docs/zh-CN/11-finding-a-desync.md",
    "docs/guide/20-parity.md": "docs/zh-CN/20-parity.md",
}
_CODE = re.compile(r"^```.*?^```$|(?:^    [^\n]*\n)+", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)]*)\)")


def find_links(text: str, page: Path) -> set[str]:
    """Return the addresses of a page; paths of files from the root."""
    matches = _LINK.findall(text)
    return {link if ":" in link else os.path.normpath(page.parent / link) for link in matches}


@pytest.mark.parametrize(("english", "chinese"), PAGES.items())
def test_translations_share_code_and_structure(english: str, chinese: str) -> None:
    """Blocks of code, inline options, the levels of headings, links and measured numbers are equal."""
    pages = [(ROOT / path).read_text(encoding="utf-8") for path in (english, chinese)]
    code = [_CODE.findall(page) for page in pages]
    assert code[0] == code[1]
    plain = [_CODE.sub("", page) for page in pages]
    assert len({tuple(re.findall(r"^(#+) ", page, re.MULTILINE)) for page in plain}) == 1
    numbers = [sorted(re.findall(r"<!-- result: ([a-z0-9-]+) -->", page)) for page in plain]
    assert numbers[0] == numbers[1]
    links = [find_links(plain[i], ROOT / path) for i, path in enumerate((english, chinese))]
    own_values = {str(ROOT / path) for path in (english, chinese, "docs/zh-CN/glossary.md")}
    assert links[1] - own_values == links[0] - own_values
    spans = [set(re.findall(r"`([^`\n]+)`", page)) for page in plain]
    assert spans[0] == spans[1]


@pytest.mark.parametrize("chinese", PAGES.values())
def test_translations_are_chinese(chinese: str) -> None:
    """Most letters outside code are Chinese, and Chinese sentences have Chinese punctuation."""
    text = _CODE.sub("", (ROOT / chinese).read_text(encoding="utf-8"))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 800
    assert not re.findall(r"[\u4e00-\u9fff][,;:?!]", text)
