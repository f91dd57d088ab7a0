"""SYN405: shards of one tensor at different positions that hold equal random numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_safetensors
from support.dtensors import save_ranks
from support.listings import find_all, find_first, list_codes, list_fields

import syncheck
from syncheck.options import Options
from syncheck.tensors.traffic import TRAFFIC

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.records import Report

CODE = "SYN405"
SHAPE = (16, 8)
# Enough rows that the first elements are not all of them.
LONG = (512, 8)


def draw(seed: int, shape: Sequence[int] = SHAPE) -> Any:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def compare_shards(folder: Path, locals_of_ranks: Sequence[Any], placements: Sequence[str], mesh: Any) -> Report:
    """Compare ranks with a DTensor `w`, and a norm that all ranks hold whole."""
    parts = dict(enumerate(locals_of_ranks))
    shape = list(parts[0].shape)
    for placement, size in zip(placements, mesh, strict=True):
        if placement.startswith(("S", "_S")):
            shape[int(placement.strip("_S()").split(",")[0])] *= size

    files = save_ranks(folder, parts, placements, mesh, norm=dict.fromkeys(parts, draw(99)))
    return syncheck.compare(files)


def list_equal(report: Report) -> list[Any]:
    """Return name, number of positions, number of equal positions and clusters of the tensors with equal shards."""
    return list_fields(report.groups[0].evidence.equal_shards, "name", "shards", "equal", "clusters")


@pytest.mark.parametrize(
    ("placements", "mesh", "seeds", "shards", "equal", "clusters"),
    [
        (["S(0)"], (4,), [0, 0, 0, 0], 4, 4, ((0, 1, 2, 3),)),
        (["S(1)"], (4,), [0, 0, 1, 1], 4, 2, ((0, 1), (2, 3))),
        (["S(0)"], (4,), [0, 1, 2, 0], 4, 2, ((0, 3),)),
        # HSDP: the copies of each shard are equal, and count once.
        (["R", "S(0)"], (2, 2), [0, 0, 0, 0], 2, 2, ((0, 1, 2, 3),)),
        # FSDP and tensor parallelism: each tensor-parallel rank has a seed of its own.
        (["S(0)", "S(1)"], (2, 2), [0, 1, 0, 1], 4, 2, ((0, 2), (1, 3))),
        (["_S(0, 2)", "S(0)"], (2, 2), [0, 1, 0, 1], 4, 2, ((0, 2), (1, 3))),
    ],
)
def test_equal_shards_are_information(
    tmp_path: Path,
    placements: list[str],
    mesh: tuple[int, ...],
    seeds: list[int],
    shards: int,
    equal: int,
    clusters: tuple[tuple[int, ...], ...],
) -> None:
    """Ranks that drew their shards with one seed are SYN405, which changes no verdict."""
    report = compare_shards(tmp_path, [draw(seed) for seed in seeds], placements, mesh)
    assert list_equal(report) == [("w", shards, equal, clusters)]
    finding = find_first(report.findings, code=CODE)
    assert (finding.severity, finding.certainty, finding.fails) == ("info", "consistent", False)
    assert finding.ranks == tuple(sorted(set().union(*clusters)))
    assert (report.verdict, report.exit_code) == ("in_sync", 0)


def repeat_values() -> Any:
    """Return rows of 16 values, like the decay rates of a Mamba layer."""
    return np.tile(np.arange(1, 17, dtype=np.float32), (64, 1))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([draw(seed) for seed in range(4)], id="seeds of their own"),
        pytest.param([np.zeros(SHAPE, np.float32)] * 4, id="zeros"),
        pytest.param([np.full(LONG, 0.02, np.float32)] * 4, id="one value"),
        pytest.param([repeat_values()] * 4, id="16 values"),
        pytest.param([draw(0, (7, 9))] * 4, id="63 elements"),
        pytest.param([np.concatenate([draw(0, LONG), draw(seed, LONG)]) for seed in range(4)], id="equal at the start"),
    ],
)
def test_shards_that_nobody_drew_twice(tmp_path: Path, parts: list[Any]) -> None:
    """Constant, repeated, tiny and trained shards are no finding."""
    report = compare_shards(tmp_path, parts, ["S(0)"], (4,))
    assert (list_codes(report.findings), list_equal(report)) == (["SYN104"], [])


def test_shards_that_begin_with_padding(tmp_path: Path) -> None:
    """The rows of padding in an embedding hide no equal shards."""
    padded = np.concatenate([np.zeros(LONG, np.float32), draw(0, LONG)])
    report = compare_shards(tmp_path, [padded, padded], ["S(0)"], (2,))
    assert list_equal(report) == [("w", 2, 2, ((0, 1),))]


@pytest.mark.parametrize("placement", ["R", "P(sum)"])
def test_copies_and_partial_sums_are_no_shards(tmp_path: Path, placement: str) -> None:
    """Copies of a tensor must be equal, and equal partial sums are no random numbers."""
    report = compare_shards(tmp_path, [draw(0)] * 2, [placement], (2,))
    assert list_equal(report) == []


def compare_plain(folder: Path, name: str, pattern: str, seeds: Sequence[int] = (0, 0), **options: Any) -> Report:
    """Compare safetensors files of ranks in a mesh. pattern: of the file names, with the coordinate."""
    for coordinate, seed in enumerate(seeds):
        for replica in range(2):
            path = folder / f"dp{replica}_{pattern}{coordinate}.safetensors"
            save_safetensors(path, {name: draw(seed), "decoder.final_norm.weight": draw(9, (64,))})

    return syncheck.compare(folder, options=Options(**options))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "tp"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "tp"),
        ("model.layers.0.mlp.down_proj.weight", "tp"),
        ("layers.0.mlp.experts.0.w1.weight", "ep"),
    ],
)
def test_plain_tensors_of_divided_layers(tmp_path: Path, name: str, pattern: str) -> None:
    """Names show which plain tensors are shards in a mesh; each shard has a copy in the other replica."""
    report = compare_plain(tmp_path, name, pattern)
    ((_, shards, equal, clusters),) = list_equal(report)
    assert (shards, equal, clusters) == (2, 2, ((0, 1, 2, 3),))
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        # May be whole on all tensor-parallel ranks.
        ("decoder.layers.0.self_attention.q_layernorm.weight", "tp"),
        ("model.layers.0.self_attn.k_proj.weight", "tp"),
        ("adapter.weight", "tp"),
        # Tensor parallelism may leave experts whole, and expert parallelism the other layers.
        ("layers.0.mlp.experts.0.w1.weight", "tp"),
        ("layers.0.mlp.shared_experts.w1.weight", "ep"),
        ("layers.0.attention.wq.weight", "ep"),
        # Stages have different layers.
        ("decoder.layers.0.mlp.linear_fc1.weight", "pp"),
    ],
)
def test_plain_tensors_that_may_be_copies(tmp_path: Path, name: str, pattern: str) -> None:
    """Equal plain tensors are no finding if the files do not show that they are shards."""
    assert list_equal(compare_plain(tmp_path, name, pattern)) == []


def test_selected_tensors_only(tmp_path: Path) -> None:
    """Excluded tensors are not searched, and `quick` reads no tensor."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert list_equal(compare_plain(tmp_path, name, "tp", exclude=("*fc1*",))) == []
    assert list_equal(compare_plain(tmp_path, name, "tp", quick=True)) == []


@pytest.mark.parametrize("parts", [[draw(0, LONG), draw(1, LONG)], [draw(0, LONG)] * 2], ids=["different", "equal"])
def test_different_shards_are_not_read(tmp_path: Path, parts: list[Any]) -> None:
    """Shards with different checksums are not read; equal shards are read to the end."""
    files = save_ranks(tmp_path, dict(enumerate(parts)), ["S(0)"], (2,))
    before = TRAFFIC.read
    report = syncheck.compare(files)
    sizes = math.prod(LONG) * 4
    are_equal = parts[0] is parts[1]
    assert bool(find_all(report.findings, code=CODE)) == are_equal
    assert (TRAFFIC.read - before >= 2 * sizes) if are_equal else (TRAFFIC.read == before)
