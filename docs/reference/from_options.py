"""Commands, options and keys, from the parsers of the command line and of pytest and from `syncheck.options`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from marks import cell, code, table

from syncheck.cli import parser
from syncheck.options import COMMAND_LINE, PYTEST, TOML, list_options
from syncheck.pytest_plugin import options as plugin
from syncheck.text import to_flag


def _commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of the help."""
    actions = parser.build_parser()._actions  # noqa: SLF001 - argparse has no public access
    (found,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    return dict(found.choices)


def _groups(of: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Return the options of a parser by the title of their group, without --help."""
    groups = {group.title or "": group._group_actions for group in of._action_groups}  # noqa: SLF001
    kept = {
        title: [a for a in actions if a.option_strings and a.dest != "help"]
        for title, actions in groups.items()
        if title != "positional arguments"
    }
    return {title: actions for title, actions in kept.items() if actions}


def _row(action: argparse.Action) -> tuple[str, str]:
    """Return the cells of an option: its spelling and its help."""
    if action.choices is not None:
        value = " " + "|".join(map(str, action.choices))
    else:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    written = ", ".join(code(name + value) for name in action.option_strings)
    return written, cell(action.help or "")


def commands() -> str:
    """Return a section for each command, and one for the options that `compare` and `report` share."""
    all_of = _commands()
    same = {_row(a) for group in _groups(all_of["compare"]).values() for a in group}
    same &= {_row(a) for group in _groups(all_of["report"]).values() for a in group}
    parts = []
    for name, of in all_of.items():
        positional = [action for action in of._actions if not action.option_strings]  # noqa: SLF001
        paths = "".join(f" {_place(action)}" for action in positional)
        parts.append(f"## {name}\n\n    syncheck {name} [OPTIONS]{paths}\n\n{cell(of.description or '')}")
        own = [_row(a) for group in _groups(of).values() for a in group]
        arguments = [(code(_place(action)), cell(action.help or "")) for action in positional]
        if name in ("compare", "report"):
            own = [row for row in own if row not in same]
            parts += [f"{path}: {text}." for path, text in arguments]
            parts.append("Options: see [compare and report](#options-of-compare-and-report).")
        elif own:
            # Arguments are the first rows, because a paragraph of each would make the page too long.
            parts.append(table(("argument or option", "meaning"), arguments + own))
    parts.append("## Options of compare and report")
    for title, actions in _groups(all_of["compare"]).items():
        rows = [_row(action) for action in actions if _row(action) in same]
        if rows:
            heading = "General" if title == "options" else title[0].upper() + title[1:]
            parts.append(f"### {heading}\n\n{table(('option', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"+": f"{name}...", "*": f"[{name}...]", "?": f"[{name}]"}.get(str(action.nargs), name)


@dataclass
class Recorder:
    """Records the options that the plugin declares, in place of pytest's parser."""

    options: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ini: list[tuple[str, ...]] = field(default_factory=list)

    def getgroup(self, *_: str) -> Recorder:
        """Stand in for a group of options."""
        return self

    def addoption(self, name: str, **settings: Any) -> None:
        """Record an option."""
        self.options.append((name, settings))

    def addini(self, name: str, text: str, type: str = "string", default: Any = None) -> None:  # noqa: A002
        """Record an ini value."""
        shown = "none" if default in (None, [], "") else code(str(default))
        self.ini.append((code(name), {"args": "list of words"}.get(type, "text"), cell(text), shown))


def record_options() -> Recorder:
    """Return the options that the plugin declares."""
    recorder = Recorder()
    plugin.add(recorder)  # type: ignore[arg-type]
    return recorder


def pytest_options() -> str:
    """Return the table of the options of `pytest`."""
    rows = []
    for name, settings in record_options().options:
        metavar = settings.get("metavar", "VALUE")
        value = (
            ""
            if settings.get("action") == "store_true"
            else f" {metavar if isinstance(metavar, str) else ' '.join(metavar)}"
        )
        rows.append((code(name + value), cell(settings["help"])))
    return table(("option", "meaning"), rows)


def ini() -> str:
    """Return the table of pytest's ini keys."""
    return table(("key", "value", "meaning", "default"), record_options().ini)


def keys() -> str:
    """Return the table of the keys of [tool.syncheck]."""
    rows = []
    for name, declaration in list_options(TOML).items():
        flags = [
            code(to_flag(name, prefix)) if surface in declaration.surfaces else ""
            for surface, prefix in ((COMMAND_LINE, "--"), (PYTEST, "--syncheck-"))
        ]
        if declaration.switch_help:
            flags[0] = code(to_flag(name) + "-...")
        rows.append((code(name), declaration.expected, *flags, cell(declaration.full_help)))
    return table(("key", "value", "command line", "pytest", "meaning"), rows)
