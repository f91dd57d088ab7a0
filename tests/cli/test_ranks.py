"""`syncheck compare 'rank_{rank}.pth'` on real gloo ranks: one report, and one exit code on all of them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import syncheck
from syncheck.report import json_document

if TYPE_CHECKING:
    from conftest import Across

pytestmark = pytest.mark.syncheck(ranks=2)


def test_ranks_in_sync_print_one_report(across: Across) -> None:
    """Equal files end with 0 on all ranks, and rank 0 alone prints the report, with each rank's own path."""
    across.save()
    ended = across.compare(across.path)
    assert [done.code for done in ended] == [0, 0]
    assert ended[1].out == ended[0].err == ended[1].err == ""
    assert ended[0].lines[:3] == [
        "run, 2 replicas: IN SYNC",
        f"  rank 0: {across.folder}/run_rank0.pth (torch-zip, 14 tensors, 4.9 kB)",
        f"  rank 1: {across.folder}/run_rank1.pth (torch-zip, 14 tensors, 4.9 kB)",
    ]
    assert ended[0].lines[-1] == "14 tensors: 14 identical, 0 close, 0 different, 0 not compared"


def test_a_difference_ends_all_ranks_with_1(across: Across) -> None:
    """A tensor that differs on rank 1 ends both with 1; `--format json` prints the document and nothing else."""
    across.save(by=0.5)
    ended = across.compare(across.path, "--format", "json")
    assert [done.code for done in ended] == [1, 1]
    assert ended[1].out == ended[0].err == ended[1].err == ""
    found = json.loads(ended[0].out)
    files = [across.folder / f"run_rank{rank}.pth" for rank in range(2)]
    wanted = json.loads(json_document.render(syncheck.compare(*files), found["version"]))
    assert [tensor["name"] for tensor in found["groups"][0]["tensors"]] == ["fc.weight"]
    for document in (found, wanted):
        document["groups"][0].pop("notes")
    hosts = [[replica.pop("host") for replica in document["groups"][0]["replicas"]] for document in (found, wanted)]
    assert hosts == [[os.uname().nodename] * 2, [None] * 2]
    assert found == wanted


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
def test_options_count_on_all_ranks(across: Across, options: list[str], codes: list[int]) -> None:
    """What leaves out, excuses or silences a difference does so on all ranks."""
    across.save(by=0.5)
    ended = across.compare(across.path, *options)
    assert [done.code for done in ended] == codes
    assert ended[0].err == ended[1].err == ended[1].out == ""
    assert (ended[0].out == "") == (options == ["-q"])


def test_reports_are_written_by_rank_0(across: Across) -> None:
    """-o writes its files once, of which the page has the histogram of what differs."""
    across.save(by=0.5)
    ended = across.compare(across.path, "-q", "-o", "report.json", "-o", "report.html")
    assert [done.code for done in ended] == [1, 1]
    assert sorted(os.listdir()) == (["report.html", "report.json"] if across.rank == 0 else [])
    if across.rank == 0:
        with open("report.html", encoding="utf-8") as page, open("report.json", encoding="utf-8") as document:
            assert "fc.weight" in page.read()
            assert json.load(document)["verdict"] == "out_of_sync"


@pytest.mark.parametrize(
    "path, says", [("no/report.json", "the folder no does not exist; create it first"), ("/dev/full", "/dev/full")]
)
def test_a_report_that_cannot_be_written_is_exit_code_2_on_all(across: Across, path: str, says: str) -> None:
    """Rank 0 fails to write; rank 1, which writes nothing, ends with 2 as well, and rank 0 says why in one line."""
    across.save()
    ended = across.compare(across.path, "-o", path)
    assert [done.code for done in ended] == [2, 2]
    assert ended[1].err == ""
    assert ended[0].err.count("\n") == 1
    assert ended[0].err.startswith("syncheck: error: ")
    assert says.lower() in ended[0].err.lower()


def test_options_of_the_project_are_told_once(across: Across) -> None:
    """What pyproject.toml excuses is said by rank 0 alone, and counts on both."""
    across.save(by=0.5)
    with open("pyproject.toml", "w", encoding="utf-8") as file:
        file.write('[tool.syncheck]\nexclude = ["fc.*"]\nquiet = true\n')
    ended = across.compare(across.path, "--no-quiet")
    assert [done.code for done in ended] == [0, 0]
    assert ended[0].err.startswith("syncheck: options from /")
    assert ended[0].err.endswith("/pyproject.toml: exclude\n")
    assert ended[1].err == ended[1].out == ""
    assert [(done.code, done.out, done.err) for done in across.compare(across.path)] == [(0, "", "")] * 2
    if across.rank == 1:
        os.remove("pyproject.toml")
    ended = across.compare(across.path)
    assert [done.code for done in ended] == [2, 2]
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
def test_what_stands_in_braces(across: Across, name: str, path: str) -> None:
    """A rank may have leading zeros; local rank, node and the number of ranks are known too, and globs still work."""
    across.save(name)
    ended = across.compare(f"{across.folder}/{path}")
    assert [(done.code, done.err) for done in ended] == [(0, ""), (0, "")]


def test_a_file_with_a_brace_in_its_name(across: Across) -> None:
    """A file that is really called so is that file, compared by each process alone as without torchrun."""
    if across.rank == 0:
        across.save("run_{{rank}}.pth")
    ended = across.compare(across.path.replace("run_rank", "run_"))
    assert [done.code for done in ended] == [2, 2]
    assert all("1 replica" in done.out or "nothing to compare" in done.out for done in ended), ended


def test_a_baseline_is_read_and_written_by_rank_0(across: Across) -> None:
    """The file that rank 0 alone has counts on both ranks; a new finding fails on both, and so does a missing file."""
    across.save(by=0.5)
    ended = across.compare(across.path, "--baseline", "known.json", "--update-baseline")
    assert [done.code for done in ended] == [0, 0]
    assert ended[0].err == "syncheck: known.json: 1 name in 1 run accepted: 1 added, 0 removed\n"
    assert sorted(os.listdir()) == (["known.json"] if across.rank == 0 else [])
    assert [done.code for done in across.compare(across.path, "--baseline", "known.json")] == [0, 0]
    across.save(by=0.5, extra=np.full(3, across.rank, np.float32))
    ended = across.compare(across.path, "--baseline", "known.json")
    assert [done.code for done in ended] == [1, 1]
    assert "not in the baseline: extra" in ended[0].out.replace("\n", " ")
    ended = across.compare(across.path, "--baseline", "none.json")
    assert [done.code for done in ended] == [2, 2]
    assert "none.json: no such baseline" in ended[0].err
