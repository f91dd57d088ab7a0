"""The code map: every module of syncheck and of the trainer, with the first line of its docstring."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from marks import cell, table
from sources import ROOT, docstring, parsed

from tools.house import measure

if TYPE_CHECKING:
    from pathlib import Path

# Rules have a table of their own, in findings.md.
# The packages of syncheck that users meet.
_DOORS = frozenset({"settings", "report", "live", "parity", "cli", "integrations", "pytest_plugin"})
_RULE = re.compile(r"syn\d{3}_")
# Modules of the trainer by purpose. A package stands for its modules, unless they follow it.
TRAIN = {
    "Start here": (
        "minimal minimal_spawn minimal_by_hand run engine trainer parts methods methods.all_methods methods.base "
        "methods.single methods.ddp "
        "methods.zero methods.localsgd methods.diloco methods.replicate methods.fsdp methods.hsdp methods.tp "
        "methods.fsdp_tp methods.ddp_tp methods.pp methods.pp_fsdp methods.cp methods.ep "
        "methods.dp"
    ),
    "Models and data": "task models data schedule seeds",
    "Distribution over processes": (
        "launch mesh methods.pipeline_stages methods.tensor_parallel_plan methods.replica_threads "
        "methods.sync_batchnorm methods.comm_hooks"
    ),
    "Checkpoints": "checkpoints checkpoints.saver checkpoints.checkpoint_files checkpoints.lock resume",
    "Faults, errors and signals": "faults errors sync_checks result",
    "Measurements and output": "metrics recorders evaluate bench columns",
    "Options": "options option old_options settings optional",
}


def _modules(folder: Path) -> set[str]:
    """Return the names of a package's modules and packages."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in folder.glob("*/__init__.py")}


def _find_mismatches(package: str, parts: dict[str, str]) -> set[str]:
    """Return the modules that are only in the package, or only in the table above."""
    listed = set(" ".join(parts.values()).split())
    existing = _modules(ROOT / package)
    for subpackage in {name.partition(".")[0] for name in listed if "." in name}:
        existing |= {f"{subpackage}.{name}" for name in _modules(ROOT / package / subpackage)}
    return existing ^ listed


def modules(package: str, parts: dict[str, str]) -> str:
    """Return a table for each part. Raises KeyError if the parts do not list exactly the existing modules."""
    if mismatches := _find_mismatches(package, parts):
        raise KeyError(f"{package}: only in {__name__} or only in the folder: {', '.join(sorted(mismatches))}")
    made = []
    for title, names in parts.items():
        rows = []
        for name in names.split():
            path = name.replace(".", "/")
            shown = f"{path}/" if (ROOT / package / path).is_dir() else f"{path}.py"
            summary = docstring(parsed(f"{package}.{name}")).partition("\n")[0]
            rows.append((f"[{shown}](../../{package}/{shown})", cell(summary)))
        made.append(f"### {title}\n\n{table(('module', 'purpose'), rows)}")
    return "\n\n".join(made)


def rooms(package: str) -> str:
    """Return a table of the modules and packages on the top level, the lowest layer first."""
    names = []
    for layer in measure(ROOT / package).layers:
        names.extend(layer)
    return _list_modules(package, names)


def modules_by_room(package: str, *, doors: bool | None = None) -> str:
    """Return a table of the modules of each package, the lowest layer first. A package within it is one row.

    doors: packages that users meet (True), or those below them (False); all by default.
    """
    made = []
    for layer in measure(ROOT / package).layers:
        for room in layer:
            if doors is not None and doors is not (room in _DOORS):
                continue
            names = [f"{room}.{name}" for name in sorted(_modules(ROOT / package / room)) if not _RULE.match(name)]
            if names:
                made.append(f"## {package}/{room}/\n\n{_list_modules(package, names)}")
    return "\n\n".join(made)


def _list_modules(package: str, names: list[str]) -> str:
    """Return a table of modules with the first lines of their docstrings. names: dotted, without the package."""
    rows = []
    for name in names:
        path = name.replace(".", "/")
        path += "/" if (ROOT / package / path).is_dir() else ".py"
        module = package if name == "__init__" else f"{package}.{name}"
        summary = docstring(parsed(module)).partition("\n")[0]
        rows.append((f"[{path}](../../{package}/{path})", cell(summary)))
    return table(("module", "purpose"), rows)
