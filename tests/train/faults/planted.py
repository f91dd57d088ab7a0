"""Runs with and without an injected fault, and the tensors of their files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from scenarios import SMALL, differing, load, run, tensors

import syncheck
from syncheck.diagnose import RULES
from train.faults import FAULTS
from train.settings import DEFAULT

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from syncheck import Report
    from train.launch import RankContext
    from train.settings import Settings

# With SyncBatchNorm nothing differs by itself, and with AdamW each parameter has a step counter.
QUIET = replace(SMALL, sync_bn=True, optimizer="adamw", lr=0.005)
# Options that a fault needs.
NEEDS: dict[str, dict[str, Any]] = {
    "buffers-never-synced": {"sync_bn": False},
    "extra-forward": {"sync_bn": False},
    "scaler-diverged": {"amp": "fp16"},
    "average-not-updated": {"ema": 0.9},
}
# If the metadata claims a synchronization in each step, the drift may be that of one step.
ALIKE = {"SYN202": {"SYN202", "SYN201"}}

# Runs without a fault. The processes of the ranks live longer than a test, and so do its files.
CLEAN: dict[Settings, tuple[Path, set[str]]] = {}


@dataclass(frozen=True)
class Pair:
    """Two ranks' files at the end of one run.

    clean: names of the tensors that differ without the fault. without: rank 0's file of that run.
    """

    settings: Settings
    good: Path
    bad: Path
    clean: set[str]
    without: Path

    @property
    def differing(self) -> set[str]:
        """Return the names of the tensors that differ between the ranks."""
        return unlike(self.good, self.bad)

    def values(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the values of a tensor on rank 0 and rank 1."""
        return tensors(self.good)[name], tensors(self.bad)[name]

    def at(self, step: int) -> tuple[Path, Path]:
        """Return the files of rank 0 and rank 1 of an earlier step."""
        folder = self.settings.out / "history" / self.settings.run / f"step_{step}"
        return folder / "rank_0.pth", folder / "rank_1.pth"


def unlike(a: Path, b: Path) -> set[str]:
    """Return the names of the tensors that only one checkpoint has, or that differ in dtype or bytes."""
    left, right = held(a), held(b)
    return {n for n in left | right if n not in left or n not in right or raw(left[n]) != raw(right[n])}


def held(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, with the averages of --ema."""
    return tensors(path) | {f"ema.{name}": tensor for name, tensor in load(path).get("ema", {}).items()}


def raw(tensor: Tensor) -> tuple[torch.dtype, bytes]:
    """Return a tensor's dtype and bytes. NumPy has no bfloat16."""
    return tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def plant(ctx: RankContext, out: Path, fault: str, *, explained: bool = True, **changes: Any) -> Pair:
    """Train on two ranks, once without the fault and once with it.

    explained: whether to check that syncheck reports the fault's finding.
    """
    settings = replace(QUIET, **NEEDS.get(fault, {}) | changes, fault=fault, out=out / "planted")
    without = replace(settings, fault=None, fault_step=None, save_every=None, out=out / "clean")
    clean, differing_there = train_clean(ctx, without)
    run(ctx, settings)
    good, bad = (settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(2))
    if explained:
        check_report(syncheck.compare(settings.out), FAULTS[fault].code)
    return Pair(settings, good, bad, differing_there, clean)


def train_clean(ctx: RankContext, settings: Settings) -> tuple[Path, set[str]]:
    """Train without a fault, once for each settings: return rank 0's file, and the tensors that differ."""
    key = replace(settings, out=DEFAULT.out)
    if not all(ctx.gather(key in CLEAN)):
        run(ctx, settings)
        files = [settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(2)]
        CLEAN[key] = files[0], differing(*files)
    return CLEAN[key]


def check_report(report: Report, code: str) -> None:
    """Check that a report is out of sync and has this finding, if there is a rule for it."""
    assert report.verdict == "out_of_sync"
    found = {finding.code for group in report.groups for finding in group.findings}
    if code in {rule.CODE for rule in RULES}:
        assert found & ALIKE.get(code, {code}), found


def parameters(path: Path) -> set[str]:
    """Return the names of the model's parameters."""
    content = load(path)
    return set(content["model"]) - set(content["syncheck"]["buffers"])


def optimizer_names(path: Path, *states: str) -> set[str]:
    """Return the names of the optimizer's tensors. states: only these."""
    named = {name for name in tensors(path) if name.startswith("optimizer.")}
    return {name for name in named if not states or name.rpartition(".")[2] in states}


def statistics(path: Path, *kinds: str) -> set[str]:
    """Return the names of BatchNorm's buffers of these kinds."""
    return {name for name in load(path)["model"] if name.rpartition(".")[2] in kinds}


def elements(left: Tensor, right: Tensor) -> list[int]:
    """Return the indices, in C order, of the elements whose bits differ between two float32 tensors."""
    apart = left.reshape(-1).view(torch.int32) != right.reshape(-1).view(torch.int32)
    places: list[int] = apart.nonzero().flatten().tolist()
    return places


def flipped_bits(left: Tensor, right: Tensor) -> int:
    """Return the number of bits that differ between two float32 tensors."""
    bits = left.reshape(-1).view(torch.int32) ^ right.reshape(-1).view(torch.int32)
    return sum(bin(number & 0xFFFFFFFF).count("1") for number in bits.tolist())
