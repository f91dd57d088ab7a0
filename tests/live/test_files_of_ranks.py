"""Ranks that each read their own file report the same as one process that reads all files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agreement import all_pass, all_raise, each_rank
from support.checkpoints import changed, network, save
from support.listings import find_all, list_codes, list_fields, list_names

import syncheck
from syncheck.cli import rank_files
from syncheck.cli.rank_files import compare_files
from syncheck.live.channel import Channel
from syncheck.live.digest import COMMON
from syncheck.live.exchange import manifest
from syncheck.messages import Grouping
from syncheck.report import json_document

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ENTRIES: list[dict[str, Any]] = json.loads((FIXTURES / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]
MOST = 4  # ranks at a time
# One fixture per kind of difference; the slow tests compare the remaining fixtures.
ALWAYS = {
    "desync/bit_flip_exp_avg",
    "desync/bn_local_stats",
    "desync/damaged_on_disk",
    "desync/gradients_not_reduced",
    "desync/missing_tensors",
    "desync/nonfinite",
    "desync/other_dtype",
    "desync/stale_stage",
    "desync/tensor_parallel_dtensor",
    "desync/tied_apart",
    "in_sync/fsdp_shards",
    "in_sync/tie_broken",
    "in_sync/wrapper_prefix",
}


def last_files(folder: str) -> list[Path]:
    """Return the files of a fixture's last step by rank, without reading them."""
    result = sorted((FIXTURES / folder).rglob("*.*"), key=lambda file: (len(str(file)), str(file)))
    last = result[-1].parent
    return find_all(result, parent=last)


def cases() -> list[Any]:
    """Return each fixture, for as many ranks as it has files."""
    result = []
    for entry in ENTRIES:
        ranks = len(last_files(entry["folder"]))
        # Files of different runs have no name in common, so one process names their group by the folder.
        if ranks <= MOST and entry["folder"] != "desync/different_runs":
            marks = [pytest.mark.syncheck(ranks=ranks), *([] if entry["folder"] in ALWAYS else [pytest.mark.slow])]
            result.append(pytest.param(entry["folder"], ranks, id=entry["folder"], marks=marks))
    assert {case.values[0] for case in result} >= ALWAYS
    return sorted(result, key=lambda case: case.values[1])  # processes are reused by tests of the same number of ranks


def collective(path: Path | str, pattern: str = "x", **options: Any) -> syncheck.Report:
    """Compare this rank's file with the files of the other ranks."""
    channel = Channel()
    chosen = syncheck.Options(**options)
    return channel.run_together(lambda: compare_files(channel, str(path), pattern, chosen))


def told(report: syncheck.Report) -> Any:
    """Return the JSON document without the fields about finding files."""
    document = json.loads(json_document.render(report, ""))
    for group in document["groups"]:
        # The first note is about grouping.
        group["notes"] = group["notes"][1:]
        group["messages"]["notes"] = group["messages"]["notes"][1:]
    return document


@pytest.mark.parametrize("folder, ranks", cases())
def test_report_equals_the_report_of_one_process(syncheck_rank: Any, folder: str, ranks: int) -> None:
    """Every number, finding and verdict equals the comparison by one process."""
    second_folder = last_files(folder)
    report = all_pass(each_rank(collective, second_folder[syncheck_rank.rank]))
    assert told(report) == told(syncheck.compare(*second_folder))


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    "tied",
    [
        {"b": "a"},
        {"c": "a"},
        {"b": "a", "c": "a"},
        {"b": "a", "a": "c"},
        {"b": "a", "a": "b"},
        {"b": "a", "a": "d", "d": "c"},
        {"b": "d", "c": "a"},
    ],
    ids=str,
)
def test_copies_in_stages(syncheck_rank: Any, tied: dict[str, str]) -> None:
    """For any list of copies, equal and different copies are reported as by one process."""
    rank = syncheck_rank.rank
    for name, factors in (("equal", (1, 1)), ("other", (1, 3))):
        model = {name: np.full(4, 2.0 * factors[rank], np.float32) for name in (("a", "d"), ("b", "c"))[rank]}
        block = syncheck.metadata(run=name, rank=rank, world_size=2, mesh={"pipeline": rank}, tied=tied)
        mine = save(syncheck_rank.shared / f"{name}_{rank}.pth", {"model": model, "syncheck": block})
        syncheck_rank.barrier()
        report = all_pass(each_rank(collective, mine))
        assert told(report) == told(syncheck.compare(*(mine.with_name(f"{name}_{r}.pth") for r in range(2))))


def written(rank: Any, name: str, by: float = 0.0, **metadata: Any) -> Path:
    """Write this rank's file. by: offset of all its weights."""
    state: dict[str, Any] = changed(network(), "weight", by=by)
    if metadata:
        state["syncheck"] = syncheck.metadata(rank=rank.rank, world_size=rank.world_size, **metadata)
    path = save(rank.shared / name.format(rank.rank), state)
    rank.barrier()
    return path


