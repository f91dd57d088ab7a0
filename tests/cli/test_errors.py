"""Bad input: one line per file on stderr, no traceback, and exit code 2 unless a difference is found."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import Call, Done, Global, changed, network, save_pth, save_records, save_safetensors
from support.listings import list_absent, list_fields

import syncheck as library
from syncheck import api

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Done]
    Ranks = Callable[..., list[Path]]


def assert_one_line_error(done: Done, *texts: str) -> None:
    """Assert exit code 2 and one line on stderr with these texts."""
    assert done.code == 2, done
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("syncheck: error: ")
    assert not list_absent(done.err, texts), done.err


def write_bad_file(folder: Path, kind: str) -> Path:
    """Write a file of this kind, which cannot be compared."""
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
        complete = (save_safetensors if kind.endswith("safetensors") else save_pth)(path, network()).read_bytes()
        path.write_bytes(complete[: len(complete) * int(kind.split()[1]) // 100])
    return path


BAD = {
    "text": "b'hello, this",
    "empty": "empty",
    "fifo": "pipe",
    "dangling": "a link to nowhere, which is missing",
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
    """A bad file is reported in one line; the exit code is 1 if the other files differ, else 2."""
    bad = write_bad_file(tmp_path, kind)
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
        assert done.verdict.startswith("COULD NOT TELL: 1 of the files")
    elif others == "out of sync":
        assert done.verdict == "OUT OF SYNC, and 1 file could not be read"


@pytest.mark.parametrize("kind", ["text", "empty", "evil", "cut 50 pth", "cut 50 safetensors"])
def test_bad_file_in_a_folder(cli: Run, tmp_path: Path, kind: str) -> None:
    """A bad file with a checkpoint's file extension is reported and never skipped."""
    for rank in (0, 2):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    write_bad_file(tmp_path, kind)
    done = cli("compare", tmp_path)
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_each_bad_file_has_its_own_line(cli: Run, tmp_path: Path) -> None:
    """Each bad file is reported on its own line."""
    for name in ("a.pth", "b.pth"):
        (tmp_path / name).write_text("text")
    done = cli("compare", "a.pth", "b.pth")
    assert (done.code, done.err.count("\n")) == (2, 2)


@pytest.mark.parametrize("target", ["nowhere", "gone/a.pth", "second.pth"])
@pytest.mark.parametrize("arguments", [("compare", "."), ("compare", "rank2.pth"), ("diff", "rank0.pth", "rank2.pth")])
def test_a_link_without_target(cli: Run, tmp_path: Path, target: str, arguments: tuple[str, ...]) -> None:
    """The error names the target of the link, also of a link to another such link, and suggests no path."""
    for rank in (0, 1):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    (tmp_path / "rank2.pth").symlink_to(target)
    if target == "second.pth":
        (tmp_path / target).symlink_to("nowhere")
    done = cli(*arguments)
    assert done.code == 2
    assert f"a link to {target}, which is missing" in done.err
    assert "id you mean" not in done.err


def test_a_baseline_that_is_a_link_without_target(cli: Run, tmp_path: Path) -> None:
    """No other path is suggested."""
    (tmp_path / "known.json").symlink_to("nowhere")
    for rank in (0, 1):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    done = cli("compare", ".", "--baseline", "known.json")
    assert done.code == 2
    assert "id you mean" not in done.err


def test_missing_path(cli: Run) -> None:
    """The error for a missing path names the path."""
    assert_one_line_error(cli("compare", "no_such.pth"), "no_such.pth", "no such file", "Check the path")


def test_glob_without_a_match(cli: Run, tmp_path: Path) -> None:
    """The error for a pattern without a match lists the content of the pattern's folder."""
    assert_one_line_error(
        cli("compare", "ckpts/*.pth"), "ckpts/*.pth: no file matches this pattern. ckpts: no such file"
    )
    (tmp_path / "ckpts").mkdir()
    assert_one_line_error(cli("compare", "ckpts/*.pth"), "ckpts contains nothing.")
    for name in ("b.pt", "a.pt", "c\x1b[31m.pt", ".hidden"):
        (tmp_path / "ckpts" / name).touch()
    assert_one_line_error(cli("compare", "ckpts/*.pth"), "ckpts contains a.pt, b.pt and 1 more.")
    assert_one_line_error(cli("compare", "ckpts/**/x.pth"), "ckpts contains a.pt")
    assert_one_line_error(cli("compare", "*.pth"), "This folder contains ckpts")


