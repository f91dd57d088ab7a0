"""Files of which each rank reads its own: the report is that of one process that sees them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agreement import all_pass, each_rank

import syncheck
from syncheck.live.channel import Channel
from syncheck.live.files import NOTE, compare_files
from syncheck.report import json_document

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ENTRIES: list[dict[str, Any]] = json.loads((FIXTURES / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]
MOST = 4  # ranks at a time


def last_files(folder: str) -> list[Path]:
    """The files of a fixture's last step, by rank; found without reading them."""
    files = sorted((FIXTURES / folder).rglob("*.*"), key=lambda file: (len(str(file)), str(file)))
    last = files[-1].parent
    return [file for file in files if file.parent == last]


def cases() -> list[Any]:
    """Each fixture, to be run on as many ranks as it has files."""
    found = []
    for entry in ENTRIES:
        ranks = len(last_files(entry["folder"]))
        if ranks <= MOST:
            mark = pytest.mark.syncheck(ranks=ranks, timeout=120)
            found.append(pytest.param(entry["folder"], ranks, id=entry["folder"], marks=mark))
    return sorted(found, key=lambda case: case.values[1])  # processes are used again by tests of as many ranks


def collective(path: Path | str, pattern: str = "x", **options: Any) -> syncheck.Report:
    """Compare this rank's file with those of the others."""
    channel = Channel()
    chosen = syncheck.Options(**options)
    return channel.together(lambda: compare_files(channel, str(path), pattern, chosen))


def told(report: syncheck.Report) -> Any:
    """The JSON document without what tells how the files were found."""
    document = json_document.document(report, "")
    for group in document["groups"]:
        group["notes"] = [note for note in group["notes"] if note not in (NOTE, "grouped by the metadata in the files")]
    return json.loads(json_document.written(document))


@pytest.mark.parametrize("folder, ranks", cases())
def test_the_report_is_that_of_one_process(syncheck_rank: Any, folder: str, ranks: int) -> None:
    """Every number, finding and verdict is that of a comparison by one process that reads all files."""
    files = last_files(folder)
    report = all_pass(each_rank(collective, files[syncheck_rank.rank]))
    assert told(report) == told(syncheck.compare(*files))
