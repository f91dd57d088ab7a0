"""The map of the code: every module of syncheck and of the trainer, with the first line of its docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marks import cell, table
from sources import ROOT, docstring, parsed

if TYPE_CHECKING:
    from pathlib import Path

# By what they are for, in the order of a comparison. A package stands for all of its modules, or they follow it.
SYNCHECK = {
    "What all parts speak of": (
        "errors dtypes snapshots clues records names kinds value_kinds tensor_parallel tolerance metadata_block"
    ),
    "From paths to groups of replicas": ("paths omissions readers layout layout.names layout.joining layout.groups"),
    "Bytes": (
        "kernel kernel.blocks kernel.open_files kernel.pieces kernel.strided kernel.shares kernel.digests kernel.quick "
        "kernel.moments"
    ),
    "Gaps": "gaps gaps.floats gaps.measured",
    "One group": (
        "comparison comparison.tensors comparison.values comparison.replica_groups comparison.optimizer_parts "
        "comparison.ties comparison.reference"
    ),
    "A second look, and several steps of a run": (
        "evidence evidence.suspects evidence.histograms evidence.history evidence.stale evidence.free_running series"
    ),
    "What it means": "diagnose verdicts baseline",
    "What is shown, and written": "report contents fingerprint atomic",
    "Doors": "api options config cli __main__ testing pytest_plugin live integrations",
}
TRAIN = {
    "To read first": (
        "run engine step job methods methods.base methods.single methods.ddp methods.zero methods.localsgd "
        "methods.fsdp methods.hsdp methods.dp"
    ),
    "What is trained": "models data loading schedule ema seeds position",
    "How it is spread": "launch data_parallel sync_batchnorm comm_hooks compiling",
    "What is kept": (
        "checkpoints checkpoints.saver checkpoints.formats checkpoints.files checkpoints.block checkpoints.attempts "
        "checkpoints.lock resume"
    ),
    "What goes wrong, and is noticed": "faults errors stopping watch",
    "What is measured and shown": "metrics scoring recorders evaluate bench listing",
    "Options": "options settings",
}


def _modules(folder: Path) -> set[str]:
    """Return the names of a package's modules and packages."""
    there = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return there | {path.parent.name for path in folder.glob("*/__init__.py")}


def _odd(package: str, parts: dict[str, str]) -> set[str]:
    """Return the modules of a package that no part names, and those that it does not have."""
    named = set(" ".join(parts.values()).split())
    there = _modules(ROOT / package)
    for opened in {name.partition(".")[0] for name in named if "." in name}:
        there |= {f"{opened}.{name}" for name in _modules(ROOT / package / opened)}
    return there ^ named


def modules(package: str, parts: dict[str, str]) -> str:
    """Return a table for each part. Raises KeyError where the parts are not those that are there."""
    if odd := _odd(package, parts):
        raise KeyError(f"{package}: in the table of {__name__} or in the folder only: {', '.join(sorted(odd))}")
    made = []
    for title, names in parts.items():
        rows = []
        for name in names.split():
            path = name.replace(".", "/")
            shown = f"{path}/" if (ROOT / package / path).is_dir() else f"{path}.py"
            says = docstring(parsed(f"{package}.{name}")).partition("\n")[0]
            rows.append((f"[{shown}](../../{package}/{shown})", cell(says)))
        made.append(f"### {title}\n\n{table(('module', 'says of itself'), rows)}")
    return "\n\n".join(made)
