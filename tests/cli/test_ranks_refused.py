"""`syncheck compare 'rank_{rank}.pth'` without a verdict: all ranks exit with 2, and one line gives the reason."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import Call, Global, network, save_pth
from support.listings import list_codes, list_fields

import syncheck
from syncheck.cli import commands
from syncheck.live.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RankCli

pytestmark = pytest.mark.syncheck(ranks=2)


def compare_with_error(rank_cli: RankCli, *arguments: Any) -> str:
    """Run a comparison that exits with 2 on both ranks, and return the only line of output, from rank 0."""
    ended = rank_cli.compare(*arguments)
    assert list_codes(ended) == [2, 2], ended
    assert (ended[0].out, ended[1].out, ended[1].err) == ("", "", "")
    assert ended[0].err.count("\n") == 1, ended[0].err
    assert ended[0].err.startswith("syncheck: error: ")
    return ended[0].err.removeprefix("syncheck: error: ").rstrip()


def delete(file: Path) -> None:
    """Delete the file."""
    file.unlink()


def truncate(file: Path) -> None:
    """Truncate the file to half its size."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def replace_with_folder(file: Path) -> None:
    """Replace the file with a folder of two checkpoints."""
    file.rename(file.with_suffix(".tmp"))
    file.mkdir()
    for name in ("a.pth", "b.pth"):
        shutil.copy(file.with_suffix(".tmp"), file / name)


def replace_with_empty_folder(file: Path) -> None:
    """Replace the file with a folder without a checkpoint."""
    file.unlink()
    file.mkdir()


def replace_with_text(file: Path) -> None:
    """Replace the file with a text."""
    file.write_text("loss 0.1\n")


def replace_with_fingerprint(file: Path) -> None:
    """Replace the file with a fingerprint."""
    from syncheck import read
    from syncheck.readers import fingerprints

    created = fingerprints.fingerprint(read(str(file)))
    file.write_text(created)


def replace_with_program(file: Path) -> None:
    """Replace the file with a pickle that runs a command when loaded."""
    save_pth(file, {"w": network()["fc.weight"], "x": Call(Global("os", "system"), ("true",))})


@pytest.mark.parametrize(
    "change, message",
    [
        (delete, "no such file or directory. Check the path."),
        (truncate, "save or copy the file again"),
        (replace_with_folder, "2 checkpoints; expected the checkpoint of this rank"),
        (replace_with_empty_folder, "no checkpoint in this folder"),
        (replace_with_text, "needed a torch.save, pickle or safetensors file"),
        (replace_with_fingerprint, "a fingerprint; compare fingerprints without torchrun: syncheck compare *.json"),
        (replace_with_program, "os.system"),
    ],
)
def test_a_file_that_cannot_be_compared(rank_cli: RankCli, change: Callable[[Path], None], message: str) -> None:
    """If rank 1 has a bad file, both ranks exit with 2, and rank 0 prints rank, path, reason and next step."""
    file = rank_cli.save()
    if rank_cli.rank == 1:
        change(file)
    line = compare_with_error(rank_cli, rank_cli.path)
    assert line.startswith(f"rank 1: {rank_cli.folder}/run_rank1.pth: ")
    assert message.lower() in line.lower()


def test_bad_files_of_both_ranks(rank_cli: RankCli) -> None:
    """If both files are missing, the error names both files."""
    line = compare_with_error(rank_cli, rank_cli.path)
    assert f"rank 0: {rank_cli.folder}/run_rank0.pth: no such file" in line
    assert f"rank 1: {rank_cli.folder}/run_rank1.pth: no such file" in line


def test_two_ranks_with_one_file(rank_cli: RankCli) -> None:
    """If two ranks read the same file, directly or through links, the comparison is refused."""
    rank_cli.save()
    message = f"ranks 0 and 1 read the same file: {rank_cli.folder}/run_rank0.pth; "
    assert compare_with_error(rank_cli, f"{rank_cli.folder}/run_rank{{node_rank}}.pth").startswith(message)
    if rank_cli.rank == 0:
        (rank_cli.folder / "l0.pth").symlink_to("run_rank0.pth")
        (rank_cli.folder / "l1.pth").hardlink_to(rank_cli.folder / "run_rank0.pth")
    assert compare_with_error(rank_cli, f"{rank_cli.folder}/l{{rank}}.pth").startswith(
        "ranks 0 and 1 read the same file: "
    )


def save_with_metadata(rank_cli: RankCli, **changes: Any) -> None:
    """Write this rank's file with a metadata block."""
    block = {"run": "mine", "rank": rank_cli.rank, "world_size": 2, "step": 5, "run_id": "4f1c"} | changes
    rank_cli.save(syncheck=syncheck.metadata(**block))


def test_a_file_of_another_rank(rank_cli: RankCli) -> None:
    """Metadata of another rank is an error, because ranks on two nodes may be reading the same file."""
    save_with_metadata(rank_cli, rank=0)
    line = compare_with_error(rank_cli, rank_cli.path)
    assert line.startswith(f"rank 1 reads {rank_cli.folder}/run_rank1.pth on ")
    assert ", but its metadata has rank 0; use {rank} in the path" in line


