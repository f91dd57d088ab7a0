"""Shards of tensor parallelism in files that state no position, beside replicas that look like them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth, save_safetensors
from support.listings import list_fields
from support.llama import CONFIG, GROUPS, HEAD, HEADS, INNER, WIDTH, make_model, write

import syncheck

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Report

    Weights = dict[str, Any]

META_NAMES = {
    "model.": "",
    "self_attn.": "attention.",
    "mlp.": "feed_forward.",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"


def cut(weights: Weights, rank: int, count: int) -> Weights:
    """Return the shards that a rank of tensor parallelism holds; ranks share heads of keys and values if necessary."""
    shards = {}
    for name, tensor in weights.items():
        shards[name] = tensor.copy()
        if "norm" not in name:
            dim = int("o_proj" in name or "down_proj" in name)
            parts = min(count, GROUPS) if "k_proj" in name or "v_proj" in name else count
            part = np.array_split(tensor, parts, dim)[rank * parts // count]
            shards[name] = np.ascontiguousarray(part)
    return shards


def rename(weights: Weights) -> Weights:
    """Return the weights with the names of Meta's files."""
    renamed = {}
    for name, tensor in weights.items():
        for old, new in META_NAMES.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def write_ranks(folder: Path, ranks: Sequence[Weights], config: object = None) -> Path:
    """Write a safetensors file for each rank, and a configuration."""
    folder.mkdir(exist_ok=True)
    for rank, weights in enumerate(ranks):
        save_safetensors(folder / f"rank{rank}.safetensors", weights)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_shards(count: int, seed: int = 0) -> list[Weights]:
    """Return the shards of all ranks of one model."""
    weights = make_model(seed)
    return [cut(weights, rank, count) for rank in range(count)]


def make_unsynchronized(ranks: int = 2) -> list[Weights]:
    """Return replicas with equal norms and other weights on each rank, as gradients keep them without a broadcast."""
    norms = {name: tensor for name, tensor in make_model().items() if "norm" in name}
    return [make_model(seed) | norms for seed in range(1, ranks + 1)]


def is_shards(report: Report) -> bool:
    """Whether the files look like shards: SYN104 is the only finding, and the verdict is undecided."""
    (group,) = report.groups
    has_doubt = group.evidence.doubt is not None
    if has_doubt:
        assert list_fields(report.findings, "code", "certainty") == [("SYN104", "consistent")]
        assert report.exit_code == 2
    return has_doubt


@pytest.mark.parametrize("config", [None, CONFIG])
@pytest.mark.parametrize("count", [2, 4])
def test_shards_without_a_position_are_undecided(tmp_path: Path, count: int, config: object) -> None:
    """Shards of 2 and 4 ranks, the latter with shared heads of keys, are no replicas with other weights."""
    report = syncheck.compare(write_ranks(tmp_path / f"tp{count}", make_shards(count), config))
    assert is_shards(report)
    assert [replica.mesh for replica in report.groups[0].replicas] == [{"tp": rank} for rank in range(count)]


def test_consolidated_files_of_meta(tmp_path: Path) -> None:
    """Files with Meta's names, written by torch.save, are shards too."""
    for rank, shards in enumerate(make_shards(2)):
        save_pth(tmp_path / f"consolidated.0{rank}.pth", rename(shards))
    assert is_shards(syncheck.compare(tmp_path))


def test_some_of_the_shards(tmp_path: Path) -> None:
    """The files of two of four ranks are shards."""
    assert is_shards(syncheck.compare(write_ranks(tmp_path, make_shards(4)[1:3])))


def test_copies_of_shards_are_compared(tmp_path: Path) -> None:
    """Of four files with two shards each, equal shards are copies: a copy that differs is a finding."""
    copies = [*make_shards(2), *make_shards(2)]
    report = syncheck.compare(write_ranks(tmp_path, copies))
    assert is_shards(report)
    assert [replica.mesh["tp"] for replica in report.groups[0].replicas] == [0, 1, 0, 1]
    copies[3][QUERY][0, 0] += 1
    report = syncheck.compare(write_ranks(tmp_path, copies))
    assert report.exit_code == 1
    assert {name for finding in report.findings for name in finding.tensors} == {QUERY}


def test_a_norm_that_differs_between_shards(tmp_path: Path) -> None:
    """If a configuration states the sizes, a norm that differs between shards is found, and no weight beside it."""
    shards = make_shards(2)
    shards[1][NORM][3] += 1
    report = syncheck.compare(write_ranks(tmp_path, shards, CONFIG))
    assert report.exit_code == 1
    assert {name for finding in report.findings for name in finding.tensors} == {NORM}


