"""The findings, from the docstrings of the rules and from the fixtures that show them."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from marks import cell, code, escaped, table

from syncheck.diagnose import RULES

ROOT = Path(__file__).resolve().parents[2]
# What a paragraph of a rule's docstring may begin with.
_HEAD = re.compile(r"^(Signature|Cause|Fix(?:, best first)?|Incidents): ")
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)?#(\d+)")
_CODE = re.compile(r"\bSYN\d{3}\b")
_PAPER = re.compile(r"arXiv (\d{4}\.\d{4,5})")


def _rows() -> list[tuple[str, ...]]:
    """Return the cells of each finding, by code."""
    return [
        (
            f"[{rule.CODE}](#{rule.CODE.lower()})",
            rule.SLUG,
            rule.SEVERITY,
            cell((rule.__doc__ or "").partition("\n")[0]),
        )
        for rule in sorted(RULES, key=lambda rule: rule.CODE)
    ]


def table_made() -> str:
    """Return the table of all findings."""
    return table(("code", "finding", "severity", "says"), _rows())


def order() -> str:
    """Return the order in which rules are asked, those aside that cover nothing."""
    return " ".join(rule.CODE[3:] for rule in RULES if rule.SEVERITY != "info")


def sections() -> str:
    """Return a section for each finding: signature, cause, fix, incidents, and a fixture to see it on."""
    shown = _shown()
    parts = []
    for rule in sorted(RULES, key=lambda rule: rule.CODE):
        first, *rest = textwrap.dedent(rule.__doc__ or "").strip().split("\n\n")
        parts.append(f"## {rule.CODE}\n\n**{rule.SLUG}**, {rule.SEVERITY}. {escaped(first)}")
        parts += [_paragraph(" ".join(text.split())) for text in rest]
        if rule.CODE in shown:
            parts.append("To see it: " + ", ".join(code(f"syncheck {line}") for line in shown[rule.CODE]))
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    head = _HEAD.match(text)
    if head is None:
        return _to_codes(escaped(text))
    body = escaped(text[head.end() :])
    return f"**{head[1]}.** {_linked(body) if head[1] == 'Incidents' else _to_codes(body[0].upper() + body[1:])}"


def _to_codes(text: str) -> str:
    """Make links of findings, where they do not stand in code."""
    parts = text.split("`")
    parts[::2] = [_CODE.sub(lambda found: f"[{found[0]}](#{found[0].lower()})", part) for part in parts[::2]]
    return "`".join(parts)


def _linked(text: str) -> str:
    """Make links of issues and papers; `#2724` alone is of the repository that was named last."""
    last = ""

    def issue(found: re.Match[str]) -> str:
        nonlocal last
        last = found[1] or last
        return f"[{found[0]}](https://github.com/{last}/issues/{found[2]})"

    return _PAPER.sub(r"[\g<0>](https://arxiv.org/abs/\1)", _ISSUE.sub(issue, text))


def _shown() -> dict[str, list[str]]:
    """Return what to type in a clone to see a finding, at most two lines each: those with the fewest other findings."""
    fixtures = json.loads((ROOT / "fixtures" / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]
    found: dict[str, list[tuple[int, str]]] = {}
    for fixture in fixtures:
        command = "report" if len(fixture["steps"]) > 1 else "compare"
        for finding in fixture["findings"]:
            line = (len(fixture["findings"]), f"{command} fixtures/{fixture['folder']}")
            found.setdefault(finding, []).append(line)
    return {name: [line for _, line in sorted(lines)[:2]] for name, lines in found.items()}
