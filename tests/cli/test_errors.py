"""Bad input: one clear line a file on stderr, no traceback, exit 2, and nothing hidden by it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import Call, Done, Global, changed, network, save_pth, save_records, save_safetensors

import syncheck as library
from syncheck import api

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Done]
    Ranks = Callable[..., list[Path]]


def one_line(done: Done, *texts: str) -> None:
    """Assert exit 2 and one line on stderr that holds these texts."""
    assert done.code == 2, done
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("syncheck: error: ")
    assert all(text in done.err for text in texts), done.err


def make_bad(folder: Path, kind: str) -> Path:
    """Write a file that cannot be compared."""
    path = folder / ("rank1.safetensors" if kind.endswith("safetensors") else "rank1.pth")
    if kind == "text":
        path.write_text("hello, this is no checkpoint\n")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "evil":
        evil = Call(Global("os", "system"), (f"touch {folder}/canary",))
        save_pth(path, {"w": np.ones(2, np.float32), "evil": evil})
    elif kind == "no pickle":
        save_records(path, b"\x80\x02nonsense")
    elif kind.startswith("cut"):
        whole = (save_safetensors if kind.endswith("safetensors") else save_pth)(path, network()).read_bytes()
        path.write_bytes(whole[: len(whole) * int(kind.split()[1]) // 100])
    return path


BAD = {
    "text": "b'hello, this",
    "empty": "empty",
    "fifo": "pipe",
    "dangling": "no such file",
    "evil": "os.system, which runs code; nothing was run",
    "no pickle": "the pickle cannot be read",
    "cut 1 pth": "cut short",
    "cut 50 pth": "cut short",
    "cut 99 pth": "cut short",
    "cut 1 safetensors": "",
    "cut 50 safetensors": "cut short",
    "cut 99 safetensors": "cut short",
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("others", ["in sync", "out of sync", "none"])
def test_bad_file_among_others(cli: Run, tmp_path: Path, kind: str, others: str) -> None:
    """A bad file beside replicas in sync is 2, beside replicas out of sync 1, alone 2; it is named in one line."""
    bad = make_bad(tmp_path, kind)
    paths = []
    if others != "none":
        second = network() if others == "in sync" else changed(network(), "fc.bias")
        paths = [save_pth(tmp_path / "rank0.pth", network()), save_pth(tmp_path / "rank2.pth", second)]
    done = cli("compare", *paths, bad)
    assert done.code == (1 if others == "out of sync" else 2)
    assert done.err.count("\n") == 1
    assert str(bad) in done.err
    assert BAD[kind] in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "canary").exists()
    if others == "in sync":
        assert done.lines[-2].startswith("COULD NOT TELL: 1 of the files")
    elif others == "out of sync":
        assert done.lines[-2] == "OUT OF SYNC, and 1 file could not be read"


@pytest.mark.parametrize("kind", ["text", "empty", "evil", "cut 50 pth", "cut 50 safetensors"])
def test_bad_file_in_a_folder(cli: Run, tmp_path: Path, kind: str) -> None:
    """A file with a checkpoint's ending in a folder is never passed over in silence."""
    for rank in (0, 2):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    make_bad(tmp_path, kind)
    done = cli("compare", tmp_path)
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_two_bad_files_are_two_lines(cli: Run, tmp_path: Path) -> None:
    """Each bad file has its line."""
    for name in ("a.pth", "b.pth"):
        (tmp_path / name).write_text("text")
    done = cli("compare", "a.pth", "b.pth")
    assert (done.code, done.err.count("\n")) == (2, 2)


def test_missing_path(cli: Run) -> None:
    """A path that is not there is named."""
    one_line(cli("compare", "no_such.pth"), "no_such.pth", "no such file", "Check the path")


def test_glob_without_a_match(cli: Run, tmp_path: Path) -> None:
    """A pattern that matches nothing is said to be one, with what is there in place of a match."""
    one_line(cli("compare", "ckpts/*.pth"), "ckpts/*.pth: no file matches this pattern. ckpts: no such file")
    (tmp_path / "ckpts").mkdir()
    one_line(cli("compare", "ckpts/*.pth"), "ckpts contains nothing.")
    for name in ("b.pt", "a.pt", "c\x1b[31m.pt", ".hidden"):
        (tmp_path / "ckpts" / name).touch()
    one_line(cli("compare", "ckpts/*.pth"), "ckpts contains a.pt, b.pt and 1 more.")
    one_line(cli("compare", "ckpts/**/x.pth"), "ckpts contains a.pt")
    one_line(cli("compare", "*.pth"), "This folder contains ckpts")


def test_folder_without_checkpoints(cli: Run, tmp_path: Path) -> None:
    """A folder without a checkpoint says how many other files it has, empty or not."""
    (tmp_path / "src").mkdir()
    one_line(cli("compare", "src"), "src", "no checkpoint in this folder (0 other files)")
    (tmp_path / "src" / "train.py").write_text("print()")
    (tmp_path / "src" / "latest").write_text("step_3")
    one_line(cli("compare", "src"), "no checkpoint in this folder (2 other files)")


def test_one_file(cli: Run, ranks: Ranks) -> None:
    """One replica is nothing to compare: 2, and the reason says what to give."""
    (path, _) = ranks()
    done = cli("compare", path)
    assert (done.code, done.err) == (2, "")
    assert done.lines[-2].startswith("COULD NOT TELL: one file has no replica to compare with")
    assert done.lines[-1] == "0 tensors: 0 identical, 0 close, 0 different, 0 not compared"


