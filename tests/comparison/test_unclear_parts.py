"""SYN104 of plain tensors that may be parts or copies: file names and metadata place ranks, and record no parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth, save_safetensors
from support.dtensors import save_ranks
from support.listings import find_first

import syncheck

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncheck.findings import UnclearParts
    from syncheck.records import Finding, Report

NAMES = ("first.weight", "head.weight", "last.weight")


def draw(seed: int, shape: Sequence[int] = (8, 4)) -> Any:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make_ranks(different: Sequence[str] = (), count: int = 2) -> list[dict[str, Any]]:
    """Return the tensors of ranks, equal except some, which differ in one element on the last rank."""
    ranks = []
    for _ in range(count):
        tensors = {name: draw(seed) for seed, name in enumerate(NAMES)}
        ranks.append(tensors)
    for name in different:
        ranks[-1][name][0, 0] += 1
    return ranks


def compare(folder: Path, ranks: Sequence[dict[str, Any]], name: str) -> Report:
    """Write a file per rank and compare all of them. name: with the dimension of a mesh."""
    for rank, tensors in enumerate(ranks):
        save_pth(folder / name.format(rank=rank), {"model": tensors})
    return syncheck.compare(folder)


def get_sharded(report: Report) -> Finding:
    """Return SYN104 of the only group."""
    return find_first(report.findings, code="SYN104")


def get_unclear(report: Report) -> UnclearParts:
    """Return the tensors that may be parts or copies."""
    (group,) = report.groups
    assert group.evidence.unclear_parts is not None
    return group.evidence.unclear_parts


@pytest.mark.parametrize("name", ["tp_rank{rank}.pth", "ep_rank{rank}.pth", "pp_rank{rank}.pth"])
def test_equal_tensors_are_no_proof_of_shards(tmp_path: Path, name: str) -> None:
    """Copies in files named after a mesh are undecided: SYN104 proves nothing, and names all tensors."""
    report = compare(tmp_path, make_ranks(["head.weight"]), name)
    finding, unclear = get_sharded(report), get_unclear(report)
    assert (report.exit_code, finding.certainty, finding.alternatives) == (2, "consistent", ("SYN299",))
    assert (unclear.equal, unclear.different) == (("first.weight", "last.weight"), ("head.weight",))


@pytest.mark.parametrize("change", ["none", "all", "four ranks", "metadata", "safetensors"])
def test_other_copies_in_a_mesh(tmp_path: Path, change: str) -> None:
    """The evidence does not depend on the source of the mesh, the format, or the number of ranks."""
    different = {"none": (), "all": NAMES}.get(change, ("head.weight",))
    ranks = make_ranks(different, count=4 if change == "four ranks" else 2)
    name = "tp_rank{rank}.pth"
    if change == "metadata":
        name = "m_rank{rank}.pth"
        for rank, tensors in enumerate(ranks):
            block = syncheck.metadata(run="tp", run_id="1", rank=rank, world_size=2, mesh={"tp": rank})
            save_pth(tmp_path / name.format(rank=rank), {"model": tensors, "syncheck": block})
        report = syncheck.compare(tmp_path)
    elif change == "safetensors":
        for rank, tensors in enumerate(ranks):
            save_safetensors(tmp_path / f"tp_rank{rank}.safetensors", tensors)
        report = syncheck.compare(tmp_path)
    else:
        report = compare(tmp_path, ranks, name)

    equal = tuple(tensor for tensor in NAMES if tensor not in different)
    unclear = get_unclear(report)
    assert (report.exit_code, get_sharded(report).certainty) == (2, "consistent")
    assert (unclear.equal, unclear.different) == (equal, tuple(different))


def test_shapes_and_names_show_parts(tmp_path: Path) -> None:
    """Tensors of one rank, of different shapes, or with the name of a divided layer are proved to be no copies."""
    ranks = [
        {
            f"layers.{rank}.weight": draw(rank),
            "vocabulary.weight": draw(7, (8 + rank, 4)),
            "layers.9.mlp.up_proj.weight": draw(20 + rank),
        }
        for rank in range(2)
    ]
    report = compare(tmp_path, ranks, "tp_rank{rank}.pth")
    unclear = get_unclear(report)
    assert (report.exit_code, get_sharded(report).certainty) == (2, "proved")
    assert (unclear.equal, unclear.different) == ((), ())


def test_dtensors_record_their_shards(tmp_path: Path) -> None:
    """Shards of DTensors are proved, even if they are equal."""
    files = save_ranks(tmp_path, {0: draw(1), 1: draw(1)}, ["S(0)"], (2,))
    report = syncheck.compare(files)
    assert get_sharded(report).certainty == "proved"