def test_folder_without_checkpoints(cli: Run, tmp_path: Path) -> None:
    """The error for a folder without a checkpoint counts the other files, 0 included."""
    (tmp_path / "src").mkdir()
    assert_one_line_error(cli("compare", "src"), "src", "no checkpoint in this folder (0 other files)")
    (tmp_path / "src" / "train.py").write_text("print()")
    (tmp_path / "src" / "latest").write_text("step_3")
    assert_one_line_error(cli("compare", "src"), "no checkpoint in this folder (2 other files)")


def test_one_file(cli: Run, ranks: Ranks) -> None:
    """For a single file, the exit code is 2, because there is no replica to compare with."""
    (path, _) = ranks()
    done = cli("compare", path)
    assert (done.code, done.err) == (2, "")
    assert done.verdict.startswith("COULD NOT TELL: one file has no replica to compare with")
    assert done.lines[-1] == "0 tensors: 0 identical, 0 close, 0 different, 0 not compared"


def test_unrelated_files(cli: Run, tmp_path: Path) -> None:
    """If no two files are replicas of each other, the verdict recommends --group-by."""
    (tmp_path / "src").mkdir()
    for name in ("best.pth", "model_0.pth", "ckpt-rank1-step100.pt"):
        save_pth(tmp_path / "src" / name, network())
    done = cli("compare", "src")
    assert done.code == 2
    assert done.verdict.startswith("COULD NOT TELL: no two of the files are replicas of each other")
    assert "--group-by ''" in done.verdict


def test_a_file_is_not_its_own_replica(cli: Run, ranks: Ranks) -> None:
    """A file is not its own replica: if one file is passed twice, under any path, the exit code is 2."""
    (path, _) = ranks()
    assert cli("compare", path, path).code == 2
    assert cli("compare", path, f"./{path.name}").code == 2
    save_pth(path.parent / "only.pth", network())
    assert cli("compare", "only.pth", "./only.pth").code == 2
    assert cli("compare", "only.pth", path.parent / "only.pth").code == 2


