"""The Chinese pages have the code, headings, numbers and links of the English pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# English pages and their translations.
PAGES = {"README.md": "README.zh-CN.md"}
_CODE = re.compile(r"^```.*?^```$|(?:^    [^\n]*\n)+", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)]*)\)")


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
    own = {english, "docs/zh-CN/glossary.md"}
    assert set(_LINK.findall(plain[1])) - own == set(_LINK.findall(plain[0])) - {chinese}
    spans = [set(re.findall(r"`([^`\n]+)`", page)) for page in plain]
    assert spans[0] == spans[1]


@pytest.mark.parametrize("chinese", PAGES.values())
def test_translations_are_chinese(chinese: str) -> None:
    """Most letters outside code are Chinese, and Chinese sentences have Chinese punctuation."""
    text = _CODE.sub("", (ROOT / chinese).read_text(encoding="utf-8"))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 800
    assert not re.findall(r"[\u4e00-\u9fff][,;:?!]", text)
