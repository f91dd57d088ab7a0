"""Where `-o` may write: what lies there, what it leads to, disks that are full or read-only, and what is never lost."""

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
from checkpoints import Done, network, save_pth, save_safetensors
from disks import make_read_only, small_disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Done]

pytestmark = pytest.mark.usefixtures("two_ranks")
TWO = ("run_rank0.pth", "run_rank1.pth")


def refused(done: Done, text: str) -> None:
    """Assert exit 2, nothing on stdout, and one line that holds a text: it was seen before anything was compared."""
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert text in done.err


@pytest.mark.parametrize("command", [("compare", *TWO), ("fingerprint", TWO[0], "-q")], ids=["report", "fingerprint"])
@pytest.mark.parametrize("what", ["pipe", "socket", "device", "link to a pipe", "loop", "below a file"])
def test_what_is_no_file(cli: Run, tmp_path: Path, command: tuple[str, ...], what: str) -> None:
    """A pipe that nobody reads makes nothing wait; it, a socket, a device and a looping link stay what they are."""
    out = tmp_path / "out.json"
    needed = "cannot be written: not a regular file but a pipe, socket or device"
    if what == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("out.json")
    elif what == "device":
        try:
            os.mknod(out, 0o666 | 0o020000, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root may make a device")
    elif what == "loop":
        out.symlink_to("out.json")
        needed = "cannot be written: Too many levels of symbolic links"
    elif what == "below a file":
        (tmp_path / "folder").touch()
        out, needed = tmp_path / "folder" / "out.json", "cannot be written: Not a directory"
    else:
        os.mkfifo(tmp_path / "pipe")
        out.symlink_to("pipe")
        if what == "pipe":
            (tmp_path / "pipe").rename(out)
    before = None if what == "below a file" else os.lstat(out)
    done = cli(*command, "-o", str(out))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"syncheck: error: -o {out}: {needed}\n"
    if before is not None:
        after = os.lstat(out)
        assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)


def test_links_stay(cli: Run, tmp_path: Path) -> None:
    """What a link leads to is written, be it there or not, and the link stays; it may lead to another folder."""
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
    """The permissions of a file that is replaced are kept; a new one gets those of any new file."""
    (tmp_path / "out.json").touch(mode=0o600)
    (tmp_path / "other").touch()
    assert cli("compare", *TWO, "-o", "out.json", "-o", "new.json").code == 1
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_longest_name(cli: Run, tmp_path: Path) -> None:
    """A name as long as the file system takes is written to, and a longer one refused before anything is compared."""
    name = "n" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 5)
    assert cli("compare", *TWO, "-o", f"{name}.json", "-o", f"{name}.json").code == 1
    assert json.loads((tmp_path / f"{name}.json").read_text())["verdict"] == "out_of_sync"
    refused(cli("compare", *TWO, "-o", f"{name}n.json"), "cannot be written: File name too long")
    assert cli("fingerprint", TWO[0], "-q", "-o", f"{name[:200]}.json").code == 0


def test_names_from_the_project_file(cli: Run, tmp_path: Path) -> None:
    """A NUL, which a command line cannot hold, is one line too."""
    (tmp_path / "pyproject.toml").write_text('[tool.syncheck]\noutput = ["a\\u0000b.json"]\n')
    done = cli("compare", *TWO)
    assert (done.code, done.out) == (2, "")
    assert re.search(r"cannot be written: .*embedded null ", done.err)  # Python 3.13 says which call it was


