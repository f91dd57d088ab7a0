"""The findings: docstrings of the rules, fixtures with each finding, and an example of the printed text."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import diff_examples
import parity_examples
import watch_examples
from finding_page import Example, write_page
from marks import cell, code, table
from sources import ROOT

from syncheck.cli import main, output
from syncheck.diagnose.rules import list_rules
from syncheck.live.witnesses.rules import WITNESS_RULES
from syncheck.parity.causes import PARITY_RULES
from syncheck.records import Counts, Group, Report
from syncheck.report import terminal
from syncheck.report.text import comparison_body
from syncheck.text import options_as_typed

EXAMPLE = "fixtures/desync/stale_rank"
# Columns of a terminal, in which the pages show findings.
_WIDTH = 100
PEFT = "fixtures/conversions/peft/a"


def example() -> str:
    """Return a command for the clone and its printed finding."""
    return f"    syncheck report {EXAMPLE}\n\n```\n{print_finding(f'report {EXAMPLE}', 'SYN217')}\n```"


def table_of_findings() -> str:
    """Return the table of all findings, by code."""
    rows = []
    for rule in sorted((*list_rules(), *WITNESS_RULES, *PARITY_RULES), key=lambda rule: rule.code):
        summary = cell(rule.explanation.partition("\n")[0])
        rows.append((f"[{rule.code}](findings/{rule.code.lower()}.md)", rule.slug, rule.severity, summary))
    return table(("code", "finding", "severity", "meaning"), rows)


def order() -> str:
    """Return the numbered list of the rules in the order in which they are applied, without rules of severity info."""
    lines = []
    for rule in list_rules():
        if rule.severity != "info":
            lines.append(f"{len(lines) + 1}. [{rule.code}](findings/{rule.code.lower()}.md) {rule.slug}")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return a page for each finding by file name: meaning, signature, example, cause, fix, code and incidents."""
    commands, pairs = _commands_by_code(), print_pairs() | print_examples()
    made = {}
    for rule in (*list_rules(), *WITNESS_RULES, *PARITY_RULES):
        printed = None
        if rule.code in commands:
            about = ", ".join(code(f"syncheck {line}") for line in commands[rule.code])
            printed = Example(about, print_finding(commands[rule.code][0], rule.code))
        elif rule.code in pairs:
            printed = Example(*pairs[rule.code])
        links = ["[All findings](../findings.md)", "[by symptom](../../by-symptom.md)"]
        if rule.code.startswith("SYN2"):
            links.append("[how often a stated cause is right](../../diagnosis-trials.md)")
        made[f"{rule.code.lower()}.md"] = write_page(rule, printed, links)
    return made


def print_pairs() -> dict[str, tuple[str, str]]:
    """Return for each finding on two models an example with its command, and the printed lines."""
    made = {}
    adapter = f"{PEFT}/base/,{PEFT}/adapter/"
    printed = print_finding(f"diff {adapter} {PEFT}/base/", "SYN303")
    made["SYN303"] = f"B is the model without the adapter. `syncheck diff {adapter} {PEFT}/base/`", printed
    for code_of, (about, a, b) in diff_examples.make_pairs().items():
        with tempfile.TemporaryDirectory() as folder:
            for name, arrays in (("a", a), ("b", b), ("old", diff_examples.make_model(1))):
                diff_examples.save(Path(folder, name), arrays)
            command = "diff a b" + " --base old" * (code_of in ("SYN301", "SYN302"))
            made[code_of] = f"{about} `syncheck {command}`", print_finding(command, code_of, Path(folder))
    return made


def print_finding(command: str, code: str, folder: Path = ROOT) -> str:
    """Return the lines that a command prints for a finding, as on a terminal. folder: where the command runs."""
    os.chdir(folder)
    printed = io.StringIO()
    terminal_of_page = patch.multiple(output, terminal_width=lambda: _WIDTH, needs_ascii=lambda: True)
    with terminal_of_page, redirect_stdout(printed), redirect_stderr(io.StringIO()):
        main([*command.split(), "--no-config", "--color", "never"])
    os.chdir(ROOT)
    return find_finding(printed.getvalue(), code, command)


def print_examples() -> dict[str, tuple[str, str]]:
    """Return for each finding of parity and of watched runs a description of a program, and the printed lines."""
    made = {}
    for command, examples in (("parity", parity_examples), ("watch", watch_examples)):
        for code_of, (about, finding) in examples.make_findings().items():
            group = Group("Mine", "Mine", None, (), Counts(), findings=(finding,), verdict="out_of_sync")
            with options_as_typed():
                body = comparison_body(Report("out_of_sync", (group,), command=command), 10)
                printed = terminal.render(body, _WIDTH, color=False, ascii_only=True)
            made[code_of] = about, find_finding(printed, code_of, command)
    return made


def find_finding(printed: str, code: str, command: str) -> str:
    """Return the lines of a finding in a printed report."""
    found = re.search(rf"^  {code} .*?^    more .*?$", printed, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"{command}: {code} is not printed; rebuild the fixtures")
    return found[0]


def _commands_by_code() -> dict[str, list[str]]:
    """Return at most two commands for each finding, on the fixtures with the fewest other findings."""
    fixtures = json.loads((ROOT / "fixtures" / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]
    found: dict[str, list[tuple[int, str]]] = {}
    for fixture in fixtures:
        command = "report" if len(fixture["steps"]) > 1 else "compare"
        for finding in fixture["findings"]:
            line = (len(fixture["findings"]), f"{command} fixtures/{fixture['folder']}")
            found.setdefault(finding, []).append(line)
    return {name: [line for _, line in sorted(lines)[:2]] for name, lines in found.items()}
