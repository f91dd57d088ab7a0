"""Output in the log of a CI system contains no commands of this system."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save_pth
from support.hostile_names import shorten
from support.hostile_report import HOSTILE, hostile
from support.listings import list_files, list_names

from syncheck.options import FORMATS
from syncheck.report import failure, formats, plain, terminal, text
from syncheck.text import logged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

OTHERS = [name for name in HOSTILE if ":" in name or "##" in name]
COMMANDS = [*OTHERS, "::add-mask::x", "  ::error::x", "##vso[task.setvariable]x", "a ##[group]b", ":::", "::[::"]


def find_commands(log: str) -> list[str]:
    """Return the lines that GitHub, Azure Pipelines or TeamCity interpret as commands.

    The runner trims a line before it looks for `::`, and looks for `##[` anywhere:
    https://github.com/actions/runner/blob/602c0085328df8cb595fc2641d69f640a11377a4/src/Runner.Worker/ActionCommand.cs
    """
    plain_lines = re.sub(r"\x1b\[[0-9;]*m", "", log).split("\n")
    return [line for line in plain_lines if line.strip().startswith("::") or re.search(r"##\w*\[", line)]


FEW = ("::add-mask::x", "  ::error::x", "##vso[task.setvariable]x", "::[::")  # fast tests: one of each kind
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in dict.fromkeys(COMMANDS)]


@pytest.mark.parametrize("name", NAMES, ids=shorten)
def test_no_name_is_a_command(name: str) -> None:
    """No format, width of terminal, color setting or assertion message turns a name into a command."""
    output = hostile(name)
    parts = [*text.draw_comparison(output, 0), *text.draw_overview(output, 0)]
    assert find_commands(plain.render(parts)) == []
    for width, color in ((None, True), (30, True), (80, False)):
        assert find_commands(terminal.render(parts, width, color)) == []
    assert find_commands(failure.message(output)) == []
    # GitHub's format consists of commands, which tests/report/test_github.py reads.
    for form in set(FORMATS) - {"text", "github"}:
        assert find_commands(formats.render_format(form, output)) == []
    assert set(list_names(json.loads(formats.render_format("json", output))["groups"])) == {name}


def test_only_commands_are_escaped() -> None:
    """Other texts are not escaped, and `find_commands` detects commands."""
    calm = "a::b\n  x ::y\n#[z]\n: :"
    assert logged(calm) == calm
    assert find_commands(calm) == []
    assert logged("a\n \x1b[1m::b\n::\n##[c]##vso[d]") == "a\n \x1b[1m\\x3a:b\n\\x3a:\n#\\x23[c]#\\x23vso[d]"
    assert len(find_commands("a\n \x1b[1m::b\n::\nx ##[c]\n##vso[d]")) == 4


def test_output_of_the_command_line(cli: Callable[..., Done], tmp_path: Path) -> None:
    """For files with hostile names, no subcommand prints a command of a CI system."""
    for rank, name in enumerate(["::error::a", "::error::b"]):
        save_pth(tmp_path / f"{name}_rank{rank}.pth", changed(network(), "fc.weight", by=0.5 * rank))
    (tmp_path / "##[error]c.pth").write_text("no checkpoint")
    for command in (
        ("compare", ".", "--group-by", ""),
        ("compare", *list_files(tmp_path)),
        ("report", "."),
        ("show", "::error::a_rank0.pth"),
        ("show", "##[error]c.pth"),
        ("show", "::error::a_rank0.pth", "--format", "json"),
        ("fingerprint", "::error::a_rank0.pth", "##[error]c.pth", "-o", "##[group]out"),
        ("compare", "::none::", "##[none]"),
    ):
        for color in ({}, {"FORCE_COLOR": "1"}):
            done = cli(*command, **color)
            assert find_commands(done.out) == [], command
            assert find_commands(done.err) == [], command
            assert done.out or done.err