def test_checkpoint_without_a_replica(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint without a replica is listed, and the exit code is 2 although the other checkpoints are equal."""
    ranks()
    save_pth(tmp_path / "best.pth", changed(network(), "fc.bias"))
    done = cli("compare", tmp_path)
    assert done.code == 2
    assert "ALONE" in done.out


def test_wrong_usage(cli: Run) -> None:
    """Wrong usage exits with 2 and prints one line that refers to --help."""
    for arguments in (("compare",), ("nonsense",), ("show",), ("compare", "--rtol")):
        done = cli(*arguments)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert "--help" in done.err


def test_no_command(cli: Run) -> None:
    """Without a command, the commands are listed on stderr, and the exit code is 2."""
    done = cli()
    assert (done.code, done.out) == (2, "")
    assert {"compare", "report", "show", "fingerprint", "explain", "demo"} <= set(done.err.split())


def test_mistyped_option(cli: Run) -> None:
    """The error for a mistyped option suggests a similar option and refers to the help of the command."""
    prefix = "syncheck compare: error: unrecognized arguments:"
    for settings, hint in (("--only-bufers", "; did you mean --only-buffers?"), ("--zzzz=3", ".")):
        done = cli("compare", settings, "a.pth")
        assert (done.code, done.err) == (2, f"{prefix} {settings}{hint} See: syncheck compare --help\n")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("compare --refer 0 a.pth", "--reference"),
        ("compare --re=0 a.pth", "--reference"),
        ("compare --forma json a.pth", "--format"),
        ("report --only a.pth", "--only-params or --only-buffers or --only-optimizer or --only-rng"),
        ("diff --ma map.json a.pth b.pth", "--map"),
        ("show --shard a.pth", "--shards"),
        ("fingerprint --quie -o out a.pth", "--quiet"),
        ("explain --col never", "--color"),
        ("--vers", "--version"),
        # Commands and values are suggested, too.
        ("comp a.pth", "compare"),
        ("reprot a.pth", "report"),
        ("compare --format jsn a.pth", "json"),
        ("compare --format md a.pth", "markdown"),
        # Options and formats of other tools.
        ("compare --format html a.pth", "-o FILE.html"),
        ("compare --tolerance 1e-3 a.pth", "--rtol R --atol A"),
        ("diff --tol=1e-3 a.pth b.pth", "--rtol R --atol A"),
        ("report --ignore X a.pth", "--exclude GLOB"),
        ("diff a.pth b.pth write_map=map.toml", "--write-map"),
    ],
)
def test_the_start_of_a_name_is_no_name(cli: Run, arguments: str, meant: str) -> None:
    """The start of an option, command or value is refused with exit code 2, and the error names what was meant."""
    done = cli(*arguments.split())
    assert (done.code, done.out) == (2, "")
    assert f"; did you mean {meant}? See: syncheck" in done.err
    assert done.err.count("\n") == 1


def test_unlike_names_are_not_suggested(cli: Run) -> None:
    """A command or an option that resembles no other one has no suggestion, and neither have dashes alone."""
    for arguments in (
        "frobnicate a.pth",
        "compare --- a.pth",
        "compare --xyzzy a.pth",
        "compare -x a.pth",
        "show --ignore X a",
    ):
        done = cli(*arguments.split())
        assert done.code == 2
        assert "did you mean" not in done.err


def test_help_and_version_exit_with_0(cli: Run) -> None:
    """--help and --version exit with 0, and the help on stdout lists the exit codes."""
    done = cli("--version")
    assert (done.code, done.err) == (0, "")
    for arguments in (("--help",), ("compare", "--help"), ("report", "--help"), ("show", "-h")):
        done = cli(*arguments)
        assert (done.code, done.err) == (0, "")
        assert "exit codes: 0 in sync, 1 out of sync, 2 could not tell" in done.out


def test_empty_path(cli: Run) -> None:
    """An empty path is an error in one line and not a crash."""
    assert_one_line_error(cli("compare", ""))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_read_permission(cli: Run, ranks: Ranks) -> None:
    """A file without read permission is an error with exit code 2."""
    paths = ranks()
    paths[1].chmod(0)
    done = cli("compare", *paths)
    assert done.code == 2
    assert "permission denied" in done.err


def test_internal_crash_is_3(cli: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash exits with 3 and prints the environment and the arguments for a bug report."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(api, "judge", broken)
    done = cli("compare", *ranks())
    assert done.code == 3
    assert "ZeroDivisionError: planted" in done.err
    assert re.search(
        r"this is a crash of syncheck, not a verdict on your files.*\n"
        r"  syncheck \S+\n  CPython .*\n  numpy .*\n  in /.*\n  arguments: \['compare', ",
        done.err,
    )


def test_interrupt_exits_with_130(cli: Run, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C exits with 130 and prints one line."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "judge", stopped)
    assert cli("compare", *ranks()) == Done(130, "", "syncheck: interrupted\n")


def test_one_folder_spelled_in_several_ways(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """Files of one folder are replicas under any spelling of the folder, and are listed with the given paths."""
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


def test_links_and_folders_without_access(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files below a link are compared once; a folder without access makes the verdict undecided."""
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
    assert list_fields(report.unreadable, "path") == [str(tmp_path / "ckpts" / "closed")]
    assert report.unreadable[0].reason.startswith("permission denied: could not list this folder")


def test_a_glob_without_quotes_has_a_hint(cli: Run, tmp_path: Path) -> None:
    """The shell makes several arguments of a glob; a name that is no file is no part of one."""
    with contextlib.chdir(tmp_path):
        for name in ("a.pth", "b.pth"):
            (tmp_path / name).write_bytes(b"")
        done = cli("diff", "a.pth", "a.pth", "b.pth")
        other = cli("explain", "SYN201", "SYN202")
    assert (done.code, other.code) == (2, 2)
    assert "need quotes" in done.err
    assert "quotes" not in other.err
