"""Replica groups of one tensor: along the replicate dimension, within a pipeline stage, and never across shards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from support.checkpoints import save_pth
from support.dtensors import dtensor, mesh_of_2_6, save_ranks
from support.listings import get_failing, list_codes, list_failing, list_fields

import syncheck
from syncheck.messages import Detail, Note
from syncheck.records import Reason
from syncheck.report import json_document

if TYPE_CHECKING:
    from syncheck.messages import Sentence
    from syncheck.records import Group, Report

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
BN = {rank: np.ones(3, np.float32) for rank in range(6)}


def hsdp(rank: int, shards: int = 2) -> Any:
    """Return the rows of a rank in a (replicate, shard) mesh."""
    return np.split(ROWS, shards)[rank % shards]


def hsdp_parts(ranks: int) -> dict[int, Any]:
    """Return the rows of each rank in a (replicate, shard) mesh."""
    return {rank: hsdp(rank) for rank in range(ranks)}


def compare_dtensors(folder: Path, *arguments: Any, **more: Any) -> Report:
    """Compare ranks with a DTensor `w`, written by `save_ranks`."""
    save_ranks(folder, *arguments, **more)
    return syncheck.compare(folder)


def codes(group: Group) -> list[str]:
    """Return the codes of a group's findings."""
    return list_codes(group.findings)


def reasons(group: Group) -> list[tuple[Reason | None, Sentence | None]]:
    """Return the reason and the code of the detail of each tensor in a group."""
    return [(diff.reason, diff.detail and diff.detail.code) for diff in group.tensors]


def change_element(array: Any, index: tuple[int, int], by: float = 1.0) -> Any:
    """Return a copy with one element changed."""
    changed = array.copy()
    changed[index] += by
    return changed


def test_hsdp_is_compared_along_the_replicate_dimension(tmp_path: Path) -> None:
    """Four ranks with two copies of two shards are in sync, and the report lists the replica groups."""
    report = compare_dtensors(tmp_path, hsdp_parts(4), ["R", "S(0)"], (2, 2))
    (group,) = report.groups
    assert (report.exit_code, group.counts.identical, codes(group)) == (0, 1, ["SYN104"])
    (shards,) = group.shards
    assert (shards.kind, shards.compared, shards.replica_groups) == ("DTensor", 1, ((0, 2), (1, 3)))
    document = json.loads(json_document.render(report, "0"))
    jsonschema.validate(document, json.loads((Path(syncheck.__file__).parent / "report" / "schema.json").read_text()))
    layout = {"kind": "DTensor", "layout": shards.layout, "tensors": 1, "compared": 1}
    assert document["groups"][0]["shards"] == [layout | {"replica_groups": [[0, 2], [1, 3]]}]


def test_different_layouts_have_no_replicas(tmp_path: Path) -> None:
    """A DTensor sharded along different mesh dimensions on different ranks has no replicas and is SYN102."""
    save_ranks(tmp_path, hsdp_parts(2), ["R", "S(0)"], (2, 2))
    report = compare_dtensors(tmp_path, {2: hsdp(1), 3: hsdp(1)}, ["S(0)", "R"], (2, 2))
    (diff,) = report.groups[0].tensors
    assert (report.exit_code, codes(report.groups[0])[0], diff.reason) == (1, "SYN102", Reason.SHAPE)
    assert diff.clusters == ((0, 1), (2, 3))


def test_a_difference_between_copies_of_a_shard_suspects_their_ranks(tmp_path: Path) -> None:
    """If rank 3's shard differs from its copy, the suspects are ranks 1 and 3, not ranks 0 and 2."""
    parts = hsdp_parts(4) | {3: change_element(hsdp(3), (2, 1), 0.5)}
    report = compare_dtensors(tmp_path, parts, ["R", "S(0)"], (2, 2))
    (group,) = report.groups
    (diff,) = group.tensors
    assert (report.exit_code, diff.status) == (1, "different")
    assert (diff.max_abs, diff.index, diff.shape) == (0.5, (2, 1), (4, 3))
    assert (diff.replica_groups, diff.clusters, diff.minority) == (((0, 2), (1, 3)), ((1,), (3,)), ())
    finding = get_failing(group)
    assert finding.ranks == (1, 3)
    assert diff.detail.code is Detail.WITHIN_GROUPS


