"""The state that --resume loads, the states that it skips, and its errors."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_files, list_names
from support.resumed import TINY, interrupt, resume, state_of, whole
from support.states import list_differing

from train.engine import train
from train.errors import UserError
from train.launch import RankContext
from train.recorders.base import Recorder
from train.resume import state_path, states_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.testing import Rank

ALONE = replace(TINY, method="single", model="convnet", width=None, save_per_rank=False)
CTX = RankContext()


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """Crash a run of one process with states after steps 2 and 3, and return the folder of the states."""
    interrupt(CTX, replace(ALONE, out=tmp_path), 3)
    return states_folder(tmp_path, "single")


def truncate(path: Path) -> None:
    """Truncate a file to half its size."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(path: Path) -> None:
    """Flip one bit of a weight, which torch.load does not notice."""
    data = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["model"]["conv1.weight"].numpy().tobytes()
    data[data.index(weight)] ^= 1
    path.write_bytes(data)


def write_foreign(path: Path) -> None:
    """Replace the file by a checkpoint of another program."""
    torch.save({"model": {"weight": torch.zeros(2)}}, path)


def write_malicious(path: Path) -> None:
    """Replace the file by a pickle that would execute code."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path.parent / "exploded"),)

    torch.save({"format": "train-resume", "bomb": Bomb()}, path)


def copy_other_step(path: Path) -> None:
    """Replace the file by that of another step."""
    shutil.copy(path.parent.parent / "step_2" / path.name, path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (truncate, "damaged or truncated"),
    "empty": (lambda path: path.write_bytes(b"") and None, "damaged or truncated"),
    "bit flipped": (flip_bit, "damaged at "),
    "foreign": (write_foreign, "not a state file"),
    "hostile": (write_malicious, "damaged or truncated"),
    "other step": (copy_other_step, "contains step 2 of rank 0"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_states_are_skipped(stopped: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """One line names the file, and the run resumes from the previous state; no code in a file is executed."""
    damage, reason = DAMAGES[kind]
    path = state_path(stopped, 3, 0)
    damage(path)
    _, notes = resume(CTX, replace(ALONE, out=stopped.parents[1]))
    assert notes.steps == [3, 4, 5, 6, 7, 8]
    skipped, resumed = capsys.readouterr().err.splitlines()
    assert skipped.startswith(f"run.py: --resume: skipping step 3: {path}: {reason}")
    assert "step 2/8" in resumed
    assert not (path.parent / "exploded").exists()


def test_no_usable_state_is_refused(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If all states are damaged, the run ends with an error instead of starting at step 0."""
    for step in (2, 3):
        truncate(state_path(stopped, step, 0))
    with pytest.raises(UserError, match=r"no state in .* is usable"):
        resume(CTX, replace(ALONE, out=stopped.parents[1]))
    assert capsys.readouterr().err.count("--resume: skipping step ") == 2


def test_without_a_state_the_run_starts_at_step_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a state, --resume starts at step 0, so that the first run and later runs can use the same command."""
    _, notes = resume(CTX, replace(ALONE, out=tmp_path))
    assert notes.steps == list(range(1, 9))
    assert (
        capsys.readouterr().err == f"run.py: --resume: no state in {tmp_path}/.resume/single yet, starting at step 0\n"
    )


def test_two_states_are_kept(stopped: Path) -> None:
    """A run keeps its newest two states and does not remove a user's file."""
    assert list_files(stopped) == ["step_2", "step_3"]
    (stopped / "step_2" / "notes.txt").write_text("mine")
    resume(CTX, replace(ALONE, out=stopped.parents[1]))
    assert sorted(str(path.relative_to(stopped)) for path in stopped.rglob("*") if path.is_file()) == [
        "step_2/notes.txt",
        "step_7/rank_0.pth",
        "step_8/rank_0.pth",
    ]


def test_a_new_run_replaces_the_states_of_an_older_one(stopped: Path) -> None:
    """Without --resume, the first save removes all states of an older run, even of later steps."""
    interrupt(CTX, replace(ALONE, out=stopped.parents[1]), 1)
    assert list_files(stopped) == ["step_1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.2}, "--resume: --lr: 0.1 when .*step_3 was saved, 0.2 now"),
        ({"shuffle": False}, "--no-shuffle: True when"),
        ({"batch_size": 17}, "--batch-size: 16 when"),
        ({"seed": 1}, "--seed: 0 when"),
        ({"max_steps": 2}, "step_3 was saved after step 3, but the run ends after 2"),
    ],
    ids=str,
)
def test_another_run_is_refused(stopped: Path, change: dict[str, Any], message: str) -> None:
    """If an option that changes the training differs from the saved run, the error names both values."""
    with pytest.raises(UserError, match=message):
        resume(CTX, replace(ALONE, out=stopped.parents[1], **change))


def test_a_longer_run_is_allowed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--epochs may change; a message describes the effect on the schedule."""
    result, _ = resume(CTX, replace(ALONE, out=stopped.parents[1], epochs=3))
    assert (result.steps, result.epochs) == (12, 3)
    note = capsys.readouterr().err.splitlines()[1]
    assert note.startswith("run.py: resumed: --epochs 3 (was 2): ")


def test_replicas_of_dp_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of dp's replicas may change; a message warns that rounding changes with it."""
    settings = replace(ALONE, method="dp", out=tmp_path)
    interrupt(CTX, settings, 3)
    assert resume(CTX, replace(settings, replicas=4))[1].steps == [4, 5, 6, 7, 8]
    note = capsys.readouterr().err.splitlines()[1]
    assert note.startswith("run.py: resumed: saved with 2 replicas, now 4: not bitwise from here")


