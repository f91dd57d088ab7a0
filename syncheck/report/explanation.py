"""The output of `syncheck explain`: the list of all findings, and the explanation of one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.report.parts import BLANK, Grid, Span, line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.rule import Rule
    from syncheck.report.parts import Part

# An issue of a repository on GitHub. `#2724` alone belongs to the repository before it.
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)?#(\d+)")
_PAPER = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_CONTINUATION = re.compile(r"\n(?!- ) *")
_ITEM = "- "
_INDENT_OF_ITEM = 2
_INCIDENTS = "Incidents: "


def list_rules(rules: Sequence[Rule]) -> list[Part]:
    """Return the table of all findings, one row per rule."""
    grid = Grid(("code", "finding", "severity", "summary"))
    for rule in rules:
        summary, _, _ = rule.explanation.partition("\n")
        grid.add(
            rule.code,
            Span(rule.slug),
            rule.severity,
            summary,
        )

    return [grid]


def explain_rule(rule: Rule) -> list[Part]:
    """Return the explanation of a rule: paragraphs and items of lists, one per line, and the addresses of incidents."""
    parts: list[Part] = [line(f"{rule.code} {rule.slug} ({rule.severity})", "bold")]
    for paragraph in rule.explanation.split("\n\n"):
        # A line of the source continues the one before it, unless it begins an item.
        texts = _CONTINUATION.sub(" ", paragraph).split("\n")
        if paragraph.startswith(_INCIDENTS):
            texts += [f"{_ITEM}{address}" for address in find_addresses(paragraph)]
        parts.append(BLANK)
        for text in texts:
            parts.append(line(text, "", _INDENT_OF_ITEM * text.startswith(_ITEM)))

    return parts


def find_addresses(text: str) -> list[str]:
    """Return the addresses of the issues and papers that a text names as 'pytorch/pytorch#13711'."""
    addresses: dict[str, None] = {}
    repository = ""
    for match in _ISSUE.finditer(text):
        repository = match[1] or repository
        addresses[f"https://github.com/{repository}/issues/{match[2]}"] = None
    for match in _PAPER.finditer(text):
        addresses[f"https://arxiv.org/abs/{match[1]}"] = None

    return list(addresses)
