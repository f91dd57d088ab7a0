"""Commands, options and keys, from the parsers of the command line and of pytest, and from `syncheck.config`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from marks import cell, code, table

from syncheck import config
from syncheck.cli import parser
from syncheck.pytest_plugin import options

# Keys of pyproject.toml that no option of the command line bears the name of.
UNTYPED = {
    "checkpoints": "paths and globs for `syncheck report` without a path",
    "only": "kinds of tensors: `params`, `buffers`, `optimizer`, `rng`; as the `--only-` options",
    "tolerance": "tolerances by kind of tensor and by glob of names: [Tolerances](../options.md#tolerances)",
}


def _commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of the help."""
    actions = parser.build()._actions  # noqa: SLF001 - argparse has no other way to ask
    (found,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    return dict(found.choices)


def _groups(of: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Return the actions of a parser by the title of their group, its paths and --help left out."""
    groups = {group.title or "": group._group_actions for group in of._action_groups}  # noqa: SLF001
    kept = {
        title: [a for a in actions if a.option_strings and a.dest != "help"]
        for title, actions in groups.items()
        if title != "positional arguments"
    }
    return {title: actions for title, actions in kept.items() if actions}


def _row(action: argparse.Action) -> tuple[str, str]:
    """Return the cells of an option: how it is written, and what it does."""
    if action.choices is not None:
        value = " " + "|".join(map(str, action.choices))
    else:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    written = ", ".join(code(name + value) for name in action.option_strings)
    return written, cell(action.help or "")


def commands() -> str:
    """Return a section for each command; what `compare` and `report` share stands once."""
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
            parts.append("Its options are those of [compare and report](#options-of-compare-and-report).")
        if own:
            parts.append(table(("option", "means"), own))
    parts.append("## Options of compare and report")
    for title, actions in _groups(all_of["compare"]).items():
        rows = [_row(action) for action in actions if _row(action) in same]
        if rows:
            heading = "General" if title == "options" else title[0].upper() + title[1:]
            parts.append(f"### {heading}\n\n{table(('option', 'means'), rows)}")
    return "\n\n".join(parts)


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"+": f"{name}...", "*": f"[{name}...]", "?": f"[{name}]"}.get(str(action.nargs), name)


@dataclass
class Asked:
    """Takes down what the plugin declares, in place of pytest's parser."""

    options: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ini: list[tuple[str, ...]] = field(default_factory=list)

    def getgroup(self, *_: str) -> Asked:
        """Stand in for a group of options."""
        return self

    def addoption(self, name: str, **how: Any) -> None:
        """Take down an option."""
        self.options.append((name, how))

    def addini(self, name: str, text: str, type: str = "string", default: Any = None) -> None:  # noqa: A002
        """Take down an ini value."""
        shown = "none" if default in (None, [], "") else code(str(default))
        self.ini.append((code(name), {"args": "several, as words"}.get(type, "text"), cell(text), shown))


def asked() -> Asked:
    """Return what the plugin declares."""
    found = Asked()
    options.add(found)  # type: ignore[arg-type]
    return found


def pytest_options() -> str:
    """Return the table of the options of `pytest`."""
    rows = []
    for name, how in asked().options:
        value = "" if how.get("action") == "store_true" else f" {how.get('metavar', 'VALUE')}"
        rows.append((code(name + value), cell(how["help"])))
    return table(("option", "means"), rows)


def ini() -> str:
    """Return the table of pytest's ini keys."""
    return table(("key", "value", "means", "default"), asked().ini)


def keys() -> str:
    """Return the table of the keys of [tool.syncheck]."""
    typed: dict[str, tuple[str, str]] = {}
    for group in _groups(_commands()["compare"]).values():
        for action in group:
            names = [n for n in action.option_strings if n.startswith("--") and not n.startswith("--no-")]
            typed |= {name[2:]: (code(name), cell(action.help or "")) for name in names}
    known = {name for name, _ in asked().options}
    rows = []
    for key, needed in (config.KEYS | config.PRINTING).items():
        option, means = typed.get(key, ("", ""))
        if key in UNTYPED:
            option, means = ("`--only-...`" if key == "only" else ""), UNTYPED[key]
        in_pytest = f"--syncheck-{key}"
        rows.append((code(key), needed, option, code(in_pytest) if in_pytest in known else "", means))
    return table(("key", "value", "command line", "pytest", "means"), rows)
