"""Compare two models in memory, stored as torch.save stores them, and return the causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import syncheck
from support.listings import index_by
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Finding, TensorDiff

    State = dict[str, Any]


def draw(*shape: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    """Return random weights."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def flip(tensor: torch.Tensor, position: int, bit: int) -> torch.Tensor:
    """Return a copy of a tensor of float32 with one flipped bit."""
    words = tensor.clone().view(torch.int32)
    words.view(-1)[position] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    return words.view(torch.float32)


def compare(tmp_path: Path, a: State, b: State, **options: Any) -> tuple[dict[str, Finding], dict[str, TensorDiff]]:
    """Return the findings by code, and the tensors that differ by name. The exit code is that of a difference."""
    paths = []
    for label, state in (("a", a), ("b", b)):
        path = tmp_path / f"{label}.pt"
        torch.save(state if "model" in state else {"model": state}, path)
        paths.append(path)
    report = syncheck.diff(*paths, options=DiffOptions(**options))
    assert report.exit_code == 1
    group = report.groups[-1]
    return index_by(group.findings, "code"), index_by(group.tensors, "name")


def find(tmp_path: Path, a: State, b: State, **options: Any) -> dict[str, set[str]]:
    """Return the tensors of each finding."""
    findings, _ = compare(tmp_path, a, b, **options)
    return {code: set(finding.tensors) for code, finding in findings.items()}


def get_parameters(tmp_path: Path, a: State, b: State, name: str, **options: Any) -> dict[str, Any]:
    """Return the parameters of the relation of a tensor."""
    _, diffs = compare(tmp_path, a, b, **options)
    evidence = diffs[name].evidence
    assert evidence is not None
    assert evidence.relation is not None
    return dict(evidence.relation.parameters)
