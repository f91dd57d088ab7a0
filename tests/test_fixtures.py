"""The fixtures are what their manifest says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import syncheck

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"
ENTRIES: list[dict[str, Any]] = json.loads((FIXTURES / "MANIFEST.json").read_text(encoding="utf-8"))["fixtures"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["folder"])
def test_findings_are_those_of_the_manifest(entry: dict[str, Any]) -> None:
    """Each fixture gives its findings and their ranks at its last step, and 1 under desync/, 0 under in_sync/."""
    report = syncheck.compare(FIXTURES / entry["folder"])
    assert report.exit_code == entry["exit_code"] == entry["folder"].startswith("desync/")
    assert [group.step for group in report.groups] == entry["steps"]
    last = report.groups[-1]
    assert [finding.code for finding in last.findings] == entry["findings"]
    assert sorted({rank for finding in last.findings for rank in finding.ranks}) == entry["ranks"]


def test_every_checkpoint_is_small_and_in_the_manifest() -> None:
    """No rank file has 100 kB or more, and none lies outside the manifest's folders."""
    files = [*FIXTURES.rglob("*.pth"), *FIXTURES.rglob("*.safetensors")]
    files = [file for file in files if not {"broken", "hostile"} & set(file.parts)]  # test_malformed_files.py has those
    assert files
    assert [file for file in files if file.stat().st_size >= 100_000] == []
    folders = [FIXTURES / entry["folder"] for entry in ENTRIES]
    assert [file for file in files if not any(folder in file.parents for folder in folders)] == []


def test_a_fixture_that_was_changed_is_noticed(tmp_path: Path) -> None:
    """One flipped bit in a fixture in sync makes it out of sync: the fixtures can fail."""
    shutil.copytree(FIXTURES / "in_sync" / "sync_bn", tmp_path / "copy")
    file = next((tmp_path / "copy").glob("*_rank1.pth"))
    tensor = syncheck.read(str(file)).tensors["fc.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.offset] ^= 1
    file.write_bytes(data)
    report = syncheck.compare(tmp_path / "copy")
    assert report.exit_code == 1
    assert [diff.name for diff in report.groups[0].tensors] == ["fc.weight"]
    assert report.groups[0].tensors[0].extent == "one"


def test_syncbn_closes_the_gap_of_the_fixtures() -> None:
    """The fixtures of plain DDP and of SyncBatchNorm are paired, and the gap closes to exactly 0.0."""
    report = syncheck.compare(FIXTURES / "desync" / "bn_local_stats", FIXTURES / "in_sync" / "sync_bn")
    (closure,) = report.closures
    assert closure.plain.max_abs > 0.001
    assert closure.synced.max_abs == 0.0
    assert closure.sentence.startswith("SyncBatchNorm closed the gap")


def test_drift_of_unsynchronized_statistics_grows() -> None:
    """Without the metadata's word, the growth over steps 2, 5 and 12 is in the files."""
    report = syncheck.compare(FIXTURES / "desync" / "bn_no_broadcast")
    gaps = {point.step: point.max_abs for point in report.drift}
    assert gaps[12] > gaps[2]


def test_manifest_is_that_of_the_table() -> None:
    """`fixtures/make.py --manifest` writes what is there: nobody has changed one and not the other."""
    pytest.importorskip("torch", reason="fixtures are made by training")
    before = (FIXTURES / "MANIFEST.json").read_text(encoding="utf-8")
    code = "import make, json; print(json.dumps([make.entry(f, make.HERE) for f in make.FIXTURES]))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, cwd=FIXTURES, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == json.loads(before)["fixtures"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_again_gives_the_same_findings() -> None:
    """`fixtures/make.py --check` trains again, elsewhere, and finds what the manifest says; here for some of them."""
    some = ["in_sync/fsdp_shards", "in_sync/wrapper_prefix", "desync/bn_no_broadcast", "desync/stale_rank"]
    subprocess.run([sys.executable, str(FIXTURES / "make.py"), "--check", *some], check=True, timeout=280, cwd=ROOT)