def test_minorities_are_determined_within_each_group(tmp_path: Path) -> None:
    """With three copies of two shards, each group has its odd rank; the numbers are those of the worse group."""
    parts = hsdp_parts(6)
    parts |= {2: change_element(hsdp(2), (0, 0), 0.25), 5: change_element(hsdp(5), (1, 1), 4.0)}
    (diff,) = compare_dtensors(tmp_path, parts, ["R", "S(0)"], (3, 2)).groups[0].tensors
    assert diff.replica_groups == ((0, 2, 4), (1, 3, 5))
    assert diff.clusters == ((0, 4), (2,), (1, 3), (5,))
    assert (diff.minority, diff.max_abs, diff.mismatched, diff.numel) == ((2, 5), 4.0, 1, 12)
    assert set(diff.nonfinite) == set(range(6))


def test_replicas_follow_mesh_coordinates_not_file_names(tmp_path: Path) -> None:
    """Renamed files are still grouped by the mesh coordinates in the files."""
    for name, rank in zip("abcd", (2, 1, 0, 3), strict=True):
        mesh = mesh_of_2_6([[0, 1], [2, 3]], divmod(rank, 2))
        save_pth(tmp_path / f"{name}.pth", {"w": dtensor(hsdp(rank), ["R", "S(0)"], mesh)})
    (group,) = syncheck.compare(tmp_path, options=syncheck.Options(group_by="")).groups
    assert (group.verdict, group.counts.identical) == ("in_sync", 1)


def test_a_missing_shard_in_a_renamed_file(tmp_path: Path) -> None:
    """If rank 3's file has the number of a rank outside the mesh, a shard absent from the file is still missing."""
    for name, rank in ((10, 1), (11, 3)):
        mesh = mesh_of_2_6([[0, 1], [2, 3]], divmod(rank, 2))
        tensors = {key: dtensor(hsdp(rank), ["R", "S(0)"], mesh) for key in ("v", "w") if (key, rank) != ("w", 3)}
        save_pth(tmp_path / f"rank{name}.pth", tensors)
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, codes(group)) == ("out_of_sync", ["SYN101", "SYN104"])
    assert group.tensors[0].detail == Detail.MISSING(ranks=(11,))


def test_shards_alone_are_undecided(tmp_path: Path) -> None:
    """FSDP shards alone give exit code 2 and a note; beside replicated buffers, shards only count as sharded."""
    report = compare_dtensors(tmp_path / "alone", hsdp_parts(2), ["S(0)"], (2,))
    (group,) = report.groups
    assert (report.exit_code, reasons(group)) == (2, [(Reason.SHARDED, Detail.SHARDED)])
    assert Note.ONLY_SHARDS() in group.notes
    report = compare_dtensors(tmp_path / "both", hsdp_parts(2), ["S(0)"], (2,), mean=BN)
    assert (report.exit_code, report.counts.identical, report.counts.not_compared) == (0, 1, 1)
    assert Note.ONLY_SHARDS() not in report.groups[0].notes


def test_a_replicated_dtensor_is_compared_on_all_ranks(tmp_path: Path) -> None:
    """A replicated DTensor is compared like a plain tensor: one of three ranks that differs is the minority."""
    parts = {0: ROWS, 1: ROWS, 2: change_element(ROWS, (7, 2))}
    (diff,) = compare_dtensors(tmp_path, parts, ["R"], (3,)).groups[0].tensors
    assert (diff.clusters, diff.minority) == (((0, 1), (2,)), (2,))


def test_a_mesh_dimension_of_size_one_does_not_shard(tmp_path: Path) -> None:
    """A shard along a mesh dimension of size 1 is the whole tensor, so ranks of the other dimension are compared."""
    assert compare_dtensors(tmp_path, {0: ROWS, 1: change_element(ROWS, (0, 0))}, ["R", "S(0)"], (2, 1)).exit_code == 1