def test_files_of_two_runs(rank_cli: RankCli) -> None:
    """Files of two launches are not replicas of each other, even if they are equal."""
    save_with_metadata(rank_cli, run_id=f"id{rank_cli.rank}")
    assert compare_with_error(rank_cli, rank_cli.path) == (
        "the files are from several runs according to their metadata: rank 0 of run 'mine' with run_id 'id0'; rank 1 "
        "of run 'mine' with run_id 'id1'; pass files from one run"
    )


def test_files_of_two_steps(rank_cli: RankCli) -> None:
    """Files of two steps are compared, and SYN106 reports the different progress."""
    save_with_metadata(rank_cli, step=5 + rank_cli.rank)
    ended = rank_cli.compare(rank_cli.path)
    assert list_codes(ended) == [1, 1]
    assert ended[0].lines[0] == "mine step 6, 2 replicas"
    assert "SYN106 different-progress" in ended[0].out


def test_missing_rank(rank_cli: RankCli) -> None:
    """If one of three ranks has no file, the other two are compared, and the report names the missing rank."""
    save_with_metadata(rank_cli, world_size=3)
    ended = rank_cli.compare(rank_cli.path)
    assert list_codes(ended) == [0, 0]
    assert "  no file from rank 2, although the metadata lists 3 ranks" in ended[0].lines


@pytest.mark.parametrize(
    "arguments, message",
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
def test_wrong_paths(rank_cli: RankCli, arguments: list[str], message: str) -> None:
    """Each process reports an invalid path, because the path is checked before the rendezvous."""
    ended = rank_cli.compare(*arguments)
    assert list_codes(ended) == [2, 2]
    assert all(done.err.startswith(f"syncheck: error: {message}") for done in ended), ended


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run_{rank:zz}.pth"], "run_{rank:zz}.pth: invalid field in braces: "),
        (["run_{rank}.pth", "--quick"], "--quick and --group-by require a single process"),
        (["run_{rank}.pth", "--group-by", "x"], "--quick and --group-by require a single process"),
        (["run_{rank}.pth", "--allow", "SYN000"], "--allow SYN000: no such code"),
        (["run_{rank}.pth", "--rtol", "1"], "--rtol and --atol belong together"),
        (["run_{rank}.pth", "-o", "report.doc"], "--output report.doc: "),
    ],
)
def test_wrong_usage(rank_cli: RankCli, arguments: list[str], message: str) -> None:
    """Wrong usage on all ranks is reported once, with the typed option."""
    assert compare_with_error(rank_cli, *arguments).startswith(message)


def test_reference(rank_cli: RankCli) -> None:
    """--reference takes a rank or a path, and the error for an unknown rank lists the compared ranks."""
    rank_cli.save(by=1.0)
    assert list_codes(rank_cli.compare(rank_cli.path, "--reference", "1")) == [1, 1]
    assert list_codes(rank_cli.compare(rank_cli.path, "--reference", rank_cli.path.format(rank=0))) == [
        1,
        1,
    ]
    assert "there are ranks 0, 1: " in compare_with_error(rank_cli, rank_cli.path, "--reference", "7")


def test_a_file_truncated_during_the_comparison(rank_cli: RankCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0's file is truncated after the digests, both ranks exit with 2, and the error names the file."""
    file = rank_cli.save(by=1.0)
    real = Channel.run_on_leader

    def run_on_leader(channel: Channel, *arguments: Any) -> Any:
        if rank_cli.rank == 0:
            file.write_bytes(b"")
        return real(channel, *arguments)

    monkeypatch.setattr(Channel, "run_on_leader", run_on_leader)
    line = compare_with_error(rank_cli, rank_cli.path)
    assert line.startswith("rank 0: ")
    assert f"{rank_cli.folder}/run_rank0.pth: " in line


def test_crash_on_rank_0(rank_cli: RankCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash on rank 0 ends all ranks with 2, and rank 0 prints the traceback."""

    def crash(*_: Any, **__: Any) -> int:
        raise KeyError("planted")

    monkeypatch.setattr(commands, "write_report", crash)
    rank_cli.save()
    ended = rank_cli.compare(rank_cli.path)
    assert list_codes(ended) == [2, 2]
    assert ended[0].err.startswith("syncheck: error: rank 0: KeyError: 'planted'\nTraceback")
    assert ended[1].err == ""


def test_without_the_variables_of_torchrun(rank_cli: RankCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside torchrun, the error names the missing variables and both ways to run the comparison."""
    unset = "torchrun sets the values in braces, but these variables are not set:"
    advice = "use torchrun --nproc-per-node N -m syncheck compare PATH, or a glob such as 'ckpts/rank_*.pth'"
    monkeypatch.delenv("GROUP_RANK")
    text = f"node_{{node_rank}}.pth: {unset} GROUP_RANK; {advice}"
    assert set(list_fields(rank_cli.compare("node_{node_rank}.pth"), "code", "err")) == {
        (2, f"syncheck: error: {text}\n")
    }
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    text = f"run_{{rank}}.pth: {unset} RANK, WORLD_SIZE; {advice}"
    assert set(list_fields(rank_cli.compare("run_{rank}.pth"), "code", "err")) == {(2, f"syncheck: error: {text}\n")}


@pytest.mark.syncheck(ranks=1)
def test_single_process(rank_cli: RankCli) -> None:
    """A single process exits with 2, because it has no replica to compare with."""
    rank_cli.save()
    (done,) = rank_cli.compare(rank_cli.path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"syncheck: error: {rank_cli.folder}/run_rank0.pth: one process reads one file")
