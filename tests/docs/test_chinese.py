"""The Chinese pages have the code, headings, numbers and links of the English pages."""

from __future__ import annotations

import importlib.util
import os
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ROOT / "docs" / "zh-CN"
CHINESE_PAGES = [ROOT / "README.zh-CN.md", *sorted(CHINESE.glob("*.md"))]
# English pages and their translations.
PAGES = {
    "README.md": "README.zh-CN.md",
    "docs/from-your-old-script.md": "docs/zh-CN/from-your-old-script.md",
    **{f"docs/guide/{page.name}": f"docs/zh-CN/{page.name}" for page in sorted(CHINESE.glob("[0-9]*.md"))},
}
# Lists of pages: the Chinese one lists only translated pages, so its structure is its own.
INDEXES = {"docs/guide/README.md": "docs/zh-CN/README.md"}
# Pictures with the texts of a table.
PICTURES = {
    f"docs/guide/pictures/{page.name}": f"docs/zh-CN/pictures/{page.name}" for page in CHINESE.glob("pictures/*.svg")
}
_CODE = re.compile(r"^```.*?^```$|(?:^    [^\n]*\n)+", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)]*)\)")
# Words that the pages do not use, and the word of the glossary that they use instead.
_OTHER_WORDS = {
    "指南": "教程",
    "监视": "监控",
    "走一步": "更新",
    "损失(?!缩放)(?<!对比损失)": "loss",
    "检查点": "checkpoint",
    "规约": "归约",
    "梯度累加": "梯度累积",
}
_HAN = r"[\u4e00-\u9fff]"
# Wide commas, stops, brackets and quotation marks.
_MARK = r"[\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f\u201c\u201d]"
_WRONG_SPACES = re.compile(rf"{_HAN}[A-Za-z0-9]|[A-Za-z0-9%]{_HAN}|{_HAN} +{_HAN}|{_MARK} | {_MARK}")
_IDEOGRAPH = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


def find_links(text: str, page: Path) -> set[str]:
    """Return the addresses of a page without anchors; paths of files from the root."""
    addresses = set()
    for link in _LINK.findall(text):
        path = link.partition("#")[0]
        if path:
            addresses.add(link if ":" in link else os.path.relpath(os.path.normpath(page.parent / path), ROOT))
    return addresses


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
    spans = [set(re.findall(r"`([^`\n]+)`", page)) for page in plain]
    assert spans[0] == spans[1]


@pytest.mark.parametrize(("english", "chinese"), PAGES.items())
def test_links_lead_to_chinese_pages(english: str, chinese: str) -> None:
    """A Chinese page has the links of the English page, to the translations of the pages that have one."""
    pages = {path: _CODE.sub("", (ROOT / path).read_text(encoding="utf-8")) for path in (english, chinese)}
    links = [find_links(text, ROOT / path) for path, text in pages.items()]
    own_values = {english, chinese, "docs/zh-CN/glossary.md"}
    translations = PAGES | PICTURES | INDEXES
    assert links[1] - own_values == {translations.get(link, link) for link in links[0]} - own_values