@pytest.mark.syncheck(ranks=2)
def test_safetensors(syncheck_rank: Any) -> None:
    """safetensors files are compared like torch.save files."""
    mine = written(syncheck_rank, "r_{}.safetensors", by=float(syncheck_rank.rank))
    report = all_pass(each_rank(collective, mine))
    assert report.verdict == "out_of_sync"
    assert set(list_fields(report.groups[0].replicas, "format")) == {"safetensors"}
    assert told(report)["groups"][0]["tensors"] == told(syncheck.compare(mine.parent))["groups"][0]["tensors"]


@pytest.mark.syncheck(ranks=4)
def test_hosts_are_those_of_the_training(syncheck_rank: Any) -> None:
    """Findings about hosts use the host of the training, not of the comparison."""
    node = syncheck_rank.rank // 2
    mine = written(syncheck_rank, "rank_{}.pth", by=0.5 * node, run="mine", step=5, host=f"gpu{node}")
    report = all_pass(each_rank(collective, mine))
    assert "SYN230" in list_codes(report.groups[0].findings)
    assert list_fields(report.groups[0].replicas, "host") == ["gpu0", "gpu0", "gpu1", "gpu1"]
    assert list_fields(report.groups[0].replicas, "path") == [
        str(syncheck_rank.shared / f"rank_{rank}.pth") for rank in range(4)
    ]


FOLDERS = """
import torch
import torch.distributed.checkpoint as dcp

for rank in range(2):
    state = {"fc.weight": torch.ones(6, 4), "fc.bias": torch.full((4,), float(rank))}
    dcp.save(state, checkpoint_id=f"rank_{rank}")
"""


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_folders_that_are_one_checkpoint(syncheck_rank: Any) -> None:
    """A torch.distributed.checkpoint folder per rank is compared like a file; a shared folder is one file."""
    if syncheck_rank.rank == 0:  # outside this group: torch 2.6 cannot save for one of several ranks
        subprocess.run([sys.executable, "-c", FOLDERS], cwd=syncheck_rank.shared, check=True, timeout=60)
    syncheck_rank.barrier()
    mine = syncheck_rank.shared / f"rank_{syncheck_rank.rank}"
    report = all_pass(each_rank(collective, mine))
    assert list_fields(report.groups[0].tensors, "name", "mismatched", "max_abs") == [("fc.bias", 4, 1.0)]
    assert set(list_fields(report.groups[0].replicas, "format")) == {"dcp"}
    refused = all_raise(each_rank(collective, syncheck_rank.shared), "UsageError").text
    assert refused == f"{syncheck_rank.shared}: 2 checkpoints; expected the checkpoint of this rank"


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("by", [0.0, 1.0])
def test_one_rank_without_xxhash(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """If one rank lacks xxhash, ranks agree on an algorithm: equal files are in sync, different files are not."""
    if syncheck_rank.rank == 1:
        monkeypatch.setattr(manifest, "default_algorithm", lambda: COMMON)
    mine = written(syncheck_rank, "rank_{}.pth", by=by * syncheck_rank.rank)
    report = all_pass(each_rank(collective, mine))
    assert (report.verdict, report.groups[0].counts.different) == (("in_sync", 0), ("out_of_sync", 5))[by > 0]


@pytest.mark.syncheck(ranks=2)
def test_excluded_tensors_are_not_read(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors outside --include are counted by name, and their bytes are not read."""
    read: list[int] = []
    real = manifest.FileBytes.digest

    def digest(self: manifest.FileBytes, algorithm: str | None) -> tuple[str, bytes]:
        read.append(1)
        return real(self, algorithm)

    monkeypatch.setattr(manifest.FileBytes, "digest", digest)
    mine = written(syncheck_rank, "rank_{}.pth", by=float(syncheck_rank.rank))
    report = all_pass(each_rank(collective, mine, include=("*.bias", "fc.weight")))
    assert len(read) == 4
    counts = report.groups[0].counts
    assert (counts.tensors, counts.identical, counts.different, report.groups[0].left_out) == (4, 3, 1, 10)
    assert list_names(report.groups[0].tensors) == ["fc.weight"]
    assert all_pass(each_rank(collective, mine, exclude=("*weight",))).verdict == "in_sync"


@pytest.mark.syncheck(ranks=2)
def test_name_without_metadata(syncheck_rank: Any) -> None:
    """A run without a name in metadata is named by the common part of its paths."""
    mine = written(syncheck_rank, "rank_{}.pth")
    report = all_pass(each_rank(collective, mine, "ckpts/mine_rank*"))
    assert (report.groups[0].name, report.verdict) == ("mine", "in_sync")
    assert report.groups[0].grouping[0].code is Grouping.LIVE_FILES


@pytest.mark.syncheck(ranks=2)
def test_one_file_seen_from_two_machines(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file on a shared disk is recognized on two machines; equal copies are two files."""
    (tmp_path / "boot").write_text(f"machine {syncheck_rank.rank}")
    monkeypatch.setattr(rank_files, "_BOOT", tmp_path / "boot")
    mine = written(syncheck_rank, "rank_{}.pth")
    assert all_pass(each_rank(collective, mine)).verdict == "in_sync"
    outcomes = each_rank(collective, syncheck_rank.shared / "rank_0.pth")
    assert all_raise(outcomes, "UsageError").text.startswith("ranks 0 and 1 read the same file: ")