def test_partial_sums_are_not_compared(tmp_path: Path) -> None:
    """Partial sums are compared only between ranks that hold the same part of the sum."""
    report = compare_dtensors(tmp_path / "sum", {0: ROWS, 1: 2 * ROWS}, ["P(sum)"], (2,))
    assert report.exit_code == 2
    assert reasons(report.groups[0]) == [(Reason.AMBIGUOUS, Detail.PARTS_OF_SUM)]
    assert report.groups[0].shards == ()
    parts = {0: ROWS, 1: 2 * ROWS, 2: ROWS, 3: change_element(2 * ROWS, (1, 1))}
    (diff,) = compare_dtensors(tmp_path / "both", parts, ["R", "P(sum)"], (2, 2)).groups[0].tensors
    assert diff.clusters == ((1,), (3,))


def test_ranks_without_a_replica_are_not_compared(tmp_path: Path) -> None:
    """If rank 1 of a 2 x 2 mesh has no replica, the exit code is 2, unless a replicated buffer was compared."""
    parts = hsdp_parts(4)
    files = save_ranks(tmp_path / "shards", parts, ["R", "S(0)"], (2, 2))
    assert syncheck.compare(*files[:2]).exit_code == 2
    report = syncheck.compare(*files[:3])
    (group,) = report.groups
    assert (report.exit_code, report.counts.identical, group.uncompared) == (2, 1, (1,))
    assert Note.RANKS_NOT_COMPARED(ranks=(1,)) in group.notes
    files = save_ranks(tmp_path / "both", parts, ["R", "S(0)"], (2, 2), mean=BN)
    assert syncheck.compare(*files[:3]).exit_code == 0  # the buffer of rank 1 was compared


def test_a_missing_shard(tmp_path: Path) -> None:
    """A tensor that one rank of the mesh lacks is SYN101 on this rank."""
    parts = hsdp_parts(4)
    save_ranks(tmp_path, parts, ["R", "S(0)"], (2, 2), mean=BN)
    save_pth(tmp_path / "m_rank3.pth", {"mean": BN[3]})
    (group,) = syncheck.compare(tmp_path).groups
    assert list_fields(list_failing(group), "code", "ranks") == [("SYN101", (3,))]


def test_different_whole_shapes_are_a_mismatch(tmp_path: Path) -> None:
    """Shards of tensors with different whole shapes are SYN102, even without replicas."""
    for rank, rows in ((0, 8), (1, 10)):
        mesh = mesh_of_2_6([0, 1], [rank])
        save_pth(tmp_path / f"m_rank{rank}.pth", {"w": dtensor(hsdp(rank), ["S(0)"], mesh, (rows, 3))})
    (group,) = syncheck.compare(tmp_path).groups
    assert codes(group)[0] == "SYN102"
    (diff,) = group.tensors
    assert (diff.reason, diff.clusters) == (Reason.SHAPE, ((0,), (1,)))
    assert re.findall(r"\[.*?\]", str(diff.detail)) == ["[8, 3]", "[10, 3]"]


def test_copies_of_a_shard_with_different_shapes_are_a_mismatch(tmp_path: Path) -> None:
    """Copies of one shard with different shapes, which torch does not write, are SYN102 within their replica group."""
    parts = hsdp_parts(4) | {2: ROWS[:3]}
    (group,) = compare_dtensors(tmp_path, parts, ["R", "S(0)"], (2, 2)).groups
    assert list_fields(list_failing(group), "code", "ranks") == [("SYN102", (0, 2))]
    (diff,) = group.tensors
    assert (diff.reason, diff.clusters) == (Reason.SHAPE, ((0,), (2,)))
    assert re.findall(r"\[.*?\]", str(diff.detail)) == ["[4, 3]", "[3, 3]"]


def test_a_shard_beside_a_whole_tensor_is_undecided(tmp_path: Path) -> None:
    """If one rank holds the whole tensor and another rank a shard, the layout is ambiguous: exit code 2."""
    save_pth(tmp_path / "m_rank0.pth", {"w": dtensor(hsdp(0), ["S(0)"], mesh_of_2_6([0, 1], [0]))})
    save_pth(tmp_path / "m_rank1.pth", {"w": ROWS})
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, reasons(report.groups[0])) == (2, [(Reason.AMBIGUOUS, Detail.AMBIGUOUS_LAYOUT)])
    assert "rank 1" in str(report.groups[0].tensors[0].detail)


