"""The arguments that Megatron saves in a checkpoint are settings of the model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import llama

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS = {
    "tensor_model_parallel_size": 1,
    "make_vocab_size_divisible_by": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "swiglu": True,
    "bias_gelu_fusion": True,
    "untie_embeddings_and_output_weights": True,
    "rotary_interleaved": False,
    "window_size": None,
    "num_experts": None,
}
CONFIG = llama.CONFIG | {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def save(path: Path, change: dict[str, Any]) -> Path:
    """Write a model in a file of Megatron with its arguments."""
    converted = llama.to_megatron(llama.make_model())
    tensors = {name: torch.from_numpy(array.copy()) for name, array in converted.items()}
    torch.save({"model": tensors, "args": ARGUMENTS | change}, path)
    return path


def find_settings(report: syncheck.Report) -> list[str]:
    """Return the names of the settings that differ."""
    return [value.name for value in report.groups[-1].values if value.unknown]


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({}, None),
        ({"rotary_base": 500000}, "rope_theta"),
        ({"norm_epsilon": 1e-2}, "rms_norm_eps"),
        ({"rotary_percent": 0.5}, "partial_rotary_factor"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rope_scaling"),
        ({"use_rope_scaling": True}, "rope_scaling"),
        ({"squared_relu": True}, "hidden_act"),
        ({"window_size": [127, 0]}, "sliding_window"),
        ({"rotary_interleaved": True}, "args.rotary_interleaved"),
        # Settings of training.
        ({"lr": 0.1, "seq_length": 4096, "hidden_dropout": 0.1, "world_size": 8}, None),
    ],
)
def test_arguments_are_settings(tmp_path: Path, change: dict[str, Any], setting: str | None) -> None:
    """Other arguments are undecided, between two files of Megatron and beside a configuration of Hugging Face."""
    changed = save(tmp_path / "changed.pt", change)
    expected = [] if setting is None else [f"(model setting {setting})"]
    code = 0 if setting is None else 2
    (tmp_path / "plain").mkdir()
    plain = save(tmp_path / "plain" / "plain.pt", {})
    for other in (plain, llama.write(tmp_path / "hf", llama.make_model(), CONFIG)):
        for sides in ((changed, other), (other, changed)):
            report = syncheck.diff(*sides)
            assert (report.exit_code, find_settings(report)) == (code, expected)


def save_folder(folder: Path, *changes: dict[str, Any]) -> Path:
    """Write a folder of Megatron with one file for each pipeline stage, with its arguments."""
    for stage, change in enumerate(changes):
        path = folder / "iter_0000500" / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        arguments = argparse.Namespace(**ARGUMENTS, pipeline_model_parallel_size=len(changes), iteration=500)
        vars(arguments).update(change)
        norm = {"decoder.layers.0.input_layernorm.weight": torch.rand(32, generator=torch.Generator().manual_seed(0))}
        torch.save({"model": norm, "args": arguments, "iteration": 500, "checkpoint_version": 3.0}, path)

    return folder


def test_arguments_in_folders(tmp_path: Path) -> None:
    """The arguments in all files of a folder are compared, also if they are an object of a class."""
    plain = save_folder(tmp_path / "a", {}, {})
    changed = save_folder(tmp_path / "b", {"rotary_base": 500000}, {"rotary_base": 500000})
    contradicting = save_folder(tmp_path / "c", {}, {"rotary_base": 500000})
    assert syncheck.diff(plain, save_folder(tmp_path / "d", {}, {})).exit_code == 0
    for other in (changed, contradicting):
        report = syncheck.diff(plain, other)
        assert (report.exit_code, find_settings(report)) == (2, ["(model setting rope_theta)"])


def test_equal_settings_of_both_libraries(tmp_path: Path) -> None:
    """A scaling and a base that both libraries state are equal."""
    changed = save(tmp_path / "a.pt", {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 500000})
    scaling = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor, code in ((8.0, 0), (32.0, 2)):
        config = CONFIG | {"rope_theta": 5e5, "rope_scaling": scaling | {"factor": factor}}
        report = syncheck.diff(changed, llama.write(tmp_path / "hf", llama.make_model(), config))
        assert report.exit_code == code


def test_arguments_of_another_program(tmp_path: Path) -> None:
    """Arguments without the marks of Megatron have no known meaning."""
    tensors = {"w": torch.ones(20, 4)}
    for side, base in (("a", 1), ("b", 2)):
        torch.save({"model": tensors, "args": {"rotary_base": base}}, tmp_path / f"{side}.pt")

    assert find_settings(syncheck.diff(tmp_path / "a.pt", tmp_path / "b.pt")) == []
