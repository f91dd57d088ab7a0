"""`syncheck compare 'rank_{rank}.pth'` on real gloo ranks: one report, and one exit code on all ranks."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.listings import list_codes, list_fields, list_names, list_rank_files

import syncheck
from syncheck.report import json_document

if TYPE_CHECKING:
    from conftest import RankCli

pytestmark = pytest.mark.syncheck(ranks=2)


def test_ranks_in_sync_print_one_report(rank_cli: RankCli) -> None:
    """Equal files exit with 0 on all ranks, and rank 0 alone prints the report, with the path of each rank."""
    rank_cli.save()
    ended = rank_cli.compare(rank_cli.path)
    assert list_codes(ended) == [0, 0]
    assert ended[1].out == ended[0].err == ended[1].err == ""
    assert ended[0].lines[:3] == [
        "run, 2 replicas",
        f"  rank 0: {rank_cli.folder}/run_rank0.pth (torch-zip, 14 tensors, 4.9 kB)",
        f"  rank 1: {rank_cli.folder}/run_rank1.pth (torch-zip, 14 tensors, 4.9 kB)",
    ]
    assert ended[0].lines[-1] == "14 tensors: 14 identical, 0 close, 0 different, 0 not compared"


def test_a_difference_ends_all_ranks_with_1(rank_cli: RankCli) -> None:
    """A tensor that differs on rank 1 ends both ranks with 1; --format json prints only the document."""
    rank_cli.save(by=0.5)
    ended = rank_cli.compare(rank_cli.path, "--format", "json")
    assert list_codes(ended) == [1, 1]
    assert ended[1].out == ended[0].err == ended[1].err == ""
    printed = json.loads(ended[0].out)
    files = list_rank_files(rank_cli.folder, "run_rank{}.pth", 2)
    expected = json.loads(json_document.render(syncheck.compare(*files), printed["version"]))
    assert list_names(printed["groups"][0]["tensors"]) == ["fc.weight"]
    for document in (printed, expected):
        document["groups"][0].pop("notes")
        document["groups"][0]["messages"].pop("notes")
    for document, host in ((printed, os.uname().nodename), (expected, None)):
        for replica in document["groups"][0]["replicas"]:
            assert replica.pop("host") == host
    assert printed == expected


@pytest.mark.parametrize(
    "options, codes",
    [
        (["--exit-zero"], [0, 0]),
        (["-q"], [1, 1]),
        (["--only-buffers"], [0, 0]),
        (["--exclude", "fc.*"], [0, 0]),
        (["--allow", "SYN299"], [0, 0]),
        (["--atol", "1", "--rtol", "0"], [0, 0]),
    ],
)
def test_options_apply_to_all_ranks(rank_cli: RankCli, options: list[str], codes: list[int]) -> None:
    """Options that exclude, accept or silence a difference apply to all ranks."""
    rank_cli.save(by=0.5)
    ended = rank_cli.compare(rank_cli.path, *options)
    assert list_codes(ended) == codes
    assert ended[0].err == ended[1].err == ended[1].out == ""
    assert (ended[0].out == "") == (options == ["-q"])


def test_reports_are_written_by_rank_0(rank_cli: RankCli) -> None:
    """Rank 0 alone writes the files of -o, and the page names the differing tensor."""
    rank_cli.save(by=0.5)
    ended = rank_cli.compare(rank_cli.path, "-q", "-o", "report.json", "-o", "report.html")
    assert list_codes(ended) == [1, 1]
    assert sorted(os.listdir()) == (["report.html", "report.json"] if rank_cli.rank == 0 else [])
    if rank_cli.rank == 0:
        with open("report.html", encoding="utf-8") as page, open("report.json", encoding="utf-8") as document:
            assert "fc.weight" in page.read()
            assert json.load(document)["verdict"] == "out_of_sync"


@pytest.mark.parametrize(
    "path, reason", [("no/report.json", "the folder no does not exist; create it first"), ("/dev/full", "/dev/full")]
)
def test_an_unwritable_report_ends_all_ranks_with_2(rank_cli: RankCli, path: str, reason: str) -> None:
    """If rank 0 cannot write the report, both ranks exit with 2, and rank 0 prints the reason in one line."""
    rank_cli.save()
    ended = rank_cli.compare(rank_cli.path, "-o", path)
    assert list_codes(ended) == [2, 2]
    assert ended[1].err == ""
    assert ended[0].err.count("\n") == 1
    assert ended[0].err.startswith("syncheck: error: ")
    assert reason.lower() in ended[0].err.lower()


def test_options_of_the_project_are_listed_once(rank_cli: RankCli) -> None:
    """Options of pyproject.toml apply to both ranks, rank 0 alone lists them, and different options are an error."""
    rank_cli.save(by=0.5)
    with open("pyproject.toml", "w", encoding="utf-8") as file:
        file.write('[tool.syncheck]\nexclude = ["fc.*"]\nquiet = true\n')
    ended = rank_cli.compare(rank_cli.path, "--no-quiet")
    assert list_codes(ended) == [0, 0]
    assert ended[0].err.startswith("syncheck: options from /")
    assert ended[0].err.endswith("/pyproject.toml: exclude\n")
    assert ended[1].err == ended[1].out == ""
    assert list_fields(rank_cli.compare(rank_cli.path), "code", "out", "err") == [(0, "", "")] * 2
    if rank_cli.rank == 1:
        os.remove("pyproject.toml")
    ended = rank_cli.compare(rank_cli.path)
    assert list_codes(ended) == [2, 2]
    assert ended[0].err == "syncheck: error: the options differ between ranks; pass the same options on every rank\n"
    assert ended[1].err == ""


@pytest.mark.parametrize(
    "name, path",
    [
        ("run_{:02d}.pth", "run_{rank:02d}.pth"),
        ("of2/run_{}.pth", "of{world_size}/run_{rank}.pth"),
        ("0/{}.pth", "{node_rank}/{local_rank}.pth"),
        ("a{{b}}_{}.pth", "a{{b}}_{rank}.pth"),
        ("r_{}/one.pth", "r_{rank}/*.pth"),
    ],
)
def test_fields_in_braces(rank_cli: RankCli, name: str, path: str) -> None:
    """The fields in braces are rank, local rank, node and number of ranks, also with a format; globs still work."""
    rank_cli.save(name)
    ended = rank_cli.compare(f"{rank_cli.folder}/{path}")
    assert list_fields(ended, "code", "err") == [(0, ""), (0, "")]


def test_a_file_with_a_brace_in_its_name(rank_cli: RankCli) -> None:
    """If a file is really named `run_{rank}.pth`, each process compares this file alone, as without torchrun."""
    if rank_cli.rank == 0:
        rank_cli.save("run_{{rank}}.pth")
    ended = rank_cli.compare(rank_cli.path.replace("run_rank", "run_"))
    assert list_codes(ended) == [2, 2]
    assert all("1 replica" in done.out or "nothing to compare" in done.out for done in ended), ended


def test_a_baseline_is_read_and_written_by_rank_0(rank_cli: RankCli) -> None:
    """The baseline of rank 0 applies to both ranks; a new finding and a missing baseline fail on both ranks."""
    rank_cli.save(by=0.5)
    ended = rank_cli.compare(rank_cli.path, "--baseline", "known.json", "--update-baseline")
    assert list_codes(ended) == [0, 0]
    assert ended[0].err == "syncheck: known.json: 1 name in 1 run accepted: 1 added, 0 removed\n"
    assert sorted(os.listdir()) == (["known.json"] if rank_cli.rank == 0 else [])
    assert list_codes(rank_cli.compare(rank_cli.path, "--baseline", "known.json")) == [0, 0]
    rank_cli.save(by=0.5, extra=np.full(3, rank_cli.rank, np.float32))
    ended = rank_cli.compare(rank_cli.path, "--baseline", "known.json")
    assert list_codes(ended) == [1, 1]
    assert "not in the baseline: extra" in ended[0].out.replace("\n", " ")
    ended = rank_cli.compare(rank_cli.path, "--baseline", "none.json")
    assert list_codes(ended) == [2, 2]
    assert "none.json: no such baseline" in ended[0].err