def model_parallel(folder: Path, tensors: dict[int, dict[str, Any]], meshes: dict[int, dict[str, int]]) -> Report:
    """Compare ranks with plain tensors and mesh coordinates in their metadata."""
    for rank, content in tensors.items():
        block = syncheck.metadata(run="mp", run_id="1", rank=rank, world_size=len(tensors), mesh=meshes[rank])
        save_pth(folder / f"mp_rank{rank}.pth", {"model": content, "syncheck": block})
    return syncheck.compare(folder)


PIPELINE = {rank: {"dp": rank % 2, "pp": rank // 2} for rank in range(4)}


def test_pipeline_stages_hold_different_tensors(tmp_path: Path) -> None:
    """Pipeline stages with different layers lack nothing; within a stage, replicas are compared."""
    content = {rank: {f"layers.{rank // 2}.weight": ROWS} for rank in range(4)}
    report = model_parallel(tmp_path, content, PIPELINE)
    assert (report.exit_code, report.counts.identical, codes(report.groups[0])) == (0, 2, ["SYN104"])
    content[3] = {"layers.1.weight": change_element(ROWS, (3, 0))}
    (diff,) = model_parallel(tmp_path, content, PIPELINE).groups[0].tensors
    assert (diff.name, diff.clusters) == ("layers.1.weight", ((2,), (3,)))


def test_a_missing_layer_within_a_stage(tmp_path: Path) -> None:
    """If a rank lacks a layer of its stage, the finding is SYN101 and suspects only ranks of this stage."""
    content = {rank: {f"layers.{rank // 2}.weight": ROWS, "norm": ROWS[0]} for rank in range(4)}
    content[1] = {"norm": ROWS[0]}
    (group,) = model_parallel(tmp_path, content, PIPELINE).groups
    finding = get_failing(group)
    assert (finding.code, finding.tensors) == ("SYN101", ("layers.0.weight",))
    assert list_fields(group.tensors, "detail") == [Detail.MISSING(ranks=(1,))]
    assert set(finding.ranks) <= {0, 1}


@pytest.mark.parametrize("step", [False, True], ids=["parameters", "and a step counter"])
def test_a_stage_with_one_file_is_undecided(tmp_path: Path, step: bool) -> None:
    """If one of two replicas of a stage has no file, the other replica is not compared: exit code 2."""
    content: dict[int, dict[str, Any]] = {rank: {f"layers.{rank // 2}.weight": ROWS} for rank in range(3)}
    for rank in content:
        if step:  # a counter common to all ranks is no evidence about rank 2's parameters
            content[rank]["optimizer.layers.step"] = np.float32(3).reshape(())
    report = model_parallel(tmp_path, content, PIPELINE)
    assert (report.exit_code, report.groups[0].uncompared) == (2, (2,))


@pytest.mark.parametrize(("name", "code"), [("tp", 0), ("expert", 0), ("cp", 1), ("dp", 1), ("shard", 1)])
def test_plain_tensors_are_shards_along_some_dimensions_only(tmp_path: Path, name: str, code: int) -> None:
    """Plain tensors may be shards along a tensor or expert parallel dimension; along other dimensions, replicas."""
    content = {rank: {"w": ROWS + (rank % 2)} for rank in range(4)}
    meshes = {rank: {"data": rank // 2, name: rank % 2} for rank in range(4)}
    assert model_parallel(tmp_path, content, meshes).exit_code == code


def test_a_partial_sum_without_a_replica_leaves_the_verdict_open(tmp_path: Path) -> None:
    """Other tensors agree, and nothing compared the sum. With a replica of each part, the parts are compared."""
    whole = dict.fromkeys(range(4), ROWS)
    parts = {rank: ROWS * (rank + 1) for rank in range(4)}
    assert compare_dtensors(tmp_path / "sum", parts, ["P(sum)"], (4,), whole=whole).exit_code == 2
    copies = {rank: ROWS * (rank % 2 + 1) for rank in range(4)}
    assert compare_dtensors(tmp_path / "copies", copies, ["R", "P(sum)"], (2, 2), whole=whole).exit_code == 0
    assert compare_dtensors(tmp_path / "shards", hsdp_parts(2), ["S(0)"], (2,), whole=whole).exit_code == 0