def test_a_finished_run_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run is evaluated without training, and newly requested final files are written."""
    settings = replace(ALONE, out=tmp_path)
    result, notes = whole(CTX, settings)
    again, later = resume(CTX, replace(settings, save_per_rank=True))
    assert (later.steps, later.epochs) == ([], notes.epochs[-1:])
    assert (again.steps, again.test) == (result.steps, result.test)
    assert list_names(again.saved) == ["single_rank0.pth"]
    assert "the run had already ended" in capsys.readouterr().err
    final = tmp_path / "single_rank0.pth"
    ended = torch.load(final, weights_only=True)["model"]
    assert not list_differing(state_of(CTX, settings, 8)["model"], ended)


def test_a_removed_final_file_is_written_again(tmp_path: Path) -> None:
    """Resuming a finished run writes a missing final file again, so that the summary names only existing files."""
    settings = replace(ALONE, save_per_rank=True, out=tmp_path)
    whole(CTX, settings)
    (tmp_path / "single_rank0.pth").unlink()
    assert [path.exists() for path in resume(CTX, settings)[0].saved] == [True]


def test_best_of_another_format_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new best epoch replaces the files of the old one even in another format, so that epochs are never mixed."""
    monkeypatch.setattr("train.metrics.Best.update", lambda *_: True)
    settings = replace(ALONE, save_best=True, save_per_rank=True, out=tmp_path)
    interrupt(CTX, settings, 5)
    best = tmp_path / "best" / "single"
    assert list_files(best) == ["rank_0.pth"]
    result, _ = resume(CTX, replace(settings, save_format="safetensors"))
    assert list_files(best) == ["rank_0.safetensors"]
    assert sorted(path.relative_to(tmp_path) for path in result.saved) == sorted(
        path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors")
    )


def test_missing_checkpoint_every_is_reported(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run resumed without --checkpoint-every prints a note about the option."""
    resume(CTX, replace(ALONE, out=stopped.parents[1], checkpoint_every=None))
    assert "resumed: without --checkpoint-every N, " in capsys.readouterr().err


def test_other_tensors_are_refused(stopped: Path) -> None:
    """A state of another model is refused before anything is restored; the error names the tensor."""
    path = state_path(stopped, 3, 0)
    state = torch.load(path, weights_only=True)
    state["model"]["fc.bias"] = torch.zeros(11)
    torch.save(state, path)
    with pytest.raises(UserError, match=r"model: fc.bias is \[11\]; this program expects \[10\]"):
        resume(CTX, replace(ALONE, out=stopped.parents[1]))


@pytest.mark.syncheck(ranks=2)
def test_a_state_counts_if_all_ranks_have_it(
    ctx: RankContext, syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a folder per rank, rank 0 skips a state that rank 1 does not have or cannot read."""
    settings = replace(ALONE, method="ddp", out=syncheck_rank.shared / f"node{ctx.rank}")
    interrupt(ctx, settings, 3)
    mine = state_path(states_folder(settings.out, "ddp"), 3, ctx.rank)
    assert list_files(mine.parent) == [mine.name]
    if ctx.rank == 1:
        mine.unlink()
    capfd.readouterr()
    assert resume(ctx, settings)[1].steps == [3, 4, 5, 6, 7, 8]
    stderr = capfd.readouterr().err
    assert ("step_3/rank_1.pth: rank 1 lacks this file" in stderr) is (ctx.rank == 0)
    if ctx.rank == 1:
        for step in (7, 8):
            truncate(state_path(states_folder(settings.out, "ddp"), step, 1))
    with pytest.raises(UserError, match=r"no state in .* is usable"):
        train(replace(settings, resume=True), ctx, Recorder())


@pytest.mark.syncheck(ranks=2)
def test_an_incomplete_first_state_starts_at_step_0(
    ctx: RankContext, syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    """If rank 1 did not write its file of the first state, --resume starts at step 0."""
    settings = replace(ALONE, method="ddp", out=syncheck_rank.shared)
    interrupt(ctx, settings, 1)
    if ctx.rank == 1:
        state_path(states_folder(settings.out, "ddp"), 1, 1).unlink()
    capfd.readouterr()
    ctx.gather(None)
    assert resume(ctx, settings)[1].steps == list(range(1, 9))
    assert ("starting at step 0" in capfd.readouterr().err) is (ctx.rank == 0)


@pytest.mark.syncheck(ranks=2)
def test_a_failed_save_leaves_the_older_state(
    ctx: RankContext, syncheck_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    """If rank 1 cannot write, one line names file and reason, and the previous state remains usable."""
    settings = replace(ALONE, method="ddp", out=syncheck_rank.shared)
    folder = states_folder(settings.out, "ddp")
    (folder / "step_3" / "rank_1.pth").mkdir(parents=True, exist_ok=True)  # prevents rank 1 from saving
    interrupt(ctx, settings, 3)
    message = f"rank 1: cannot write {folder}/step_3/rank_1.pth: Is a directory"
    assert capfd.readouterr().err.count(message) == (ctx.rank == 0)
    ctx.gather(None)
    assert list_names(sorted(folder.rglob("rank_0.pth"))) == ["rank_0.pth"] * 2  # of steps 1 and 2
    ctx.gather(None)  # both ranks have listed the folder
    if ctx.rank == 1:
        (folder / "step_3" / "rank_1.pth").rmdir()
    ctx.gather(None)
    assert resume(ctx, settings)[1].steps == [3, 4, 5, 6, 7, 8]
