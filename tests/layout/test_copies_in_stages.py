"""Copies of a tensor in several pipeline stages: compared if the metadata lists them, and never merged wrongly."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import find_all, find_texts, list_fields, list_names

import syncheck
from syncheck.errors import MalformedFile

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group

TIED = {"head.weight": "embed.weight"}
KINDS = {"table": "buffer", "weight": "parameter"}
ONES = np.ones((4, 3), np.float32)


def compare_stages(
    folder: Path, *models: dict[str, Any], tied: Any = TIED, mesh: Any = None, optimizer: bool = False
) -> Group:
    """Save a file for each model, and compare the files. mesh: by default one pipeline stage for each rank."""
    for rank, model in enumerate(models):
        position = {"pipeline": rank} if mesh is None else mesh[rank]
        block = syncheck.metadata(run="pp", rank=rank, world_size=len(models), step=1, mesh=position)
        block["tied"] = tied[rank] if isinstance(tied, list) else tied
        block["buffers"] = find_texts(model, end="table")
        block["optimizer_parameters"] = [name for name in model if name not in block["buffers"]]
        states = {index: {"momentum_buffer": value} for index, value in enumerate(model.values())}
        groups = [{"lr": 0.1, "params": list(range(len(model)))}]
        more = {"optimizer": {"state": states, "param_groups": groups}} if optimizer else {}
        save_pth(folder / f"rank{rank}.pth", {"model": model, "syncheck": block, **more})
    (group,) = syncheck.compare(folder).groups
    return group


def first(value: Any = ONES) -> dict[str, Any]:
    """Return the first stage."""
    return {"embed.weight": value, "layers.0.weight": ONES}


def last(value: Any = ONES) -> dict[str, Any]:
    """Return the last stage."""
    return {"layers.1.weight": 2 * ONES, "head.weight": value}


def test_copies_are_compared_across_stages(tmp_path: Path) -> None:
    """Equal copies are in sync with their momentum; a changed copy is a difference of the embedding."""
    group = compare_stages(tmp_path / "equal", first(), last(), optimizer=True)
    assert (group.verdict, group.counts.identical, group.counts.not_compared) == ("in_sync", 2, 4)
    group = compare_stages(tmp_path / "other", first(), last(2 * ONES), optimizer=True)
    assert group.verdict == "out_of_sync"
    different = set(list_names(find_all(group.tensors, status="different")))
    assert different == {"embed.weight", "optimizer.embed.weight.momentum_buffer"}
    # Four ranks: two copies of two stages, and one of four embeddings differs.
    mesh = [{"pipeline": stage, "data": copy} for stage, copy in product(range(2), range(2))]
    group = compare_stages(tmp_path / "copies", first(), first(), last(), last(2 * ONES), mesh=mesh)
    assert list_fields(find_all(group.tensors, out_of_sync=True), "name", "minority") == [("embed.weight", (3,))]


@pytest.mark.parametrize(
    "tied",
    [
        {},
        [TIED, {"head.weight": "layers.0.weight"}],
        {"head.weight": "no.such"},
        {"no.such": "embed.weight"},
        {"head.weight": "head.weight"},
        {"embed.weight": "layers.0.weight", "head.weight": "layers.1.weight"},
    ],
    ids=["none", "contradictory", "unknown target", "unknown name", "itself", "within a stage"],
)
def test_useless_lists_compare_nothing(tmp_path: Path, tied: Any) -> None:
    """Without a usable list on all ranks, stages have nothing in common, and nothing is in sync."""
    group = compare_stages(tmp_path, first(), last(), tied=tied)
    assert (group.verdict, group.counts.identical) == ("undecided", 0)


@pytest.mark.parametrize(
    "tied",
    [
        {"head.weight": "embed.weight", "embed.weight": "layers.1.weight"},
        {"head.weight": "embed.weight", "embed.weight": "head.weight"},
        {"head.weight": "embed.weight", "layers.1.weight": "embed.weight"},
        {"layers.1.weight": "embed.weight", "head.weight": "layers.0.weight"},
    ],
    ids=["chain", "cycle", "two names for one", "other tensors"],
)
def test_strange_lists_hide_no_difference(tmp_path: Path, tied: Any) -> None:
    """With any list, each rank keeps all its tensors, and compared tensors with different values are out of sync."""
    group = compare_stages(tmp_path, first(), {name: 3 * value for name, value in last().items()}, tied=tied)
    assert group.verdict in ("out_of_sync", "undecided")
    tensors = group.counts.tensors
    assert tensors in (2, 3, 4)
    assert tensors - group.counts.not_compared == sum(diff.status == "different" for diff in group.tensors)


def test_buffers_of_all_stages_are_known(tmp_path: Path) -> None:
    """The metadata of each stage lists the buffers of this stage only."""
    models = [{f"{layer}.table": ONES, f"{layer}.weight": ONES} for layer in (0, 0, 1, 1)]
    mesh = [{"pipeline": stage, "data": copy} for stage, copy in product(range(2), range(2))]
    group = compare_stages(tmp_path, *models, mesh=mesh)
    assert group.evidence.names == {f"{layer}.{name}": kind for layer, (name, kind) in product((0, 1), KINDS.items())}


def test_copies_need_different_stages(tmp_path: Path) -> None:
    """Without a pipeline, a tensor under another name is missing, even if the metadata lists it as a copy."""
    group = compare_stages(tmp_path, first(), {"head.weight": ONES, "layers.0.weight": ONES}, mesh=[{}, {}])
    assert group.verdict == "out_of_sync"
    assert set(list_names(find_all(group.tensors, reason="missing"))) == {"embed.weight", "head.weight"}


@pytest.mark.parametrize("tied", [["head.weight"], {"head.weight": 1}, {1: "embed.weight"}, "head.weight"])
def test_lists_of_other_types_are_refused(tmp_path: Path, tied: Any) -> None:
    """A value that does not map names to names is an error in one line."""
    block = syncheck.metadata(run="pp", rank=0, world_size=1) | {"tied": tied}
    with pytest.raises(MalformedFile, match="metadata block 'syncheck', tied"):
        syncheck.read(str(save_pth(tmp_path / "a.pth", {"model": first(), "syncheck": block})))
