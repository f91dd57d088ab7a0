"""Two models with other names, one in plain tensors of tensor-parallel ranks: the parts may hold all tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import syncheck
from syncheck.report.undecided import undecided_reason

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report

    State = dict[str, torch.Tensor]

LAYERS = 3
LOST = "blocks.1.attn.wo.weight"


def make_model() -> State:
    """Return a model with separate parts, as Hugging Face stores them."""
    model = {"embed.weight": torch.randn(32, 16), "norm.weight": torch.randn(16)}
    for layer in range(LAYERS):
        model |= {
            f"layers.{layer}.q.weight": torch.randn(16, 16),
            f"layers.{layer}.k.weight": torch.randn(8, 16),
            f"layers.{layer}.v.weight": torch.randn(8, 16),
            f"layers.{layer}.o.weight": torch.randn(16, 16),
            f"layers.{layer}.input_norm.weight": torch.randn(16),
        }
    return model


def fuse(model: State) -> State:
    """Return the model with other names and fused tensors."""
    fused = {"tok.weight": model["embed.weight"], "final_norm.weight": model["norm.weight"]}
    for layer in range(LAYERS):
        parts = [model[f"layers.{layer}.{part}.weight"] for part in "qkv"]
        fused |= {
            f"blocks.{layer}.attn.wqkv.weight": torch.cat(parts),
            f"blocks.{layer}.attn.wo.weight": model[f"layers.{layer}.o.weight"],
            f"blocks.{layer}.norm1.weight": model[f"layers.{layer}.input_norm.weight"],
        }
    return fused


def divide(fused: State, ranks: int) -> list[State]:
    """Return the plain tensors of tensor-parallel ranks: divided by rows or columns, norms as copies."""
    files: list[State] = [{} for _ in range(ranks)]
    for name, tensor in fused.items():
        parts = [tensor] * ranks
        if "wqkv" in name:
            shares = [part.chunk(ranks) for part in tensor.split([16, 8, 8])]
            parts = [torch.cat(shares_of_rank) for shares_of_rank in zip(*shares, strict=True)]
        elif "norm" not in name:
            parts = [*tensor.chunk(ranks, dim=1 if "wo" in name else 0)]
        for state, part in zip(files, parts, strict=True):
            state[name] = part.clone()
    return files


def compare(
    folder: Path, model: State, files: list[State], name: str = "tp_rank{}.pt", *, swap: bool = False
) -> Report:
    """Return the report on a model in one file, and the same in the files of ranks."""
    paths = [folder / "model.pt", folder / "ranks"]
    paths[1].mkdir(parents=True)
    torch.save(model, paths[0])
    for rank, state in enumerate(files):
        torch.save(state, paths[1] / name.format(rank))
    return syncheck.diff(*(paths[::-1] if swap else paths))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("swap", [False, True])
def test_tensors_that_parts_may_hold_are_undecided(tmp_path: Path, ranks: int, *, swap: bool) -> None:
    """A correct conversion in plain parts is neither proved nor called out of sync; the reason names the files."""
    model = make_model()
    report = compare(tmp_path, model, divide(fuse(model), ranks), swap=swap)
    assert (report.verdict, report.exit_code, report.groups[-1].findings) == ("undecided", 2, ())
    assert "tp_rank0.pt, tp_rank1.pt" in str(undecided_reason(report))


def test_models_without_a_common_tensor_are_undecided(tmp_path: Path) -> None:
    """Without a pair of names, two models may still be one."""
    model = make_model()
    fused = {name: tensor + 1 for name, tensor in fuse(model).items()}
    report = compare(tmp_path, model, divide(fused, 2))
    assert (report.verdict, report.groups[-1].findings) == ("undecided", ())


def test_parts_with_too_few_elements_are_out_of_sync(tmp_path: Path) -> None:
    """A tensor, norm, part or file is missing if the other elements cannot hold the tensors; no name is proved."""
    model = make_model()
    fused = fuse(model)
    without_tensor = {name: tensor for name, tensor in fused.items() if name != LOST}
    without_norm = {name: tensor for name, tensor in fused.items() if name != "blocks.2.norm1.weight"}
    first, second = divide(fused, 2)
    del second[LOST]
    faults = {
        "tensor": divide(without_tensor, 2),
        "norm": divide(without_norm, 4),
        "part": [first, second],
        "file": divide(fused, 4)[:3],
    }
    for fault, files in faults.items():
        report = compare(tmp_path / fault, model, files)
        (finding,) = report.groups[-1].findings
        assert (report.exit_code, finding.code, finding.certainty) == (1, "SYN101", "consistent"), fault


def test_copies_of_parts_count_once(tmp_path: Path) -> None:
    """Data-parallel copies of the parts hold no other elements."""
    model = make_model()
    files = divide({name: tensor for name, tensor in fuse(model).items() if name != LOST}, 2)
    copies = [state for state in files for _ in range(2)]
    paths = [tmp_path / "model.pt", *(tmp_path / f"tp_rank{rank // 2}_dp_rank{rank % 2}.pt" for rank in range(4))]
    for path, state in zip(paths, [model, *copies], strict=True):
        torch.save(state, path)
    report = syncheck.diff(paths[0], paths[1:])
    assert [finding.code for finding in report.groups[-1].findings] == ["SYN101"]


def test_tensors_of_one_model_are_missing(tmp_path: Path) -> None:
    """If only one model has tensors without a partner, no part of the other model holds them."""
    fused = fuse(make_model())
    more = {**fused, "head.weight": torch.randn(32, 16)}
    report = compare(tmp_path / "whole", more, divide(fused, 2))
    (finding,) = report.groups[-1].findings
    assert (finding.code, finding.certainty, finding.tensors) == ("SYN101", "proved", ("head.weight",))
    report = compare(tmp_path / "split", fused, divide(more, 2))
    assert [finding.code for finding in report.groups[-1].findings] == ["SYN101"]


def test_pipeline_stages_hold_whole_tensors(tmp_path: Path) -> None:
    """A tensor that no stage has is missing, with a proof: each stage has names of its own."""
    model = make_model()
    fused = fuse(model)
    del fused[LOST]
    stages: list[State] = [{}, {}]
    for name, tensor in fused.items():
        stages[name.startswith("blocks.2")][name] = tensor
    report = compare(tmp_path, model, stages, "pp_rank{}.pt")
    (finding,) = report.groups[-1].findings
    assert (finding.code, finding.certainty, finding.tensors) == ("SYN101", "proved", ("layers.1.o.weight",))
