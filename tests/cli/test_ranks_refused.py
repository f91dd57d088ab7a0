"""`syncheck compare 'rank_{rank}.pth'` where it could not tell: all ranks end with 2, and one says why in one line."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import Call, Global, network, save_pth

import syncheck
from syncheck.cli import commands
from syncheck.live.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Across

pytestmark = pytest.mark.syncheck(ranks=2)


def reason(across: Across, *arguments: Any) -> str:
    """Compare; return the one line that rank 0 prints where both ranks end with 2."""
    ended = across.compare(*arguments)
    assert [done.code for done in ended] == [2, 2], ended
    assert (ended[0].out, ended[1].out, ended[1].err) == ("", "", "")
    assert ended[0].err.count("\n") == 1, ended[0].err
    assert ended[0].err.startswith("syncheck: error: ")
    return ended[0].err.removeprefix("syncheck: error: ").rstrip()


def missing(file: Path) -> None:
    """Take the file away."""
    file.unlink()


def cut_short(file: Path) -> None:
    """Leave half of the file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def folder(file: Path) -> None:
    """Put a folder of two checkpoints in the file's place."""
    file.rename(file.with_suffix(".tmp"))
    file.mkdir()
    for name in ("a.pth", "b.pth"):
        shutil.copy(file.with_suffix(".tmp"), file / name)


def empty_folder(file: Path) -> None:
    """Put a folder without a checkpoint in the file's place."""
    file.unlink()
    file.mkdir()


def text(file: Path) -> None:
    """Write something else into it."""
    file.write_text("loss 0.1\n")


def fingerprint(file: Path) -> None:
    """Put a fingerprint in the file's place."""
    from syncheck import fingerprint, read

    made = fingerprint.fingerprint(read(str(file)))
    file.write_text(made)


def program(file: Path) -> None:
    """Put a pickle in its place that would run something."""
    save_pth(file, {"w": network()["fc.weight"], "x": Call(Global("os", "system"), ("true",))})


@pytest.mark.parametrize(
    "change, says",
    [
        (missing, "no such file or directory. Check the path."),
        (cut_short, "save or copy the file again"),
        (folder, "2 checkpoints; expected the checkpoint of this rank"),
        (empty_folder, "no checkpoint in this folder"),
        (text, "needed a torch.save or safetensors file"),
        (fingerprint, "a fingerprint; compare fingerprints without torchrun: syncheck compare *.json"),
        (program, "os.system"),
    ],
)
def test_a_file_that_cannot_be_compared(across: Across, change: Callable[[Path], None], says: str) -> None:
    """A bad file on rank 1 alone is told by rank 0 with rank, path, reason and next step, and none waits."""
    file = across.save()
    if across.rank == 1:
        change(file)
    line = reason(across, across.path)
    assert line.startswith(f"rank 1: {across.folder}/run_rank1.pth: ")
    assert says.lower() in line.lower()


def test_bad_files_of_both_ranks(across: Across) -> None:
    """Where both files are missing both are named."""
    line = reason(across, across.path)
    assert f"rank 0: {across.folder}/run_rank0.pth: no such file" in line
    assert f"rank 1: {across.folder}/run_rank1.pth: no such file" in line


def test_two_ranks_with_one_file(across: Across) -> None:
    """A path that gives both ranks one file, or links to it, is never a file in sync with itself."""
    across.save()
    says = f"ranks 0 and 1 read the same file: {across.folder}/run_rank0.pth; "
    assert reason(across, f"{across.folder}/run_rank{{node_rank}}.pth").startswith(says)
    if across.rank == 0:
        (across.folder / "l0.pth").symlink_to("run_rank0.pth")
        (across.folder / "l1.pth").hardlink_to(across.folder / "run_rank0.pth")
    assert reason(across, f"{across.folder}/l{{rank}}.pth").startswith("ranks 0 and 1 read the same file: ")


def described(across: Across, **changes: Any) -> None:
    """Write this rank's file with a metadata block."""
    block = {"run": "mine", "rank": across.rank, "world_size": 2, "step": 5, "run_id": "4f1c"} | changes
    across.save(syncheck=syncheck.metadata(**block))


def test_a_file_of_another_rank(across: Across) -> None:
    """A file that by its metadata was saved by another rank is told, for then ranks may read one file on two nodes."""
    described(across, rank=0)
    line = reason(across, across.path)
    assert line.startswith(f"rank 1 reads {across.folder}/run_rank1.pth on ")
    assert ", but its metadata has rank 0; use {rank} in the path" in line


def test_files_of_two_runs(across: Across) -> None:
    """Files of two launches are no replicas of one another, however equal they are."""
    described(across, run_id=f"id{across.rank}")
    assert reason(across, across.path) == (
        "the files are from several runs according to their metadata: rank 0 of run 'mine' with run_id 'id0'; rank 1 "
        "of run 'mine' with run_id 'id1'; pass files from one run"
    )


def test_files_of_two_steps(across: Across) -> None:
    """Files of two steps are compared, and the finding says that they are of different moments."""
    described(across, step=5 + across.rank)
    ended = across.compare(across.path)
    assert [done.code for done in ended] == [1, 1]
    assert ended[0].lines[0] == "mine step 6, 2 replicas: OUT OF SYNC"
    assert "SYN106 different-progress" in ended[0].out


