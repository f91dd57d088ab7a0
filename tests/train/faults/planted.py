"""Runs with and without an injected fault, and the tensors of their files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from support.listings import find_texts, list_codes, list_rank_files
from support.scenarios import SMALL, differing, load, run, tensors
from support.states import add_prefix

import syncheck
from syncheck.diagnose.rules import list_rules
from train.faults import FAULTS
from train.settings import DEFAULT

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from syncheck import Report
    from train.launch import RankContext
    from train.settings import Settings

# SyncBatchNorm keeps replicas equal without a fault, and AdamW has a step counter for each parameter.
QUIET = replace(SMALL, sync_bn=True, optimizer="adamw", lr=0.005)
# Options required by a fault.
NEEDED_OPTIONS: dict[str, dict[str, Any]] = {
    "buffers-never-synced": {"sync_bn": False},
    "extra-forward": {"sync_bn": False},
    "scaler-diverged": {"amp": "fp16"},
    "average-not-updated": {"ema": 0.9},
}
# If the metadata claims a synchronization in each step, SYN201 may explain the drift as the drift of one step.
EQUIVALENT_CODES = {"SYN202": {"SYN202", "SYN201"}}

# Runs without a fault, shared by the tests: the rank processes and the files outlive a test.
CLEAN_RUNS: dict[Settings, tuple[Path, set[str]]] = {}


@dataclass(frozen=True)
class Pair:
    """Two ranks' files at the end of one run.

    clean_differences: names of the tensors that differ in a run without the fault. clean_file: rank 0's file of that
    run.
    """

    settings: Settings
    good: Path
    bad: Path
    clean_differences: set[str]
    clean_file: Path

    @property
    def differing(self) -> set[str]:
        """Return the names of the tensors that differ between the ranks."""
        return differing_tensors(self.good, self.bad)

    def values(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the values of a tensor on rank 0 and rank 1."""
        return tensors(self.good)[name], tensors(self.bad)[name]

    def at(self, step: int) -> tuple[Path, Path]:
        """Return the files of rank 0 and rank 1 of an earlier step."""
        folder = self.settings.out / "history" / self.settings.run / f"step_{step}"
        return folder / "rank_0.pth", folder / "rank_1.pth"


def differing_tensors(a: Path, b: Path) -> set[str]:
    """Return the names of tensors that differ in dtype or bytes, or are missing from one checkpoint."""
    remaining, right = all_tensors(a), all_tensors(b)
    return {
        n
        for n in remaining | right
        if n not in remaining or n not in right or dtype_and_bytes(remaining[n]) != dtype_and_bytes(right[n])
    }


def all_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, including the averages of --ema."""
    return tensors(path) | add_prefix(load(path).get("ema", {}), "ema.")


def dtype_and_bytes(tensor: Tensor) -> tuple[torch.dtype, bytes]:
    """Return a tensor's dtype and bytes. NumPy has no bfloat16."""
    return tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def train_with_fault(ctx: RankContext, out: Path, fault: str, *, explained: bool = True, **changes: Any) -> Pair:
    """Train on two ranks, once without the fault and once with it.

    explained: whether to check that syncheck reports the fault's finding.
    """
    settings = replace(QUIET, **NEEDED_OPTIONS.get(fault, {}) | changes, fault=fault, out=out / "planted")
    settings_without_fault = replace(settings, fault=None, fault_step=None, save_every=None, out=out / "clean")
    clean_file, clean_differences = train_clean(ctx, settings_without_fault)
    run(ctx, settings)
    good = settings.out / f"{settings.run}_rank0.pth"
    bad = settings.out / f"{settings.run}_rank1.pth"
    if explained:
        check_report(syncheck.compare(settings.out), FAULTS[fault].code)
    return Pair(settings, good, bad, clean_differences, clean_file)


def train_clean(ctx: RankContext, settings: Settings) -> tuple[Path, set[str]]:
    """Train without a fault, once for each settings; return rank 0's file and the names of differing tensors."""
    key = replace(settings, out=DEFAULT.out)
    if not all(ctx.gather(key in CLEAN_RUNS)):
        run(ctx, settings)
        files = list_rank_files(settings.out, f"{settings.run}_rank{{}}.pth", 2)
        CLEAN_RUNS[key] = files[0], differing(*files)
    return CLEAN_RUNS[key]


def check_report(report: Report, code: str) -> None:
    """Check that a report is out of sync, and has this finding if a rule exists for the code."""
    assert report.verdict == "out_of_sync"
    codes = set(list_codes(report.findings))
    if code in list_codes(list_rules()):
        assert codes & EQUIVALENT_CODES.get(code, {code}), codes


def parameters(path: Path) -> set[str]:
    """Return the names of the model's parameters."""
    content = load(path)
    return set(content["model"]) - set(content["syncheck"]["buffers"])


def optimizer_names(path: Path, *states: str) -> set[str]:
    """Return the names of the optimizer's tensors, or only of these states."""
    names = set(find_texts(tensors(path), start="optimizer."))
    return {name for name in names if not states or name.rpartition(".")[2] in states}


def statistics(path: Path, *kinds: str) -> set[str]:
    """Return the names of BatchNorm's buffers of these kinds."""
    return {name for name in load(path)["model"] if name.rpartition(".")[2] in kinds}


def differing_elements(left: Tensor, right: Tensor) -> list[int]:
    """Return the indices, in C order, of the elements with different bits in two float32 tensors."""
    differs = left.reshape(-1).view(torch.int32) != right.reshape(-1).view(torch.int32)
    indices: list[int] = differs.nonzero().flatten().tolist()
    return indices


def flipped_bits(left: Tensor, right: Tensor) -> int:
    """Return the number of bits that differ between two float32 tensors."""
    bits = left.reshape(-1).view(torch.int32) ^ right.reshape(-1).view(torch.int32)
    return sum(bin(number & 0xFFFFFFFF).count("1") for number in bits.tolist())
