"""The map of the code: every module of syncheck and of the trainer, with the first line of its docstring."""

from __future__ import annotations

from marks import cell, table
from sources import ROOT, docstring, parsed

# By what they are for, in the order of a comparison. A package stands for all of its modules.
SYNCHECK = {
    "What all parts speak of": "errors dtypes snapshots clues records names kinds tolerance metadata_block",
    "From paths to snapshots, and to groups of replicas": (
        "paths readers layout layout_names layout_metadata layout_groups reference"
    ),
    "Bytes": "blocks pieces shares kernel digests quick",
    "Gaps": "gaps float_gaps integer_gaps measured moments histograms",
    "One group": "comparison tensors values replica_groups optimizer_parts tensor_parallel ties evidence",
    "Several steps of a run": "series history stale free_running",
    "What it means": "diagnose suspects verdicts baseline",
    "What is shown, and written": "report contents fingerprint atomic",
    "Doors": "api config cli __main__ testing pytest_plugin live integrations",
}
TRAIN = {
    "To read first": "run engine step methods job",
    "What is trained": "models data loading schedule ema seeds position",
    "How it is spread": "launch data_parallel sync_batchnorm comm_hooks compiling",
    "What is kept": "saver checkpoint attempts resume replicas",
    "What goes wrong, and is noticed": "faults errors stopping watch",
    "What is measured and shown": (
        "metrics logbook recorders progress output usage scoring rank_scores evaluate bench listing"
    ),
    "Options": "options settings",
}


def _missing(package: str, parts: dict[str, str]) -> set[str]:
    """Return the modules of a package that no part names, and those that it does not have."""
    there = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    return there ^ set(" ".join(parts.values()).split())


def modules(package: str, parts: dict[str, str]) -> str:
    """Return a table for each part. Raises KeyError where the parts are not those that are there."""
    if odd := _missing(package, parts):
        raise KeyError(f"{package}: in the table of {__name__} or in the folder only: {', '.join(sorted(odd))}")
    made = []
    for title, names in parts.items():
        rows = []
        for name in names.split():
            folder = (ROOT / package / name).is_dir()
            shown = f"{name}/" if folder else f"{name}.py"
            says = docstring(parsed(f"{package}.{name}")).partition("\n")[0]
            rows.append((f"[{shown}](../../{package}/{shown})", cell(says)))
        made.append(f"### {title}\n\n{table(('module', 'says of itself'), rows)}")
    return "\n\n".join(made)
