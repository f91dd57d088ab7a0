"""`syncheck fingerprint`: output paths, exit codes, and fingerprints as input of `compare` and `show`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
from support.checkpoints import changed, network, save_pth, save_safetensors
from support.listings import list_codes, list_files, list_starts

import syncheck as library

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

    Run = Callable[..., Done]
    Ranks = Callable[..., list[Path]]

SCHEMA = json.loads((Path(library.__file__).parent / "report" / "schema.json").read_text())


def test_fingerprints_replace_checkpoints(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """Fingerprints of ranks out of sync give the finding, exit code and counts without the checkpoints."""
    for path, state in zip(ranks(), (network(), changed(network(), "running_mean", "running_var")), strict=True):
        save_pth(path, state)
    done = cli("fingerprint", "run_rank*.pth", "-o", "kept")
    assert (done.code, done.out) == (0, "")
    assert list_starts(done.err.splitlines(), ",") == [
        "syncheck: wrote kept/run_rank0.fingerprint.json",
        "syncheck: wrote kept/run_rank1.fingerprint.json",
    ]
    for path in tmp_path.glob("*.pth"):
        path.unlink()
    done = cli("compare", "kept", "--format", "json")
    document = json.loads(done.out)
    jsonschema.validate(document, SCHEMA)
    assert done.code == 1
    assert list_codes(document["groups"][0]["findings"]) == ["SYN201"]
    done = cli("compare", "kept")
    assert [done.verdict, done.counts] == [
        "OUT OF SYNC",
        "14 tensors: 10 identical, 0 close, 4 different, 0 not compared",
    ]


def test_one_checkpoint_to_a_file(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """A single checkpoint is written to the given path, readable for all users, and no other file is created."""
    ranks()
    done = cli("fingerprint", "run_rank0.pth", "-o", "one.json", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert list_files(tmp_path) == ["one.json", "run_rank0.pth", "run_rank1.pth"]
    assert stat.S_IMODE((tmp_path / "one.json").stat().st_mode) & 0o444 == 0o444
    assert cli("compare", "one.json", "run_rank1.pth", "--group-by", "n").code == 0


def test_fingerprint_and_checkpoint_are_replicas(cli: Run, ranks: Ranks) -> None:
    """A fingerprint of rank 0 and the checkpoint of rank 1 form one group by their names alone."""
    ranks()
    assert cli("fingerprint", "run_rank0.pth", "-o", "kept/").code == 0
    assert cli("fingerprint", "run_rank0.pth", "-o", ".").code == 0
    done = cli("compare", "run_rank0.fingerprint.json", "run_rank1.pth")
    assert done.code == 0
    assert "run, 2 replicas\n" in done.out
    assert "(fingerprint, 14 tensors" in done.out


def test_show_lists_a_fingerprint(cli: Run, ranks: Ranks) -> None:
    """`show` prints the same statistics for a fingerprint and for its checkpoint."""
    ranks()
    cli("fingerprint", "run_rank0.pth", "-o", "one.json")
    a = json.loads(cli("show", "run_rank0.pth", "--format", "json").out)
    b = json.loads(cli("show", "one.json", "--format", "json").out)
    assert a["tensors"] == b["tensors"]
    assert (a["format"], b["format"]) == ("torch-zip", "fingerprint")


def test_errors_exit_with_2_and_name_the_file(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """For an unreadable file, the exit code is 2, and other fingerprints are written; wrong usage writes no file."""
    ranks()
    (tmp_path / "broken.pth").write_bytes(b"PK\x03\x04")
    save_safetensors(tmp_path / "run_rank0.safetensors", network())
    done = cli("fingerprint", "run_rank0.pth", "broken.pth", "nowhere.pth", "-o", "kept/")
    assert done.code == 2
    assert [line.partition(": zip")[0][:35] for line in done.err.splitlines()] == [
        "syncheck: wrote kept/run_rank0.fing",
        "syncheck: error: broken.pth",
        "syncheck: error: nowhere.pth: no su",
    ]
    assert (tmp_path / "kept" / "run_rank0.fingerprint.json").exists()
    for arguments, message in (
        (["run_rank0.pth"], "required: -o/--output"),
        (["*.nothing", "-o", "x"], "no file matches"),
        (["run_rank0.pth", "-o", "run_rank1.pth"], "would overwrite a checkpoint"),
        (["run_rank0.pth", "run_rank1.pth", "-o", "broken.pth"], "pass a folder"),
        (["kept", "-o", "again"], "already"),
        (["run_rank0.pth", "run_rank0.safetensors", "-o", "again"], "both would be written to"),
        (["run_rank0.pth", "-o", "broken.pth/x.json"], "cannot be written"),
    ):
        before = sorted(tmp_path.rglob("*"))
        done = cli("fingerprint", *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), done
        assert message in done.err
        assert sorted(tmp_path.rglob("*")) == before
