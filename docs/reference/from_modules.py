"""The code map: every module of syncheck and of the trainer, with the first line of its docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marks import cell, table
from sources import ROOT, docstring, parsed

if TYPE_CHECKING:
    from pathlib import Path

# Modules by purpose, in the order of a comparison. A package stands for its modules, unless they follow it.
SYNCHECK = {
    "Shared records and tables": (
        "errors messages dtypes snapshots records steps rank_sets names kinds value_kinds tensor_parallel tolerance "
        "metadata_block"
    ),
    "Paths, readers and replica groups": (
        "paths omissions readers layout layout.grouping layout.names layout.refining layout.joining layout.groups"
    ),
    "Comparing bytes": (
        "kernel kernel.clustering kernel.blocks kernel.open_files kernel.pieces kernel.strided kernel.shares "
        "kernel.digests kernel.moments kernel.finiteness"
    ),
    "Measuring differences": "differences",
    "Logical tensors": (
        "logical logical.boxes logical.views logical.dtensors logical.deepspeed logical.megatron logical.labels "
        "logical.progress logical.second_weights logical.model"
    ),
    "Conversions of a model": (
        "conversion conversion.templates conversion.name_maps conversion.map_files conversion.mapped_models "
        "conversion.recognition conversion.pairings conversion.numbering conversion.layer_rules "
        "conversion.general_rules conversion.affine_parameters conversion.vocabularies "
        "conversion.shared_weights conversion.guesses conversion.inference conversion.adapters "
        "conversion.adapter_parts conversion.adapter_settings conversion.adapter_targets conversion.replacements "
        "conversion.patterns conversion.merges conversion.acceptance "
        "conversion.quantized conversion.scales conversion.casts conversion.rows conversion.causes relations"
    ),
    "Comparing one group": (
        "comparison comparison.group comparison.tensors comparison.values comparison.model_values "
        "comparison.replica_groups comparison.owners comparison.optimizer_parts comparison.ties comparison.copies "
        "comparison.reference comparison.attributes"
    ),
    "Evidence, and several steps of a run": (
        "evidence evidence.tensors evidence.suspects evidence.histograms evidence.history evidence.stale "
        "evidence.free_running series"
    ),
    "Diagnosis and verdict": "diagnose verdicts baseline",
    "Reports and files": "report events event_consistency contents fingerprint outputs atomic",
    "Entry points": "api sides earlier_steps model_diff options config cli __main__ testing pytest_plugin live "
    "integrations",
}
TRAIN = {
    "Start here": (
        "minimal run engine step job methods methods.table methods.base methods.single methods.ddp "
        "methods.zero methods.localsgd methods.diloco methods.replicate methods.fsdp methods.hsdp methods.tp "
        "methods.fsdp_tp methods.ddp_tp methods.pp methods.pp_fsdp methods.cp methods.ep "
        "methods.dp"
    ),
    "Models and data": "task models data loading schedule seeds",
    "Distribution over processes": (
        "launch mesh pipeline_stages tensor_parallel data_parallel sync_batchnorm comm_hooks"
    ),
    "Checkpoints": ("checkpoints checkpoints.saver checkpoints.formats checkpoints.files checkpoints.lock resume"),
    "Faults, errors and signals": "faults errors upkeep",
    "Measurements and output": "metrics recorders plot evaluate bench",
    "Options": "options settings optional",
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