def test_a_square_layer_is_a_shard_only_by_a_configuration(tmp_path: Path) -> None:
    """Half of an attention that is wider than the model looks whole, unless a configuration states its size."""
    shards = make_unsynchronized()
    wide = CONFIG | {"num_attention_heads": 2 * HEADS}
    assert syncheck.compare(write_ranks(tmp_path, shards)).exit_code == 1
    assert is_shards(syncheck.compare(write_ranks(tmp_path, shards, wide)))
    assert syncheck.compare(write_ranks(tmp_path, shards, CONFIG)).exit_code == 1
    # The configuration of Meta's files.
    settings = {"dim": WIDTH, "n_heads": HEADS, "head_dim": 2 * HEAD}
    (tmp_path / "config.json").rename(tmp_path / "params.json")
    (tmp_path / "params.json").write_text(json.dumps(settings), encoding="utf-8")
    assert is_shards(syncheck.compare(tmp_path))


def change(name: str, ranks: list[Weights]) -> None:
    """Change the last of two ranks with the sizes of shards so that it cannot be another shard."""
    last = ranks[-1]
    if name == "one equal weight":
        last[QUERY] = ranks[0][QUERY].copy()
    elif name == "equal rows":
        last[QUERY][: len(last[QUERY]) // 2] = ranks[0][QUERY][: len(last[QUERY]) // 2]
    elif name == "drift":
        for weight in last:
            noise = np.random.default_rng(0).standard_normal(last[weight].shape, np.float32)
            last[weight] = ranks[0][weight] + np.float32(0.0 if "norm" in weight else 0.01) * noise
    elif name == "other norms":
        last[NORM] += 1
    elif name == "missing":
        del last["lm_head.weight"]


@pytest.mark.parametrize("name", ["one equal weight", "equal rows", "drift", "other norms", "missing"])
def test_replicas_with_the_sizes_of_shards_are_out_of_sync(tmp_path: Path, name: str) -> None:
    """Files with narrow layers whose contents are not those of different shards are compared as replicas."""
    ranks = make_shards(2)
    change(name, ranks)
    report = syncheck.compare(write_ranks(tmp_path, ranks))
    assert (report.exit_code, report.groups[0].evidence.doubt) == (1, None)


def test_whole_layers_are_replicas(tmp_path: Path) -> None:
    """Weights that no rank broadcast, with norms that equal gradients keep equal, are SYN210."""
    report = syncheck.compare(write_ranks(tmp_path, make_unsynchronized()))
    assert (report.exit_code, report.findings[0].code) == (1, "SYN210")


def test_equal_moments_show_replicas(tmp_path: Path) -> None:
    """Equal state of the optimizer for different weights shows equal gradients, which shards do not have."""
    shards = make_shards(2)
    for rank, weights in enumerate(shards):
        names = [*weights]
        moments = {i: {"momentum_buffer": shards[0][name].copy()} for i, name in enumerate(names)}
        groups = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "params": [*moments], "param_names": names}]
        optimizer = {"state": moments, "param_groups": groups}
        save_pth(tmp_path / f"rank{rank}.pth", {"model": weights, "optimizer": optimizer})
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, report.groups[0].evidence.doubt) == (1, None)


def test_the_user_states_replicas(tmp_path: Path) -> None:
    """Files that `group_by` groups are replicas."""
    folder = write_ranks(tmp_path, make_shards(2))
    assert syncheck.compare(folder, options=syncheck.Options(group_by="")).exit_code == 1


def test_a_size_in_the_name_of_a_folder_is_no_coordinate(tmp_path: Path) -> None:
    """The folder `tp2` names the size of a mesh: whole weights in it are replicas, without SYN104."""
    report = syncheck.compare(write_ranks(tmp_path / "tp2", make_unsynchronized()))
    assert list_fields(report.findings, "code") == ["SYN210"]
    assert [replica.mesh for replica in report.groups[0].replicas] == [{}, {}]


def test_diff_does_not_take_shards_for_copies(tmp_path: Path) -> None:
    """Against a whole model, shards without a position are not compared, and are no copies that differ."""
    whole = write(tmp_path / "whole", make_model(), CONFIG)
    shards = write_ranks(tmp_path / "shards", make_shards(2))
    for pair in ((whole, str(shards)), (str(shards), whole)):
        report = syncheck.diff(*pair)
        assert (report.exit_code, len(report.groups), report.findings) == (2, 1, ())


def test_quick_and_fingerprints_know_no_elements(tmp_path: Path) -> None:
    """Without elements, different checksums of all weights and the sizes show shards."""
    for rank, shards in enumerate(make_shards(2)):
        save_pth(tmp_path / f"rank{rank}.pth", shards)
    assert is_shards(syncheck.compare(tmp_path, options=syncheck.Options(quick=True)))


def test_constants_of_the_model() -> None:
    """The tests need an attention as wide as the model, and layers that four ranks divide."""
    assert (HEADS * HEAD, INNER % 4) == (WIDTH, 0)