def test_files_of_nothing_in_common(cli: Run, tmp_path: Path) -> None:
    """Several files, none another's replica: what would put them into one group is said."""
    (tmp_path / "src").mkdir()
    for name in ("best.pth", "model_0.pth", "ckpt-rank1-step100.pt"):
        save_pth(tmp_path / "src" / name, network())
    done = cli("compare", "src")
    assert done.code == 2
    assert done.lines[-2].startswith("COULD NOT TELL: no two of the files are replicas of each other")
    assert "--group-by ''" in done.lines[-2]


def test_the_same_file_twice_is_one(cli: Run, ranks: Ranks) -> None:
    """A file is no replica of itself: given twice, by whatever path, nothing was compared."""
    (path, _) = ranks()
    assert cli("compare", path, path).code == 2
    assert cli("compare", path, f"./{path.name}").code == 2
    save_pth(path.parent / "only.pth", network())
    assert cli("compare", "only.pth", "./only.pth").code == 2
    assert cli("compare", "only.pth", path.parent / "only.pth").code == 2


def test_alone_beside_a_group(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint that was compared with nothing is listed, and the answer is not "in sync"."""
    ranks()
    save_pth(tmp_path / "best.pth", changed(network(), "fc.bias"))
    done = cli("compare", tmp_path)
    assert done.code == 2
    assert "ALONE" in done.out


def test_no_arguments(cli: Run) -> None:
    """Wrong usage is one line and 2."""
    for arguments in (("compare",), ("nonsense",), ("show",), ("compare", "--rtol")):
        done = cli(*arguments)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert "--help" in done.err


def test_no_command(cli: Run) -> None:
    """A line without a command is answered with the commands there are, on stderr, and 2."""
    done = cli()
    assert (done.code, done.out) == (2, "")
    assert {"compare", "report", "show", "fingerprint", "explain", "demo"} <= set(done.err.split())


def test_mistyped_option(cli: Run) -> None:
    """A mistyped option is named with the one that it resembles, and with the help that lists it: the command's."""
    start = "syncheck compare: error: unrecognized arguments:"
    for given, answer in (("--only-bufers", "; did you mean --only-buffers?"), ("--zzzz=3", ".")):
        done = cli("compare", given, "a.pth")
        assert (done.code, done.err) == (2, f"{start} {given}{answer} See: syncheck compare --help\n")


def test_help_and_version_are_0(cli: Run) -> None:
    """Help names the exit codes, and goes to stdout."""
    done = cli("--version")
    assert (done.code, done.err) == (0, "")
    for arguments in (("--help",), ("compare", "--help"), ("report", "--help"), ("show", "-h")):
        done = cli(*arguments)
        assert (done.code, done.err) == (0, "")
        assert "exit codes: 0 in sync, 1 out of sync, 2 could not tell" in done.out


def test_empty_path_and_nul(cli: Run) -> None:
    """An empty path is bad input and no crash."""
    one_line(cli("compare", ""))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read(cli: Run, ranks: Ranks) -> None:
    """A file without permission is unreadable."""
    paths = ranks()
    paths[1].chmod(0)
    done = cli("compare", *paths)
    assert done.code == 2
    assert "permission denied" in done.err


def test_crash_of_ours_is_3(cli: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash has exit code 3, and ends with the environment and the arguments, which a bug report needs."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(api, "compare", broken)
    done = cli("compare", *ranks())
    assert done.code == 3
    assert "ZeroDivisionError: planted" in done.err
    assert re.search(
        r"this is a crash of syncheck, not a verdict on your files.*\n"
        r"  syncheck \S+\n  CPython .*\n  numpy .*\n  in /.*\n  arguments: \['compare', ",
        done.err,
    )


def test_interrupt_is_130(cli: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is 130 and one line."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "compare", stopped)
    assert cli("compare", *ranks()) == Done(130, "", "syncheck: interrupted\n")


def test_one_folder_spelled_in_several_ways(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """Files of one folder are replicas however the folder is written, and are shown as they were given."""
    ranks(name="ddp_rank{}.pth")
    (tmp_path / "here").symlink_to(tmp_path)
    for rank in range(2):
        save_pth(tmp_path / "bad" / f"rank{rank}.pth", {"w": np.full(2, rank, np.float32)})
    for paths in (
        ("./bad/rank0.pth", tmp_path / "bad" / "rank1.pth"),
        ("bad//rank0.pth", "bad/../bad/rank1.pth"),
        (tmp_path / "here" / "bad" / "rank0.pth", "bad/rank1.pth"),
    ):
        done = cli("compare", "ddp_rank0.pth", "ddp_rank1.pth", *paths, PWD=str(tmp_path / "here"))
        assert done.code == 1, done.out
        for rank, path in enumerate(paths):
            assert f"rank {rank}: {path} " in done.out


def test_folders_that_cannot_be_entered_or_are_links(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies below a link is compared, once; below a folder that may not be entered it is unknown, never in sync."""
    ranks(name="ckpts/ddp_rank{}.pth")
    for rank in range(2):
        save_pth(tmp_path / "elsewhere" / f"bad_rank{rank}.pth", {"w": np.full(2, rank, np.float32)})
    assert library.compare(tmp_path / "ckpts").verdict == "in_sync"
    (tmp_path / "ckpts" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "ckpts" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "ckpts")
    (tmp_path / "ckpts" / "up").symlink_to(tmp_path)
    report = library.compare(tmp_path / "ckpts")
    assert (report.verdict, len(report.groups)) == ("out_of_sync", 2)
    (tmp_path / "ckpts" / "linked").unlink()
    (tmp_path / "ckpts" / "again").unlink()
    (tmp_path / "ckpts" / "closed").mkdir()
    scan = os.scandir

    def scandir(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    report = library.compare(tmp_path / "ckpts")
    assert report.verdict == "undecided"
    assert [file.path for file in report.unreadable] == [str(tmp_path / "ckpts" / "closed")]
    assert report.unreadable[0].reason.startswith("permission denied: could not list this folder")
