"""The page of a finding: its explanation under headings, an example, wrong and right code."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from marks import escaped
from sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

CODE_PAIRS = ROOT / "docs" / "reference" / "code_pairs"
# Titles of paragraphs in the docstring of a rule, with the headings of the page in their order. Paragraphs without a
# title belong to the heading of the paragraph before them.
HEADINGS = {
    "Signature": "Signature",
    "Cause": "Cause",
    "Fix": "Fix",
    "Fix, best first": "Fix",
    "If it is no problem": "When it is no problem",
    "Incidents": "Incidents",
}
ORDER = ("", "Signature", "Example", "Cause", "Fix", "When it is no problem", "Incidents")
_HEAD = re.compile(rf"^({'|'.join(HEADINGS)}): ")
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)?#(\d+)")
_CODE = re.compile(r"\bSYN\d{3}\b")
_PAPER = re.compile(r"arXiv (\d{4}\.\d{4,5})")


class Rule(Protocol):
    """The parts of a rule that its page needs."""

    code: str
    slug: str
    severity: str
    explanation: str


class Example(NamedTuple):
    """A sentence with the commands of an example, and the finding that they print."""

    about: str
    printed: str


@cache
def read_code_pairs() -> dict[str, dict[str, str]]:
    """Return for each finding the texts `wrong`, `right` and, unless the rule has it, `fine`."""
    pairs: dict[str, dict[str, str]] = {}
    for path in sorted(CODE_PAIRS.glob("*.toml")):
        pairs |= tomllib.loads(path.read_text(encoding="utf-8"))
    return pairs


def write_page(rule: Rule, example: Example | None, links: Iterable[str]) -> str:
    """Return the page of a finding as Markdown. links: for its last line.

    Raises KeyError if the finding has no wrong and right code.
    """
    sections = _split(rule.explanation)
    if example is not None:
        sections["Example"] = [example.about, f"```\n{example.printed}\n```"]
    pair = read_code_pairs()[rule.code]
    for title, name in (("Wrong", "wrong"), ("Right", "right")):
        sections.setdefault("Fix", []).extend((f"### {title}", _as_block(pair[name])))
    if "fine" in pair:
        sections["When it is no problem"] = [_link_codes(pair["fine"])]
    severity = f'Severity: <span class="severity {rule.severity}">{rule.severity}</span>.'
    parts = [f"# {rule.code} {rule.slug}", f"{severity} {sections[''][0]}", *sections[""][1:]]
    for heading in ORDER[1:]:
        if heading in sections:
            parts += [f"## {heading}", *sections[heading]]
    return "\n\n".join((*parts, ", ".join(links))) + "\n"


def _split(explanation: str) -> dict[str, list[str]]:
    """Return the paragraphs of an explanation as Markdown by their heading; those before the first heading by ""."""
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for text in explanation.split("\n\n"):
        if text.startswith("- "):
            items = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
            sections[heading].append("\n".join(f"- {_link_codes(escaped(' '.join(item.split())))}" for item in items))
            continue
        paragraph = " ".join(text.split())
        if title := _HEAD.match(paragraph):
            heading = HEADINGS[title[1]]
            paragraph = paragraph[title.end() :]
            # Incidents begin with the name of a repository, which keeps its case.
            if "#" not in paragraph.split()[0]:
                paragraph = paragraph[0].upper() + paragraph[1:]
        link = _link_issues if heading == "Incidents" else _link_codes
        sections.setdefault(heading, []).append(link(escaped(paragraph)))
    return sections


def _as_block(code: str) -> str:
    """Return a block of Python code, or of commands if the first line begins with a prompt."""
    language = "console" if code.startswith("$ ") else "python"
    return f"```{language}\n{code.strip()}\n```"


def _link_codes(text: str) -> str:
    """Link codes of findings, except inside `code` and in links."""
    parts = re.split(r"(`[^`]*`|\[[^\]]*\]\([^)]*\))", text)
    parts[::2] = [_CODE.sub(lambda match: f"[{match[0]}]({match[0].lower()}.md)", part) for part in parts[::2]]
    return "".join(parts)


def _link_issues(text: str) -> str:
    """Link issues and papers; `#2724` alone belongs to the last repository mentioned before it."""
    last = ""

    def issue(match: re.Match[str]) -> str:
        nonlocal last
        last = match[1] or last
        return f"[{match[0]}](https://github.com/{last}/issues/{match[2]})"

    return _PAPER.sub(r"[\g<0>](https://arxiv.org/abs/\1)", _ISSUE.sub(issue, text))
