"""Replicas with equal weights beside configurations of other models are undecided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import llama
from support.listings import find_all, list_codes

import syncheck
from syncheck.messages import Note

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = llama.CONFIG | {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": False}


def write_ranks(folder: Path, *configs: dict[str, Any] | None) -> None:
    """Write one folder of Hugging Face for each rank, with equal weights."""
    for rank, config in enumerate(configs):
        llama.write(folder / f"rank_{rank}", llama.make_model(), config)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 5e5},
        {"num_attention_heads": 8},
        {"rms_norm_eps": 1e-2},
        {"tie_word_embeddings": True},
        {"quantization_config": {"bits": 4}},
        {"sliding_window": 4096},
    ],
)
def test_ranks_with_other_settings_are_undecided(tmp_path: Path, change: dict[str, Any]) -> None:
    """A setting that differs on one rank of three is named with the values of all ranks, and --exclude skips it."""
    write_ranks(tmp_path, CONFIG, CONFIG | change, CONFIG)
    report = syncheck.compare(str(tmp_path))
    (key,) = change
    assert report.exit_code == 2
    (diff,) = report.groups[0].values
    assert (diff.name, diff.unknown, diff.counts) == (f"(model setting {key})", True, False)
    assert diff.by_rank[0] == diff.by_rank[2] != diff.by_rank[1]
    assert list_codes(report.groups[0].notes).count(Note.MODEL_SETTINGS_DIFFER) == 1
    options = syncheck.Options(exclude=(diff.name,))
    assert syncheck.compare(str(tmp_path), options=options).exit_code == 0
    # Copies within a side of a difference are no single model.
    both = [tmp_path / f"rank_{rank}" for rank in (0, 1)]
    assert syncheck.diff(both, tmp_path / "rank_2").exit_code == 2


@pytest.mark.parametrize(
    "other", [None, CONFIG, CONFIG | {"torch_dtype": "bfloat16", "_name_or_path": "x", "rms_norm_eps": 1e-6}]
)
def test_ranks_with_equal_settings_are_in_sync(tmp_path: Path, other: dict[str, Any] | None) -> None:
    """Equal settings, the default in place of none, and a configuration of one rank for all need no note."""
    write_ranks(tmp_path, CONFIG, other)
    report = syncheck.compare(str(tmp_path))
    assert (report.exit_code, report.groups[0].values) == (0, ())
    assert find_all(report.groups[0].notes, code=Note.MODEL_SETTINGS_DIFFER) == []


def test_arguments_of_ranks(tmp_path: Path) -> None:
    """Other arguments of Megatron in the file of one rank are undecided; its number is no setting."""
    for rank, base in enumerate((10000, 10000, 500000)):
        arguments = {"tensor_model_parallel_size": 1, "rotary_base": base, "rank": rank}
        torch.save({"model": {"w": torch.ones(20, 4)}, "args": arguments}, tmp_path / f"rank{rank}.pt")

    report = syncheck.compare(str(tmp_path))
    (diff,) = [value for value in report.groups[0].values if value.unknown]
    assert (report.exit_code, diff.by_rank) == (2, {0: 10000, 1: 10000, 2: 500000})
    (tmp_path / "rank2.pt").unlink()
    assert syncheck.compare(str(tmp_path)).exit_code == 0
