"""One file of a tensor-parallel model beside the whole model, and models that lost rows and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.llama import INNER, WIDTH, make_model, write

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report

    Weights = dict[str, Any]

BY_INPUTS = ("o_proj", "down_proj")
NORM = "model.norm.weight"


def cut(weights: Weights, rank: int, shards: int, kept: tuple[str, ...] = ("norm",)) -> Weights:
    """Return one of several shards of each layer. kept: parts of the names of whole layers."""
    shard = dict(weights)
    for name, tensor in weights.items():
        if not any(part in name for part in kept):
            dim = int(any(part in name for part in BY_INPUTS))
            shard[name] = np.array_split(tensor, shards, dim)[rank]
    return shard


def diff(folder: Path, a: Weights, b: Weights) -> Report:
    """Write two models and compare them."""
    return syncheck.diff(write(folder / "a", a), write(folder / "b", b))


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("kept", [("norm",), ("norm", "embed", "lm_head"), ("norm", "k_proj", "v_proj")])
def test_one_shard_is_no_lost_part(tmp_path: Path, rank: int, shards: int, kept: tuple[str, ...]) -> None:
    """The file of one rank is undecided in either order, and the report states the number of shards."""
    whole = make_model()
    shard = cut(whole, rank, shards, kept)
    for a, b in ((whole, shard), (shard, whole)):
        report = diff(tmp_path, a, b)
        details = {tensor.detail for tensor in report.tensors}
        assert (report.exit_code, report.findings, len(details)) == (2, (), 1)
        (detail,) = details
        assert detail is not None
        assert detail.parameters["shards"] == shards


def test_a_norm_that_differs_is_a_difference(tmp_path: Path) -> None:
    """A replicated tensor of a shard is compared with the whole model."""
    whole = make_model()
    shard = cut(whole, 0, 2)
    shard[NORM] = whole[NORM] + 1
    report = diff(tmp_path, whole, shard)
    assert (report.exit_code, {name for finding in report.findings for name in finding.tensors}) == (1, {NORM})


def lose_rows(weights: Weights) -> Weights:
    """Return weights with half the rows of all layers."""
    return {name: tensor if "norm" in name else tensor[: len(tensor) // 2] for name, tensor in weights.items()}


def lose_vocabulary(weights: Weights) -> Weights:
    """Return weights with half the vocabulary."""
    return cut(weights, 0, 2, ("norm", "layers"))


def prune_inner_layers(weights: Weights) -> Weights:
    """Return weights with half the width of each MLP, and whole attentions."""
    return cut(weights, 0, 2, ("norm", "attn", "embed", "lm_head"))


def lose_other_rows(weights: Weights) -> Weights:
    """Return weights with rows that are no part of the whole rows."""
    shard = cut(weights, 0, 2)
    name = "model.layers.0.mlp.gate_proj.weight"
    return shard | {name: weights[name][: INNER // 2 + 1]}


def narrow(weights: Weights) -> Weights:
    """Return the weights of a narrower model."""
    return {
        name: tensor[: WIDTH // 2] if tensor.ndim == 1 else tensor[: len(tensor) // 2, : tensor.shape[1] // 2]
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize("change", [lose_rows, lose_vocabulary, prune_inner_layers, lose_other_rows, narrow])
def test_other_sizes_are_differences(tmp_path: Path, change: Callable[[Weights], Weights]) -> None:
    """Models with other sizes than those of a shard are out of sync."""
    whole = make_model()
    assert diff(tmp_path, whole, change(whole)).exit_code == 1


def rename(weights: Weights) -> Weights:
    """Return the weights under names without a map."""
    names = {"self_attn": "mix", "mlp": "ff", "_proj": "", "embed_tokens": "tokens", "lm_head": "output", "layers": "b"}
    renamed = {}
    for name, tensor in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        # No rows are equal: another order, as of fused tensors.
        renamed[name] = tensor if "norm" in name else np.ascontiguousarray(tensor[::-1, ::-1])
    return renamed


@pytest.mark.parametrize("shards", [2, 4])
def test_a_shard_under_other_names(tmp_path: Path, shards: int) -> None:
    """Equal norms, and matrices with 1/N of all elements without a counterpart, show a shard under other names."""
    whole = make_model()
    shard = rename(cut(whole, 1, shards))
    for a, b in ((whole, shard), (shard, whole)):
        report = diff(tmp_path, a, b)
        assert (report.exit_code, report.findings) == (2, ())
        assert all(tensor.detail.parameters["shards"] == shards for tensor in report.tensors if tensor.detail)


def lose_layer(weights: Weights) -> Weights:
    """Return half of the layers, with all their tensors."""
    return {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}


def train(weights: Weights) -> Weights:
    """Return a shard with other norms."""
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in cut(weights, 0, 2).items()}


def keep_all(weights: Weights) -> Weights:
    """Return the whole weights."""
    return weights


@pytest.mark.parametrize("change", [lose_layer, train, keep_all, lose_vocabulary, prune_inner_layers])
def test_other_models_under_other_names(tmp_path: Path, change: Callable[[Weights], Weights]) -> None:
    """Without the sizes and norms of a shard, tensors without a counterpart are missing."""
    whole = make_model()
    assert diff(tmp_path, whole, rename(change(whole))).exit_code == 1
