"""Commands, options and keys, from the command-line parsers, the pytest plugin and `syncheck.config`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from marks import cell, code, table

from syncheck import config
from syncheck.cli import parser
from syncheck.pytest_plugin import options

# Keys of pyproject.toml without a command-line option of the same name.
UNTYPED = {
    "checkpoints": "paths and globs for `syncheck report` without a path",
    "only": "kinds of tensors to compare: `params`, `buffers`, `optimizer`, `rng`",
    "tolerance": "tolerances by kind of tensor and by glob of tensor names: [Tolerances](../options.md#tolerances)",
}


def _commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of the help."""
    actions = parser.build()._actions  # noqa: SLF001 - argparse has no public accessor
    (found,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    return dict(found.choices)


def _groups(of: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Return the actions of a parser by the title of their group, without paths and --help."""
    groups = {group.title or "": group._group_actions for group in of._action_groups}  # noqa: SLF001
    kept = {
        title: [a for a in actions if a.option_strings and a.dest != "help"]
        for title, actions in groups.items()
        if title != "positional arguments"
    }
    return {title: actions for title, actions in kept.items() if actions}


def _row(action: argparse.Action) -> tuple[str, str]:
    """Return the cells of an option: its spellings and its help."""
    if action.choices is not None:
        value = " " + "|".join(map(str, action.choices))
    else:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    written = ", ".join(code(name + value) for name in action.option_strings)
    return written, cell(action.help or "")


def commands() -> str:
    """Return a section for each command, and a section for the options that `compare` and `report` share."""
    all_of = _commands()
    same = {_row(a) for group in _groups(all_of["compare"]).values() for a in group}
    same &= {_row(a) for group in _groups(all_of["report"]).values() for a in group}
    parts = []
    for name, of in all_of.items():
        positional = [action for action in of._actions if not action.option_strings]  # noqa: SLF001
        paths = "".join(f" {_place(action)}" for action in positional)
        parts.append(f"## {name}\n\n    syncheck {name} [OPTIONS]{paths}\n\n{cell(of.description or '')}")
        parts += [f"{code(_place(action))}: {cell(action.help or '')}." for action in positional]
        own = [_row(a) for group in _groups(of).values() for a in group]
        if name in ("compare", "report"):
            own = [row for row in own if row not in same]
            parts.append("Options: see [compare and report](#options-of-compare-and-report).")
        if own:
            parts.append(table(("option", "meaning"), own))
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
class OptionRecorder:
    """Records the options that the plugin declares, in place of the parser of pytest."""

    options: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ini: list[tuple[str, ...]] = field(default_factory=list)

    def getgroup(self, *_: str) -> OptionRecorder:
        """Return the recorder itself, as the group."""
        return self

    def addoption(self, name: str, **how: Any) -> None:
        """Record an option."""
        self.options.append((name, how))

    def addini(self, name: str, text: str, type: str = "string", default: Any = None) -> None:  # noqa: A002
        """Record an ini key."""
        shown = "none" if default in (None, [], "") else code(str(default))
        self.ini.append((code(name), {"args": "list of words"}.get(type, "text"), cell(text), shown))


def record_plugin() -> OptionRecorder:
    """Return the options and ini keys of the pytest plugin."""
    recorder = OptionRecorder()
    options.add(recorder)  # type: ignore[arg-type]
    return recorder


def pytest_options() -> str:
    """Return the table of the options of `pytest`."""
    rows = []
    for name, how in record_plugin().options:
        value = "" if how.get("action") == "store_true" else f" {how.get('metavar', 'VALUE')}"
        rows.append((code(name + value), cell(how["help"])))
    return table(("option", "meaning"), rows)


def ini() -> str:
    """Return the table of pytest's ini keys."""
    return table(("key", "value", "meaning", "default"), record_plugin().ini)


def keys() -> str:
    """Return the table of the keys of [tool.syncheck]."""
    typed: dict[str, tuple[str, str]] = {}
    for group in _groups(_commands()["compare"]).values():
        for action in group:
            names = [n for n in action.option_strings if n.startswith("--") and not n.startswith("--no-")]
            typed |= {name[2:]: (code(name), cell(action.help or "")) for name in names}
    known = {name for name, _ in record_plugin().options}
    rows = []
    for key, needed in (config.KEYS | config.PRINTING).items():
        option, meaning = typed.get(key, ("", ""))
        if key in UNTYPED:
            option, meaning = ("`--only-...`" if key == "only" else ""), UNTYPED[key]
        in_pytest = f"--syncheck-{key}"
        rows.append((code(key), needed, option, code(in_pytest) if in_pytest in known else "", meaning))
    return table(("key", "value", "command line", "pytest", "meaning"), rows)