@pytest.fixture(scope="module")
def translator() -> ModuleType:
    """Return docs/guide/translate_pictures.py."""
    path = ROOT / "docs" / "guide" / "translate_pictures.py"
    specification = importlib.util.spec_from_file_location("translate_pictures", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_pictures_are_translated(translator: ModuleType) -> None:
    """The pictures of Chinese pages are the English ones with the texts of the table; no other picture is used."""
    contents = translator.translate_all()
    assert {path: path.read_text(encoding="utf-8") for path in contents} == contents
    linked = set()
    for page in CHINESE.glob("[0-9]*.md"):
        linked |= {link for link in find_links(page.read_text(encoding="utf-8"), page) if link.endswith(".svg")}
    assert linked == {str(path.relative_to(ROOT)) for path in contents}


@pytest.mark.parametrize("name", ["ddp", "overlap", "precision", "speed"])
def test_lines_stay_centered(name: str) -> None:
    """Each line of a diagram is anchored in its middle, so that a shorter line is centered too."""
    picture = (CHINESE / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text [^>]*>", picture)
    assert texts
    assert [text for text in texts if "text-anchor: middle" not in text] == []


def test_translated_texts_fit(translator: ModuleType) -> None:
    """A Chinese text is at most as wide as the English one, within the space of two letters."""
    too_wide = {}
    for labels in translator.read_labels().values():
        for english, chinese in labels.items():
            # An ideograph is as wide as about 1.8 letters of the font.
            width = sum(1.8 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in chinese)
            if width > len(english) + 2:
                too_wide[english] = chinese
    assert too_wide == {}


def test_a_text_without_a_translation_is_refused(translator: ModuleType) -> None:
    """A new text of a picture needs a translation; numbers do not, and markup stays escaped."""
    assert translator.translate("<text x='1'>a &lt; b2</text>", {}) == "<text x='1'>a &lt; b2</text>"
    assert translator.translate("<text>rank 0</text>", {"rank 0": "<0>"}) == "<text>&lt;0&gt;</text>"
    with pytest.raises(KeyError):
        translator.translate("<text>new text</text>", {})


@pytest.mark.parametrize(("english", "chinese"), PAGES.items())
def test_a_page_of_two_languages_has_a_switch(english: str, chinese: str) -> None:
    """The first lines of both pages link to the other language."""
    for page, other in ((english, chinese), (chinese, english)):
        top = "\n".join((ROOT / page).read_text(encoding="utf-8").splitlines()[:4])
        assert other in find_links(top, ROOT / page), page


@pytest.mark.parametrize("chinese", PAGES.values())
def test_translations_are_chinese(chinese: str) -> None:
    """Most letters outside code are Chinese, and Chinese sentences have Chinese punctuation."""
    text = _CODE.sub("", (ROOT / chinese).read_text(encoding="utf-8"))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 300
    assert not re.findall(r"[\u4e00-\u9fff][,;:?!]", text)


@pytest.mark.parametrize("path", CHINESE_PAGES, ids=lambda path: path.name)
def test_emphasis_and_lines_render(path: Path) -> None:
    """No asterisk of an emphasis is shown, and no line ends between two Chinese characters, which shows a space."""
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        if token.type == "inline":
            assert not re.search(rf"{_IDEOGRAPH}\n{_IDEOGRAPH}", token.content), token.content
            texts = [child.content for child in token.children or [] if child.type == "text"]
            assert "*" not in "".join(texts), token.content


def read_paragraphs(path: Path) -> list[str]:
    """Return the text of each paragraph, heading and cell of a page as a reader sees it, without blocks of code."""
    paragraphs = []
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        if token.type == "inline":
            children = token.children or []
            paragraphs.append("".join(child.content for child in children if child.type in {"text", "code_inline"}))
    return paragraphs


@pytest.mark.parametrize("path", CHINESE_PAGES, ids=lambda path: path.name)
def test_spaces_stand_between_chinese_and_latin(path: Path) -> None:
    """A space separates a Chinese from a Latin word, but not two Chinese ones, and none is beside a wide mark."""
    assert [text for text in read_paragraphs(path) if _WRONG_SPACES.search(text)] == []


@pytest.mark.parametrize("path", CHINESE_PAGES, ids=lambda path: path.name)
def test_one_thing_has_one_word(path: Path) -> None:
    """The pages use the words of the glossary, which itself may name the others in quotation marks."""
    text = re.sub("“.*?”", "", "\n".join(read_paragraphs(path)))
    assert {word: right for word, right in _OTHER_WORDS.items() if re.search(word, text)} == {}


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("用 DDP 包装", False),
        ("用DDP 包装", True),
        ("之间的 转换", True),
        ("两次运行 torch 2.15。", False),
        ("各取平均。 all-reduce", True),
        ("占 2 %、即 0.5", False),
    ],
)
def test_wrong_spaces_are_seen(text: str, is_wrong: bool) -> None:
    """The rule of spaces accepts right texts and refuses wrong ones."""
    assert bool(_WRONG_SPACES.search(text)) == is_wrong
