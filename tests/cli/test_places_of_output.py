"""Targets of `-o`: existing files, links, full and read-only disks, and files that must not be lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import chdir, suppress
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import Done, network, save_pth, save_safetensors
from support.disks import make_read_only, small_disk
from support.listings import list_files, list_starts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Done]

pytestmark = pytest.mark.usefixtures("two_ranks")
TWO = ("run_rank0.pth", "run_rank1.pth")


def assert_refused(done: Done, text: str) -> None:
    """Assert exit code 2, no output and one error line with this text: nothing was compared."""
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert text in done.err


@pytest.mark.parametrize("command", [("compare", *TWO), ("fingerprint", TWO[0], "-q")], ids=["report", "fingerprint"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "loop", "below a file"])
def test_irregular_files_are_refused(cli: Run, tmp_path: Path, command: tuple[str, ...], kind: str) -> None:
    """Pipes, sockets, devices and looping links are refused without waiting, and stay unchanged."""
    out = tmp_path / "out.json"
    expected = "cannot be written: not a regular file but a pipe, socket or device"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("out.json")
    elif kind == "device":
        try:
            os.mknod(out, 0o666 | 0o020000, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root may make a device")
    elif kind == "loop":
        out.symlink_to("out.json")
        expected = "cannot be written: Too many levels of symbolic links"
    elif kind == "below a file":
        (tmp_path / "folder").touch()
        out, expected = tmp_path / "folder" / "out.json", "cannot be written: Not a directory"
    else:
        os.mkfifo(tmp_path / "pipe")
        out.symlink_to("pipe")
        if kind == "pipe":
            (tmp_path / "pipe").rename(out)
    before = None if kind == "below a file" else os.lstat(out)
    done = cli(*command, "-o", str(out))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"syncheck: error: --output {out}: {expected}\n"
    if before is not None:
        after = os.lstat(out)
        assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)


def test_links_stay(cli: Run, tmp_path: Path) -> None:
    """A report is written to the target of a link, existing or new, also in another folder, and the link stays."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        (tmp_path / "out.json").symlink_to(f"reports/{name}")
        assert cli("compare", *TWO, "-o", "out.json").code == 1
        assert (tmp_path / "out.json").is_symlink()
        assert json.loads((tmp_path / "reports" / name).read_text())["verdict"] == "out_of_sync"
        (tmp_path / "out.json").unlink()
    assert sorted(os.listdir(tmp_path / "reports")) == ["new.json", "old.json"]


def test_a_private_report_stays_private(cli: Run, tmp_path: Path) -> None:
    """A replaced report keeps its permissions; a new report gets the permissions of any new file."""
    (tmp_path / "out.json").touch(mode=0o600)
    (tmp_path / "other").touch()
    assert cli("compare", *TWO, "-o", "out.json", "-o", "new.json").code == 1
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_longest_name(cli: Run, tmp_path: Path) -> None:
    """A file name of the maximum length is written; a longer name is refused before anything is compared."""
    name = "n" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 5)
    assert cli("compare", *TWO, "-o", f"{name}.json", "-o", f"{name}.json").code == 1
    assert json.loads((tmp_path / f"{name}.json").read_text())["verdict"] == "out_of_sync"
    assert_refused(cli("compare", *TWO, "-o", f"{name}n.json"), "cannot be written: File name too long")
    assert cli("fingerprint", TWO[0], "-q", "-o", f"{name[:200]}.json").code == 0


def test_nul_in_an_output_path(cli: Run, tmp_path: Path) -> None:
    """A NUL in an output path, which only pyproject.toml can contain, exits with 2 and no traceback."""
    (tmp_path / "pyproject.toml").write_text('[tool.syncheck]\noutput = ["a\\u0000b.json"]\n')
    done = cli("compare", *TWO)
    assert (done.code, done.out) == (2, "")
    assert re.search(r"cannot be written: .*embedded null ", done.err)  # Python 3.13 adds the name of the call