def test_no_checkpoint_is_lost(cli: Run, tmp_path: Path) -> None:
    """A report goes over no checkpoint: whatever its ending, also through a link, a fingerprint, a part of a folder."""
    save_pth(tmp_path / "mine.json", network())
    (tmp_path / "link.txt").symlink_to("run_rank1.pth")
    assert cli("fingerprint", *TWO, "-q", "-o", "prints").code == 0
    whole = tmp_path / "whole"
    save_safetensors(whole / "model-00001-of-00001.safetensors", network())
    names = dict.fromkeys(network(), "model-00001-of-00001.safetensors")
    (whole / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for place in ("mine.json", "link.txt", "prints/run_rank0.fingerprint.json", "whole/model.safetensors.index.json"):
        before = (tmp_path / place).read_bytes()
        told = f"-o {place}: would overwrite a checkpoint; pass another path"
        refused(cli("compare", *TWO, "-o", "good.md", "-o", place), told)
        if "prints" not in place:  # a fingerprint may be made anew
            refused(cli("fingerprint", *TWO[:1], "-o", place), told)
        assert (tmp_path / place).read_bytes() == before
        assert not (tmp_path / "good.md").exists()
    # An earlier report is replaced, also one that lies beside checkpoints.
    for place in ("whole/report.json", "prints/report.json", "report.json"):
        for _ in range(2):
            assert cli("compare", *TWO, "-o", place).code == 1


def test_seen_before_anything_is_compared(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is missing or a file that is one is told at once, and not after an hour."""
    from syncheck import api

    monkeypatch.setattr(api, "compare", lambda *_, **__: pytest.fail("this compared"))
    (tmp_path / "folder.json").mkdir()
    refused(
        cli("compare", *TWO, "-o", "no/out.json"),
        "-o no/out.json: cannot be written: the folder no does not exist; create it first",
    )
    refused(cli("compare", *TWO, "-o", "folder.json"), "-o folder.json: cannot be written: Is a directory")


def test_a_verdict_survives_its_report(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of three files cannot be written after all, it is told, the others and stdout have the verdict: 2."""
    replace = os.replace

    def failing(source: str | Path, target: str | Path) -> None:
        if str(target).endswith(".xml"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    done = cli("compare", *TWO, "-o", "a.json", "-o", "b.xml", "-o", "c.md")
    assert (done.code, done.err) == (2, "syncheck: error: -o b.xml: cannot be written: No space left on device\n")
    assert done.lines[-2] == "OUT OF SYNC"
    shown = sorted(path.name for path in tmp_path.iterdir() if "rank" not in path.name)
    assert shown == ["a.json", "c.md"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["html", "json"])
def test_full_disk(cli: Run, tmp_path: Path, ending: str) -> None:
    """On a disk that is full the old report stays whole, the verdict is printed, and nothing is left behind."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        out = disk / f"out.{ending}"
        assert cli("compare", *TWO, "-o", str(disk / "first.txt")).code == 1
        out.write_text("old")
        with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        before = sorted(os.listdir(disk))
        done = cli("compare", *TWO, "-o", str(out))
        assert done.err == f"syncheck: error: -o {out}: cannot be written: No space left on device\n"
        assert (done.code, done.lines[-2]) == (2, "OUT OF SYNC")
        assert (out.read_text(), sorted(os.listdir(disk))) == ("old", before)
        done = cli("fingerprint", TWO[0], "-o", str(disk / "f.json"))
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith("No space left on device\n")
        assert sorted(os.listdir(disk)) == before


@pytest.mark.slow
def test_read_only_disk(cli: Run, tmp_path: Path) -> None:
    """A folder that cannot be written, by root neither, is told before anything is compared; reading there goes on."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        for name in TWO:
            shutil.copy(tmp_path / name, disk)
        (disk / "out.json").write_text("old")
        (tmp_path / "here.json").symlink_to(disk / "out.json")
        assert make_read_only(disk)
        for place in (disk / "out.json", disk / "new.json", tmp_path / "here.json"):
            done = cli("compare", *TWO, "-o", str(place))
            assert (done.code, done.out) == (2, "")
            assert done.err == f"syncheck: error: -o {place}: cannot be written: Read-only file system\n"
        assert (disk / "out.json").read_text() == "old"
        # Where one stands there, too.
        with chdir(disk):
            assert cli("compare", *TWO, "-o", str(tmp_path / "out.json")).code == 1
            assert cli("fingerprint", *TWO, "-o", "prints").err.endswith("Read-only file system\n")


@pytest.mark.slow
def test_at_once(tmp_path: Path) -> None:
    """Several runs that write the same report at the same time succeed, and the report is complete each time."""
    command = [sys.executable, "-m", "syncheck", "report", ".", "-q", "-o", "out.json", "-o", "out.html"]
    programs = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) for _ in range(4)]
    seen = 0
    while any(program.poll() is None for program in programs):
        if (tmp_path / "out.json").exists():
            assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "out_of_sync"
            seen += 1
    assert [(program.communicate()[1], program.returncode) for program in programs] == [(b"", 1)] * 4
    assert seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json", *TWO]