def test_a_rank_that_is_missing(across: Across) -> None:
    """Of a run of three ranks two are compared, and the one that is not there is named."""
    described(across, world_size=3)
    ended = across.compare(across.path)
    assert [done.code for done in ended] == [0, 0]
    assert "  no file from rank 2, although the metadata lists 3 ranks" in ended[0].lines


@pytest.mark.parametrize(
    "arguments, says",
    [
        (
            ["run_{rnk}.pth"],
            "run_{rnk}.pth: no such file, and {rnk} is not a field; must be one of {rank}, ",
        ),
        (["{}_{rank}.pth"], "{}_{rank}.pth: no such file, and {} is not a field"),
        (["{rank}/{step}.pth"], "{rank}/{step}.pth: no such file, and {step} is not a field"),
        (["run_{rank.real}.pth"], "run_{rank.real}.pth: no such file, and {rank.real} is not a field"),
        (["a_{rank}.pth", "b_{rank}.pth"], "2 paths: a path with a rank in braces must be the only path"),
    ],
)
def test_wrong_paths(across: Across, arguments: list[str], says: str) -> None:
    """A path that each process refuses for itself, before it meets the others, is told by each."""
    ended = across.compare(*arguments)
    assert [done.code for done in ended] == [2, 2]
    assert all(done.err.startswith(f"syncheck: error: {says}") for done in ended), ended


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["run_{rank:zz}.pth"], "run_{rank:zz}.pth: invalid field in braces: "),
        (["run_{rank}.pth", "--quick"], "--quick and --group-by require a single process"),
        (["run_{rank}.pth", "--group-by", "x"], "--quick and --group-by require a single process"),
        (["run_{rank}.pth", "--allow", "SYN000"], "--allow SYN000: no such code"),
        (["run_{rank}.pth", "--rtol", "1"], "--rtol and --atol belong together"),
        (["run_{rank}.pth", "-o", "report.doc"], "-o report.doc: "),
    ],
)
def test_wrong_use(across: Across, arguments: list[str], says: str) -> None:
    """What is wrong on all ranks is told once, in the words of the command line."""
    assert reason(across, *arguments).startswith(says)


def test_a_reference_that_is_none(across: Across) -> None:
    """--reference takes a rank or a path of those compared, and lists them where it is none."""
    across.save(by=1.0)
    assert [done.code for done in across.compare(across.path, "--reference", "1")] == [1, 1]
    assert [done.code for done in across.compare(across.path, "--reference", across.path.format(rank=0))] == [1, 1]
    assert "there are ranks 0, 1: " in reason(across, across.path, "--reference", "7")


def test_a_file_that_breaks_while_it_is_read(across: Across, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of rank 0 that is cut short between its digest and its comparison ends all with 2, as one of rank 1."""
    file = across.save(by=1.0)
    real = Channel.run_on_leader

    def run_on_leader(channel: Channel, *arguments: Any) -> Any:
        if across.rank == 0:
            file.write_bytes(b"")
        return real(channel, *arguments)

    monkeypatch.setattr(Channel, "run_on_leader", run_on_leader)
    line = reason(across, across.path)
    assert line.startswith("rank 0: ")
    assert f"{across.folder}/run_rank0.pth: " in line


def test_a_crash_of_rank_0_shows_where(across: Across, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of syncheck's own ends all ranks with 2 as well, and shows its traceback on the rank that had it."""

    def crash(*_: Any, **__: Any) -> int:
        raise KeyError("planted")

    monkeypatch.setattr(commands, "write_report", crash)
    across.save()
    ended = across.compare(across.path)
    assert [done.code for done in ended] == [2, 2]
    assert ended[0].err.startswith("syncheck: error: rank 0: KeyError: 'planted'\nTraceback")
    assert ended[1].err == ""


def test_without_the_variables_of_torchrun(across: Across, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside torchrun, the error names the missing variables and both ways to run the comparison."""
    unset = "torchrun sets the values in braces, but these variables are not set:"
    advice = "use torchrun --nproc-per-node N -m syncheck compare PATH, or a glob such as 'ckpts/rank_*.pth'"
    monkeypatch.delenv("GROUP_RANK")
    text = f"node_{{node_rank}}.pth: {unset} GROUP_RANK; {advice}"
    assert {(done.code, done.err) for done in across.compare("node_{node_rank}.pth")} == {
        (2, f"syncheck: error: {text}\n")
    }
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    text = f"run_{{rank}}.pth: {unset} RANK, WORLD_SIZE; {advice}"
    assert {(done.code, done.err) for done in across.compare("run_{rank}.pth")} == {(2, f"syncheck: error: {text}\n")}


@pytest.mark.syncheck(ranks=1)
def test_a_process_alone(across: Across) -> None:
    """A single process has nothing to compare with, and is told to be started as several."""
    across.save()
    (done,) = across.compare(across.path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"syncheck: error: {across.folder}/run_rank0.pth: one process reads one file")