def test_no_checkpoint_is_overwritten(cli: Run, tmp_path: Path) -> None:
    """A report never overwrites a checkpoint, a linked checkpoint, a fingerprint, or a part of a checkpoint folder."""
    save_pth(tmp_path / "mine.json", network())
    (tmp_path / "link.txt").symlink_to("run_rank1.pth")
    assert cli("fingerprint", *TWO, "-q", "-o", "prints").code == 0
    complete = tmp_path / "whole"
    save_safetensors(complete / "model-00001-of-00001.safetensors", network())
    names = dict.fromkeys(network(), "model-00001-of-00001.safetensors")
    (complete / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for path in ("mine.json", "link.txt", "prints/run_rank0.fingerprint.json", "whole/model.safetensors.index.json"):
        before = (tmp_path / path).read_bytes()
        message = f"--output {path}: would overwrite a checkpoint; pass another path"
        assert_refused(cli("compare", *TWO, "-o", "good.md", "-o", path), message)
        if "prints" not in path:  # `fingerprint` may replace a fingerprint
            assert_refused(cli("fingerprint", *TWO[:1], "-o", path), message)
        assert (tmp_path / path).read_bytes() == before
        assert not (tmp_path / "good.md").exists()
    # An earlier report is replaced, even beside checkpoints.
    for path in ("whole/report.json", "prints/report.json", "report.json"):
        for _ in range(2):
            assert cli("compare", *TWO, "-o", path).code == 1


def test_bad_targets_are_refused_before_the_comparison(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing folder, and a folder instead of a file, are refused before the comparison, which may take an hour."""
    from syncheck import api

    monkeypatch.setattr(api, "judge", lambda *_, **__: pytest.fail("this compared"))
    (tmp_path / "folder.json").mkdir()
    assert_refused(
        cli("compare", *TWO, "-o", "no/out.json"),
        "--output no/out.json: cannot be written: the folder no does not exist; create it first",
    )
    assert_refused(cli("compare", *TWO, "-o", "folder.json"), "--output folder.json: cannot be written: Is a directory")


def test_verdict_survives_a_failed_report(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of three reports cannot be written, the other reports and stdout are complete, and the exit code is 2."""
    replace = os.replace

    def failing(source: str | Path, target: str | Path) -> None:
        if str(target).endswith(".xml"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    done = cli("compare", *TWO, "-o", "a.json", "-o", "b.xml", "-o", "c.md")
    assert done.code == 2
    assert list_starts(done.err.splitlines(), ",") == [
        "syncheck: wrote a.json",
        "syncheck: error: --output b.xml: cannot be written: No space left on device",
        "syncheck: wrote c.md",
    ]
    assert done.verdict == "OUT OF SYNC"
    reports = sorted(path.name for path in tmp_path.iterdir() if "rank" not in path.name)
    assert reports == ["a.json", "c.md"]


@pytest.mark.slow
@pytest.mark.parametrize("extension", ["html", "json"])
def test_full_disk(cli: Run, tmp_path: Path, extension: str) -> None:
    """On a full disk, the old report stays, the verdict is printed, and no file is left behind."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        out = disk / f"out.{extension}"
        assert cli("compare", *TWO, "-o", str(disk / "first.txt")).code == 1
        out.write_text("old")
        with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        before = sorted(os.listdir(disk))
        done = cli("compare", *TWO, "-o", str(out))
        assert done.err == f"syncheck: error: --output {out}: cannot be written: No space left on device\n"
        assert (done.code, done.verdict) == (2, "OUT OF SYNC")
        assert (out.read_text(), sorted(os.listdir(disk))) == ("old", before)
        done = cli("fingerprint", TWO[0], "-o", str(disk / "f.json"))
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith("No space left on device\n")
        assert sorted(os.listdir(disk)) == before


@pytest.mark.slow
def test_read_only_disk(cli: Run, tmp_path: Path) -> None:
    """A read-only disk is refused before anything is compared, even for root, and can still be read."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        for name in TWO:
            shutil.copy(tmp_path / name, disk)
        (disk / "out.json").write_text("old")
        (tmp_path / "here.json").symlink_to(disk / "out.json")
        assert make_read_only(disk)
        for target in (disk / "out.json", disk / "new.json", tmp_path / "here.json"):
            done = cli("compare", *TWO, "-o", str(target))
            assert (done.code, done.out) == (2, "")
            assert done.err == f"syncheck: error: --output {target}: cannot be written: Read-only file system\n"
        assert (disk / "out.json").read_text() == "old"
        # With the disk as the current folder, reading works and writing is refused.
        with chdir(disk):
            assert cli("compare", *TWO, "-o", str(tmp_path / "out.json")).code == 1
            assert cli("fingerprint", *TWO, "-o", "prints").err.endswith("Read-only file system\n")


@pytest.mark.slow
def test_concurrent_runs(tmp_path: Path) -> None:
    """Several runs that write the same report at the same time succeed, and the report is complete each time."""
    command = [sys.executable, "-m", "syncheck", "report", ".", "-q", "-o", "out.json", "-o", "out.html"]
    programs = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) for _ in range(4)]
    reads = 0
    while any(program.poll() is None for program in programs):
        if (tmp_path / "out.json").exists():
            assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "out_of_sync"
            reads += 1
    assert [(program.communicate()[1], program.returncode) for program in programs] == [(b"", 1)] * 4
    assert reads
    assert list_files(tmp_path) == ["out.html", "out.json", *TWO]
