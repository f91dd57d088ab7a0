"""An option is declared once, and every surface has it."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import network, save
from support.listings import find_texts, list_fields, list_names

import syncheck
from syncheck import api, config, option_kinds, options
from syncheck.cli import commands, main, parser
from syncheck.comparison import selection
from syncheck.errors import OptionError, UsageError
from syncheck.frozen import record
from syncheck.option_kinds import INTEGER
from syncheck.options import (
    COMMAND_LINE,
    PYTEST,
    PYTHON,
    SELECTION,
    TOML,
    Options,
    RunOptions,
    list_options,
    option,
)

DOCS = str(Path(__file__).resolve().parents[1] / "docs" / "reference")


@record
class Extended(Options):
    """The options with one more."""

    depth_limit: int | None = option(
        None, INTEGER, "a help text that no other option has", SELECTION, metavar="N", minimum=1
    )


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an option to the declared options."""
    monkeypatch.setattr(options, "Options", Extended)
    monkeypatch.setattr(commands, "Options", Extended)


@pytest.mark.usefixtures("extended")
def test_one_declaration_reaches_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A declared option is in the help of both commands, is parsed, checked, and reaches the comparison."""
    for rank in range(2):
        save(tmp_path / f"rank{rank}.pth", network())
    compared: list[Any] = []
    judge = api.judge

    def spy(found: api.Found, options: Any, **how: Any) -> Any:
        compared.append(options)
        return judge(found, options, **how)

    monkeypatch.setattr(api, "judge", spy)
    monkeypatch.chdir(tmp_path)
    for command in ("compare", "report"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--depth-limit N" in capsys.readouterr().out
        assert main([command, ".", "--depth-limit", "3"]) == 0
    (tmp_path / "pyproject.toml").write_text("[tool.syncheck]\ndepth_limit = 4\n")
    assert main(["compare", "."]) == 0
    assert capsys.readouterr().err.endswith("pyproject.toml: depth_limit\n")
    assert list_fields(compared, "depth_limit") == [3, 3, 4]
    assert main(["compare", ".", "--depth-limit", "0"]) == 2
    assert "--depth-limit 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("extended")
def test_one_declaration_reaches_the_project_file(tmp_path: Path) -> None:
    """A declared option is a key of [tool.syncheck] that is checked, and a typed value wins."""
    (tmp_path / ".git").mkdir()
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.syncheck]\ndepth_limit = 4\n")
    _, values = config.load(tmp_path)
    assert config.merge_options(values, Extended, {}).depth_limit == 4
    assert config.list_applied(values, Extended, {"depth_limit": 5}) == []
    for value in ("'4'", "0", "true"):
        file.write_text(f"[tool.syncheck]\ndepth-limit = {value}\n")
        with pytest.raises(UsageError, match=r"depth_limit=.*: must be "):
            config.load(tmp_path)


@pytest.mark.usefixtures("extended")
def test_one_declaration_reaches_pytest_and_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A declared option is an option of the plugin and has rows in the generated pages."""
    monkeypatch.syspath_prepend(DOCS)
    import from_options

    assert "| `--syncheck-depth-limit N` | a help text" in from_options.pytest_options()
    assert "| `--depth-limit N` | a help text" in from_options.commands()
    (row,) = find_texts(from_options.keys().splitlines(), "a help text")
    assert row.startswith("| `depth_limit` | a whole number, at least 1 | `--depth-limit` | `--syncheck-depth-limit` |")


def test_a_declared_option_is_checked_in_python() -> None:
    """Type and range come from the declaration, and the error names the field."""
    assert Extended(depth_limit=2).depth_limit == 2
    for value in (0, "2", 1.0, True):
        with pytest.raises(OptionError) as caught:
            Extended(depth_limit=value)  # type: ignore[arg-type]
        assert caught.value.values == {"depth_limit": value}


@pytest.mark.parametrize("cls", [Options, RunOptions])
def test_declarations_are_complete(cls: type) -> None:
    """Each field has a default that passes its own check, a help text, and a placeholder if it takes a value."""
    declarations = {}
    for surface in (PYTHON, COMMAND_LINE, TOML, PYTEST):
        declarations |= list_options(surface, cls)
    assert set(declarations) == set(list_names(fields(cls)))
    for name, declaration in declarations.items():
        declaration.check(name, getattr(cls(), name))
        assert declaration.help
        assert not declaration.section or declaration.section in options.SECTIONS
        typed = declaration.surfaces & {COMMAND_LINE, PYTEST}
        if typed and declaration.kind is not option_kinds.FLAG:
            assert declaration.metavar or declaration.choices
        assert set(declaration.switch_help) <= set(declaration.choices)


def test_help_does_not_spell_options() -> None:
    """A help text serves all surfaces, so it contains no flag and no table."""
    for declaration in list_options(TOML).values():
        assert "--" not in declaration.help
        assert "tool." not in declaration.help


def test_options_are_importable_from_the_api() -> None:
    """`syncheck.Options` and `syncheck.api.Options` are the declared class."""
    assert syncheck.Options is api.Options is Options


def test_each_choice_of_only_selects_kinds() -> None:
    """The kinds of tensors of each value of `only` are known, and the command line has a switch for each."""
    declaration = list_options(PYTHON, Options)["only"]
    assert set(declaration.choices) == set(selection.ONLY) == set(declaration.switch_help)
    arguments = parser.build_parser().parse_args(["compare", "x", *(f"--only-{name}" for name in declaration.choices)])
    assert arguments.only == list(declaration.choices)


def test_importing_the_declarations_is_cheap() -> None:
    """The module imports few others, because the command line and pytest import it on every start."""
    import subprocess

    code = "import sys, syncheck.options; print(sorted(name for name in sys.modules if name.startswith('syncheck.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["errors", "frozen", "option_kinds", "options", "text"]
    assert done.stdout.strip() == str([f"syncheck.{name}" for name in names])
